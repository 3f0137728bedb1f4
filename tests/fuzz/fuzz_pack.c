/* The header text of packed rows: what is accepted prints and parses back to the same. */
#include "fuzz.h"

#include "pack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    char *text = malloc(size + 1), print[320], again[320];
    CHECK(text);
    memcpy(text, data, size);
    text[size] = '\0';
    struct qx_pack_info a, b;
    struct qx_error err = {0};
    if (qx_pack_parse(&a, text, &err) == 0) {
        qx_pack_print(&a, print);
        CHECK(qx_pack_parse(&b, print, &err) == 0);
        qx_pack_print(&b, again);
        CHECK(strcmp(print, again) == 0);
        CHECK(a.rows_per_block && a.block_bytes >= a.rows_per_block * ((uint64_t)a.code_bytes + a.scale_bytes));
        CHECK(a.n_rows == 0 || qx_pack_row_off(&a, a.n_rows - 1) / a.block_bytes == (a.n_rows - 1) / a.rows_per_block);
    } else {
        CHECK(err.kind && err.msg[0]);
    }
    free(text);
    CHECK(qx_alloc_live() == live);
    return 0;
}
