/* rules_table.c: the n-gram table from headers: its form, its shards without gap, their rows
 * against the hash heads (formats 5). Its scales are rules_scale.c's, the buffers' values
 * rules_value.c's. */
#include "rules_impl.h"

#include "pack.h"
#include "ple_hash.h"
#include "resolve_impl.h"
#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* "0-3, 7" of the shards without weight below n. */
static uint32_t missing_list(const struct qx_table *t, uint32_t n, struct qx_buf *out)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (i < t->n_shards && t->shards[i].weight) {
            continue;
        }
        uint32_t from = i;
        while (i + 1 < n && !(i + 1 < t->n_shards && t->shards[i + 1].weight)) {
            i++;
        }
        count += i - from + 1;
        if (out->n < 400) {
            qx_buf_fmt(out, from == i ? "%s%" PRIu32 : "%s%" PRIu32 "-%" PRIu32, out->n ? ", " : "",
                       from, i);
        }
    }
    return count;
}

/* Shards that the index gives to a file which is not there are that file's finding. */
static bool listed_absent(const struct qx_headers_check *k, const char *module)
{
    size_t n = strlen(module);
    for (size_t i = 0; i < qx_ckpt_n_absent(k->ck); i++) {
        const char *name = qx_ckpt_absent(k->ck, i)->name;
        if (strncmp(name, module, n) == 0 && strncmp(name + n, ".shard_", 7) == 0) {
            return true;
        }
    }
    return false;
}

static void shard_missing(struct qx_headers_check *k, const struct qx_table *t, uint32_t n)
{
    struct qx_buf list = {0};
    struct qx_buf text = {0};
    uint32_t count = missing_list(t, n, &list);
    if (count && !k->foreign_table && !listed_absent(k, t->module)) {
        char expected[48];
        snprintf(expected, sizeof expected, "shards 0 to %" PRIu32, n - 1);
        qx_buf_fmt(&text, "missing shards of the table: %s", qx_buf_cstr(&list));
        qx_findings_add(k->fs, &QX_REPORT("ple-shard-missing", QX_ERROR, .tensor = t->module,
                                          .expected = expected, .found = qx_buf_cstr(&list),
                                          .text = qx_buf_cstr(&text), .count = count));
    }
    qx_buf_fini(&list);
    qx_buf_fini(&text);
}

/* Tables that other programs keep beside the checkpoint (formats 11): named, not read. */
static bool sidecar(struct qx_headers_check *k, const struct qx_table *t)
{
    static const struct {
        const char *file, *what;
    } known[] = {
        {"ple/qwen3.8-flash-next-ple-fp8.bin", "a raw file for streaming"},
        {"ssd-stream.json", "a raw file for streaming"},
        {"ples_nvfp4", "sidecar files of NVFP4 shards"},
        {"ngram_embedding.safetensors", "an EXL3 table"},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(known); i++) {
        char path[4096];
        char text[256];
        struct stat st;
        int n = snprintf(path, sizeof path, "%s/%s", qx_ckpt_dir(k->ck), known[i].file);
        if (n <= 0 || (size_t)n >= sizeof path || stat(path, &st) != 0) {
            continue;
        }
        snprintf(text, sizeof text,
                 "the table is kept beside the checkpoint as %s (%s), which is not "
                 "supported; no shard of it is in the files",
                 known[i].what, known[i].file);
        qx_findings_add(k->fs, &QX_REPORT("foreign-layout", QX_ERROR, .file = known[i].file,
                                          .tensor = t->module, .expected = "shards in the files",
                                          .found = known[i].what, .text = text));
        return true;
    }
    return false;
}

static void split_mismatch(struct qx_headers_check *k, const struct qx_table *t, uint32_t n,
                           uint64_t padded)
{
    char expected[96];
    char found[96];
    char text[320];
    snprintf(expected, sizeof expected, "%" PRIu64 " shards, %" PRIu64 " rows",
             k->c->split_ngram_parts, padded);
    snprintf(found, sizeof found, "%" PRIu32 " shards of %" PRIu64 " rows%s", n, t->rows_per_shard,
             t->n_rows % (t->rows_per_shard ? t->rows_per_shard : 1) ? ", the last with fewer" : "");
    if (k->c->split_ngram_parts) {
        snprintf(text, sizeof text,
                 "split_ngram_parts is %" PRIu64 " and the table has %" PRIu64 " rows; "
                 "stored are %s",
                 k->c->split_ngram_parts, padded, found);
    } else {
        snprintf(expected, sizeof expected, "%" PRIu64 " rows", padded);
        snprintf(text, sizeof text,
                 "the table has %" PRIu64 " rows by the configuration; stored are %s", padded,
                 found);
    }
    qx_findings_add(k->fs, &QX_REPORT("ple-split-mismatch", QX_ERROR, .file = "config.json",
                                      .tensor = t->module, .key = "text_config.split_ngram_parts",
                                      .expected = expected, .found = found, .text = text));
}

