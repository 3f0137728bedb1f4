/* indep_decode.c: the second decoder, in integers. A code is taken apart into sign, integer mantissa and
 * power of two by the words of formats 6.1; products are integer products; one rounding gives f32 and a
 * second one bfloat16 (formats 6.2). Owns nothing. Reads bytes through qx_ckpt_read only and assumes no
 * alignment and no byte order of the machine. */
#include "indep_decode.h"

#include "alloc.h"
#include "error.h"

#include <stdatomic.h>
#include <string.h>

/* ---- codes -------------------------------------------------------------------------------- */

/* A binary floating format with `eb` exponent bits and `mb` mantissa bits, IEEE-like below the top
 * exponent; the caller deals with what the top exponent means. */
static struct qx_exact take_apart(uint32_t bits, unsigned eb, unsigned mb, int bias)
{
    struct qx_exact x = {0};
    uint32_t frac = bits & ((1u << mb) - 1u);
    uint32_t e = (bits >> mb) & ((1u << eb) - 1u);
    x.neg = (bits >> (eb + mb)) & 1u;
    if (e == 0) {
        x.mant = frac;
        x.exp = 1 - bias - (int)mb;
    } else {
        x.mant = frac + (1u << mb);
        x.exp = (int)e - bias - (int)mb;
    }
    return x;
}

static struct qx_exact ieee(uint32_t bits, unsigned eb, unsigned mb, int bias)
{
    struct qx_exact x = take_apart(bits, eb, mb, bias);
    uint32_t top = (1u << eb) - 1u;
    if (((bits >> mb) & top) == top) {
        x.nan = (bits & ((1u << mb) - 1u)) != 0;
        x.inf = !x.nan;
        x.mant = 0;
        x.exp = 0;
    }
    return x;
}

struct qx_exact qx_exact_e4m3(unsigned byte)
{
    struct qx_exact x = take_apart(byte & 0xffu, 4, 3, 7);
    if ((byte & 0x7fu) == 0x7fu) {
        x.nan = true;
    }
    return x;
}

struct qx_exact qx_exact_e5m2(unsigned byte)
{
    return ieee(byte & 0xffu, 5, 2, 15);
}

struct qx_exact qx_exact_e8m0(unsigned byte)
{
    struct qx_exact x = {.mant = 1, .exp = (int)(byte & 0xffu) - 127};
    x.nan = (byte & 0xffu) == 0xffu;
    return x;
}

struct qx_exact qx_exact_e2m1(unsigned nibble)
{
    /* One mantissa bit, two exponent bits of bias 1: 0, 1/2, then (1 + m/2) 2^(e-1). */
    struct qx_exact x = {.neg = (nibble >> 3) & 1u};
    unsigned e = (nibble >> 1) & 3u, m = nibble & 1u;
    x.mant = e == 0 ? m : 2u + m;
    x.exp = e == 0 ? -1 : (int)e - 2;
    return x;
}

struct qx_exact qx_exact_bf16(unsigned bits)
{
    return ieee(bits & 0xffffu, 8, 7, 127);
}

struct qx_exact qx_exact_f16(unsigned bits)
{
    return ieee(bits & 0xffffu, 5, 10, 15);
}

struct qx_exact qx_exact_f32(uint32_t bits)
{
    return ieee(bits, 8, 23, 127);
}

struct qx_exact qx_exact_mul(struct qx_exact a, struct qx_exact b)
{
    struct qx_exact x = {.neg = a.neg != b.neg};
    bool zero = (!a.inf && !a.nan && a.mant == 0) || (!b.inf && !b.nan && b.mant == 0);
    if (a.nan || b.nan || ((a.inf || b.inf) && zero)) {
        x.nan = true;
    } else if (a.inf || b.inf) {
        x.inf = true;
    } else {
        x.mant = a.mant * b.mant;
        x.exp = a.exp + b.exp;
    }
    return x;
}

/* ---- rounding ----------------------------------------------------------------------------- */

