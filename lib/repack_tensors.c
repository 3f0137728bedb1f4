/* repack_tensors.c: which tensors the output holds and where each comes from. Everything that the
 * output needs must be there and readable; otherwise the plan fails and names what is missing. */
#include "repack_impl.h"

#include "fp8.h"
#include "nvfp4.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct rp_tensor *rp_add(struct qx_repack *r, const char *name, const char *dtype,
                         const uint64_t *shape, uint32_t n_dims, uint64_t size,
                         enum rp_source source)
{
    if (!qx_grow((void **)&r->t, &r->cap_t, r->n_t + 1, sizeof *r->t)) {
        return NULL;
    }
    char *copy = qx_arena_strndup(r->arena, name, strlen(name));
    uint64_t *dims = qx_arena_alloc(r->arena, (n_dims + 1) * sizeof *dims, sizeof *dims);
    if (copy == NULL || dims == NULL) {
        return NULL;
    }
    memcpy(dims, shape, n_dims * sizeof *dims);
    struct rp_tensor *t = &r->t[r->n_t++];
    *t = (struct rp_tensor){.name = copy,
                            .dtype = dtype,
                            .shape = dims,
                            .n_dims = n_dims,
                            .size = size,
                            .source = source};
    return t;
}

static int missing(const struct qx_repack *r, enum qx_code code, const char *kind,
                   const char *tensor, const char *fmt, const char *detail, struct qx_error *err)
{
    int rc = qx_fail(err, code, kind, fmt, detail);
    const struct qx_tensor *t = tensor != NULL ? qx_ckpt_find(r->ck, tensor) : NULL;
    qx_error_at(err, t != NULL ? qx_ckpt_file(r->ck, t->file)->name : NULL, tensor, QX_NO_OFF);
    return rc;
}

bool rp_dropped(const struct qx_repack *r, const char *name)
{
    if (!r->o.drop_vision && !r->o.drop_mtp) {
        return false;
    }
    struct qx_name_info i = qx_name_classify(qx_ckpt_config(r->ck), name);
    return (r->o.drop_vision && i.component == QX_C_VISION) || (r->o.drop_mtp && i.is_mtp);
}

/* ---- the table ---------------------------------------------------------------------------- */

static enum qx_format table_format(enum qx_format f)
{
    return f == QX_F_W4A16_NVFP4 ? QX_F_NVFP4 : f;
}

static int table_usage(struct qx_error *err, const char *kind, const char *what)
{
    return qx_fail(err, QX_E_USAGE, kind, "%s", what);
}

/* Rows and shards of the output. */
static int table_geometry(struct qx_repack *r, const struct qx_table *src, struct qx_error *err)
{
    struct rp_table *t = &r->table;
    uint64_t shards = r->o.table_shards;
    t->row0 = 0;
    t->n_rows = t->src_rows;
    t->n_shards = src->packed_rows ? 1 : src->n_shards;
    if (r->o.n_ranks > 0) {
        if (src->row_base > 0) {
            return table_usage(err, "rank", "the input is already one rank's slice of a table");
        }
        if (shards > 1) {
            return table_usage(err, "usage",
                               "a rank's slice is one shard: --rank and --table-shards exclude "
                               "each other");
        }
        uint64_t per = qx_ceil_div(t->src_rows, r->o.n_ranks), base;
        if (!qx_mul_u64(per, r->o.rank, &base) || base >= t->src_rows) {
            return qx_fail(err, QX_E_USAGE, "rank",
                           "rank %" PRIu32 " of %" PRIu32 " owns no row: the table has %" PRIu64
                           " rows",
                           r->o.rank, r->o.n_ranks, t->src_rows);
        }
        t->row0 = base;
        t->n_rows = per;
        t->n_shards = 1;
    } else if (shards > 0) {
        if (shards > 65536) {
            return table_usage(err, "table-shards", "more than 65536 shards");
        }
        if (shards > t->src_rows) {
            return qx_fail(err, QX_E_USAGE, "table-shards",
                           "the table's %" PRIu64 " rows cannot fill %" PRIu64 " shards",
                           t->src_rows, shards);
        }
        t->n_shards = shards;
    }
    t->rows_per_shard = qx_ceil_div(t->n_rows, t->n_shards);
    return 0;
}