static void check_forms(struct qx_headers_check *k, const struct qx_table *t)
{
    const struct qx_tensor *w = NULL;
    for (uint32_t i = 0; i < t->n_shards; i++) {
        const struct qx_tensor *s = t->shards[i].weight;
        uint64_t rows = qx_table_shard_rows(t, i);
        char expected[96];
        char found[96];
        char text[300];
        if (!s) {
            continue;
        }
        w = w ? w : s;
        if (s->dtype != w->dtype) {
            snprintf(text, sizeof text, "shards of one table have two dtypes");
            qx_findings_add(k->fs, &QX_REPORT("ple-form-mixed", QX_ERROR,
                                              .file = qx_check_file(k, s), .tensor = s->name,
                                              .expected = qx_dtype_name((enum qx_dtype)w->dtype),
                                              .found = qx_dtype_name((enum qx_dtype)s->dtype),
                                              .text = text, .group = "all"));
        } else if (s->n_dims != 2 || s->shape[1] != w->shape[w->n_dims ? w->n_dims - 1 : 0] ||
                   (t->rows_per_shard && s->shape[0] != rows)) {
            uint64_t want[2] = {rows, w->n_dims == 2 ? w->shape[1] : 0};
            qx_shape_text(want, 2, expected);
            qx_shape_text(s->shape, s->n_dims, found);
            snprintf(text, sizeof text,
                     "a shard of the table is %s, which should be %s: all have %" PRIu64
                     " rows, the last what is left of %" PRIu64,
                     found, expected, t->rows_per_shard, t->n_rows);
            qx_findings_add(k->fs, &QX_REPORT("shape", QX_ERROR, .file = qx_check_file(k, s),
                                              .tensor = s->name, .expected = expected,
                                              .found = found, .text = text, .group = found));
        }
    }
    if ((!w && !t->foreign) || t->form != QX_F_NONE) {
        return;
    }
    char found[128] = "";
    char shape[96];
    char text[360];
    if (w) {
        qx_shape_text(w->shape, w->n_dims, shape);
        snprintf(found, sizeof found, "%s %s", qx_dtype_name((enum qx_dtype)w->dtype), shape);
    }
    if (t->foreign) {
        /* The configuration's word for the same form has been refused already. */
        if (qx_claim_of_ple_dtype(k->c).kind == QX_CL_UNKNOWN) {
            return;
        }
        snprintf(text, sizeof text, "the table is stored in the form of %s, which is not supported",
                 t->foreign);
        qx_findings_add(k->fs, &QX_REPORT(strcmp(t->foreign, "NF4") == 0 ? "unsupported-ple-dtype"
                                                                         : "foreign-convention",
                                          QX_ERROR, .file = qx_check_file(k, w),
                                          .tensor = w ? w->name : t->module,
                                          .expected = "BF16, F16, F32, FP8 with one scale or NVFP4",
                                          .found = t->foreign, .text = text));
        return;
    }
    bool width = w->n_dims == 2 &&
                 (w->dtype == QX_DT_BF16 || w->dtype == QX_DT_F16 || w->dtype == QX_DT_F32 ||
                  w->dtype == QX_DT_F8_E4M3 || w->dtype == QX_DT_U8);
    snprintf(text, sizeof text,
             "the table's shards are %s, which is no form of %" PRIu32 " columns", found,
             k->c->ple_row_width);
    char expected[96];
    snprintf(expected, sizeof expected, "%" PRIu32 " columns (%" PRIu32 " bytes of U8)",
             k->c->ple_row_width, k->c->ple_row_width / 2);
    qx_findings_add(k->fs,
                    &QX_REPORT(width ? "shape" : "unsupported-ple-dtype", QX_ERROR,
                               .file = qx_check_file(k, w), .tensor = w->name,
                               .expected = width ? expected : "BF16, F16, F32, F8_E4M3 or U8",
                               .found = found, .text = text));
}

static void check_split(struct qx_headers_check *k, const struct qx_table *t, uint64_t padded)
{
    uint64_t parts = k->c->split_ngram_parts;
    uint32_t n = t->n_shards;
    struct qx_buf none = {0};
    if (n == 0) {
        if (k->foreign_table || !sidecar(k, t)) {
            shard_missing(k, t, (uint32_t)(parts ? parts : 1));
        }
        return;
    }
    bool whole = missing_list(t, n, &none) == 0 && t->n_rows == padded;
    qx_buf_fini(&none);
    if (t->is_slice) {
        return; /* a rank's slice says itself what it holds */
    }
    if (parts == 0) {
        if (whole) {
            char found[24];
            snprintf(found, sizeof found, "%" PRIu32, n);
            qx_findings_add(k->fs,
                            &QX_REPORT("ple-split-inferred", QX_NOTE, .file = "config.json",
                                       .key = "text_config.split_ngram_parts", .found = found,
                                       .text = "split_ngram_parts is absent; the stored shards "
                                               "give it"));
        } else {
            shard_missing(k, t, n);
            if (t->n_rows != padded) {
                split_mismatch(k, t, n, padded);
            }
        }
        return;
    }
    if (whole && n == parts) {
        return;
    }
    if (whole || n > parts) {
        split_mismatch(k, t, n, padded);
        return;
    }
    shard_missing(k, t, (uint32_t)parts);
    if (t->rows_per_shard && t->n_rows != padded) {
        split_mismatch(k, t, n, padded);
    }
}

void qx_check_table(struct qx_headers_check *k)
{
    const struct qx_table *t = qx_resolved_table(k->r);
    struct qx_ple_hash h;
    struct qx_error e;
    if (k->c->n_ple_layers == 0) {
        return;
    }
    if (t->packed) {
        struct qx_pack_info p;
        if (qx_pack_read(&p, k->ck, t->packed, &e) != 0) {
            struct qx_report rep = QX_REPORT(e.kind, QX_ERROR, .file = qx_check_file(k, t->packed),
                                             .tensor = t->packed->name, .text = e.msg);
            qx_findings_add(k->fs, &rep);
        }
        return;
    }
    check_forms(k, t);
    if (t->foreign) {
        return; /* its shards are not ours to count */
    }
    if (qx_ple_hash_init(&h, k->c, 0, &e) == 0) {
        check_split(k, t, h.n_rows_padded);
    } else {
        qx_findings_add(k->fs, &QX_REPORT(e.kind, QX_ERROR, .file = "config.json", .text = e.msg));
    }
}
