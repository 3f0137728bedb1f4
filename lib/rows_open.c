/* rows_open.c: opening a row source: which tensors it reads, how a row lies in them, and the scales
 * that are small enough to be read at once. Nothing missing is assumed: a format without its scale
 * does not open. */
#include "rows_impl.h"

#include "alloc.h"
#include "ckpt.h"
#include "codes.h"
#include "file_map.h"
#include "fp8.h"
#include "nvfp4.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- small reads -------------------------------------------------------------------------- */

int qx_rows_read_at(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t off, void *dst,
                    uint64_t n, struct qx_error *err)
{
    const struct qx_file *f = qx_ckpt_file(ck, t->file);
    int fd = qx_ckpt_fd(ck, t->file);
    uint64_t end;
    if (fd < 0) {
        int rc = qx_fail(err, f->state == QX_FILE_MISSING ? QX_E_MISSING : QX_E_FORMAT,
                         f->state == QX_FILE_MISSING ? "shard-missing" : "unreadable-file",
                         "the file cannot be read");
        qx_error_at(err, f->name, t->name, QX_NO_OFF);
        return rc;
    }
    if (!qx_add_u64(off, n, &end) || end > t->size_bytes ||
        (!t->readable && f->state != QX_FILE_SHORT)) {
        int rc = qx_fail(err, QX_E_FORMAT, "size-mismatch",
                         "bytes %" PRIu64 " to %" PRIu64
                         " of the tensor cannot be read: it has %" PRIu64 " usable bytes",
                         off, off + n, t->readable ? t->size_bytes : 0);
        qx_error_at(err, f->name, t->name, t->off);
        return rc;
    }
    if (f->state == QX_FILE_SHORT && t->off + end > f->size_bytes) {
        int rc = qx_fail(err, QX_E_FORMAT, "truncated",
                         "the file ends at byte %" PRIu64 ", %" PRIu64
                         " bytes were expected from byte %" PRIu64,
                         f->size_bytes, n, t->off + off);
        qx_error_at(err, f->name, t->name, t->off + off);
        return rc;
    }
    int rc = qx_file_read(fd, dst, n, t->off + off, err);
    if (rc != 0) {
        qx_error_at(err, f->name, t->name, t->off + off);
    }
    return rc;
}

static float widen(enum qx_dtype t, const uint8_t *p)
{
    switch (t) {
    case QX_DT_BF16:
        return qx_bf16_to_f32(qx_load_u16(p));
    case QX_DT_F16:
        return qx_f16_to_f32(qx_load_u16(p));
    default:
        return qx_load_f32(p);
    }
}

/* Floating scales as f32, n of them. */
static int read_scales(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t n, float **out,
                       struct qx_error *err)
{
    enum qx_dtype dt = (enum qx_dtype)t->dtype;
    const char *file = qx_ckpt_file(ck, t->file)->name;
    if (dt != QX_DT_BF16 && dt != QX_DT_F16 && dt != QX_DT_F32) {
        int rc = qx_fail(err, QX_E_QUANT, "scale-dtype",
                         "the scale is stored as %s, expected BF16, F16 "
                         "or F32",
                         qx_dtype_name(dt));
        qx_error_at(err, file, t->name, QX_NO_OFF);
        return rc;
    }
    if (t->n_elems != n) {
        int rc = qx_fail(err, QX_E_QUANT, "scale-shape",
                         "the scale has %" PRIu64 " elements, expected %" PRIu64, t->n_elems, n);
        qx_error_at(err, file, t->name, QX_NO_OFF);
        return rc;
    }
    size_t size = qx_dtype_size(dt), bytes;
    float *v = NULL;
    uint8_t *raw = NULL;
    if (qx_mul_size(n, sizeof(float), &bytes)) {
        v = qx_malloc(bytes);
        raw = qx_malloc(n * size);
    }
    int rc = v == NULL || raw == NULL ? qx_fail_nomem(err)
                                      : qx_rows_read_at(ck, t, 0, raw, n * size, err);
    if (rc == 0) {
        for (uint64_t i = 0; i < n; i++) {
            v[i] = widen(dt, raw + i * size);
        }
    } else {
        qx_free(v);
        v = NULL;
    }
    qx_free(raw);
    *out = v;
    return rc;
}