/* mant / 2^drop, nearest even. */
static uint64_t round_shift(uint64_t mant, unsigned drop)
{
    uint64_t kept, rest, half;
    if (drop == 0) {
        return mant;
    }
    if (drop > 64) {
        return 0;
    }
    kept = drop == 64 ? 0 : mant >> drop;
    rest = drop == 64 ? mant : mant & ((UINT64_C(1) << drop) - 1);
    half = UINT64_C(1) << (drop - 1);
    if (rest > half || (rest == half && (kept & 1u))) {
        ++kept;
    }
    return kept;
}

uint32_t qx_exact_to_f32(struct qx_exact x)
{
    uint32_t sign = x.neg ? 0x80000000u : 0u;
    unsigned width = 0;
    int lsb;
    uint64_t q;
    if (x.nan) {
        return sign | 0x7fc00000u;
    }
    if (x.inf) {
        return sign | 0x7f800000u;
    }
    if (x.mant == 0) {
        return sign;
    }
    while (width < 64 && (x.mant >> width) != 0) {
        ++width;
    }
    /* Weight of the result's last bit: 24 significant bits, but never below 2^-149. */
    lsb = x.exp + (int)width - 24;
    if (lsb < -149) {
        lsb = -149;
    }
    if (lsb <= x.exp) {
        unsigned up = (unsigned)(x.exp - lsb);
        q = up < 64 ? x.mant << up : 0;
    } else {
        q = round_shift(x.mant, (unsigned)(lsb - x.exp));
    }
    if (q == UINT64_C(1) << 24) {
        q >>= 1;
        ++lsb;
    }
    if (q < UINT64_C(1) << 23) {
        return sign | (uint32_t)q; /* subnormal: lsb is -149 */
    }
    if (lsb + 23 > 127) {
        return sign | 0x7f800000u;
    }
    return sign | (uint32_t)(lsb + 23 + 127) << 23 | ((uint32_t)q & 0x7fffffu);
}

uint16_t qx_exact_f32_to_bf16(uint32_t bits)
{
    uint32_t magnitude = bits & 0x7fffffffu, sign = bits & 0x80000000u;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)((sign | 0x7fc00000u) >> 16);
    }
    /* Bits of a magnitude are ordered like the numbers, and neighbours differ by one: rounding the
     * integer rounds the number, up to infinity. */
    return (uint16_t)((uint32_t)round_shift(magnitude, 16) | sign >> 16);
}

/* ---- bytes -------------------------------------------------------------------------------- */

static uint32_t le(const uint8_t *p, unsigned n)
{
    uint32_t v = 0;
    for (unsigned i = n; i > 0; --i) {
        v = v << 8 | p[i - 1];
    }
    return v;
}

/* Bytes of one stored element that can stand as a number here; 0 for other types. */
static unsigned number_size(uint8_t dtype)
{
    switch (dtype) {
    case QX_DT_F8_E4M3:
    case QX_DT_F8_E5M2:
    case QX_DT_F8_E8M0:
        return 1;
    case QX_DT_BF16:
    case QX_DT_F16:
        return 2;
    case QX_DT_F32:
        return 4;
    default:
        return 0;
    }
}

static struct qx_exact number_at(uint8_t dtype, const uint8_t *p)
{
    switch (dtype) {
    case QX_DT_F8_E4M3:
        return qx_exact_e4m3(p[0]);
    case QX_DT_F8_E5M2:
        return qx_exact_e5m2(p[0]);
    case QX_DT_F8_E8M0:
        return qx_exact_e8m0(p[0]);
    case QX_DT_BF16:
        return qx_exact_bf16(le(p, 2));
    case QX_DT_F16:
        return qx_exact_f16(le(p, 2));
    default:
        return qx_exact_f32(le(p, 4));
    }
}

static int need(const struct qx_tensor *t, const char *what, const char *module, struct qx_error *err)
{
    if (!t) {
        return qx_fail(err, QX_E_MISSING, "missing-scale", "%s of '%s' is not stored", what, module);
    }
    if (!t->readable) {
        return qx_fail(err, QX_E_FORMAT, "truncated", "'%s' cannot be read whole", t->name);
    }
    return 0;
}

