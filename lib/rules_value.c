/* rules_value.c: values. Which tensors are looked at and as what; and after the pass over their bytes, what
 * is wrong with them: NaN, infinities, signs and zeros of scales (formats 6.4), weights that are all zero,
 * the constants of the n-gram hash (formats 5.1). Reads again only where a zero scale makes it matter
 * whether the codes below it are zero too. */
#include "verify_impl.h"

#include "alloc.h"
#include "error.h"
#include "ple_hash.h"
#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- gathering ---------------------------------------------------------------------------- */

static enum qx_scan_kind value_kind(uint8_t dtype)
{
    switch (dtype) {
    case QX_DT_F8_E4M3:
        return QX_SCAN_E4M3;
    case QX_DT_F8_E5M2:
        return QX_SCAN_E5M2;
    case QX_DT_F8_E8M0:
        return QX_SCAN_E8M0;
    case QX_DT_F16:
        return QX_SCAN_F16;
    case QX_DT_BF16:
        return QX_SCAN_BF16;
    case QX_DT_F32:
        return QX_SCAN_F32;
    case QX_DT_F64:
        return QX_SCAN_F64;
    default:
        return QX_SCAN_NONE;
    }
}

static enum qx_scan_kind scale_kind(uint8_t dtype)
{
    switch (dtype) {
    case QX_DT_F16:
        return QX_SCAN_SCALE_F16;
    case QX_DT_BF16:
        return QX_SCAN_SCALE_BF16;
    case QX_DT_F32:
        return QX_SCAN_SCALE_F32;
    case QX_DT_F64:
        return QX_SCAN_SCALE_F64;
    default:
        return QX_SCAN_NONE;
    }
}

static bool push(struct verify *v, const struct qx_tensor *t, enum qx_scan_kind kind,
                 enum verify_role role, size_t ref)
{
    if (!t || !t->readable) {
        return true;
    }
    if (!qx_grow((void **)&v->items, &v->cap_items, v->n_items + 1, sizeof *v->items)) {
        return false;
    }
    v->items[v->n_items++] = (struct qx_scan_item){
        .t = t, .file = t->file, .kind = (uint8_t)kind, .role = (uint8_t)role, .ref = (uint32_t)ref};
    return true;
}

static bool push_module(struct verify *v, const struct qx_module *m, size_t i)
{
    bool ok = true;
    bool codes = m->weight && m->weight->dtype == QX_DT_U8;
    bool fp8 = m->weight && m->weight->dtype == QX_DT_F8_E4M3;
    if (!codes && !fp8) {
        return true; /* scales beside plain weights are not used: plain values */
    }
    if (m->scale) {
        if (codes && m->scale->dtype == QX_DT_F8_E4M3) {
            ok = push(v, m->scale, QX_SCAN_BLOCK_SCALE, ROLE_BLOCK_SCALE, i);
        } else if (fp8 && (m->scale->dtype == QX_DT_U8 || m->scale->dtype == QX_DT_F8_E8M0)) {
            ok = push(v, m->scale, QX_SCAN_E8M0, ROLE_E8M0, i);
        } else if (scale_kind(m->scale->dtype) != QX_SCAN_NONE) {
            ok = push(v, m->scale, scale_kind(m->scale->dtype), ROLE_SCALE, i);
        }
    }
    if (m->scale_2 && scale_kind(m->scale_2->dtype) != QX_SCAN_NONE) {
        ok = ok && push(v, m->scale_2, scale_kind(m->scale_2->dtype), ROLE_SCALE_2, i);
    }
    if (m->input_scale && scale_kind(m->input_scale->dtype) != QX_SCAN_NONE) {
        ok = ok && push(v, m->input_scale, scale_kind(m->input_scale->dtype), ROLE_INPUT_SCALE, i);
    }
    return ok;
}

/* Bytes of the row layout as elements: rows and the zeros between them are whole numbers of these. */
static enum qx_scan_kind packed_kind(enum qx_format f)
{
    return f == QX_F_FP8    ? QX_SCAN_E4M3
           : f == QX_F_BF16 ? QX_SCAN_BF16
           : f == QX_F_F16  ? QX_SCAN_F16
           : f == QX_F_F32  ? QX_SCAN_F32
                            : QX_SCAN_NONE;
}