int qx_read_scalar(const struct qx_ckpt *ck, const struct qx_tensor *t, float *out,
                   struct qx_error *err)
{
    float *v = NULL;
    int rc = read_scales(ck, t, 1, &v, err);
    if (rc == 0) {
        *out = v[0];
        qx_free(v);
    }
    return rc;
}

/* ---- opening ------------------------------------------------------------------------------ */

static int missing_scale(const struct qx_ckpt *ck, const struct qx_tensor *weight,
                         const char *module, const char *leaf, struct qx_error *err)
{
    int rc = qx_fail(err, QX_E_MISSING, "missing-scale", "'%s.%s' is missing", module, leaf);
    qx_error_at(err, weight ? qx_ckpt_file(ck, weight->file)->name : NULL,
                weight ? weight->name : module, QX_NO_OFF);
    return rc;
}

/* The finding that explains best why the table cannot be read. */
static int table_refused(const struct qx_ckpt *ck, const struct qx_table *tab, struct qx_error *err)
{
    static const char *const kinds[] = {
        "foreign-convention", "unsupported-ple-dtype",
        "foreign-layout",     "missing-scale",
        "scale-dtype",        "scale-shape",
        "ple-range",          "ple-shard-missing",
        "ple-split-mismatch", "shape",
        "pack-header",        "pack-shape",
        "weight-dtype",
    };
    const struct qx_findings *fs = qx_ckpt_findings(ck);
    for (size_t k = 0; k < QX_ARRAY_LEN(kinds); k++) {
        for (size_t i = 0; i < qx_findings_count(fs); i++) {
            const struct qx_finding *f = qx_findings_at(fs, i);
            if (f->severity == QX_ERROR && strcmp(f->kind, kinds[k]) == 0 &&
                (f->tensor == NULL || strstr(f->tensor, "ngram_embedding") != NULL)) {
                int rc = qx_fail(err, QX_E_QUANT, f->kind, "%s", f->text ? f->text : f->kind);
                qx_error_at(err, f->file, f->tensor, f->off);
                return rc;
            }
        }
    }
    const struct qx_tensor *w = NULL;
    for (uint32_t i = 0; i < tab->n_shards && w == NULL; i++) {
        w = tab->shards[i].weight;
    }
    if (w != NULL && w->dtype == QX_DT_F8_E4M3 && tab->global == NULL) {
        return missing_scale(ck, w, tab->module, "weight_scale", err);
    }
    if (w != NULL && w->dtype == QX_DT_U8) {
        if (tab->global == NULL) {
            return missing_scale(ck, w, tab->module, "weight_scale_2", err);
        }
        for (uint32_t i = 0; i < tab->n_shards; i++) {
            const struct qx_table_shard *s = &tab->shards[i];
            if (s->weight != NULL && s->scale == NULL) {
                char module[320];
                size_t n = strlen(s->weight->name);
                n = n > 7 ? n - 7 : n;
                n = n < sizeof module ? n : sizeof module - 1;
                memcpy(module, s->weight->name, n);
                module[n] = 0;
                return missing_scale(ck, s->weight, module, "weight_scale", err);
            }
        }
    }
    int rc = qx_fail(
        err, QX_E_UNSUPPORTED, "unsupported-ple-dtype",
        "the n-gram table is stored in a form that is not supported: found %s, supported are "
        "BF16, F16, F32, FP8 with one scale and NVFP4",
        w != NULL ? qx_dtype_name((enum qx_dtype)w->dtype) : "no shard");
    qx_error_at(err, w ? qx_ckpt_file(ck, w->file)->name : NULL, w ? w->name : tab->module,
                QX_NO_OFF);
    return rc;
}

static int wrong_size(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t expected,
                      struct qx_error *err)
{
    int rc =
        qx_fail(err, QX_E_FORMAT, "shape", "the tensor has %" PRIu64 " bytes, expected %" PRIu64,
                t->size_bytes, expected);
    qx_error_at(err, qx_ckpt_file(ck, t->file)->name, t->name, QX_NO_OFF);
    return rc;
}