static bool wants_table(const struct qx_repack *r)
{
    return r->o.table != QX_F_NONE || r->o.table_shards > 0 || r->o.n_ranks > 0 || r->o.row_layout;
}

static const char *leaf(struct qx_repack *r, const char *module, const char *name)
{
    size_t n = strlen(module) + strlen(name) + 2;
    char *s = qx_arena_alloc(r->arena, n, 1);
    if (s != NULL) {
        snprintf(s, n, "%s.%s", module, name);
    }
    return s;
}

static int add_table_tensors(struct qx_repack *r, const struct qx_table *src, struct qx_error *err)
{
    struct rp_table *t = &r->table;
    const char *code_type = t->to == QX_F_FP8     ? "F8_E4M3"
                            : t->to == QX_F_NVFP4 ? "U8"
                                                  : qx_format_name(t->to);
    char name[512];
    bool ok = true;
    if (t->packed) {
        t->pack = (struct qx_pack_info){
            .format = t->to, .width = t->width, .n_rows = t->n_rows, .row_base = t->row0};
        if (!qx_pack_layout(&t->pack)) {
            return qx_fail(err, QX_E_UNSUPPORTED, "pack",
                           "rows of %" PRIu32 " %s values do not fit into a "
                           "block of %u bytes",
                           t->width, qx_format_name(t->to), QX_PACK_BLOCK_BYTES);
        }
        uint64_t shape[2] = {t->pack.n_blocks, t->pack.block_bytes};
        const char *n = leaf(r, src->module, QX_PACK_LEAF);
        ok =
            n != NULL && rp_add(r, n, "U8", shape, 2, shape[0] * shape[1], RP_TABLE_PACKED) != NULL;
    }
    for (uint64_t s = 0; ok && !t->packed && s < t->n_shards; s++) {
        uint64_t begin = s * t->rows_per_shard < t->n_rows ? s * t->rows_per_shard : t->n_rows;
        uint64_t rows = t->n_rows - begin;
        rows = rows < t->rows_per_shard ? rows : t->rows_per_shard;
        uint64_t cols = t->to == QX_F_NVFP4 ? t->width / 2 : t->width;
        uint64_t shape[2] = {rows, cols}, bytes;
        ok = qx_mul_u64(rows, t->code_bytes, &bytes);
        snprintf(name, sizeof name, "%s.shard_%" PRIu64 ".weight", src->module, s);
        struct rp_tensor *w =
            ok ? rp_add(r, name, code_type, shape, 2, bytes, RP_TABLE_CODES) : NULL;
        ok = w != NULL;
        if (ok) {
            w->row0 = t->row0 + begin;
            w->n_rows = rows;
        }
        if (ok && t->scale_bytes > 0) {
            shape[1] = t->scale_bytes;
            snprintf(name, sizeof name, "%s.shard_%" PRIu64 ".weight_scale", src->module, s);
            struct rp_tensor *sc = rp_add(r, name, "F8_E4M3", shape, 2,
                                          rows * t->scale_bytes, RP_TABLE_SCALES);
            ok = sc != NULL;
            if (ok) {
                sc->row0 = t->row0 + begin;
                sc->n_rows = rows;
            }
        }
    }
    if (ok && (t->to == QX_F_FP8 || t->to == QX_F_NVFP4)) {
        const char *n = leaf(r, src->module, t->to == QX_F_FP8 ? "weight_scale" : "weight_scale_2");
        uint64_t one = 1;
        if (t->convert) {
            ok = n != NULL && rp_add(r, n, t->to == QX_F_FP8 ? "BF16" : "F32", &one, 1,
                                     t->to == QX_F_FP8 ? 2 : 4, RP_TABLE_GLOBAL) != NULL;
        } else {
            const struct qx_tensor *g = src->global;
            struct rp_tensor *c = n != NULL
                                      ? rp_add(r, g->name, qx_dtype_name((enum qx_dtype)g->dtype),
                                               g->shape, g->n_dims, g->size_bytes, RP_TABLE_GLOBAL)
                                      : NULL;
            ok = c != NULL;
            if (ok) {
                c->from = g;
            }
        }
    }
    return ok ? 0 : qx_fail_nomem(err);
}