static bool push_table(struct verify *v, const struct qx_table *t)
{
    bool ok = true, plain = t->format == QX_F_BF16 || t->format == QX_F_F16 || t->format == QX_F_F32;
    if (!t->present || plain) {
        return true;
    }
    if (t->global && scale_kind(t->global->dtype) != QX_SCAN_NONE) {
        ok = push(v, t->global, scale_kind(t->global->dtype), ROLE_TABLE_GLOBAL, 0);
    }
    for (uint32_t i = 0; ok && !t->packed_rows && i < t->n_shards; ++i) {
        const struct qx_tensor *s = t->shards[i].scale;
        if (s && s->dtype == QX_DT_F8_E4M3) {
            ok = push(v, s, QX_SCAN_BLOCK_SCALE, ROLE_TABLE_BLOCK, i);
        }
    }
    return ok;
}

static int by_tensor(const void *pa, const void *pb)
{
    const struct qx_scan_item *a = pa, *b = pb;
    return a->t < b->t ? -1 : a->t > b->t ? 1 : 0;
}

int qx_values_gather(struct verify *v, struct qx_error *err)
{
    bool ok = true;
    size_t n_special;
    for (size_t i = 0; v->res && ok && i < qx_resolved_n_modules(v->res); ++i) {
        ok = push_module(v, qx_resolved_module(v->res, i), i);
    }
    if (v->res && ok && qx_resolved_table(v->res)) {
        ok = push_table(v, qx_resolved_table(v->res));
    }
    if (v->o->level == QX_VERIFY_FULL && ok) {
        /* Weights of modules and shards, then whatever is left. */
        const struct qx_table *t = v->res ? qx_resolved_table(v->res) : NULL;
        for (size_t i = 0; v->res && ok && i < qx_resolved_n_modules(v->res); ++i) {
            const struct qx_module *m = qx_resolved_module(v->res, i);
            ok = !m->weight || push(v, m->weight, value_kind(m->weight->dtype), ROLE_WEIGHT, i);
        }
        if (t && t->packed_rows) {
            ok = ok && push(v, t->packed, packed_kind(t->format), ROLE_SHARD, 0);
        }
        for (uint32_t i = 0; t && t->present && !t->packed_rows && ok && i < t->n_shards; ++i) {
            const struct qx_tensor *w = t->shards[i].weight;
            ok = !w || push(v, w, value_kind(w->dtype), ROLE_SHARD, i);
        }
        n_special = v->n_items;
        if (n_special) {
            size_t kept = 1;
            qsort(v->items, n_special, sizeof *v->items, by_tensor);
            for (size_t i = 1; i < n_special; ++i) {
                if (v->items[i].t != v->items[kept - 1].t) {
                    v->items[kept++] = v->items[i];
                }
            }
            v->n_items = n_special = kept;
        }
        for (size_t i = 0; ok && i < qx_ckpt_n_tensors(v->ck); ++i) {
            const struct qx_tensor *x = qx_ckpt_tensor(v->ck, i);
            struct qx_scan_item key = {.t = x};
            if (!n_special || !bsearch(&key, v->items, n_special, sizeof *v->items, by_tensor)) {
                ok = push(v, x, value_kind(x->dtype), ROLE_PLAIN, 0);
            }
        }
    }
    return ok ? 0 : qx_fail_nomem(err);
}

/* ---- are the codes zero? ------------------------------------------------------------------ */

#define COPY_BYTES (UINT64_C(1) << 20)

/* Reads a tensor until a byte is not zero. */
static int all_zero(struct verify *v, const struct qx_tensor *t, uint8_t mask, bool *zero,
                    struct qx_error *err)
{
    uint8_t *b = qx_malloc(COPY_BYTES);
    int rc = b ? 0 : qx_fail_nomem(err);
    *zero = true;
    for (uint64_t at = 0; rc == 0 && *zero && t->readable && at < t->size_bytes; at += COPY_BYTES) {
        uint64_t n = t->size_bytes - at < COPY_BYTES ? t->size_bytes - at : COPY_BYTES;
        uint8_t any = 0;
        rc = qx_ckpt_read(v->ck, t, at, b, n, err);
        for (uint64_t i = 0; rc == 0 && i < n; ++i) {
            any |= b[i] & mask;
        }
        *zero = any == 0;
    }
    qx_free(b);
    return rc;
}

/* Blocks of an NVFP4 scale tensor that are zero over codes that are not (signs do not count: -0 is 0).
 * Each look at codes costs one piece of v->zero_pieces; without any left the rest is taken for right. */
