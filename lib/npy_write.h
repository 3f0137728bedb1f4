/* npy_write.h: headers of .npy files, format 1.0, C order. */
#ifndef QX_NPY_WRITE_H
#define QX_NPY_WRITE_H

#include "base.h"

/* Room for every header of up to four dimensions, so that a file whose row count is only known at the
 * end can have its header written again in place. */
#define QX_NPY_HEADER_BYTES 128u

/* descr is "<f4", "<u2", "|u1", ...; n_dims at most 4. The data follows at byte QX_NPY_HEADER_BYTES. */
void qx_npy_header(char out[QX_NPY_HEADER_BYTES], const char *descr, const uint64_t *shape, size_t n_dims);

#endif