int rp_plan_table(struct qx_repack *r, struct qx_error *err)
{
    struct rp_table *t = &r->table;
    const struct qx_table *src = qx_resolved_table(qx_ckpt_resolved(r->ck));
    t->present = src != NULL && src->present;
    if (!wants_table(r)) {
        return 0;
    }
    int rc = qx_rows_open_table(&t->rows, r->ck, err);
    if (rc != 0) {
        return rc;
    }
    if (src == NULL || src->n_shards == 0) { /* opening it has said so already */
        return qx_fail_no_table(r->ck, err);
    }
    for (uint32_t i = 0; i < src->n_shards && !src->packed_rows; i++) {
        const struct qx_table_shard *s = &src->shards[i];
        if (s->weight == NULL) {
            return qx_fail(err, QX_E_MISSING, "ple-shard-missing",
                           "shard %" PRIu32 " of the n-gram table is missing", i);
        }
    }
    t->from = table_format(qx_rows_format(t->rows));
    t->to = r->o.table != QX_F_NONE ? r->o.table : t->from;
    t->width = (uint32_t)qx_rows_width(t->rows);
    t->src_rows = qx_rows_count(t->rows);
    t->convert = t->to != t->from;
    /* The row layout of the input is kept unless plain shards are asked for. */
    t->packed = r->o.row_layout || (src->packed_rows && r->o.table_shards == 0);
    if (t->packed && r->o.table_shards > 0) {
        return table_usage(err, "usage",
                           "--layout row has no shards: it and --table-shards exclude each other");
    }
    rc = table_geometry(r, src, err);
    if (rc != 0) {
        return rc;
    }
    t->changed = t->convert || t->packed != src->packed_rows || r->o.n_ranks > 0 ||
                 (!t->packed && t->n_shards != src->n_shards);
    if (!qx_table_row_bytes(t->to, t->width, &t->code_bytes, &t->scale_bytes)) {
        return qx_fail(err, QX_E_UNSUPPORTED, "format-unsupported",
                       "rows of %" PRIu32 " values cannot be stored as %s", t->width,
                       qx_format_name(t->to));
    }
    t->chunk_rows = (2u << 20) / (4 * (uint64_t)t->width) + 1;
    if (t->packed) {
        struct qx_pack_info p = {.format = t->to, .width = t->width, .n_rows = t->n_rows};
        if (qx_pack_layout(&p)) { /* whole blocks */
            t->chunk_rows = (t->chunk_rows / p.rows_per_block + 1) * p.rows_per_block;
        }
    }
    return t->changed ? add_table_tensors(r, src, err) : 0;
}

/* ---- experts ------------------------------------------------------------------------------ */

static struct rp_container *container(struct qx_repack *r, const char *prefix, size_t n, bool mtp)
{
    for (size_t i = 0; i < r->n_c; i++) {
        if (strlen(r->c[i].prefix) == n && memcmp(r->c[i].prefix, prefix, n) == 0) {
            return &r->c[i];
        }
    }
    if (!qx_grow((void **)&r->c, &r->cap_c, r->n_c + 1, sizeof *r->c)) {
        return NULL;
    }
    char *copy = qx_arena_strndup(r->arena, prefix, n);
    if (copy == NULL) {
        return NULL;
    }
    struct rp_container *c = &r->c[r->n_c++];
    *c = (struct rp_container){.prefix = copy, .mtp = mtp};
    return c;
}

/* Splits "...mlp.experts.7.gate_proj" or "...mlp.experts.gate_up_proj" at the experts. */
static bool split_name(const char *name, size_t *prefix, int64_t *expert, const char **proj)
{
    static const char mark[] = ".mlp.experts.";
    const char *p = strstr(name, mark);
    if (p == NULL) {
        return false;
    }
    *prefix = (size_t)(p - name) + sizeof mark - 2;
    p += sizeof mark - 1;
    *expert = -1;
    if (*p >= '0' && *p <= '9') {
        uint64_t v = 0;
        while (*p >= '0' && *p <= '9' && v < 1000000) {
            v = v * 10 + (uint64_t)(*p++ - '0');
        }
        if (*p++ != '.') {
            return false;
        }
        *expert = (int64_t)v;
    }
    *proj = p;
    return true;
}