struct zero_blocks { uint64_t n, first; };

static int zero_over_codes(struct verify *v, const struct qx_tensor *scale, const struct qx_tensor *codes,
                           struct zero_blocks *z, struct qx_error *err)
{
    const uint64_t piece = 65536;
    uint8_t *s = qx_malloc(piece), *c = qx_malloc(piece * 8);
    int rc = s && c ? 0 : qx_fail_nomem(err);
    z->n = z->first = 0;
    if (codes->size_bytes != scale->size_bytes * 8) {
        goto out; /* shapes do not fit: reported elsewhere */
    }
    for (uint64_t at = 0; rc == 0 && at < scale->size_bytes && v->zero_pieces; at += piece) {
        uint64_t n = scale->size_bytes - at < piece ? scale->size_bytes - at : piece;
        bool loaded = false;
        rc = qx_ckpt_read(v->ck, scale, at, s, n, err);
        for (uint64_t i = 0; rc == 0 && i < n && v->zero_pieces; ++i) {
            unsigned any = 0;
            if (s[i] & 0x7f) {
                continue;
            }
            if (!loaded) {
                --v->zero_pieces;
                rc = qx_ckpt_read(v->ck, codes, at * 8, c, n * 8, err);
                loaded = true;
            }
            for (unsigned k = 0; rc == 0 && k < 8; ++k) {
                any |= c[i * 8 + k] & 0x77u;
            }
            if (rc == 0 && any) {
                if (z->n++ == 0) {
                    z->first = at + i;
                }
            }
        }
    }
out:
    qx_free(s);
    qx_free(c);
    return rc;
}

/* The same for FP8 blocks of 128 x 128: scale [.., R, C] over a weight [.., rows, cols]. */
static int zero_over_fp8(struct verify *v, const struct qx_tensor *scale, const struct qx_tensor *w,
                         struct zero_blocks *z, struct qx_error *err)
{
    uint32_t size = qx_dtype_size((enum qx_dtype)scale->dtype);
    uint64_t rows, cols, br, bc, n_stacked;
    uint8_t *s, line[128];
    int rc = 0;
    z->n = z->first = 0;
    if (!w->readable || w->n_dims < 2 || scale->size_bytes > SIZE_MAX / 2) {
        return 0;
    }
    rows = w->shape[w->n_dims - 2];
    cols = w->shape[w->n_dims - 1];
    br = qx_ceil_div(rows, 128);
    bc = qx_ceil_div(cols, 128);
    if (!rows || !cols || scale->n_elems % (br * bc) != 0) {
        return 0;
    }
    n_stacked = scale->n_elems / (br * bc);
    if (n_stacked * rows * cols != w->n_elems) {
        return 0;
    }
    s = qx_malloc((size_t)scale->size_bytes);
    rc = s ? qx_ckpt_read(v->ck, scale, 0, s, scale->size_bytes, err) : qx_fail_nomem(err);
    for (uint64_t i = 0; rc == 0 && i < scale->n_elems; ++i) {
        uint64_t stack = i / (br * bc), r0 = i / bc % br * 128, c0 = i % bc * 128;
        uint64_t n = cols - c0 < 128 ? cols - c0 : 128;
        unsigned any = 0;
        if (!(qx_scan_classify(scale_kind(scale->dtype), s + i * size) & QX_SCAN_IS_ZERO)) {
            continue;
        }
        for (uint64_t r = r0; rc == 0 && !any && r < rows && r < r0 + 128; ++r) {
            rc = qx_ckpt_read(v->ck, w, (stack * rows + r) * cols + c0, line, n, err);
            for (uint64_t k = 0; rc == 0 && k < n; ++k) {
                any |= line[k] & 0x7fu;
            }
        }
        if (any && z->n++ == 0) {
            z->first = i;
        }
    }
    qx_free(s);
    return rc;
}

/* ---- scales ------------------------------------------------------------------------------- */

static uint64_t size_of(const struct qx_scan_item *it)
{
    return qx_scan_elem_size(it->kind);
}

/* "[3,17]" of an element. */
static void place_text(const struct qx_tensor *t, uint64_t elem, char out[96])
{
    uint64_t index[8];
    size_t at = 1;
    unsigned n = t->n_dims < 8 ? t->n_dims : 8;
    for (unsigned i = n; i > 0; --i) {
        uint64_t d = t->shape[t->n_dims - 1 - (n - i)];
        index[i - 1] = d ? elem % d : 0;
        elem = d ? elem / d : 0;
    }
    snprintf(out, 96, "[");
    for (unsigned i = 0; i < n && at < 72; ++i) {
        at += (size_t)snprintf(out + at, 96 - at, "%s%" PRIu64, i ? "," : "", index[i]);
    }
    snprintf(out + at, 96 - at, "]");
}

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

