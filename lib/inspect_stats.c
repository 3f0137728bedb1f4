/* inspect_stats.c: distribution of one tensor's values. Weights of a module are decoded through
 * rows.c; scales, buffers and bytes are taken as the numbers they are. Two passes in pieces of
 * bounded size: the range, then the histogram. */
#include "alloc.h"
#include "ckpt.h"
#include "codes.h"
#include "layout.h"
#include "qx.h"
#include "resolve.h"

#include <math.h>
#include <string.h>

#define PIECE_VALUES (1u << 18)

/* A source of values: rows of a matrix, or raw elements. */
struct source {
    const struct qx_ckpt *ck;
    const struct qx_tensor *t;
    struct qx_rows *rows; /* NULL: raw elements */
    uint64_t n_rows, width;
    float *f32; /* [PIECE_VALUES at least one row] */
    double *f64;
    uint64_t *ids;
    uint8_t *raw;
};

static double raw_value(enum qx_dtype t, const uint8_t *p)
{
    int64_t i64;
    uint64_t u64;
    double f64;
    int32_t i32;
    uint32_t u32;
    switch (t) {
    case QX_DT_BOOL:
    case QX_DT_U8:
        return p[0];
    case QX_DT_I8:
        return (int8_t)p[0];
    case QX_DT_F8_E4M3:
        return (double)qx_e4m3_table[p[0]];
    case QX_DT_F8_E5M2:
        return (double)qx_e5m2_to_f32(p[0]);
    case QX_DT_F8_E8M0:
        return (double)qx_e8m0_to_f32(p[0]);
    case QX_DT_I16:
        return (int16_t)qx_load_u16(p);
    case QX_DT_U16:
        return qx_load_u16(p);
    case QX_DT_F16:
        return (double)qx_f16_to_f32(qx_load_u16(p));
    case QX_DT_BF16:
        return (double)qx_bf16_to_f32(qx_load_u16(p));
    case QX_DT_I32:
        memcpy(&i32, p, 4);
        return i32;
    case QX_DT_U32:
        memcpy(&u32, p, 4);
        return u32;
    case QX_DT_F32:
        return (double)qx_load_f32(p);
    case QX_DT_I64:
        memcpy(&i64, p, 8);
        return (double)i64;
    case QX_DT_U64:
        memcpy(&u64, p, 8);
        return (double)u64;
    case QX_DT_F64:
        memcpy(&f64, p, 8);
        return f64;
    default:
        return 0;
    }
}

/* Fetches values from `at`, at most a piece; returns how many, or a negative error. */
static int64_t fetch(struct source *s, uint64_t at, struct qx_error *err)
{
    uint64_t total = s->n_rows * s->width;
    if (!s->rows) {
        uint32_t size = qx_dtype_size((enum qx_dtype)s->t->dtype);
        uint64_t n = total - at < PIECE_VALUES ? total - at : PIECE_VALUES;
        int rc = qx_ckpt_read(s->ck, s->t, at * size, s->raw, n * size, err);
        if (rc) {
            return rc;
        }
        for (uint64_t i = 0; i < n; i++) {
            s->f64[i] = raw_value((enum qx_dtype)s->t->dtype, s->raw + i * size);
        }
        return (int64_t)n;
    }
    uint64_t row0 = at / s->width;
    uint64_t n = PIECE_VALUES / s->width;
    n = n ? n : 1;
    n = s->n_rows - row0 < n ? s->n_rows - row0 : n;
    for (uint64_t i = 0; i < n; i++) {
        s->ids[i] = row0 + i;
    }
    int rc = qx_rows_read(s->rows, s->ids, n, QX_ROW_F32, s->f32, err);
    if (rc) {
        return rc;
    }
    for (uint64_t i = 0; i < n * s->width; i++) {
        s->f64[i] = (double)s->f32[i];
    }
    return (int64_t)(n * s->width);
}