static bool put_proj(struct rp_container *c, uint64_t e, int which, const struct qx_module *m,
                     uint64_t row0)
{
    if (e >= 65536) {
        return false;
    }
    if (e >= c->n) {
        size_t old = c->cap;
        if (!qx_grow((void **)&c->e, &c->cap, e + 1, sizeof *c->e)) {
            return false;
        }
        memset(c->e + old, 0, (c->cap - old) * sizeof *c->e);
        c->n = (uint32_t)e + 1;
    }
    c->e[e].p[which] = (struct rp_proj){m, row0};
    return true;
}

static int gather_experts(struct qx_repack *r, struct qx_error *err)
{
    const struct qx_resolved *res = qx_ckpt_resolved(r->ck);
    for (size_t i = 0; i < qx_resolved_n_modules(res); i++) {
        const struct qx_module *m = qx_resolved_module(res, i);
        size_t n;
        int64_t e;
        const char *proj;
        if (!split_name(m->name, &n, &e, &proj) || rp_dropped(r, m->name)) {
            continue;
        }
        struct rp_container *c = container(r, m->name, n, m->is_mtp);
        if (c == NULL) {
            return qx_fail_nomem(err);
        }
        bool ok = true;
        if (strcmp(proj, "gate_up_proj") == 0) {
            uint64_t inter = m->rows / 2, first = e < 0 ? 0 : (uint64_t)e,
                     count = e < 0 ? m->n_stacked : 1;
            for (uint64_t k = 0; ok && k < count; k++) {
                ok = put_proj(c, first + k, 0, m, k * m->rows) &&
                     put_proj(c, first + k, 1, m, k * m->rows + inter);
            }
        } else {
            int which = strcmp(proj, "gate_proj") == 0   ? 0
                        : strcmp(proj, "up_proj") == 0   ? 1
                        : strcmp(proj, "down_proj") == 0 ? 2
                                                         : -1;
            uint64_t count = e < 0 ? m->n_stacked : 1;
            for (uint64_t k = 0; ok && which >= 0 && k < count; k++) {
                ok = put_proj(c, e < 0 ? k : (uint64_t)e, which, m, k * m->rows);
            }
        }
        if (!ok) {
            return qx_fail_nomem(err);
        }
    }
    return 0;
}

static enum qx_format same_kind(enum qx_format f)
{
    return f == QX_F_W4A16_NVFP4 ? QX_F_NVFP4 : f;
}

/* Every projection is there, in a readable form, and of the shape that the first expert has. */
static int check_container(struct qx_repack *r, struct rp_container *c, struct qx_error *err)
{
    static const char *const names[] = {"gate_proj", "up_proj", "down_proj"};
    c->from = QX_F_NONE;
    for (uint32_t e = 0; e < c->n; e++) {
        for (int k = 0; k < 3; k++) {
            const struct qx_module *m = c->e[e].p[k].m;
            if (m == NULL) {
                int rc = qx_fail(err, QX_E_MISSING, "missing-tensor",
                                 "expert %" PRIu32 " has no %s", e, names[k]);
                qx_error_at(err, NULL, c->prefix, QX_NO_OFF);
                return rc;
            }
            if (m->foreign != NULL) {
                return missing(r, QX_E_UNSUPPORTED, "foreign-convention", m->foreign->name,
                               "'%s' follows another convention and is not converted", m->name,
                               err);
            }
            if (m->format == QX_F_NONE || m->weight == NULL) {
                /* Opening it as a matrix says what is wrong. */
                struct qx_rows *rows;
                int rc =
                    m->weight != NULL ? qx_rows_open_tensor(&rows, r->ck, m->weight->name, err) : 0;
                if (rc == 0 && m->weight != NULL) {
                    qx_rows_close(rows);
                }
                return rc != 0
                           ? rc
                           : missing(
                                 r, QX_E_MISSING, "missing-scale", m->name,
                                 "'%s' cannot be read: its weight or a scale is missing or wrong",
                                 m->name, err);
            }
            bool fused = m->n_stacked > 1 || strstr(m->name, "gate_up_proj") != NULL;
            uint64_t rows =
                k < 2 && strstr(m->name, "gate_up_proj") != NULL ? m->rows / 2 : m->rows;
            uint64_t inter = k < 2 ? rows : m->cols, hidden = k < 2 ? m->cols : rows;
            if (e == 0 && k == 0) {
                c->inter = inter;
                c->hidden = hidden;
            }
            if (inter != c->inter || hidden != c->hidden || inter == 0 || hidden == 0) {
                return missing(r, QX_E_FORMAT, "shape", m->weight->name,
                               "'%s' has another shape than the first expert", m->name, err);
            }
            enum qx_format f = same_kind(m->format);
            f = fused && f != QX_F_BF16 ? QX_F_MIXED : f; /* only BF16 is kept fused */
            c->from = c->from == QX_F_NONE || c->from == f ? f : QX_F_MIXED;
        }
    }
    return 0;
}

