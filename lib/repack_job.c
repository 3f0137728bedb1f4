/* repack_job.c: see repack_job.h. A job reads its part of the input, converts it and writes its own
 * byte ranges; it depends on no other job, and what it writes depends only on the plan and the
 * input. */
#include "repack_job.h"

#include "codes.h"
#include "decode.h"
#include "file_map.h"
#include "file_out.h"
#include "fp8.h"
#include "nvfp4.h"
#include "out_dir.h"
#include "pool.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

void *rp_scratch_get(struct rp_scratch *s, unsigned i, size_t n)
{
    if (s->cap[i] < n) {
        qx_free(s->p[i]);
        s->p[i] = qx_malloc(n);
        s->cap[i] = s->p[i] != NULL ? n : 0;
    }
    return s->p[i];
}

void rp_scratch_fini(struct rp_scratch *s)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(s->p); i++) {
        qx_free(s->p[i]);
    }
}

static int differs(const struct qx_repack *r, uint32_t file, uint64_t off, struct qx_error *err)
{
    int rc =
        qx_fail(err, QX_E_WRITE, "verify", "what was written differs from what should be there");
    qx_error_at(err, r->f[file].name, NULL, off);
    return rc;
}

static int read_back(const struct qx_repack *r, const struct rp_sink *k, uint32_t file,
                     uint64_t off, void *dst, size_t n, struct qx_error *err)
{
    return qx_file_read(k->fd[file], dst, n, off, NULL) == 0 ? 0 : differs(r, file, off, err);
}

static int emit(const struct qx_repack *r, const struct rp_sink *k, uint32_t file, uint64_t off,
                const void *p, size_t n, struct qx_error *err)
{
    if (!k->compare) {
        return qx_pwrite_all(k->fd[file], p, n, off, r->f[file].name, err);
    }
    char buf[65536];
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < n; i += sizeof buf) {
        size_t m = n - i < sizeof buf ? n - i : sizeof buf;
        rc = read_back(r, k, file, off + i, buf, m, err);
        if (rc == 0 && memcmp(buf, (const char *)p + i, m) != 0) {
            rc = differs(r, file, off + i, err);
        }
    }
    return rc;
}

static int copy(struct qx_repack *r, const struct rp_job *j, const struct rp_sink *k,
                struct rp_scratch *s, struct qx_error *err)
{
    const char *src = qx_ckpt_file(r->ck, (size_t)j->from)->name;
    int fd = qx_ckpt_fd(r->ck, (uint32_t)j->from);
    if (fd < 0) {
        int rc = qx_fail(err, QX_E_IO, "read", "the file cannot be read");
        qx_error_at(err, src, NULL, QX_NO_OFF);
        return rc;
    }
    if (!k->compare) {
        pthread_mutex_lock(k->copying);
        int rc = qx_copy_range(fd, j->from_off, k->fd[j->file], j->off, j->n, src,
                               r->f[j->file].name, err);
        pthread_mutex_unlock(k->copying);
        return rc;
    }
    uint8_t *buf = rp_scratch_get(s, 0, 1u << 20);
    int rc = buf == NULL ? qx_fail_nomem(err) : 0;
    for (uint64_t i = 0; rc == 0 && i < j->n; i += 1u << 20) {
        size_t n = j->n - i < 1u << 20 ? (size_t)(j->n - i) : 1u << 20;
        rc = qx_file_read(fd, buf, n, j->from_off + i, err);
        if (rc != 0) {
            qx_error_at(err, src, NULL, j->from_off + i);
            return rc;
        }
        rc = emit(r, k, j->file, j->off + i, buf, n, err);
    }
    return rc;
}

/* ---- table -------------------------------------------------------------------------------- */

/* Statistics of rounding to BF16. */
static void bf16_stats(const float *x, const uint16_t *b, uint64_t n_rows, uint64_t cols,
                       struct qx_quant_stats *st)
{
    for (uint64_t row = 0; row < n_rows; row++) {
        double sum = 0.0, err = 0.0;
        for (uint64_t i = row * cols; i < (row + 1) * cols; i++) {
            double d = (double)qx_bf16_to_f32(b[i]) - (double)x[i];
            if (isfinite(d)) {
                sum += (double)x[i] * (double)x[i];
                err += d * d;
                st->max_err = fabs(d) > st->max_err ? fabs(d) : st->max_err;
            }
        }
        st->sum_sq += sum;
        st->err_sq += err;
        st->rows_above += err > QX_QUANT_ROW_LIMIT * QX_QUANT_ROW_LIMIT * sum;
    }
    st->n_rows += n_rows;
    st->n_values += n_rows * cols;
    st->plain_err_sq = st->err_sq;
    st->plain_max_err = st->max_err;
    st->plain_rows_above = st->rows_above;
}