static bool bad_scale(struct verify *v, const struct qx_scan_item *it, const char *kind,
                      enum qx_severity severity, unsigned cls, const char *expected, const char *what)
{
    struct qx_buf text = {0};
    char place[96], group[128];
    unsigned k = 0;
    bool ok;
    while (!(cls >> k & 1u)) {
        ++k;
    }
    place_text(it->t, it->first[k], place);
    qx_buf_fmt(&text, "'%s' %s", it->t->name, what);
    if (it->t->n_elems > 1) {
        qx_buf_fmt(&text, " at %s (%" PRIu64 " of %" PRIu64 " values)", place, it->n[k], it->t->n_elems);
    }
    snprintf(group, sizeof group, "%s|%d|%s", kind, (int)it->role, last_part(it->t->name));
    ok = verify_add(v, QX_REPORT(kind, severity, .file = verify_file(v, it->t), .tensor = it->t->name,
                                 .expected = expected, .found = place, .text = qx_buf_cstr(&text),
                                 .group = group));
    qx_buf_fini(&text);
    return ok;
}

/* Are all codes that a global scale multiplies zero? */
static int codes_zero(struct verify *v, const struct qx_scan_item *it, bool *zero, struct qx_error *err)
{
    int rc = 0;
    *zero = true;
    if (it->role == ROLE_TABLE_GLOBAL) {
        const struct qx_table *t = qx_resolved_table(v->res);
        if (t->packed_rows) {
            return t->packed ? all_zero(v, t->packed, 0xff, zero, err) : 0;
        }
        for (uint32_t i = 0; rc == 0 && *zero && i < t->n_shards; ++i) {
            const struct qx_tensor *w = t->shards[i].weight;
            if (w) {
                rc = all_zero(v, w, w->dtype == QX_DT_U8 ? 0x77 : 0x7f, zero, err);
            }
        }
        return rc;
    }
    const struct qx_tensor *w = qx_resolved_module(v->res, it->ref)->weight;
    return all_zero(v, w, w->dtype == QX_DT_U8 ? 0x77 : 0x7f, zero, err);
}

static int report_scale(struct verify *v, const struct qx_scan_item *it, struct qx_error *err)
{
    bool ok = true, zero = false;
    int rc = 0;
    uint64_t n_nan = it->n[0], n_inf = it->n[1], n_sign = it->n[2], n_zero = it->n[3];
    if (n_nan) {
        ok = bad_scale(v, it, "scale-not-finite", QX_ERROR, QX_SCAN_IS_NAN, "a finite number", "is NaN");
    }
    if (n_inf) {
        ok = ok && bad_scale(v, it, "scale-not-finite", QX_ERROR, QX_SCAN_IS_INF, "a finite number",
                             "is infinite");
    }
    if (n_sign) {
        ok = ok && bad_scale(v, it, "scale-negative", QX_ERROR, QX_SCAN_IS_SIGNED, "sign bit clear",
                             "has its sign bit set");
    }
    /* One number for a whole matrix that is too small is as wrong as one that is too large; small blocks are
     * usual. Scales of activations are not asked: nothing bounds them. */
    if (it->n[4] && it->role != ROLE_INPUT_SCALE) {
        ok = ok && bad_scale(v, it, "scale-range", QX_WARNING, QX_SCAN_IS_HUGE, "below 4096",
                             "would give weights beyond a million");
    }
    if (it->n[5] && it->t->n_elems == 1 && it->role != ROLE_INPUT_SCALE) {
        rc = codes_zero(v, it, &zero, err);
        ok = ok && (zero || bad_scale(v, it, "scale-range", QX_WARNING, QX_SCAN_IS_TINY, "2^-41 or more",
                                      "leaves all weights below a hundred millionth"));
    }
    if (n_zero && (it->role == ROLE_BLOCK_SCALE || it->role == ROLE_TABLE_BLOCK)) {
        struct zero_blocks z;
        const struct qx_tensor *codes = it->role == ROLE_TABLE_BLOCK
                                            ? qx_resolved_table(v->res)->shards[it->ref].weight
                                            : qx_resolved_module(v->res, it->ref)->weight;
        struct qx_scan_item copy = *it;
        if (codes && codes->readable) {
            rc = zero_over_codes(v, it->t, codes, &z, err);
            if (rc == 0 && z.n) {
                copy.n[3] = z.n;
                copy.first[3] = z.first;
                ok = ok && bad_scale(v, &copy, "scale-zero", QX_WARNING, QX_SCAN_IS_ZERO, "> 0",
                                     "is zero over codes that are not zero");
            }
        }
    } else if (n_zero && it->role == ROLE_INPUT_SCALE) {
        ok = ok && bad_scale(v, it, "scale-zero", QX_ERROR, QX_SCAN_IS_ZERO, "> 0", "is zero");
    } else if (n_zero && it->t->n_elems > 1 && it->role == ROLE_SCALE) {
        /* FP8 blocks: zero is milder, and right over a block of zeros. */
        struct zero_blocks z = {0, 0};
        struct qx_scan_item copy = *it;
        rc = zero_over_fp8(v, it->t, qx_resolved_module(v->res, it->ref)->weight, &z, err);
        if (rc == 0 && z.n) {
            copy.n[3] = z.n;
            copy.first[3] = z.first;
            ok = ok && bad_scale(v, &copy, "scale-zero", QX_WARNING, QX_SCAN_IS_ZERO, "> 0",
                                 "is zero over codes that are not zero");
        }
    } else if (n_zero) {
        rc = codes_zero(v, it, &zero, err);
        if (rc == 0) {
            ok = ok && bad_scale(v, it, "scale-zero", zero ? QX_WARNING : QX_ERROR, QX_SCAN_IS_ZERO,
                                 "> 0", zero ? "is zero, as are all codes" : "is zero but codes are not");
        }
    }
    return rc ? rc : ok ? 0 : qx_fail_nomem(err);
}