/* One number for all, or for a fused stack one an expert. */
static int read_global(struct qx_indep *d, const struct qx_tensor *t, const char *what,
                       const char *module, uint64_t stacked, struct qx_error *err)
{
    uint8_t b[4];
    int rc = need(t, what, module, err);
    unsigned size;
    if (rc) {
        return rc;
    }
    size = number_size(t->dtype);
    if ((t->n_elems != 1 && t->n_elems != stacked) || size < 2) {
        return qx_fail(err, QX_E_QUANT, "scale-shape", "'%s' is not one floating number", t->name);
    }
    rc = qx_ckpt_read(d->ck, t, 0, b, size, err);
    if (!rc) {
        d->global = t;
        d->global_code = le(b, size);
    }
    return rc;
}

/* Elements that a companion must have for `rows` x `cols` at the least; guards every later offset. */
static int need_elems(const struct qx_tensor *t, uint64_t rows, uint64_t per_row, struct qx_error *err)
{
    uint64_t n;
    if (!qx_mul_u64(rows, per_row, &n) || t->n_elems != n) {
        return qx_fail(err, QX_E_QUANT, "scale-shape", "'%s' has %llu elements, %llu x %llu needed",
                       t->name, (unsigned long long)t->n_elems, (unsigned long long)rows,
                       (unsigned long long)per_row);
    }
    return 0;
}

/* ---- preparation -------------------------------------------------------------------------- */

static uint64_t next_serial(void)
{
    static _Atomic uint64_t last;
    return atomic_fetch_add(&last, 1) + 1;
}

static bool plain(enum qx_format f)
{
    return f == QX_F_BF16 || f == QX_F_F16 || f == QX_F_F32;
}

int qx_indep_module(struct qx_indep *d, const struct qx_ckpt *ck, const struct qx_module *m,
                    struct qx_error *err)
{
    int rc;
    uint64_t rows;
    memset(d, 0, sizeof *d);
    d->serial = next_serial();
    d->ck = ck;
    d->module = m;
    d->format = m->format;
    if ((rc = need(m->weight, "the weight", m->name, err)) != 0) {
        return rc;
    }
    if (!qx_mul_u64(m->rows, m->n_stacked ? m->n_stacked : 1, &rows)) {
        return qx_fail(err, QX_E_FORMAT, "shape", "'%s' is too large", m->name);
    }
    d->rows = rows;
    d->cols = m->cols;
    if (plain(m->format)) {
        return number_size(m->weight->dtype) ? need_elems(m->weight, rows, m->cols, err)
                                             : qx_fail(err, QX_E_QUANT, "dtype", "'%s' holds no "
                                                       "floating numbers", m->weight->name);
    }
    switch (m->format) {
    case QX_F_FP8:
        rc = need_elems(m->weight, rows, m->cols, err);
        return rc ? rc : read_global(d, m->scale, "weight_scale", m->name, m->n_stacked, err);
    case QX_F_FP8_BLOCK:
        if ((rc = need(m->scale, "weight_scale_inv", m->name, err)) != 0 ||
            (rc = need_elems(m->weight, rows, m->cols, err)) != 0) {
            return rc;
        }
        if (number_size(m->scale->dtype) < 2) {
            return qx_fail(err, QX_E_QUANT, "scale-dtype", "'%s' holds no scales", m->scale->name);
        }
        return need_elems(m->scale, qx_ceil_div(m->rows, 128) * (m->n_stacked ? m->n_stacked : 1),
                          qx_ceil_div(m->cols, 128), err);
    case QX_F_MXFP8:
        if ((rc = need(m->scale, "weight_scale", m->name, err)) != 0 ||
            (rc = need_elems(m->weight, rows, m->cols, err)) != 0) {
            return rc;
        }
        return need_elems(m->scale, rows, qx_ceil_div(m->cols, 32), err);
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        if ((rc = need(m->scale, "weight_scale", m->name, err)) != 0 ||
            (rc = need_elems(m->weight, rows, m->cols / 2, err)) != 0 ||
            (rc = need_elems(m->scale, rows, m->cols / 16, err)) != 0) {
            return rc;
        }
        return read_global(d, m->scale_2, "weight_scale_2", m->name, m->n_stacked, err);
    default:
        return qx_fail(err, QX_E_QUANT, "unsupported-format", "'%s' is in no form that can be read",
                       m->name);
    }
}