#define PIECE_VALUES 49152u

static int bad_row(uint64_t row, struct qx_error *err)
{
    return qx_fail(err, QX_E_VALUE, "payload-nan",
                   "row %" PRIu64
                   " of the table holds a value that is not finite and cannot be quantised",
                   row);
}

/* FP8 to NVFP4: the scan ends where it has seen the largest finite code, so NaN is looked for here. */
static int check_e4m3(const struct rp_table *t, const uint8_t *in, uint64_t row0, uint64_t n,
                      struct qx_error *err)
{
    if (qx_amax_e4m3(in, n * t->width) < 0x7f) {
        return 0;
    }
    uint64_t i = 0;
    while ((in[i] & 0x7f) != 0x7f) {
        i++;
    }
    return bad_row(row0 + i / t->width, err);
}

static int convert_rows(struct qx_repack *r, uint64_t row0, uint64_t n, struct rp_scratch *s,
                        uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st,
                        struct qx_error *err)
{
    const struct rp_table *t = &r->table;
    if (!t->convert) {
        return qx_rows_read_stored(t->rows, row0, n, codes, scales, err);
    }
    /* Pieces whose values stay in the processor's cache between the decoder and the encoder. */
    uint64_t piece = PIECE_VALUES / t->width + 1;
    uint64_t code_n = qx_rows_raw_bytes(t->rows), scale_n = qx_rows_scale_bytes(t->rows);
    float *x = rp_scratch_get(s, 0, piece * t->width * sizeof *x + 1);
    uint8_t *in = rp_scratch_get(s, 4, piece * (code_n + scale_n) + 1);
    int rc = x == NULL || in == NULL ? qx_fail_nomem(err) : 0;
    for (uint64_t i = 0, m; rc == 0 && i < n; i += m) {
        m = n - i < piece ? n - i : piece;
        uint8_t *in_scales = in + m * code_n, *out = codes + i * t->code_bytes;
        rc = qx_rows_read_stored(t->rows, row0 + i, m, in, in_scales, err);
        if (rc != 0) {
            break;
        }
        if (t->from == QX_F_FP8 && t->to == QX_F_NVFP4) {
            /* The encoder takes the bytes themselves, unless their scale is odd. */
            rc = check_e4m3(t, in, row0 + i, m, err);
            if (rc != 0 ||
                qx_nvfp4_quantize_e4m3(in, qx_rows_global(t->rows), m, t->width, t->global,
                                       !r->o.plain_scales, out, scales + i * t->scale_bytes, st)) {
                continue;
            }
        }
        qx_rows_decode_stored(t->rows, row0 + i, m, in, in_scales, x);
        if (t->to == QX_F_BF16) {
            qx_decode_ops()->to_bf16(x, m * t->width, (uint16_t *)(void *)out);
            bf16_stats(x, (const uint16_t *)(const void *)out, m, t->width, st);
        } else if (t->to == QX_F_FP8) {
            qx_fp8_quantize(x, m, t->width, t->global, t->plain_global, out, st);
        } else {
            qx_nvfp4_quantize(x, m, t->width, t->global, !r->o.plain_scales, out,
                              scales + i * t->scale_bytes, st);
        }
    }
    return rc;
}