/* ---- values ------------------------------------------------------------------------------- */

/* NaN and infinities of one tensor that is no table shard. */
static bool report_payload(struct verify *v, const struct qx_scan_item *it, uint64_t *reported)
{
    struct qx_buf text = {0};
    char place[96];
    uint64_t n = it->n[0] + it->n[1], first;
    bool ok;
    if (!n) {
        return true;
    }
    first = it->n[0] && (!it->n[1] || it->first[0] < it->first[1]) ? it->first[0] : it->first[1];
    place_text(it->t, first, place);
    qx_buf_fmt(&text, "'%s' holds %" PRIu64 " NaN and %" PRIu64 " infinite values of %" PRIu64
               ", the first at %s", it->t->name, it->n[0], it->n[1], it->t->n_elems, place);
    ok = verify_add(v, QX_REPORT("payload-nan", QX_ERROR, .file = verify_file(v, it->t),
                                 .tensor = it->t->name, .expected = "finite values", .found = place,
                                 .text = qx_buf_cstr(&text),
                                 /* A few are named one by one; a flood becomes one finding. */
                                 .group = ++*reported > 200 ? "payload-nan" : NULL, .count = n));
    qx_buf_fini(&text);
    return ok;
}

/* The table counts as one tensor, addressed by global row. */
struct table_nan { uint64_t n, row, col, local, off; const struct qx_scan_item *it; };

static void add_shard(struct table_nan *a, const struct qx_table *t, const struct qx_scan_item *it)
{
    uint64_t n = it->n[0] + it->n[1], first, width = it->t->n_dims ? it->t->shape[it->t->n_dims - 1] : 1;
    uint64_t row;
    if (!t || !n || !width) {
        return;
    }
    first = it->n[0] && (!it->n[1] || it->first[0] < it->first[1]) ? it->first[0] : it->first[1];
    row = it->ref * t->rows_per_shard + first / width;
    if (t->packed_rows) {
        uint64_t size = size_of(it), row_bytes = t->width * size, in = first * size % width;
        row = first * size / width * (width / row_bytes) + in / row_bytes; /* width: bytes of a block */
        first = row * t->width + in % row_bytes / size;
        width = t->width;
    }
    if (a->n == 0 || row < a->row) {
        a->row = row;
        a->col = first % width;
        a->local = first / width;
        a->off = it->t->off + first * size_of(it);
        a->it = it;
    }
    a->n += n;
}