static int open_source(struct source *s, const struct qx_ckpt *ck, const char *tensor,
                       struct qx_error *err)
{
    struct qx_name nm;
    memset(s, 0, sizeof *s);
    s->ck = ck;
    s->t = qx_ckpt_find(ck, tensor);
    if (!s->t) {
        int rc =
            qx_fail(err, QX_E_NOT_FOUND, "tensor-not-found", "there is no tensor '%.300s'", tensor);
        qx_error_at(err, NULL, tensor, QX_NO_OFF);
        return rc;
    }
    qx_layout_parse(&nm, qx_ckpt_config(ck), tensor, strlen(tensor));
    bool weight = nm.leaf == QX_LEAF_WEIGHT || (nm.entry && nm.entry->kind == QX_K_FUSED);
    bool coded = s->t->dtype == QX_DT_U8 || s->t->dtype == QX_DT_F8_E4M3;
    s->n_rows = 1;
    s->width = s->t->n_elems;
    if (weight && coded && qx_ckpt_resolved(ck)) {
        int rc = qx_rows_open_tensor(&s->rows, ck, tensor, err);
        if (rc) {
            return rc;
        }
        s->n_rows = qx_rows_count(s->rows);
        s->width = qx_rows_width(s->rows);
    }
    uint64_t piece = s->rows && s->width > PIECE_VALUES ? s->width : PIECE_VALUES;
    size_t bytes;
    if (piece > SIZE_MAX / 8 || !qx_mul_size(piece, sizeof *s->f64, &bytes)) {
        return qx_fail_nomem(err);
    }
    s->f64 = qx_malloc(bytes);
    s->f32 = s->rows ? qx_malloc(piece * sizeof *s->f32) : NULL;
    s->ids = s->rows ? qx_malloc(PIECE_VALUES * sizeof *s->ids) : NULL;
    s->raw = s->rows ? NULL : qx_malloc((size_t)PIECE_VALUES * 8);
    return s->f64 && (s->rows ? s->f32 && s->ids : s->raw != NULL) ? 0 : qx_fail_nomem(err);
}

static void close_source(struct source *s)
{
    qx_rows_close(s->rows);
    qx_free(s->f64);
    qx_free(s->f32);
    qx_free(s->ids);
    qx_free(s->raw);
}

int qx_tensor_stats(const struct qx_ckpt *ck, const char *tensor, struct qx_value_stats *out,
                    struct qx_error *err)
{
    struct source s;
    double sum = 0;
    double squares = 0;
    uint64_t finite = 0;
    memset(out, 0, sizeof *out);
    int rc = open_source(&s, ck, tensor, err);
    uint64_t total = rc ? 0 : s.n_rows * s.width;
    for (uint64_t at = 0; !rc && at < total;) {
        int64_t n = fetch(&s, at, err);
        if (n < 0) {
            rc = (int)n;
            break;
        }
        for (int64_t i = 0; i < n; i++) {
            double v = s.f64[i];
            out->n_nan += isnan(v) ? 1 : 0;
            out->n_inf += isinf(v) ? 1 : 0;
            if (!isfinite(v)) {
                continue;
            }
            out->n_zero += v == 0;
            out->min = finite == 0 || v < out->min ? v : out->min;
            out->max = finite == 0 || v > out->max ? v : out->max;
            sum += v;
            squares += v * v;
            finite++;
        }
        at += (uint64_t)n;
    }
    out->n = total;
    if (!rc && finite) {
        out->mean = sum / (double)finite;
        out->rms = sqrt(squares / (double)finite);
        out->amax = fmax(fabs(out->min), fabs(out->max));
        out->bin_lo = out->min;
        out->bin_hi = out->max > out->min ? out->max : out->min + 1;
    }
    double per_bin = QX_STATS_BINS / (out->bin_hi - out->bin_lo);
    for (uint64_t at = 0; !rc && finite && at < total;) {
        int64_t n = fetch(&s, at, err);
        if (n < 0) {
            rc = (int)n;
            break;
        }
        for (int64_t i = 0; i < n; i++) {
            if (isfinite(s.f64[i])) {
                double x = (s.f64[i] - out->bin_lo) * per_bin;
                size_t k = x >= QX_STATS_BINS ? QX_STATS_BINS - 1 : x > 0 ? (size_t)x : 0;
                out->bin[k]++;
            }
        }
        at += (uint64_t)n;
    }
    close_source(&s);
    return rc;
}