static int table(struct qx_repack *r, const struct rp_job *j, const struct rp_sink *k,
                 struct rp_scratch *s, struct qx_quant_stats *st, struct qx_error *err)
{
    const struct rp_table *t = &r->table;
    const struct rp_tensor *a = &r->t[j->tensor];
    uint64_t row0 = (t->packed ? t->row0 : a->row0) + j->row;
    uint64_t have = row0 >= t->src_rows ? 0 : t->src_rows - row0;
    have = have < j->n_rows ? have : j->n_rows;
    size_t code_n = j->n_rows * t->code_bytes, scale_n = j->n_rows * t->scale_bytes;
    uint8_t *codes = rp_scratch_get(s, 1, code_n + 16),
            *scales = rp_scratch_get(s, 2, scale_n + 16);
    if (codes == NULL || scales == NULL) {
        return qx_fail_nomem(err);
    }
    /* Rows behind the source's last are a rank's padding: zeros. */
    memset(codes + have * t->code_bytes, 0, (j->n_rows - have) * t->code_bytes);
    memset(scales + have * t->scale_bytes, 0, (j->n_rows - have) * t->scale_bytes);
    int rc = have > 0 ? convert_rows(r, row0, have, s, codes, scales, st, err) : 0;
    if (rc != 0 || !t->packed) {
        rc =
            rc == 0 ? emit(r, k, a->file, a->off + j->row * t->code_bytes, codes, code_n, err) : rc;
        const struct rp_tensor *b = &r->t[j->tensor2];
        if (rc == 0 && scale_n > 0) {
            rc = emit(r, k, b->file, b->off + j->row * t->scale_bytes, scales, scale_n, err);
        }
        return rc;
    }
    uint64_t per = t->pack.rows_per_block, n_blocks = qx_ceil_div(j->n_rows, per);
    uint8_t *out = rp_scratch_get(s, 3, n_blocks * t->pack.block_bytes);
    if (out == NULL) {
        return qx_fail_nomem(err);
    }
    memset(out, 0, n_blocks * t->pack.block_bytes);
    for (uint64_t i = 0; i < j->n_rows; i++) {
        uint8_t *p = out + qx_pack_row_off(&t->pack, i);
        memcpy(p, codes + i * t->code_bytes, t->code_bytes);
        memcpy(p + t->code_bytes, scales + i * t->scale_bytes, t->scale_bytes);
    }
    return emit(r, k, a->file, a->off + qx_pack_row_off(&t->pack, j->row), out,
                n_blocks * t->pack.block_bytes, err);
}

/* ---- experts ------------------------------------------------------------------------------ */

/* One projection as f32. */
static int read_proj(struct qx_repack *r, const struct rp_proj *p, uint64_t rows, float *x,
                     struct qx_error *err)
{
    struct qx_rows *src;
    int rc = qx_rows_open_tensor(&src, r->ck, p->m->weight->name, err);
    if (rc == 0) {
        rc = qx_rows_read_range(src, p->row0, rows, QX_ROW_F32, x, err);
        qx_rows_close(src);
    }
    return rc;
}

static int not_finite(const struct rp_proj *p, struct qx_error *err)
{
    int rc = qx_fail(err, QX_E_VALUE, "payload-nan",
                     "the matrix holds a value that is not finite and cannot "
                     "be quantised");
    qx_error_at(err, NULL, p->m->name, QX_NO_OFF);
    return rc;
}

static int store_proj(struct qx_repack *r, const struct rp_container *c, uint32_t tensor,
                      const float *x, uint64_t rows, uint64_t cols, float global,
                      const struct rp_sink *k, struct rp_scratch *s, struct qx_quant_stats *st,
                      struct qx_error *err)
{
    uint8_t *codes = rp_scratch_get(s, 1, rows * cols + 16),
            *scales = rp_scratch_get(s, 2, rows * cols + 16);
    if (codes == NULL || scales == NULL) {
        return qx_fail_nomem(err);
    }
    const struct rp_tensor *w = &r->t[tensor], *sc = &r->t[tensor + 1], *g = &r->t[tensor + 2];
    int rc = 0;
    if (c->to == QX_F_NVFP4) {
        qx_nvfp4_quantize(x, rows, cols, global, !r->o.plain_scales, codes, scales, st);
        rc = emit(r, k, g->file, g->off, &global, 4, err);
    } else {
        rc = qx_fp8_block_quantize(x, rows, cols, !r->o.plain_scales, codes,
                                   (uint16_t *)(void *)scales, st, err);
    }
    rc = rc == 0 ? emit(r, k, w->file, w->off, codes, w->size, err) : rc;
    return rc == 0 ? emit(r, k, sc->file, sc->off, scales, sc->size, err) : rc;
}