static bool add_expert_tensors(struct qx_repack *r, struct rp_container *c, uint32_t e)
{
    static const char *const names[] = {"gate_proj", "up_proj", "down_proj"};
    char name[512];
    for (int k = 0; k < 3; k++) {
        uint64_t rows = k < 2 ? c->inter : c->hidden, cols = k < 2 ? c->hidden : c->inter;
        uint64_t shape[2] = {rows, cols};
        bool nvfp4 = c->to == QX_F_NVFP4;
        int n = snprintf(name, sizeof name, "%s.%" PRIu32 ".%s.weight", c->prefix, e, names[k]);
        if (n < 0 || (size_t)n + 16 > sizeof name) {
            return false;
        }
        shape[1] = nvfp4 ? cols / 2 : cols;
        if (rp_add(r, name, nvfp4 ? "U8" : "F8_E4M3", shape, 2, shape[0] * shape[1], RP_EXPERT) ==
            NULL) {
            return false;
        }
        if (nvfp4) {
            shape[1] = cols / QX_NVFP4_BLOCK;
            snprintf(name + n, sizeof name - (size_t)n, "_scale");
            if (rp_add(r, name, "F8_E4M3", shape, 2, shape[0] * shape[1], RP_EXPERT) == NULL) {
                return false;
            }
            snprintf(name + n, sizeof name - (size_t)n, "_scale_2");
            if (rp_add(r, name, "F32", shape, 0, 4, RP_EXPERT) == NULL) {
                return false;
            }
        } else {
            shape[0] = qx_ceil_div(rows, QX_FP8_BLOCK_SIDE);
            shape[1] = qx_ceil_div(cols, QX_FP8_BLOCK_SIDE);
            snprintf(name + n, sizeof name - (size_t)n, "_scale_inv");
            if (rp_add(r, name, "BF16", shape, 2, 2 * shape[0] * shape[1], RP_EXPERT) == NULL) {
                return false;
            }
        }
    }
    return true;
}

int rp_plan_experts(struct qx_repack *r, struct qx_error *err)
{
    if (r->o.experts == QX_F_NONE) {
        return 0;
    }
    int rc = gather_experts(r, err);
    for (size_t i = 0; rc == 0 && i < r->n_c; i++) {
        struct rp_container *c = &r->c[i];
        rc = check_container(r, c, err);
        if (rc != 0) {
            break;
        }
        c->to = r->o.experts;
        c->convert = c->from != c->to;
        if (!c->convert) {
            continue;
        }
        if (c->to == QX_F_NVFP4 &&
            (c->inter % QX_NVFP4_BLOCK != 0 || c->hidden % QX_NVFP4_BLOCK != 0)) {
            rc = qx_fail(err, QX_E_UNSUPPORTED, "group-size-indivisible",
                         "experts of %" PRIu64 " x %" PRIu64 " do not divide into groups of 16",
                         c->inter, c->hidden);
            qx_error_at(err, NULL, c->prefix, QX_NO_OFF);
            break;
        }
        c->tensor0 = (uint32_t)r->n_t;
        bool ok = true;
        if (c->to == QX_F_BF16) {
            uint64_t up[3] = {c->n, 2 * c->inter, c->hidden}, down[3] = {c->n, c->hidden, c->inter};
            const char *a = leaf(r, c->prefix, "gate_up_proj"),
                       *b = leaf(r, c->prefix, "down_proj");
            uint64_t bytes = 2 * (uint64_t)c->n * c->inter * c->hidden;
            ok = a != NULL && b != NULL &&
                 rp_add(r, a, "BF16", up, 3, 2 * bytes, RP_EXPERT) != NULL &&
                 rp_add(r, b, "BF16", down, 3, bytes, RP_EXPERT) != NULL;
        } else {
            c->per_expert = c->to == QX_F_NVFP4 ? 9 : 6;
            for (uint32_t e = 0; ok && e < c->n; e++) {
                ok = add_expert_tensors(r, c, e);
            }
        }
        rc = ok ? 0 : qx_fail_nomem(err);
    }
    return rc;
}