/* Every part must hold its rows of codes, and of scales where the format has them: all rows_per_part,
 * the last what is left. */
static int check_parts(const struct qx_rows *r, struct qx_error *err)
{
    enum qx_dtype want = qx_format_weight_dtype(r->format);
    for (uint32_t i = 0; i < r->n_parts; i++) {
        const struct qx_tensor *w = r->parts[i].weight, *s = r->parts[i].scale;
        uint64_t bytes, begin = i * r->rows_per_part,
                        rows = begin >= r->n_rows                   ? 0
                               : r->n_rows - begin < r->rows_per_part ? r->n_rows - begin
                                                                      : r->rows_per_part;
        if (w == NULL) {
            continue; /* an absent shard matters only to rows that lie in it */
        }
        if (want != QX_DT_UNKNOWN && w->dtype != want) {
            int rc = qx_fail(err, QX_E_FORMAT, "weight-dtype", "stored as %s, expected %s",
                             qx_dtype_name((enum qx_dtype)w->dtype), qx_dtype_name(want));
            qx_error_at(err, qx_ckpt_file(r->ck, w->file)->name, w->name, QX_NO_OFF);
            return rc;
        }
        if (!qx_mul_u64(rows, r->code_bytes, &bytes) || bytes != w->size_bytes) {
            return wrong_size(r->ck, w, rows * r->code_bytes, err);
        }
        if (r->scale_bytes > 0) {
            if (s == NULL) {
                return missing_scale(r->ck, w, w->name, "weight_scale", err);
            }
            if (s->dtype != QX_DT_F8_E4M3 && s->dtype != QX_DT_U8 && s->dtype != QX_DT_F8_E8M0) {
                int rc = qx_fail(err, QX_E_QUANT, "scale-dtype", "stored as %s, expected %s",
                                 qx_dtype_name((enum qx_dtype)s->dtype),
                                 r->format == QX_F_MXFP8 ? "U8 or F8_E8M0" : "F8_E4M3");
                qx_error_at(err, qx_ckpt_file(r->ck, s->file)->name, s->name, QX_NO_OFF);
                return rc;
            }
            if (!qx_mul_u64(rows, r->scale_bytes, &bytes) || bytes != s->size_bytes) {
                return wrong_size(r->ck, s, rows * r->scale_bytes, err);
            }
        }
    }
    return 0;
}

static int open_packed(struct qx_rows *r, const struct qx_table *tab, struct qx_error *err)
{
    int rc = tab->packed != NULL ? qx_pack_read(&r->pack, r->ck, tab->packed, err)
                                 : table_refused(r->ck, tab, err);
    if (rc == 0) {
        r->packed = true;
        r->format = r->pack.format;
        r->width = r->pack.width;
        r->n_rows = r->rows_per_part = r->pack.n_rows;
        r->n_parts = 1;
    }
    return rc;
}

int qx_fail_no_table(const struct qx_ckpt *ck, struct qx_error *err)
{
    const struct qx_config *c = qx_ckpt_config(ck);
    const struct qx_tensor *t;
    struct qx_error why;
    char name[160];
    if (c != NULL && c->n_ple_layers > 0) {
        snprintf(name, sizeof name,
                 "model.language_model.layers.%" PRIu32
                 ".ple.ple_embedding.ngram_embedding.shard_0.weight",
                 c->ple_layer[0]);
        int rc = qx_ckpt_need(ck, name, &t, &why);
        if (rc != 0 && strcmp(why.kind, "missing-tensor") != 0) {
            if (err != NULL) {
                *err = why;
            }
            return rc;
        }
    }
    int rc = qx_fail(err, QX_E_MISSING, "table-missing", "the checkpoint has no n-gram table");
    qx_error_at(err, qx_ckpt_path(ck), NULL, QX_NO_OFF);
    return rc;
}

/* An eighth of the memory, 512 MiB to 4 GiB. */
static uint64_t map_bytes(void)
{
    uint64_t n = qx_host_memory_bytes() / 8;
    return n < (512ull << 20) ? 512ull << 20 : n > (4ull << 30) ? 4ull << 30 : n;
}