static int expert(struct qx_repack *r, const struct rp_job *j, const struct rp_sink *k,
                  struct rp_scratch *s, struct qx_quant_stats *st, struct qx_error *err)
{
    const struct rp_container *c = &r->c[j->container];
    const struct rp_expert *e = &c->e[j->expert];
    uint64_t n = c->inter * c->hidden;
    float *x = rp_scratch_get(s, 0, 3 * n * sizeof *x);
    if (x == NULL) {
        return qx_fail_nomem(err);
    }
    int rc = 0;
    float amax[3] = {0};
    for (int p = 0; rc == 0 && p < 3; p++) {
        bool finite = true;
        rc = read_proj(r, &e->p[p], p < 2 ? c->inter : c->hidden, x + (uint64_t)p * n, err);
        amax[p] = rc == 0 ? qx_amax(x + (uint64_t)p * n, n, &finite) : 0.0f;
        if (rc == 0 && !finite && c->to != QX_F_BF16) {
            rc = not_finite(&e->p[p], err);
        }
    }
    if (rc == 0 && c->per_expert == 0) {
        /* Fused: gate and up are neighbours in one tensor, down in the other. */
        const struct rp_tensor *up = &r->t[c->tensor0], *down = &r->t[c->tensor0 + 1];
        uint16_t *b = rp_scratch_get(s, 1, 3 * n * sizeof *b);
        if (b == NULL) {
            return qx_fail_nomem(err);
        }
        qx_decode_ops()->to_bf16(x, 3 * n, b);
        bf16_stats(x, b, 2 * c->inter, c->hidden, st);
        bf16_stats(x + 2 * n, b + 2 * n, c->hidden, c->inter, st);
        rc = emit(r, k, up->file, up->off + j->expert * 4 * n, b, 4 * n, err);
        return rc == 0
                   ? emit(r, k, down->file, down->off + j->expert * 2 * n, b + 2 * n, 2 * n, err)
                   : rc;
    }
    /* Runtimes fuse gate and up under one scale: they share the larger. */
    float both = qx_nvfp4_global(amax[0] > amax[1] ? amax[0] : amax[1]);
    for (int p = 0; rc == 0 && p < 3; p++) {
        uint32_t tensor =
            c->tensor0 + j->expert * c->per_expert + (uint32_t)p * (c->per_expert / 3);
        rc = store_proj(r, c, tensor, x + (uint64_t)p * n, p < 2 ? c->inter : c->hidden,
                        p < 2 ? c->hidden : c->inter, p < 2 ? both : qx_nvfp4_global(amax[2]), k, s,
                        st, err);
    }
    return rc;
}

int rp_do_job(struct qx_repack *r, const struct rp_job *j, const struct rp_sink *k,
              struct rp_scratch *s, struct qx_quant_stats *st, struct qx_error *err)
{
    uint16_t half;
    switch (j->kind) {
    case RP_J_COPY:
        return copy(r, j, k, s, err);
    case RP_J_BYTES:
        return emit(r, k, j->file, j->off, j->bytes, j->n, err);
    case RP_J_TABLE:
        return table(r, j, k, s, st, err);
    case RP_J_EXPERT:
        return expert(r, j, k, s, st, err);
    default:
        half = qx_f32_to_bf16(r->table.global);
        return r->table.to == QX_F_FP8 ? emit(r, k, j->file, j->off, &half, 2, err)
                                       : emit(r, k, j->file, j->off, &r->table.global, 4, err);
    }
}

/* ---- the scan ----------------------------------------------------------------------------- */

#define BINS 32768u

struct scan {
    struct qx_repack *r;
    uint64_t chunk, first; /* rows a piece; number of the first piece of this round */
    uint64_t *bins;        /* [threads][BINS] */
    float *amax;           /* [threads], F32 sources */
    struct rp_scratch *scratch;
    _Atomic uint64_t bad_row; /* the first row with a value that is not finite */
    _Atomic bool known;       /* no value can be larger than what was seen */
    _Atomic int failed;
    pthread_mutex_t lock;
    struct qx_error err;
};

static void note_bad(struct scan *s, uint64_t row)
{
    uint64_t old = atomic_load(&s->bad_row);
    while (row < old && !atomic_compare_exchange_weak(&s->bad_row, &old, row)) {
    }
}