/* ---- the rest ----------------------------------------------------------------------------- */

/* A tensor of the input that the plan replaces: table parts and converted experts. */
static bool replaced(const struct qx_repack *r, const struct qx_tensor *t)
{
    const struct rp_table *tab = &r->table;
    if (tab->changed) {
        const struct qx_table *src = qx_resolved_table(qx_ckpt_resolved(r->ck));
        size_t n = strlen(src->module);
        if (strncmp(t->name, src->module, n) == 0 && t->name[n] == '.') {
            const char *rest = t->name + n + 1;
            if (strncmp(rest, "shard_", 6) == 0 || strcmp(rest, QX_PACK_LEAF) == 0 ||
                strcmp(rest, "weight_scale") == 0 || strcmp(rest, "weight_scale_2") == 0) {
                return true;
            }
        }
    }
    for (size_t i = 0; i < r->n_c; i++) {
        size_t n = strlen(r->c[i].prefix);
        if (r->c[i].convert && strncmp(t->name, r->c[i].prefix, n) == 0 && t->name[n] == '.') {
            return true;
        }
    }
    return false;
}

static int unreadable(const struct qx_repack *r, const struct qx_tensor *t, struct qx_error *err)
{
    const struct qx_file *f = qx_ckpt_file(r->ck, t->file);
    const struct qx_findings *fs = qx_ckpt_findings(r->ck);
    int rc = 0;
    for (size_t i = 0; i < qx_findings_count(fs) && rc == 0; i++) {
        const struct qx_finding *x = qx_findings_at(fs, i);
        if (x->severity == QX_ERROR && x->file != NULL && strcmp(x->file, f->name) == 0) {
            rc = qx_fail(err, QX_E_FORMAT, x->kind, "%s", x->text != NULL ? x->text : x->kind);
        }
    }
    if (rc == 0) {
        rc =
            qx_fail(err, QX_E_FORMAT, f->state == QX_FILE_SHORT ? "truncated" : "unreadable-tensor",
                    "the tensor's bytes cannot be read");
    }
    qx_error_at(err, f->name, t->name, t->off);
    return rc;
}

int rp_plan_copies(struct qx_repack *r, struct qx_error *err)
{
    const struct qx_ckpt *ck = r->ck;
    const struct qx_findings *fs = qx_ckpt_findings(ck);
    for (size_t i = 0; i < qx_findings_count(fs); i++) {
        /* Which of two copies is meant is not guessed. */
        const struct qx_finding *f = qx_findings_at(fs, i);
        if (f->severity == QX_ERROR && strcmp(f->kind, "duplicate-tensor") == 0) {
            int rc = qx_fail(err, QX_E_FORMAT, f->kind, "%s", f->text != NULL ? f->text : f->kind);
            qx_error_at(err, f->file, f->tensor, f->off);
            return rc;
        }
    }
    for (size_t i = 0; i < qx_ckpt_n_absent(ck); i++) {
        const struct qx_absent *a = qx_ckpt_absent(ck, i);
        if (rp_dropped(r, a->name)) {
            continue;
        }
        int rc =
            qx_fail(err, QX_E_MISSING, a->file_exists ? "index-tensor-absent" : "shard-missing",
                    a->file_exists ? "the index places this tensor in '%s', which lacks it"
                                   : "the index names the file '%s', which is missing",
                    a->file);
        qx_error_at(err, a->file, a->name, QX_NO_OFF);
        return rc;
    }
    for (size_t i = 0; i < qx_ckpt_n_tensors(ck); i++) {
        const struct qx_tensor *t = qx_ckpt_tensor(ck, i);
        if (rp_dropped(r, t->name)) {
            r->n_dropped++;
            continue;
        }
        if (!t->readable) {
            return unreadable(r, t, err);
        }
        if (replaced(r, t)) {
            continue;
        }
        struct rp_tensor *c = rp_add(r, t->name, qx_dtype_name((enum qx_dtype)t->dtype), t->shape,
                                     t->n_dims, t->size_bytes, RP_COPY);
        if (c == NULL) {
            return qx_fail_nomem(err);
        }
        c->from = t;
    }
    return 0;
}