/* Bytes of a table row: codes, then block scales. */
static uint64_t table_row_bytes(enum qx_format f, uint64_t width, uint64_t *codes)
{
    switch (f) {
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        *codes = width / 2;
        return *codes + width / 16;
    case QX_F_FP8:
        *codes = width;
        return *codes;
    case QX_F_F32:
        *codes = width * 4;
        return *codes;
    default:
        *codes = width * 2;
        return *codes;
    }
}

/* qx's own layout: blocks of block_bytes, as many whole rows in each as fit (qx-pack(5)). */
static int packed_rows(struct qx_indep *d, const struct qx_table *t, struct qx_error *err)
{
    uint64_t codes, row = table_row_bytes(t->format, t->width, &codes), blocks;
    if (!t->packed || !t->packed->readable || t->packed->n_dims != 2 || row == 0 ||
        t->packed->shape[1] < row) {
        return qx_fail(err, QX_E_FORMAT, "pack-shape", "the packed table cannot be read");
    }
    d->block_bytes = t->packed->shape[1];
    d->rows_per_block = d->block_bytes / row;
    blocks = qx_ceil_div(t->n_rows, d->rows_per_block);
    if (t->packed->shape[0] < blocks) {
        return qx_fail(err, QX_E_FORMAT, "pack-shape", "the packed table has %llu blocks, %llu needed",
                       (unsigned long long)t->packed->shape[0], (unsigned long long)blocks);
    }
    return 0;
}

int qx_indep_table(struct qx_indep *d, const struct qx_ckpt *ck, const struct qx_table *t,
                   struct qx_error *err)
{
    memset(d, 0, sizeof *d);
    d->serial = next_serial();
    d->ck = ck;
    d->table = t;
    d->format = t->format;
    d->rows = t->n_rows;
    d->cols = t->width;
    if (!t->present || !t->rows_per_shard) {
        return qx_fail(err, QX_E_MISSING, "ple-shard-missing", "there is no table");
    }
    if (t->packed_rows) {
        int rc = packed_rows(d, t, err);
        if (rc) {
            return rc;
        }
    }
    if (plain(t->format)) {
        return 0;
    }
    switch (t->format) {
    case QX_F_FP8:
        return read_global(d, t->global, "weight_scale", t->module, 1, err);
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        return read_global(d, t->global, "weight_scale_2", t->module, 1, err);
    default:
        return qx_fail(err, QX_E_QUANT, "unsupported-format", "the table is in no form that can be read");
    }
}

/* ---- rows --------------------------------------------------------------------------------- */

void qx_indep_work_fini(struct qx_indep_work *w)
{
    if (w) {
        qx_free(w->codes.bytes);
        qx_free(w->scales.bytes);
        memset(w, 0, sizeof *w);
    }
}

/* f32 bits of code x scale x global. `code` and `scale` are stored bits. */
static uint32_t product(const struct qx_indep *d, struct qx_indep_work *w, uint32_t code, uint32_t scale,
                        uint8_t code_dtype, uint8_t scale_dtype, struct qx_exact global)
{
    uint64_t key = ((uint64_t)scale << 32 | code) + 1;
    size_t slot = (code ^ scale << 4) % QX_INDEP_MEMO; /* a place of its own for every pair of small codes */
    if (w->key[slot] != key) {
        struct qx_exact x;
        uint8_t b[4] = {(uint8_t)code, (uint8_t)(code >> 8), (uint8_t)(code >> 16), (uint8_t)(code >> 24)};
        uint8_t sb[4] = {(uint8_t)scale, (uint8_t)(scale >> 8), (uint8_t)(scale >> 16),
                         (uint8_t)(scale >> 24)};
        switch (d->format) {
        case QX_F_NVFP4:
        case QX_F_W4A16_NVFP4:
            x = qx_exact_mul(qx_exact_mul(qx_exact_e2m1(code), qx_exact_e4m3(scale)), global);
            break;
        case QX_F_FP8:
            x = qx_exact_mul(number_at(code_dtype, b), global);
            break;
        case QX_F_FP8_BLOCK:
            x = qx_exact_mul(number_at(code_dtype, b), number_at(scale_dtype, sb));
            break;
        case QX_F_MXFP8:
            x = qx_exact_mul(number_at(code_dtype, b), qx_exact_e8m0(scale));
            break;
        default:
            x = number_at(code_dtype, b);
            break;
        }
        w->key[slot] = key;
        w->value[slot] = qx_exact_to_f32(x);
    }
    return w->value[slot];
}