/* Block scales of an NVFP4 table in the row layout lie between codes: read apart, in pieces. */
static int report_packed_scales(struct verify *v, const struct qx_table *t, struct qx_error *err)
{
    static const struct { unsigned cls; const char *kind, *what; enum qx_severity severity; } rule[] = {
        {QX_SCAN_IS_NAN, "scale-not-finite", "a NaN block scale", QX_ERROR},
        {QX_SCAN_IS_SIGNED, "scale-negative", "a block scale with its sign bit set", QX_ERROR},
        {QX_SCAN_IS_ZERO, "scale-zero", "a zero block scale over codes that are not zero", QX_WARNING}};
    uint64_t codes = t->width / 2, scales = t->width / 16, n[3] = {0}, first[3] = {0}, block, per_block;
    const struct qx_tensor *p = t->packed;
    uint8_t *b;
    int rc = 0;
    if (!p || !p->readable || p->n_dims != 2 || p->shape[1] < codes + scales || p->shape[1] > COPY_BYTES) {
        return 0;
    }
    block = p->shape[1];
    per_block = block / (codes + scales);
    b = qx_malloc((size_t)block);
    rc = b ? 0 : qx_fail_nomem(err);
    for (uint64_t row = 0; rc == 0 && row < t->n_rows; ++row) {
        const uint8_t *q = b ? b + row % per_block * (codes + scales) : NULL;
        if (row % per_block == 0) {
            rc = qx_ckpt_read(v->ck, p, row / per_block * block, b, block, err);
        }
        for (uint64_t i = 0; rc == 0 && i < scales; ++i) {
            unsigned c = qx_scan_classify(QX_SCAN_BLOCK_SCALE, q + codes + i), any = 0;
            for (unsigned k = 0; c & QX_SCAN_IS_ZERO && k < 8; ++k) {
                any |= q[i * 8 + k] & 0x77u;
            }
            c &= any ? ~0u : ~QX_SCAN_IS_ZERO;
            for (unsigned k = 0; c && k < QX_ARRAY_LEN(rule); ++k) {
                if (c & rule[k].cls && n[k]++ == 0) {
                    first[k] = row;
                }
            }
        }
    }
    qx_free(b);
    for (unsigned k = 0; rc == 0 && k < QX_ARRAY_LEN(rule); ++k) {
        struct qx_buf text = {0};
        if (!n[k]) {
            continue;
        }
        qx_buf_fmt(&text, "row %" PRIu64 " of the n-gram table has %s (%" PRIu64 " in all)", first[k],
                   rule[k].what, n[k]);
        rc = verify_add(v, QX_REPORT(rule[k].kind, rule[k].severity, .file = verify_file(v, p),
                                     .tensor = p->name, .text = qx_buf_cstr(&text), .count = n[k]))
                 ? 0
                 : qx_fail_nomem(err);
        qx_buf_fini(&text);
    }
    return rc;
}

static bool report_table_nan(struct verify *v, const struct table_nan *a)
{
    struct qx_buf text = {0};
    char place[64];
    bool ok;
    if (!a->n) {
        return true;
    }
    snprintf(place, sizeof place, "row %" PRIu64 " column %" PRIu64, a->row, a->col);
    qx_buf_fmt(&text, "the n-gram table holds %" PRIu64 " NaN or infinite values, the first at %s "
               "(shard %" PRIu32 " row %" PRIu64 ")", a->n, place, a->it->ref, a->local);
    struct qx_report r = QX_REPORT("payload-nan", QX_ERROR, .file = verify_file(v, a->it->t),
                                   .tensor = a->it->t->name, .expected = "finite values", .found = place,
                                   .text = qx_buf_cstr(&text), .count = a->n);
    r.off = a->off;
    ok = verify_add(v, r);
    qx_buf_fini(&text);
    return ok;
}

static bool report_zero(struct verify *v, const struct qx_scan_item *it)
{
    const struct qx_module *m = it->role == ROLE_WEIGHT ? qx_resolved_module(v->res, it->ref) : NULL;
    bool matrix = it->t->n_dims >= 2 && (it->role == ROLE_SHARD || (m && it->t->n_elems > 1));
    struct qx_buf text = {0};
    char group[96];
    bool ok;
    if (it->nonzero || it->bad || it->t->n_elems < 2) {
        return true;
    }
    qx_buf_fmt(&text, "every byte of '%s' is zero", it->t->name);
    snprintf(group, sizeof group, "zero|%d|%s", (int)it->role, last_part(it->t->name));
    ok = verify_add(v, QX_REPORT("all-zero", matrix ? QX_WARNING : QX_NOTE, .file = verify_file(v, it->t),
                                 .tensor = it->t->name, .text = qx_buf_cstr(&text), .group = group));
    qx_buf_fini(&text);
    return ok;
}