int qx_rows_open_table(struct qx_rows **out, const struct qx_ckpt *ck, struct qx_error *err)
{
    *out = NULL;
    int rc = qx_ckpt_config_status(ck, err);
    if (rc == 0) {
        rc = qx_ckpt_require(ck, err);
    }
    if (rc != 0) {
        return rc;
    }
    const struct qx_resolved *res = qx_ckpt_resolved(ck);
    const struct qx_table *tab = res != NULL ? qx_resolved_table(res) : NULL;
    if (tab == NULL || !tab->present) {
        return qx_fail_no_table(ck, err);
    }
    struct qx_rows *r = qx_calloc(1, sizeof *r);
    if (r == NULL) {
        return qx_fail_nomem(err);
    }
    r->ck = ck;
    r->name = tab->module;
    r->table = true;
    r->format = tab->format;
    r->width = tab->width;
    r->n_rows = tab->n_rows;
    r->rows_per_part = tab->rows_per_shard;
    r->n_parts = tab->n_shards;
    uint32_t code_bytes = 0, scale_bytes = 0;
    if (tab->packed_rows) {
        rc = open_packed(r, tab, err);
    } else if (tab->format == QX_F_NONE || tab->rows_per_shard == 0) {
        rc = table_refused(ck, tab, err);
    }
    if (rc == 0 && !qx_table_row_bytes(r->format, (uint32_t)r->width, &code_bytes, &scale_bytes)) {
        rc = table_refused(ck, tab, err);
    }
    r->code_bytes = code_bytes;
    r->scale_bytes = scale_bytes;
    if (rc == 0) {
        r->parts = qx_calloc(r->n_parts, sizeof *r->parts);
        rc = r->parts == NULL ? qx_fail_nomem(err) : 0;
    }
    for (uint32_t i = 0; rc == 0 && i < r->n_parts; i++) {
        r->parts[i] = r->packed ? (struct qx_row_part){tab->packed, NULL}
                                : (struct qx_row_part){tab->shards[i].weight, tab->shards[i].scale};
    }
    if (rc == 0 &&
        (r->format == QX_F_FP8 || r->format == QX_F_NVFP4 || r->format == QX_F_W4A16_NVFP4)) {
        if (tab->global == NULL) {
            rc = missing_scale(ck, r->parts[0].weight, tab->module,
                               r->format == QX_F_FP8 ? "weight_scale" : "weight_scale_2", err);
        } else {
            r->n_global = 1;
            r->rows_per_stack = r->n_rows;
            rc = read_scales(ck, tab->global, 1, &r->global, err);
        }
    }
    if (rc == 0 && !r->packed) {
        rc = check_parts(r, err);
    }
    if (rc == 0) {
        r->maps = qx_calloc(r->n_parts, 2 * sizeof *r->maps);
        r->times = qx_calloc(1, sizeof *r->times);
        r->map_bytes = map_bytes();
        rc = r->maps == NULL || r->times == NULL ? qx_fail_nomem(err) : 0;
    }
    if (rc != 0) {
        qx_rows_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

/* The module whose weight t is, NULL if none. False: no memory. */
static bool module_of(const struct qx_ckpt *ck, const struct qx_tensor *t,
                      const struct qx_module **out)
{
    *out = NULL;
    static const char *const leaves[] = {".weight", ".weight_packed", ""};
    const struct qx_resolved *res = qx_ckpt_resolved(ck);
    for (size_t i = 0; res != NULL && i < QX_ARRAY_LEN(leaves); i++) {
        size_t n = strlen(leaves[i]);
        if (t->name_len < n || strcmp(t->name + t->name_len - n, leaves[i]) != 0) {
            continue;
        }
        char *name = qx_strndup(t->name, t->name_len - n);
        if (name == NULL) {
            return false;
        }
        const struct qx_module *m = qx_resolved_find(res, name);
        qx_free(name);
        if (m != NULL && m->weight == t) {
            *out = m;
            break;
        }
    }
    return true;
}

static int open_module(struct qx_rows *r, const struct qx_module *m, struct qx_error *err)
{
    int rc = 0;
    r->format = m->format;
    r->width = m->cols;
    r->rows_per_stack = m->rows;
    if (!qx_mul_u64(m->rows, m->n_stacked, &r->n_rows)) {
        return wrong_size(r->ck, m->weight, m->rows, err);
    }
    switch (m->format) {
    case QX_F_BF16:
    case QX_F_F16:
        r->code_bytes = 2 * m->cols;
        break;
    case QX_F_F32:
        r->code_bytes = 4 * m->cols;
        break;
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        if (m->cols % QX_NVFP4_BLOCK != 0) {
            rc = qx_fail(err, QX_E_QUANT, "group-size-indivisible",
                         "%" PRIu64 " columns do not divide into groups of 16", m->cols);
            break;
        }
        r->code_bytes = m->cols / 2;
        r->scale_bytes = m->cols / QX_NVFP4_BLOCK;
        break;
    case QX_F_MXFP8:
        r->code_bytes = m->cols;
        r->scale_bytes = qx_ceil_div(m->cols, QX_MXFP8_BLOCK);
        break;
    default:
        r->code_bytes = m->cols;
        break;
    }
    const struct qx_tensor *g = NULL;
    bool nvfp4 = m->format == QX_F_NVFP4 || m->format == QX_F_W4A16_NVFP4;
    if (rc == 0 && (m->format == QX_F_FP8 || nvfp4)) {
        g = m->format == QX_F_FP8 ? m->scale : m->scale_2;
        if (g == NULL) {
            return missing_scale(r->ck, m->weight, m->name,
                                 nvfp4 ? "weight_scale_2" : "weight_scale", err);
        }
        r->n_global = g->n_elems == m->n_stacked ? m->n_stacked : 1;
        rc = read_scales(r->ck, g, r->n_global, &r->global, err);
    }
    if (rc == 0 && m->format == QX_F_FP8_BLOCK) {
        if (m->scale == NULL) {
            return missing_scale(r->ck, m->weight, m->name, "weight_scale_inv", err);
        }
        uint64_t n;
        r->block_rows = qx_ceil_div(m->rows, QX_FP8_BLOCK_SIDE);
        r->block_cols = qx_ceil_div(m->cols, QX_FP8_BLOCK_SIDE);
        if (!qx_mul_u64(r->block_rows, r->block_cols, &n) || !qx_mul_u64(n, m->n_stacked, &n)) {
            return wrong_size(r->ck, m->scale, 0, err);
        }
        rc = read_scales(r->ck, m->scale, n, &r->blocks, err);
    }
    if (rc == 0) {
        r->parts[0].scale = r->scale_bytes > 0 ? m->scale : NULL;
    }
    return rc;
}

/* weight_packed, qweight and the like stand for values that only their own program can give. */
static bool is_foreign(const struct qx_resolved *r, const struct qx_tensor *t)
{
    char module[512];
    const char *dot = strrchr(t->name, '.');
    if (r == NULL || dot == NULL || (size_t)(dot - t->name) >= sizeof module) {
        return false;
    }
    memcpy(module, t->name, (size_t)(dot - t->name));
    module[dot - t->name] = 0;
    const struct qx_module *m = qx_resolved_find(r, module);
    return m != NULL && m->foreign == t;
}

int qx_rows_open_tensor(struct qx_rows **out, const struct qx_ckpt *ck, const char *tensor,
                        struct qx_error *err)
{
    *out = NULL;
    const struct qx_tensor *t;
    const struct qx_table *whole =
        qx_ckpt_resolved(ck) != NULL ? qx_resolved_table(qx_ckpt_resolved(ck)) : NULL;
    int needed = qx_ckpt_require(ck, err);
    if (needed == 0 && whole != NULL && whole->module != NULL &&
        strcmp(whole->module, tensor) == 0 && qx_ckpt_find(ck, tensor) == NULL) {
        return qx_rows_open_table(out, ck, err); /* the name that verify gives to a --decoder */
    }
    if (needed == 0) {
        needed = qx_ckpt_need(ck, tensor, &t, err);
    }
    if (needed) {
        return needed;
    }
    struct qx_rows *r = qx_calloc(1, sizeof *r);
    if (r != NULL) {
        r->parts = qx_calloc(1, sizeof *r->parts);
    }
    if (r == NULL || r->parts == NULL) {
        qx_rows_close(r);
        return qx_fail_nomem(err);
    }
    r->ck = ck;
    r->name = t->name;
    r->dtype = (enum qx_dtype)t->dtype;
    r->n_parts = 1;
    r->parts[0].weight = t;
    const struct qx_module *m;
    if (!module_of(ck, t, &m)) {
        qx_rows_close(r);
        return qx_fail_nomem(err);
    }
    const struct qx_resolved *res = qx_ckpt_resolved(ck);
    if (is_foreign(res, t)) {
        qx_rows_close(r);
        int refused =
            qx_fail(err, QX_E_QUANT, "foreign-convention",
                    "the tensor is in the convention of another program and is not decoded");
        qx_error_at(err, qx_ckpt_file(ck, t->file)->name, t->name, QX_NO_OFF);
        return refused;
    }
    int rc = 0;
    const struct qx_table *tab = res != NULL ? qx_resolved_table(res) : NULL;
    bool shard = false;
    for (uint32_t i = 0; tab != NULL && tab->present && !tab->packed_rows && i < tab->n_shards;
         i++) {
        if (tab->shards[i].weight == t && tab->format != QX_F_NONE) {
            /* One shard of the table: as the table, but its own rows. */
            uint32_t c = 0, s = 0;
            shard = qx_table_row_bytes(tab->format, tab->width, &c, &s);
            r->format = tab->format;
            r->width = tab->width;
            r->code_bytes = c;
            r->scale_bytes = s;
            r->n_rows = r->rows_per_stack = t->shape[0];
            r->parts[0].scale = s > 0 ? tab->shards[i].scale : NULL;
            if (tab->global != NULL && (tab->format == QX_F_FP8 || s > 0)) {
                r->n_global = 1;
                rc = read_scales(ck, tab->global, 1, &r->global, err);
            }
        }
    }
    bool quantised =
        m != NULL && m->format != QX_F_NONE && m->format != QX_F_I64 && m->format != QX_F_MIXED;
    if (rc == 0 && !shard && quantised) {
        rc = open_module(r, m, err);
    } else if (rc == 0 && !shard) {
        size_t n = t->name_len;
        bool weight = n > 7 && strcmp(t->name + n - 7, ".weight") == 0;
        if (t->dtype == QX_DT_UNKNOWN || t->dtype == QX_DT_C64) {
            rc = qx_fail(err, QX_E_UNSUPPORTED, "unknown-dtype",
                         "values of this type cannot be decoded");
        } else if (n > 14 && strcmp(t->name + n - 14, ".weight_packed") == 0) {
            rc = qx_fail(
                err, QX_E_UNSUPPORTED, "foreign-convention",
                "codes by the convention of another tool (compressed-tensors): not decoded");
        } else if (weight && (t->dtype == QX_DT_F8_E4M3 || t->dtype == QX_DT_U8)) {
            /* Codes without the scale that gives them a value: none is ever assumed. */
            rc = qx_fail(err, QX_E_MISSING, "missing-scale",
                         "stored as %s, and nothing tells its scale%s", qx_dtype_name(r->dtype),
                         res == NULL ? ": give the checkpoint directory" : "");
        } else {
            r->width = t->n_dims == 0 ? 1 : t->shape[t->n_dims - 1];
            r->n_rows = r->width == 0 ? 0 : t->n_elems / r->width;
            r->code_bytes = r->width * qx_dtype_size(r->dtype);
        }
        qx_error_at(rc != 0 ? err : NULL, qx_ckpt_file(ck, t->file)->name, t->name, QX_NO_OFF);
    }
    r->rows_per_part = r->n_rows;
    rc = rc == 0 ? check_parts(r, err) : rc;
    if (rc != 0) {
        qx_rows_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

void qx_rows_close(struct qx_rows *r)
{
    if (r != NULL) {
        qx_free(r->parts);
        qx_free(r->maps);
        qx_free(r->times);
        qx_free(r->global);
        qx_free(r->blocks);
        qx_free(r);
    }
}
