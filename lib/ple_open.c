/* ple_open.c: see ple_open.h. */
#include "ple_open.h"

#include "rows.h"
#include "resolve.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The stored buffer of this leaf into v [n]; leaves v alone when there is none. */
static int stored(const struct qx_ckpt *ck, const char *base, const char *leaf, uint64_t *v,
                  uint32_t n, struct qx_error *err)
{
    char name[512];
    int k = snprintf(name, sizeof name, "%s.%s", base, leaf);
    const struct qx_tensor *t = k > 0 && (size_t)k < sizeof name ? qx_ckpt_find(ck, name) : NULL;
    if (t == NULL) {
        return 0;
    }
    int64_t raw[QX_MAX_PLE_HEADS];
    int rc = 0;
    if (t->dtype != QX_DT_I64) {
        rc = qx_fail(err, QX_E_FORMAT, "dtype", "stored as %s, expected I64",
                     qx_dtype_name((enum qx_dtype)t->dtype));
    } else if (t->n_elems != n) {
        rc = qx_fail(err, QX_E_FORMAT, "shape", "has %" PRIu64 " elements, expected %" PRIu32,
                     t->n_elems, n);
    } else {
        rc = qx_ckpt_read(ck, t, 0, raw, n * sizeof raw[0], err);
    }
    for (uint32_t i = 0; rc == 0 && i < n; i++) {
        if (raw[i] < 0) {
            rc = qx_fail(err, QX_E_VALUE, "hash-constants-mismatch",
                         "element %" PRIu32 " is %" PRId64 ", expected no negative number", i,
                         raw[i]);
        } else {
            v[i] = (uint64_t)raw[i];
        }
    }
    qx_error_at(rc != 0 ? err : NULL, qx_ckpt_file(ck, t->file)->name, t->name, QX_NO_OFF);
    return rc;
}

int qx_ple_hash_open(struct qx_ple_hash *h, const struct qx_ckpt *ck, struct qx_error *err)
{
    int rc = qx_ckpt_config_status(ck, err);
    if (rc != 0) {
        return rc;
    }
    const struct qx_config *c = qx_ckpt_config(ck);
    const struct qx_resolved *res = qx_ckpt_resolved(ck);
    const struct qx_table *tab = res != NULL ? qx_resolved_table(res) : NULL;
    if (c == NULL || tab == NULL || !tab->present) {
        return qx_fail_no_table(ck, err);
    }
    char base[448];
    const char *dot = strrchr(tab->module, '.');
    size_t n = dot != NULL ? (size_t)(dot - tab->module) : 0;
    n = n < sizeof base ? n : 0;
    memcpy(base, tab->module, n);
    base[n] = 0;
    rc = qx_ple_hash_init(h, c, 0, err);
    rc = rc == 0 ? stored(ck, base, "layer_multipliers", h->multiplier, h->ngram_size, err) : rc;
    rc = rc == 0 ? stored(ck, base, "ngram_heads_vocab_sizes", h->size, h->n_heads, err) : rc;
    rc = rc == 0 ? stored(ck, base, "ngram_heads_offsets", h->offset, h->n_heads, err) : rc;
    /* A rank's slice holds only some rows of the table that the heads address. */
    uint64_t rows = tab->is_slice ? h->n_rows_padded : tab->n_rows;
    for (uint32_t i = 0; rc == 0 && i < h->n_heads; i++) {
        uint64_t end;
        if (h->size[i] == 0 || !qx_add_u64(h->offset[i], h->size[i], &end) || end > rows) {
            rc = qx_fail(err, QX_E_VALUE, "ple-range",
                         "head %" PRIu32 " addresses %" PRIu64 " rows from row %" PRIu64
                         ", but the table has %" PRIu64 " rows",
                         i, h->size[i], h->offset[i], rows);
            qx_error_at(err, NULL, tab->module, QX_NO_OFF);
        }
    }
    return rc;
}