/* ---- gate and up -------------------------------------------------------------------------- */

struct scalar { uint32_t module; uint64_t bits; };

static int by_module(const void *pa, const void *pb)
{
    const struct scalar *a = pa, *b = pb;
    return a->module < b->module ? -1 : a->module > b->module;
}

/* Modules are sorted by name, so gate_proj of an expert is found by name from its up_proj. */
static int report_gate_up(struct verify *v, struct qx_error *err)
{
    struct scalar *s = qx_calloc(v->n_items ? v->n_items : 1, sizeof *s);
    size_t n = 0;
    bool ok = s != NULL;
    for (size_t i = 0; ok && i < v->n_items; ++i) {
        if (v->items[i].role == ROLE_SCALE_2 && v->items[i].t->n_elems == 1 && !v->items[i].bad) {
            s[n++] = (struct scalar){v->items[i].ref, v->items[i].value};
        }
    }
    if (ok) {
        qsort(s, n, sizeof *s, by_module);
    }
    for (size_t i = 0; ok && i < n; ++i) {
        const struct qx_module *m = qx_resolved_module(v->res, s[i].module);
        size_t len = strlen(m->name);
        char gate[640];
        const struct qx_module *g;
        const struct scalar *found = NULL;
        if (m->expert < 0 || !qx_str_ends(m->name, ".up_proj") || len + 2 > sizeof gate) {
            continue;
        }
        snprintf(gate, sizeof gate, "%.*s.gate_proj", (int)(len - strlen(".up_proj")), m->name);
        g = qx_resolved_find(v->res, gate);
        for (size_t j = i; g && !found && j > 0 && j + 4 > i; --j) {
            if (qx_resolved_module(v->res, s[j - 1].module) == g) {
                found = &s[j - 1];
            }
        }
        if (found && found->bits != s[i].bits && g->scale_2->dtype == m->scale_2->dtype) {
            ok = verify_add(v, QX_REPORT("gate-up-scales", QX_NOTE, .file = verify_file(v, m->scale_2),
                                         .tensor = m->scale_2->name,
                                         .text = "gate_proj and up_proj of one expert have different "
                                                 "weight_scale_2; a runtime that fuses them must keep both",
                                         .group = "gate-up"));
        }
    }
    qx_free(s);
    return ok ? 0 : qx_fail_nomem(err);
}

/* ---- constants of the hash ---------------------------------------------------------------- */

struct constants { const char *leaf; uint64_t n; const uint64_t *want; };

static int read_i64(struct verify *v, const struct qx_tensor *t, uint64_t n, uint64_t *out,
                    struct qx_error *err)
{
    uint8_t b[8 * QX_MAX_PLE_HEADS];
    int rc = qx_ckpt_read(v->ck, t, 0, b, n * 8, err);
    for (uint64_t i = 0; rc == 0 && i < n; ++i) {
        out[i] = 0;
        for (unsigned k = 8; k > 0; --k) {
            out[i] = out[i] << 8 | b[i * 8 + k - 1];
        }
    }
    return rc;
}