#define MAX_AHEAD (UINT64_C(1) << 20)

/* The n bytes of t from off on, with those of `ahead` more rows when they are not there yet. */
static int fetch(const struct qx_indep *d, struct qx_indep_window *w, const struct qx_tensor *t,
                 uint64_t off, uint64_t n, uint64_t ahead, const uint8_t **p, struct qx_error *err)
{
    if (w->t != t || off < w->off || n > w->n || off - w->off > w->n - n) {
        uint64_t all = n;
        int rc;
        if (n && ahead && ahead <= MAX_AHEAD / n && off <= t->size_bytes &&
            n <= t->size_bytes - off) {
            all = (ahead + 1) * n;
            all = all <= t->size_bytes - off ? all : t->size_bytes - off;
        }
        w->t = NULL;
        if (all > SIZE_MAX / 2 || !qx_grow((void **)&w->bytes, &w->cap, (size_t)all, 1)) {
            return qx_fail_nomem(err);
        }
        if ((rc = qx_ckpt_read(d->ck, t, off, w->bytes, all, err)) != 0) {
            return rc;
        }
        w->t = t;
        w->off = off;
        w->n = all;
    }
    *p = w->bytes + (off - w->off);
    return 0;
}

static void forget(struct qx_indep_work *w)
{
    memset(w->key, 0, sizeof w->key);
    memset(w->ready, 0, sizeof w->ready);
}

/* Values of the 16 four-bit codes under one block scale: they are neighbours in the memo. */
static const uint32_t *nibbles(const struct qx_indep *d, struct qx_indep_work *w, uint32_t scale,
                               struct qx_exact global)
{
    if (!w->ready[scale]) {
        for (uint32_t code = 0; code < 16; ++code) {
            product(d, w, code, scale, QX_DT_U8, QX_DT_F8_E4M3, global);
        }
        w->ready[scale] = true;
    }
    return w->value + (scale << 4) % QX_INDEP_MEMO;
}

/* Where the bytes of one row lie. */
struct place {
    const struct qx_tensor *weight, *scale; /* scale: per row or block, NULL for plain and FP8 */
    uint64_t local;        /* row within weight */
    uint64_t scale_row;
};

static int find_row(const struct qx_indep *d, uint64_t row, struct place *p, struct qx_error *err)
{
    memset(p, 0, sizeof *p);
    if (row >= d->rows) {
        return qx_fail(err, QX_E_RANGE, "row-out-of-range", "row %llu is not in 0..%llu",
                       (unsigned long long)row, (unsigned long long)(d->rows - 1));
    }
    if (d->block_bytes) {
        p->weight = p->scale = d->table->packed;
        return 0;
    }
    if (d->table) {
        uint64_t shard = row / d->table->rows_per_shard;
        if (shard >= d->table->n_shards || !d->table->shards[shard].weight) {
            return qx_fail(err, QX_E_MISSING, "ple-shard-missing", "table shard %llu is not stored",
                           (unsigned long long)shard);
        }
        p->weight = d->table->shards[shard].weight;
        p->scale = d->table->shards[shard].scale;
        p->local = row - shard * d->table->rows_per_shard;
        p->scale_row = p->local;
        return 0;
    }
    p->weight = d->module->weight;
    p->scale = d->module->scale;
    p->local = row;
    p->scale_row = row;
    if (d->format == QX_F_FP8_BLOCK) {
        uint64_t e = row / d->module->rows, r = row % d->module->rows;
        p->scale_row = e * qx_ceil_div(d->module->rows, 128) + r / 128;
    }
    return 0;
}

static uint8_t packed_dtype(enum qx_format f)
{
    return f == QX_F_FP8   ? QX_DT_F8_E4M3
           : f == QX_F_F32 ? QX_DT_F32
           : f == QX_F_F16 ? QX_DT_F16
                           : QX_DT_BF16;
}

/* The global scale of a row. Where experts have their own, what is remembered is forgotten when another
 * expert's rows begin. */
