/* npy_write.c: see npy_write.h. */
#include "npy_write.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void qx_npy_header(char out[QX_NPY_HEADER_BYTES], const char *descr, const uint64_t *shape,
                   size_t n_dims)
{
    char dims[96] = "";
    size_t at = 0;
    for (size_t i = 0; i < n_dims && i < 4; i++) {
        at += (size_t)snprintf(dims + at, sizeof dims - at, "%s%" PRIu64, i > 0 ? ", " : "",
                               shape[i]);
    }
    /* A tuple of one element needs its comma. */
    memset(out, ' ', QX_NPY_HEADER_BYTES);
    memcpy(out, "\x93NUMPY\x01\x00", 8);
    out[8] = (char)(QX_NPY_HEADER_BYTES - 10);
    out[9] = 0;
    int n = snprintf(out + 10, QX_NPY_HEADER_BYTES - 11,
                     "{'descr': '%.4s', 'fortran_order': False, 'shape': (%s%s), }", descr, dims,
                     n_dims == 1 ? "," : "");
    if (n > 0 && (size_t)n + 10 < QX_NPY_HEADER_BYTES) {
        out[10 + n] = ' ';
    }
    out[QX_NPY_HEADER_BYTES - 1] = '\n';
}