static void count_half(struct scan *s, uint64_t *bins, const uint8_t *p, uint64_t row0, uint64_t n,
                       uint64_t width, uint32_t infinity)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t worst = 0;
        for (uint64_t k = 0; k < width; k++) {
            uint32_t v = qx_load_u16(p) & 0x7fffu;
            bins[v]++;
            worst = v > worst ? v : worst;
            p += 2;
        }
        if (worst >= infinity) {
            note_bad(s, row0 + i);
        }
    }
}

/* NVFP4 needs only the largest magnitude: its bin is all that is filled. False when the form has no
 * short way or holds a value that is not finite, which the long way finds. */
static bool scan_amax(struct scan *s, uint64_t *bins, const uint8_t *codes, uint64_t n)
{
    const struct rp_table *t = &s->r->table;
    uint32_t top, end;
    if (t->from == QX_F_BF16 || t->from == QX_F_F16) {
        top = qx_amax_half(codes, n * t->width);
        end = t->from == QX_F_BF16 ? 0x7f80 : 0x7c00;
    } else if (t->from == QX_F_FP8) {
        top = qx_amax_e4m3(codes, n * t->width);
        end = 0x7f;
    } else {
        return false;
    }
    if (top >= end) {
        return false;
    }
    bins[top]++;
    if (t->from == QX_F_FP8 && top + 1 == end) {
        atomic_store(&s->known, true);
    }
    return true;
}

static void scan_piece(void *user, uint64_t i, uint32_t worker)
{
    struct scan *s = user;
    const struct rp_table *t = &s->r->table;
    uint64_t row0 = t->row0 + (s->first + i) * s->chunk, end = t->row0 + t->n_rows;
    end = end < t->src_rows ? end : t->src_rows;
    if (row0 >= end || atomic_load(&s->failed) || atomic_load(&s->known)) {
        return;
    }
    uint64_t n = end - row0 < s->chunk ? end - row0 : s->chunk;
    uint64_t code_n = qx_rows_raw_bytes(t->rows), scale_n = qx_rows_scale_bytes(t->rows);
    uint8_t *codes = rp_scratch_get(&s->scratch[worker], 0, n * code_n + 16);
    uint8_t *scales = rp_scratch_get(&s->scratch[worker], 1, n * scale_n + 16);
    struct qx_error err = {0};
    int rc = codes == NULL || scales == NULL
                 ? qx_fail_nomem(&err)
                 : qx_rows_read_stored(t->rows, row0, n, codes, scales, &err);
    if (rc != 0) {
        pthread_mutex_lock(&s->lock);
        s->err = err;
        atomic_store(&s->failed, 1);
        pthread_mutex_unlock(&s->lock);
        return;
    }
    uint64_t *bins = s->bins + (size_t)worker * BINS;
    if (t->to == QX_F_NVFP4 && scan_amax(s, bins, codes, n)) {
        return;
    }
    if (t->from == QX_F_BF16 || t->from == QX_F_F16) {
        count_half(s, bins, codes, row0, n, t->width, t->from == QX_F_BF16 ? 0x7f80 : 0x7c00);
    } else if (t->from == QX_F_FP8) {
        for (uint64_t k = 0; k < n * code_n; k++) {
            uint32_t v = codes[k] & 0x7fu;
            bins[v]++;
            if (v == 0x7f) {
                note_bad(s, row0 + k / code_n);
            }
        }
    } else if (t->from == QX_F_NVFP4) {
        for (uint64_t b = 0; b < n * scale_n; b++) {
            uint32_t sc = (scales[b] & 0x7fu) * 8;
            if (sc == 0x7f * 8) {
                note_bad(s, row0 + b / scale_n);
            }
            for (int k = 0; k < 8; k++) {
                uint8_t c = codes[b * 8 + (uint64_t)k];
                bins[sc + (c & 7)]++;
                bins[sc + (c >> 4 & 7)]++;
            }
        }
    } else {
        bool finite;
        float a = qx_amax((const float *)(const void *)codes, n * t->width, &finite);
        s->amax[worker] = a > s->amax[worker] ? a : s->amax[worker];
        if (!finite) {
            note_bad(s, row0);
        }
    }
}