static int global_of(const struct qx_indep *d, uint64_t row, struct qx_indep_work *w,
                     struct qx_exact *global, struct qx_error *err)
{
    uint8_t b[4] = {0};
    unsigned size = number_size(d->global->dtype);
    uint32_t bits = d->global_code;
    int rc = 0;
    if (d->global->n_elems > 1) {
        rc = qx_ckpt_read(d->ck, d->global, row / d->module->rows * size, b, size, err);
        bits = le(b, size);
    }
    for (unsigned i = 0; i < 4; ++i) {
        b[i] = (uint8_t)(bits >> (8 * i));
    }
    if (w->global_code != bits) {
        forget(w);
        w->global_code = bits;
    }
    *global = number_at(d->global->dtype, b);
    return rc;
}

int qx_indep_row(const struct qx_indep *d, uint64_t row, uint32_t *f32_bits, uint16_t *bf16_bits,
                 struct qx_indep_work *w, struct qx_error *err)
{
    struct place p;
    uint64_t code_bytes = 0, scale_bytes = 0;
    unsigned code_size = 1, scale_size = 0;
    uint64_t group = 0;
    const uint8_t *codes, *scales = NULL;
    uint8_t code_dtype;
    struct qx_exact global = {0};
    bool packed = d->format == QX_F_NVFP4 || d->format == QX_F_W4A16_NVFP4;
    uint64_t code_off, scale_off;
    int rc = find_row(d, row, &p, err);
    if (rc) {
        return rc;
    }
    code_dtype = p.weight->dtype;
    if (packed) {
        code_bytes = d->cols / 2;
        group = 16;
        scale_size = 1;
    } else {
        code_dtype = d->block_bytes ? packed_dtype(d->format) : p.weight->dtype;
        code_size = number_size(code_dtype);
        code_bytes = d->cols * code_size;
    }
    if (d->format == QX_F_FP8_BLOCK) {
        group = 128;
    } else if (d->format == QX_F_MXFP8) {
        group = 32;
    }
    if (group) {
        if ((rc = need(p.scale, "a scale", p.weight->name, err)) != 0) {
            return rc;
        }
        scale_size = group == 128 ? number_size(p.scale->dtype) : 1;
        scale_bytes = qx_ceil_div(d->cols, group) * scale_size;
    }
    if (w->serial != d->serial) {
        forget(w);
        w->codes.t = w->scales.t = NULL;
        w->serial = d->serial;
    }
    code_off = p.local * code_bytes;
    scale_off = p.scale_row * scale_bytes;
    if (d->block_bytes) {
        code_off = row / d->rows_per_block * d->block_bytes +
                   row % d->rows_per_block * (code_bytes + scale_bytes);
        scale_off = code_off + code_bytes;
    }
    rc = fetch(d, &w->codes, p.weight, code_off, code_bytes, d->block_bytes ? 0 : w->ahead, &codes, err);
    if (!rc && group) {
        rc = fetch(d, &w->scales, p.scale, scale_off, scale_bytes,
                   d->block_bytes || group == 128 ? 0 : w->ahead, &scales, err);
    }
    if (!rc && d->global) {
        rc = global_of(d, row, w, &global, err);
    }
    if (rc) {
        return rc;
    }
    for (uint64_t from = 0, step = group ? group : d->cols; from < d->cols; from += step) {
        uint64_t to = d->cols - from < step ? d->cols : from + step;
        uint32_t scale = group ? le(scales + from / step * scale_size, scale_size) : 0;
        uint8_t scale_dtype = group ? p.scale->dtype : 0;
        if (packed) {
            const uint32_t *value = nibbles(d, w, scale, global);
            for (uint64_t c = from; c < to; c += 2) { /* groups are even */
                f32_bits[c] = value[codes[c / 2] % 16u];
                f32_bits[c + 1] = value[codes[c / 2] / 16u];
            }
            continue;
        }
        for (uint64_t c = from; c < to; ++c) {
            uint32_t code = code_size == 1 ? codes[c] : le(codes + c * code_size, code_size);
            f32_bits[c] = product(d, w, code, scale, code_dtype, scale_dtype, global);
        }
    }
    for (uint64_t c = 0; bf16_bits && c < d->cols; ++c) {
        bf16_bits[c] = qx_exact_f32_to_bf16(f32_bits[c]);
    }
    return 0;
}