static int report_constants(struct verify *v, struct qx_error *err)
{
    const struct qx_config *c = qx_ckpt_config(v->ck);
    const struct qx_table *table = qx_resolved_table(v->res);
    struct qx_ple_hash h;
    uint64_t got[3][QX_MAX_PLE_HEADS];
    bool have[3] = {false, false, false};
    int rc = 0;
    if (!c || c->n_ple_layers == 0 || qx_ple_hash_init(&h, c, 0, NULL) != 0) {
        return 0;
    }
    struct constants k[3] = {{"layer_multipliers", h.ngram_size, h.multiplier},
                             {"ngram_heads_vocab_sizes", h.n_heads, h.size},
                             {"ngram_heads_offsets", h.n_heads, h.offset}};
    for (int i = 0; rc == 0 && i < 3; ++i) {
        char name[256];
        const struct qx_tensor *t;
        snprintf(name, sizeof name, "model.language_model.layers.%u.ple.ple_embedding.%s", c->ple_layer[0],
                 k[i].leaf);
        t = qx_ckpt_find(v->ck, name);
        if (!t || !t->readable || t->dtype != QX_DT_I64 || t->n_elems != k[i].n) {
            continue; /* absent: a note; type and shape: errors of the layout */
        }
        rc = read_i64(v, t, k[i].n, got[i], err);
        have[i] = rc == 0;
        for (uint64_t j = 0; rc == 0 && j < k[i].n; ++j) {
            struct qx_buf text = {0};
            char want[32], found[32], key[32];
            if (got[i][j] == k[i].want[j]) {
                continue;
            }
            snprintf(want, sizeof want, "%" PRIu64, k[i].want[j]);
            snprintf(found, sizeof found, "%" PRId64, (int64_t)got[i][j]);
            snprintf(key, sizeof key, "[%" PRIu64 "]", j);
            qx_buf_fmt(&text, "%s%s is stored as %s, computed from the configuration %s; the stored "
                       "values are used to look rows up", k[i].leaf, key, found, want);
            struct qx_report r = QX_REPORT("hash-constants-mismatch", QX_ERROR,
                                           .file = verify_file(v, t), .tensor = name, .key = key,
                                           .expected = want, .found = found, .text = qx_buf_cstr(&text),
                                           .group = name);
            r.off = t->off + j * 8;
            rc = verify_add(v, r) ? 0 : qx_fail_nomem(err);
            qx_buf_fini(&text);
        }
    }
    /* Heads as stored (or computed where not stored) must lie inside the table. */
    for (uint32_t j = 0; rc == 0 && table && table->present && table->n_rows && j < h.n_heads; ++j) {
        uint64_t size = have[1] ? got[1][j] : h.size[j], off = have[2] ? got[2][j] : h.offset[j], end;
        struct qx_buf text = {0};
        char key[32], found[64], expected[48];
        if (qx_add_u64(size, off, &end) && end <= table->n_rows + table->row_base) {
            continue;
        }
        if (table->is_slice) {
            break; /* a rank's slice: heads reach over other ranks */
        }
        if (!have[1] && !have[2]) {
            break; /* the shards are too few: ple-shard-missing or shape */
        }
        snprintf(key, sizeof key, "head %u", j);
        snprintf(expected, sizeof expected, "<= %" PRIu64, table->n_rows);
        snprintf(found, sizeof found, "%" PRId64 " + %" PRId64, (int64_t)off, (int64_t)size);
        qx_buf_fmt(&text, "head %u of the n-gram table: offset %" PRId64 " + size %" PRId64
                   " reaches past its %" PRIu64 " rows", j, (int64_t)off, (int64_t)size, table->n_rows);
        rc = verify_add(v, QX_REPORT("ple-range", QX_ERROR, .tensor = table->module, .key = key,
                                     .expected = expected, .found = found, .text = qx_buf_cstr(&text),
                                     .group = "ple-range"))
                 ? 0
                 : qx_fail_nomem(err);
        qx_buf_fini(&text);
    }
    return rc;
}

/* ---- all ---------------------------------------------------------------------------------- */

int qx_values_report(struct verify *v, struct qx_error *err)
{
    struct table_nan nan = {0};
    const struct qx_table *table = v->res ? qx_resolved_table(v->res) : NULL;
    uint64_t reported = 0;
    bool full = v->o->level == QX_VERIFY_FULL, ok = true;
    int rc = 0;
    /* Up to 1 GiB of codes below zero scales is read; at level full all. */
    v->zero_pieces = full ? UINT64_MAX : 2048;
    for (size_t i = 0; rc == 0 && ok && i < v->n_items; ++i) {
        const struct qx_scan_item *it = &v->items[i];
        switch (it->role) {
        case ROLE_PLAIN:
        case ROLE_WEIGHT:
            ok = report_payload(v, it, &reported);
            break;
        case ROLE_SHARD:
            add_shard(&nan, table, it);
            break;
        default:
            rc = report_scale(v, it, err);
            break;
        }
        if (full && (it->role <= ROLE_SHARD)) {
            ok = ok && report_zero(v, it);
        }
    }
    ok = ok && report_table_nan(v, &nan);
    if (full && rc == 0 && ok && table && table->packed_rows && table->format == QX_F_NVFP4) {
        rc = report_packed_scales(v, table, err);
    }
    if (rc == 0 && ok && v->res) {
        rc = report_gate_up(v, err);
        rc = rc ? rc : report_constants(v, err);
    }
    return rc ? rc : ok ? 0 : qx_fail_nomem(err);
}