static float bin_value(const struct rp_table *t, uint32_t bin, float global)
{
    switch (t->from) {
    case QX_F_BF16:
        return qx_bf16_to_f32((uint16_t)bin);
    case QX_F_F16:
        return qx_f16_to_f32((uint16_t)bin);
    case QX_F_FP8:
        return bin < 0x80 ? qx_e4m3_table[bin] * global : 0.0f;
    default:
        return bin < 0x80 * 8 ? (qx_e2m1_table[bin & 7] * qx_e4m3_table[bin / 8]) * global : 0.0f;
    }
}

static int choose_scale(struct scan *s, uint32_t threads, struct qx_error *err)
{
    struct rp_table *t = &s->r->table;
    struct qx_histogram h = {0};
    float amax = 0.0f, global = fabsf(qx_rows_global(t->rows));
    h.value = qx_calloc(BINS, sizeof *h.value);
    h.count = qx_calloc(BINS, sizeof *h.count);
    if (h.value == NULL || h.count == NULL) {
        qx_free(h.value);
        qx_free(h.count);
        return qx_fail_nomem(err);
    }
    for (uint32_t b = 0; b < BINS; b++) {
        uint64_t n = 0;
        for (uint32_t k = 0; k < threads; k++) {
            n += s->bins[(size_t)k * BINS + b];
        }
        if (n > 0) {
            h.value[h.n] = bin_value(t, b, global);
            h.count[h.n] = n;
            amax = h.value[h.n] > amax ? h.value[h.n] : amax;
            h.n++;
        }
    }
    for (uint32_t k = 0; k < threads; k++) {
        amax = s->amax[k] > amax ? s->amax[k] : amax;
    }
    int rc = 0;
    if (!isfinite(amax)) {
        rc = qx_fail(err, QX_E_VALUE, "payload-nan",
                     "the table's scale makes values that are not finite");
    } else if (t->to == QX_F_NVFP4) {
        t->global = t->plain_global = qx_nvfp4_global(amax);
    } else {
        t->plain_global = qx_fp8_plain_scale(amax);
        t->global = s->r->o.plain_scales || h.n == 0 ? t->plain_global : qx_fp8_search(&h, amax);
    }
    qx_free(h.value);
    qx_free(h.count);
    return rc;
}

int rp_scan_table(struct qx_repack *r, struct qx_pool *pool, int (*tick)(void *user), void *user,
                  struct qx_error *err)
{
    struct rp_table *t = &r->table;
    uint32_t threads = qx_pool_threads(pool);
    struct scan s = {.r = r, .bad_row = UINT64_MAX, .lock = PTHREAD_MUTEX_INITIALIZER};
    s.chunk = (1u << 20) / (qx_rows_raw_bytes(t->rows) + 1) + 1;
    s.bins = qx_calloc((size_t)threads * BINS, sizeof *s.bins);
    s.amax = qx_calloc(threads, sizeof *s.amax);
    s.scratch = qx_calloc(threads, sizeof *s.scratch);
    int rc = s.bins == NULL || s.amax == NULL || s.scratch == NULL ? qx_fail_nomem(err) : 0;
    uint64_t pieces = qx_ceil_div(t->n_rows, s.chunk);
    for (; rc == 0 && s.first < pieces && !atomic_load(&s.known); s.first += 256) {
        qx_pool_run(pool, pieces - s.first < 256 ? pieces - s.first : 256, 1, scan_piece, &s);
        if (atomic_load(&s.failed)) {
            rc = -(int)s.err.code;
            if (err != NULL) {
                *err = s.err;
            }
        } else if (tick != NULL && tick(user) != 0) {
            rc = qx_fail(err, QX_E_INTERRUPTED, "interrupted", "stopped");
        }
    }
    uint64_t bad = atomic_load(&s.bad_row);
    if (rc == 0 && bad != UINT64_MAX) {
        rc = bad_row(bad, err);
    }
    rc = rc == 0 ? choose_scale(&s, threads, err) : rc;
    for (uint32_t k = 0; s.scratch != NULL && k < threads; k++) {
        rp_scratch_fini(&s.scratch[k]);
    }
    qx_free(s.bins);
    qx_free(s.amax);
    qx_free(s.scratch);
    return rc;
}
