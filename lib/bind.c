/* bind.c: which modules a model needs, and their descriptors. Walks the model twice with the same code:
 * the first walk looks at headers only, counts bytes and collects what is missing; the second places.
 * Shapes come from the configuration: a module of another shape is refused. */
#include "bind.h"

#include "alloc.h"
#include "codes.h"
#include "resolve.h"
#include "rules.h"
#include "str.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define TEXT "model.language_model."

/* Notes a problem: the first one's words are kept, the others counted. Only memory and device failures
 * end a walk early. */
static void problem(struct qx_bind *b, enum qx_code code, const char *kind, const char *tensor,
                    const char *fmt, ...) QX_PRINTF(5, 6);
static void problem(struct qx_bind *b, enum qx_code code, const char *kind, const char *tensor,
                    const char *fmt, ...)
{
    if (b->first.code) {
        ++b->n_missing;
        return;
    }
    char msg[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    qx_fail(&b->first, code, kind, "%s", msg);
    qx_error_at(&b->first, NULL, tensor, QX_NO_OFF);
}

/* The same for a reason that the checkpoint gave, with its place. */
static void problem_why(struct qx_bind *b, const struct qx_error *why)
{
    if (b->first.code) {
        ++b->n_missing;
    } else {
        b->first = *why;
    }
}

static bool own(struct qx_bind *b, void *p)
{
    if (!qx_grow((void **)&b->owned, &b->cap_owned, b->n_owned + 1, sizeof *b->owned)) {
        qx_free(p);
        return false;
    }
    b->owned[b->n_owned++] = p;
    return true;
}

static int add_piece(struct qx_bind *b, const struct qx_piece *p, const void **out, struct qx_error *err)
{
    uint64_t at;
    if (!qx_align_u64(b->arena_bytes, 256, &at) || !qx_add_u64(at, p->size, &b->arena_bytes)) {
        return qx_fail(err, QX_E_PLAN, "memory-plan", "the weights' sizes overflow 64 bits");
    }
    if (!b->loading) {
        return 0;
    }
    if (!qx_grow((void **)&b->pieces, &b->cap_pieces, b->n_pieces + 1, sizeof *b->pieces)) {
        return qx_fail_nomem(err);
    }
    b->pieces[b->n_pieces] = *p;
    b->pieces[b->n_pieces++].dst = at;
    *out = b->arena + at;
    return 0;
}

int qx_bind_bytes(struct qx_bind *b, const struct qx_tensor *t, uint64_t off, uint64_t size,
                  const void **out, struct qx_error *err)
{
    *out = NULL;
    if (!b->m->be->host_memory) {
        return add_piece(b, &(struct qx_piece){.t = t, .off = off, .size = size}, out, err);
    }
    b->arena_bytes += size;
    if (b->loading) {
        const char *p = qx_ckpt_map(b->m->ck, t, err);
        if (!p) {
            return -(int)(err ? err->code : QX_E_IO);
        }
        *out = p + off;
    }
    return 0;
}

int qx_bind_values(struct qx_bind *b, void *values, uint64_t size, const void **out, struct qx_error *err)
{
    *out = NULL;
    if (!b->m->be->host_memory) {
        return add_piece(b, &(struct qx_piece){.data = values, .size = size}, out, err);
    }
    b->arena_bytes += size;
    *out = values;
    return 0;
}

/* ---- plain tensors ------------------------------------------------------------------------ */

/* The module of a weight's name when it is stored in another convention, else NULL. */
static const struct qx_module *foreign_module(const struct qx_bind *b, const char *name)
{
    char module[512];
    const char *dot = strrchr(name, '.');
    if (!dot || strcmp(dot, ".weight") != 0 || (size_t)(dot - name) >= sizeof module) {
        return NULL;
    }
    snprintf(module, sizeof module, "%.*s", (int)(dot - name), name);
    const struct qx_module *m = qx_resolved_find(b->r, module);
    return m && m->foreign ? m : NULL;
}

/* A tensor by name, or a problem that says where it should be. */
static const struct qx_tensor *need(struct qx_bind *b, const char *name)
{
    const struct qx_tensor *t = qx_ckpt_find(b->m->ck, name);
    struct qx_error why = {0};
    if (b->first.code && !(t && t->readable)) {
        ++b->n_missing; /* only the first is explained */
        return NULL;
    }
    if (qx_ckpt_need(b->m->ck, name, &t, &why)) {
        const struct qx_module *m = foreign_module(b, name);
        if (m) {
            problem(b, QX_E_QUANT, "foreign-convention", name,
                    "the module is stored as '%s', in the convention of another program, and is not read",
                    m->foreign->name);
        } else {
            problem_why(b, &why);
        }
        return NULL;
    }
    return t;
}

static float plain_value(const uint8_t *p, enum qx_dtype t, uint64_t i)
{
    return t == QX_DT_F32 ? qx_load_f32(p + 4 * i)
           : t == QX_DT_F16 ? qx_f16_to_f32(qx_load_u16(p + 2 * i))
                            : qx_bf16_to_f32(qx_load_u16(p + 2 * i));
}

/* n values of a plain tensor as f32, to be freed by the caller. */
static int read_f32(struct qx_bind *b, const struct qx_tensor *t, float **out, struct qx_error *err)
{
    *out = NULL;
    uint8_t *raw = qx_malloc(t->size_bytes ? t->size_bytes : 1);
    float *v = qx_malloc(t->n_elems * 4 + 4);
    int rc = raw && v ? qx_ckpt_read(b->m->ck, t, 0, raw, t->size_bytes, err) : qx_fail_nomem(err);
    for (uint64_t i = 0; i < t->n_elems && !rc; ++i) {
        v[i] = plain_value(raw, t->dtype, i);
    }
    qx_free(raw);
    if (rc) {
        qx_free(v);
        return rc;
    }
    *out = v;
    b->read_bytes += t->size_bytes;
    return 0;
}

/* A vector (norm, convolution, gate constant) of n elements as f32 on the device. */
static int vector(struct qx_bind *b, uint64_t n, const float **out, struct qx_error *err, const char *fmt,
                  ...) QX_PRINTF(5, 6);
static int vector(struct qx_bind *b, uint64_t n, const float **out, struct qx_error *err, const char *fmt,
                  ...)
{
    char name[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    *out = NULL;
    const struct qx_tensor *t = need(b, name);
    if (!t) {
        return 0;
    }
    if (t->n_elems != n) {
        problem(b, QX_E_FORMAT, "tensor-shape", name, "expected %llu elements, found %llu",
                (unsigned long long)n, (unsigned long long)t->n_elems);
        return 0;
    }
    if (t->dtype != QX_DT_BF16 && t->dtype != QX_DT_F16 && t->dtype != QX_DT_F32) {
        problem(b, QX_E_FORMAT, "weight-dtype", name, "expected BF16, F16 or F32, found %s",
                qx_dtype_name(t->dtype));
        return 0;
    }
    float *v = NULL;
    if (b->loading) {
        int rc = read_f32(b, t, &v, err);
        if (rc) {
            return rc;
        }
        if (!own(b, v)) {
            return qx_fail_nomem(err);
        }
    }
    const void *p;
    int rc = qx_bind_values(b, v, n * 4, &p, err);
    *out = p;
    return rc;
}

/* ---- matrices ----------------------------------------------------------------------------- */

/* A scale that is not there: because its file is not, or because nothing stores it. */
static void no_scale(struct qx_bind *b, const struct qx_module *m, const char *leaf, const char *what)
{
    char name[512];
    const struct qx_tensor *t;
    struct qx_error why = {0};
    snprintf(name, sizeof name, "%s.%s", m->name, leaf);
    if (!b->first.code && qx_ckpt_need(b->m->ck, name, &t, &why) && strcmp(why.kind, "missing-tensor") != 0) {
        problem_why(b, &why);
    } else {
        problem(b, QX_E_MISSING, "missing-scale", name, "the codes of '%s' have no %s; none is invented",
                m->weight->name, what);
    }
}

/* Why a module cannot be used, as a problem. */
static void unusable(struct qx_bind *b, const struct qx_module *m)
{
    char name[512];
    if (!m->weight) {
        snprintf(name, sizeof name, "%s.weight", m->name);
        (void)need(b, name);
        return;
    }
    if (!m->weight->readable) {
        (void)need(b, m->weight->name);
        return;
    }
    enum qx_dtype t = m->weight->dtype;
    bool quantised = t == QX_DT_U8 || t == QX_DT_F8_E4M3;
    if (quantised && !m->scale) {
        no_scale(b, m, t == QX_DT_U8 ? "weight_scale" : "weight_scale_inv", "scale");
    } else if (t == QX_DT_U8 && !m->scale_2) {
        no_scale(b, m, "weight_scale_2", "global scale");
    } else if (quantised) {
        problem(b, QX_E_QUANT, m->scale && !m->scale->readable ? "truncated" : "scale-shape", m->name,
                "dtype %s with its scales is none of the known forms", qx_dtype_name(t));
    } else {
        problem(b, QX_E_FORMAT, "weight-dtype", m->weight->name, "dtype %s cannot be used as a weight",
                qx_dtype_name(t));
    }
}

static uint8_t weight_format(enum qx_format f)
{
    switch (f) {
    case QX_F_F32: return QX_W_F32;
    case QX_F_F16: return QX_W_F16;
    case QX_F_BF16: return QX_W_BF16;
    case QX_F_FP8: return QX_W_FP8;
    case QX_F_FP8_BLOCK: return QX_W_FP8_BLOCK;
    case QX_F_MXFP8: return QX_W_MXFP8;
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4: return QX_W_NVFP4;
    default: return QX_W_NONE;
    }
}

/* Bytes of codes and scales of `rows` rows. */
static uint64_t code_bytes(uint8_t fmt, uint64_t rows, uint64_t cols)
{
    switch (fmt) {
    case QX_W_F32: return rows * cols * 4;
    case QX_W_F16:
    case QX_W_BF16: return rows * cols * 2;
    case QX_W_NVFP4: return rows * (cols / 2);
    default: return rows * cols;
    }
}

static int scalar_scale(struct qx_bind *b, const struct qx_tensor *t, uint64_t i, float *out,
                        struct qx_error *err)
{
    if (t->n_elems == 1) {
        return qx_read_scalar(b->m->ck, t, out, err);
    }
    uint8_t raw[4];
    uint32_t size = qx_dtype_size(t->dtype);
    int rc = qx_ckpt_read(b->m->ck, t, i * size, raw, size, err);
    *out = rc ? 0.0f : plain_value(raw, t->dtype, 0);
    return rc;
}

/* Rows [row0, row0 + rows) of expert e of a module (e 0 and the whole matrix for ordinary ones). The
 * block scales of one expert are placed whole, once for each slice. */
static int slice(struct qx_bind *b, const struct qx_module *m, uint64_t e, uint32_t row0, uint32_t rows,
                 struct qx_weight *w, struct qx_error *err)
{
    uint8_t fmt = weight_format(m->format);
    uint64_t cols = m->cols;
    *w = (struct qx_weight){.global = 1.0f, .rows = rows, .cols = (uint32_t)cols, .row0 = 0, .fmt = fmt};
    uint64_t row = e * m->rows + row0;
    int rc = qx_bind_bytes(b, m->weight, code_bytes(fmt, row, cols), code_bytes(fmt, rows, cols), &w->codes,
                           err);
    if (rc) {
        return rc;
    }
    uint64_t off = 0, size = 0;
    if (fmt == QX_W_FP8_BLOCK) {
        uint64_t per = qx_ceil_div(m->rows, 128) * qx_ceil_div(cols, 128);
        if (m->scale->dtype == QX_DT_F16) {
            /* Widened once: descriptors know BF16 and F32. */
            float *v = NULL;
            if (b->loading && ((rc = read_f32(b, m->scale, &v, err)) != 0 || !own(b, v))) {
                return rc ? rc : qx_fail_nomem(err);
            }
            w->row0 = row0;
            return qx_bind_values(b, v ? v + e * per : NULL, per * 4, &w->scale, err);
        }
        uint64_t elem = qx_dtype_size(m->scale->dtype);
        w->row0 = row0;
        w->scale_bf16 = m->scale->dtype == QX_DT_BF16;
        off = e * per * elem;
        size = per * elem;
    } else if (fmt == QX_W_MXFP8) {
        off = row * (cols / 32);
        size = rows * (cols / 32);
    } else if (fmt == QX_W_NVFP4) {
        off = row * (cols / 16);
        size = rows * (cols / 16);
        if (b->loading) {
            rc = scalar_scale(b, m->scale_2, e, &w->global, err);
        }
    } else if (fmt == QX_W_FP8 && b->loading) {
        rc = scalar_scale(b, m->scale, e, &w->global, err);
    }
    if (!rc && size) {
        rc = qx_bind_bytes(b, m->scale, off, size, &w->scale, err);
    }
    return rc;
}

/* A module by name with its shape checked; a problem and NULL otherwise. */
static const struct qx_module *module(struct qx_bind *b, const char *name, uint64_t rows, uint64_t cols)
{
    const struct qx_module *m = qx_resolved_find(b->r, name);
    if (!m) {
        char tensor[512];
        snprintf(tensor, sizeof tensor, "%s.weight", name);
        (void)need(b, tensor);
        return NULL;
    }
    if (m->format == QX_F_NONE || weight_format(m->format) == QX_W_NONE || !m->weight
        || !m->weight->readable || (m->scale && !m->scale->readable)) {
        unusable(b, m);
        return NULL;
    }
    if (m->rows != rows || m->cols != cols) {
        problem(b, QX_E_FORMAT, "tensor-shape", m->weight->name,
                "expected a matrix [%llu, %llu], found [%llu, %llu]", (unsigned long long)rows,
                (unsigned long long)cols, (unsigned long long)m->rows, (unsigned long long)m->cols);
        return NULL;
    }
    return m;
}

static int matrix(struct qx_bind *b, uint64_t rows, uint64_t cols, struct qx_weight *w,
                  struct qx_error *err, const char *fmt, ...) QX_PRINTF(6, 7);
static int matrix(struct qx_bind *b, uint64_t rows, uint64_t cols, struct qx_weight *w,
                  struct qx_error *err, const char *fmt, ...)
{
    char name[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    const struct qx_module *m = module(b, name, rows, cols);
    return m ? slice(b, m, 0, 0, (uint32_t)rows, w, err) : 0;
}

/* ---- blocks ------------------------------------------------------------------------------- */

static int bind_hc(struct qx_bind *b, const char *p, bool inject, struct qx_hc_weights *w,
                   struct qx_error *err)
{
    const struct qx_config *c = b->m->cfg;
    uint64_t wide = (uint64_t)c->hc_count * c->hidden_size;
    QX_TRY(vector(b, wide, &w->norm, err, "%shc_norm.weight", p));
    QX_TRY(matrix(b, c->hc_lowrank, wide, &w->down, err, "%sinput_mix_weight_down", p));
    QX_TRY(matrix(b, wide, c->hc_lowrank, &w->up, err, "%sinput_mix_weight_up", p));
    return inject ? matrix(b, c->hc_count, wide, &w->inject, err, "%sblock_inject_weight", p) : 0;
}

static int bind_gdn(struct qx_bind *b, const char *p, struct qx_gdn_weights *w, struct qx_error *err)
{
    const struct qx_config *c = b->m->cfg;
    uint64_t values = (uint64_t)c->gdn_v_heads * c->gdn_v_dim, h = c->hidden_size;
    uint64_t channels = 2ull * c->gdn_k_heads * c->gdn_k_dim + values;
    QX_TRY(matrix(b, channels, h, &w->qkv, err, "%slinear_attn.in_proj_qkv", p));
    QX_TRY(matrix(b, values, h, &w->z, err, "%slinear_attn.in_proj_z", p));
    QX_TRY(matrix(b, c->gdn_v_heads, h, &w->b, err, "%slinear_attn.in_proj_b", p));
    QX_TRY(matrix(b, c->gdn_v_heads, h, &w->a, err, "%slinear_attn.in_proj_a", p));
    QX_TRY(matrix(b, h, values, &w->out, err, "%slinear_attn.out_proj", p));
    QX_TRY(vector(b, channels * c->gdn_conv_kernel, &w->conv, err, "%slinear_attn.conv1d.weight", p));
    QX_TRY(vector(b, c->gdn_v_heads, &w->a_log, err, "%slinear_attn.A_log", p));
    QX_TRY(vector(b, c->gdn_v_heads, &w->dt_bias, err, "%slinear_attn.dt_bias", p));
    return vector(b, c->gdn_v_dim, &w->norm, err, "%slinear_attn.norm.weight", p);
}

static int bind_qsa(struct qx_bind *b, const char *p, struct qx_qsa_weights *w, struct qx_error *err)
{
    const struct qx_config *c = b->m->cfg;
    uint64_t heads = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    uint64_t h = c->hidden_size, index = (uint64_t)(c->indexer_n_heads + 1) * c->indexer_head_dim;
    QX_TRY(matrix(b, 2 * heads, h, &w->q, err, "%sself_attn.q_proj", p));
    QX_TRY(matrix(b, kv, h, &w->k, err, "%sself_attn.k_proj", p));
    QX_TRY(matrix(b, kv, h, &w->v, err, "%sself_attn.v_proj", p));
    QX_TRY(matrix(b, h, heads, &w->o, err, "%sself_attn.o_proj", p));
    QX_TRY(matrix(b, index, h, &w->index, err, "%sself_attn.indexer.index_qk_proj", p));
    QX_TRY(vector(b, c->head_dim, &w->q_norm, err, "%sself_attn.q_norm.weight", p));
    QX_TRY(vector(b, c->head_dim, &w->k_norm, err, "%sself_attn.k_norm.weight", p));
    QX_TRY(vector(b, c->indexer_head_dim, &w->iq_norm, err, "%sself_attn.indexer.q_layernorm.weight", p));
    return vector(b, c->indexer_head_dim, &w->ik_norm, err, "%sself_attn.indexer.k_layernorm.weight", p);
}

/* One projection of one expert: its own module, else its slice of a fused one. */
static int bind_expert(struct qx_bind *b, const char *p, uint32_t e, int which, struct qx_weight *w,
                       struct qx_error *err)
{
    static const char *const names[3] = {"gate", "up", "down"};
    const struct qx_config *c = b->m->cfg;
    uint32_t inter = c->moe_intermediate_size, h = c->hidden_size;
    uint32_t rows = which == 2 ? h : inter, cols = which == 2 ? inter : h;
    char name[512];
    snprintf(name, sizeof name, "%smlp.experts.%u.%s_proj", p, e, names[which]);
    const struct qx_module *m = qx_resolved_find(b->r, name);
    if (m) {
        m = module(b, name, rows, cols);
        if (!m) {
            return 0;
        }
        if (m->format == QX_F_NVFP4 && !m->input_scale && !b->loading) {
            b->n_no_input_scale++;
        }
        return slice(b, m, 0, 0, rows, w, err);
    }
    char fused[512];
    snprintf(fused, sizeof fused, "%smlp.experts.%s", p, which == 2 ? "down_proj" : "gate_up_proj");
    if (!qx_resolved_find(b->r, fused)) {
        size_t at = strlen(name);
        snprintf(name + at, sizeof name - at, ".weight");
        (void)need(b, name);
        return 0;
    }
    m = module(b, fused, which == 2 ? rows : 2ull * rows, cols);
    if (!m) {
        return 0;
    }
    if (m->n_stacked != c->n_experts) {
        problem(b, QX_E_FORMAT, "tensor-shape", m->weight->name, "expected %u experts, found %llu",
                c->n_experts, (unsigned long long)m->n_stacked);
        return 0;
    }
    return slice(b, m, e, which == 1 ? inter : 0, rows, w, err);
}

/* The format of all matrices when it is one and they lie as tiled kernels want them, else QX_W_NONE. */
static uint8_t common_format(const struct qx_weight *w, uint32_t n)
{
    for (uint32_t i = 0; i < n; ++i) {
        if (w[i].fmt != w->fmt || (uintptr_t)w[i].codes & 15
            || (w->fmt != QX_W_FP8_BLOCK && (uintptr_t)w[i].scale & 15)) {
            return QX_W_NONE;
        }
    }
    return w->fmt;
}

static int bind_moe(struct qx_bind *b, const char *p, struct qx_moe_weights *w, struct qx_error *err)
{
    const struct qx_config *c = b->m->cfg;
    uint64_t h = c->hidden_size, s = c->shared_expert_intermediate_size;
    uint32_t n = c->n_experts;
    QX_TRY(matrix(b, n, h, &w->gate, err, "%smlp.gate", p));
    QX_TRY(matrix(b, s, h, &w->s_gate, err, "%smlp.shared_expert.gate_proj", p));
    QX_TRY(matrix(b, s, h, &w->s_up, err, "%smlp.shared_expert.up_proj", p));
    QX_TRY(matrix(b, h, s, &w->s_down, err, "%smlp.shared_expert.down_proj", p));
    QX_TRY(matrix(b, 1, h, &w->s_gate_vec, err, "%smlp.shared_expert_gate", p));
    struct qx_weight *all = qx_calloc(3ull * n, sizeof *all);
    if (!all || !own(b, all)) {
        return qx_fail_nomem(err);
    }
    for (uint32_t e = 0; e < n; ++e) {
        for (int i = 0; i < 3; ++i) {
            QX_TRY(bind_expert(b, p, e, i, &all[(uint32_t)i * n + e], err));
        }
    }
    const void *dev;
    QX_TRY(qx_bind_values(b, all, 3ull * n * sizeof *all, &dev, err));
    w->gates = dev;
    w->ups = w->gates ? w->gates + n : NULL;
    w->downs = w->gates ? w->gates + 2ull * n : NULL;
    w->expert_fmt = common_format(all, 3 * n);
    return 0;
}

static int bind_layer(struct qx_bind *b, const char *p, struct qx_layer *l, struct qx_error *err)
{
    char name[256];
    snprintf(name, sizeof name, "%sattn_hyper_connection.", p);
    QX_TRY(bind_hc(b, name, true, &l->hc_attn, err));
    snprintf(name, sizeof name, "%smlp_hyper_connection.", p);
    QX_TRY(bind_hc(b, name, true, &l->hc_mlp, err));
    QX_TRY(l->type == QX_LAYER_GDN ? bind_gdn(b, p, &l->gdn, err) : bind_qsa(b, p, &l->qsa, err));
    return bind_moe(b, p, &l->moe, err);
}

static int bind_ple(struct qx_bind *b, const char *p, struct qx_ple_weights *w, struct qx_error *err)
{
    const struct qx_config *c = b->m->cfg;
    uint64_t h = c->hidden_size, wide = c->hc_count * h;
    QX_TRY(matrix(b, wide, c->ple_embed_dim, &w->key, err, "%sple.key_proj", p));
    QX_TRY(matrix(b, h, c->ple_embed_dim, &w->value, err, "%sple.value_proj", p));
    QX_TRY(vector(b, wide, &w->norm_key, err, "%sple.norm_key.weight", p));
    QX_TRY(vector(b, wide, &w->norm_query, err, "%sple.norm_query.weight", p));
    QX_TRY(vector(b, wide, &w->norm_conv, err, "%sple.norm_conv.weight", p));
    return vector(b, wide * c->ple_conv_kernel, &w->conv, err, "%sple.conv1d.weight", p);
}

static int bind_mtp(struct qx_bind *b, struct qx_mtp *t, struct qx_error *err)
{
    const struct qx_config *c = b->m->cfg;
    uint64_t h = c->hidden_size;
    char alias[64];
    QX_TRY(matrix(b, h, h, &t->fc_embedding, err, "mtp.fc_embedding"));
    QX_TRY(matrix(b, h, h, &t->fc_hidden, err, "mtp.fc_hidden"));
    QX_TRY(vector(b, h, &t->norm_embedding, err, "mtp.pre_fc_norm_embedding.weight"));
    QX_TRY(vector(b, h * c->hc_count, &t->norm_hidden, err, "mtp.pre_fc_norm_hidden.weight"));
    QX_TRY(bind_hc(b, "mtp.hyper_connection_mixer.", false, &t->mixer, err));
    /* Some conversions number the draft layer behind the decoder's (formats 10). */
    snprintf(alias, sizeof alias, "mtp.layers.%u.", c->n_layers);
    char probe[128];
    snprintf(probe, sizeof probe, "%smlp.gate.weight", alias);
    return bind_layer(b, qx_ckpt_find(b->m->ck, probe) ? alias : "mtp.layers.0.", &t->layer, err);
}

/* ---- table -------------------------------------------------------------------------------- */

static int bind_table(struct qx_bind *b)
{
    struct qx_model *m = b->m;
    const struct qx_table *t = qx_resolved_table(b->r);
    char name[256];
    snprintf(name, sizeof name, TEXT "layers.%u.ple.ple_embedding.ngram_embedding", m->ple_layer);
    if (!t || !t->present) {
        problem(b, QX_E_MISSING, "missing-tensor", name, "the n-gram table is not in the checkpoint");
        return 0;
    }
    for (uint32_t i = 0; i < t->n_shards && !t->packed_rows; ++i) {
        char shard[300];
        snprintf(shard, sizeof shard, "%s.shard_%u.weight", t->module, i);
        if (!t->shards[i].weight) {
            (void)need(b, shard);
        } else if (!t->shards[i].weight->readable) {
            (void)need(b, t->shards[i].weight->name);
        } else if (t->format == QX_F_NVFP4 && !t->shards[i].scale) {
            snprintf(shard, sizeof shard, "%s.shard_%u.weight_scale", t->module, i);
            problem(b, QX_E_MISSING, "missing-scale", shard, "the codes have no scale; none is invented");
        }
    }
    uint8_t fmt = weight_format(t->format);
    if (!t->packed_rows && t->n_shards && t->shards[0].weight && !t->global
        && (t->shards[0].weight->dtype == QX_DT_F8_E4M3 || t->shards[0].weight->dtype == QX_DT_U8)) {
        snprintf(name, sizeof name, "%s.%s", t->module,
                 t->shards[0].weight->dtype == QX_DT_U8 ? "weight_scale_2" : "weight_scale");
        problem(b, QX_E_MISSING, "missing-scale", name, "the table's codes have no scale; none is invented");
        return 0;
    }
    if (fmt == QX_W_NONE || fmt == QX_W_FP8_BLOCK || fmt == QX_W_MXFP8) {
        problem(b, QX_E_QUANT, "table-format", t->module, "the n-gram table's stored form cannot be read");
        return 0;
    }
    if (t->row_base || t->n_rows < m->hash.n_rows) {
        problem(b, QX_E_MISSING, "rank-slice", t->module,
                "holds rows %" PRIu64 "..%" PRIu64 "; generation needs all %" PRIu64, t->row_base,
                t->row_base + t->n_rows, m->hash.n_rows);
        return 0;
    }
    if (t->width != m->cfg->ple_row_width) {
        problem(b, QX_E_FORMAT, "tensor-shape", t->module, "expected rows of %u, found %u",
                m->cfg->ple_row_width, t->width);
        return 0;
    }
    b->table_bytes = t->n_rows * (code_bytes(fmt, 1, t->width) + (fmt == QX_W_NVFP4 ? t->width / 16 : 0));
    m->table = (struct qx_table_desc){.n_rows = t->n_rows, .width = t->width, .fmt = fmt, .global = 1.0f};
    return 0;
}

/* The I64 buffers: what is stored is what is used; a difference from the computed is said. */
static int bind_hash(struct qx_bind *b, struct qx_error *err)
{
    struct qx_model *m = b->m;
    static const char *const leaf[3] = {"layer_multipliers", "ngram_heads_vocab_sizes",
                                        "ngram_heads_offsets"};
    uint64_t *into[3] = {m->hash.multiplier, m->hash.size, m->hash.offset};
    uint32_t n[3] = {m->hash.ngram_size, m->hash.n_heads, m->hash.n_heads};
    for (int i = 0; i < 3; ++i) {
        char name[300];
        snprintf(name, sizeof name, TEXT "layers.%u.ple.ple_embedding.%s", m->ple_layer, leaf[i]);
        const struct qx_tensor *t = qx_ckpt_find(m->ck, name);
        if (!t || !t->readable || t->dtype != QX_DT_I64 || t->n_elems != n[i]) {
            continue; /* the configuration determines them; verify says so */
        }
        uint64_t v[QX_MAX_PLE_HEADS];
        QX_TRY(qx_ckpt_read(m->ck, t, 0, v, n[i] * 8ull, err));
        for (uint32_t j = 0; j < n[i]; ++j) {
            if (i == 1 && v[j] == 0) {
                problem(b, QX_E_VALUE, "hash-constants-mismatch", name, "head %u has size 0", j);
                return 0;
            }
            if (v[j] != into[i][j] && b->warn) {
                char text[400];
                snprintf(text, sizeof text, "'%s'[%u] is %llu, the configuration gives %llu; the stored one is used",
                         name, j, (unsigned long long)v[j], (unsigned long long)into[i][j]);
                b->warn(b->user, "hash-constants-mismatch", text);
            }
            into[i][j] = v[j];
        }
    }
    return 0;
}

/* ---- the walk ----------------------------------------------------------------------------- */

static int walk(struct qx_bind *b, bool mtp, struct qx_error *err)
{
    struct qx_model *m = b->m;
    const struct qx_config *c = m->cfg;
    QX_TRY(matrix(b, c->vocab_size, c->hidden_size, &m->embed, err, TEXT "embed_tokens"));
    if (c->tie_word_embeddings && !qx_ckpt_find(m->ck, "lm_head.weight")) {
        m->head = m->embed;
    } else {
        QX_TRY(matrix(b, c->vocab_size, c->hidden_size, &m->head, err, "lm_head"));
    }
    QX_TRY(bind_hc(b, TEXT "hyper_connection_mixer.", false, &m->mixer, err));
    for (uint32_t i = 0; i < c->n_layers; ++i) {
        char p[64];
        snprintf(p, sizeof p, TEXT "layers.%u.", i);
        QX_TRY(bind_layer(b, p, &m->layers[i], err));
        if (m->layers[i].has_ple) {
            QX_TRY(bind_ple(b, p, &m->layers[i].ple, err));
        }
    }
    return mtp ? bind_mtp(b, &m->mtp, err) : 0;
}

/* The words of verify for the same thing. */
static void warn_input_scales(const struct qx_bind *b)
{
    struct qx_findings *fs = qx_findings_create();
    if (fs && qx_rules_scale_headers(b->m->ck, fs, NULL) == 0) {
        for (size_t i = 0; i < qx_findings_count(fs); ++i) {
            const struct qx_finding *f = qx_findings_at(fs, i);
            if (f->text && strstr(f->text, "input_scale")) {
                b->warn(b->user, "missing-scale", f->text);
            }
        }
    }
    qx_findings_destroy(fs);
}

int qx_bind_create(struct qx_bind **out, struct qx_model *m, const struct qx_model_opts *o,
                   struct qx_error *err)
{
    *out = NULL;
    struct qx_bind *b = qx_calloc(1, sizeof *b);
    if (!b) {
        return qx_fail_nomem(err);
    }
    b->m = m;
    b->r = qx_ckpt_resolved(m->ck);
    b->user = o->user;
    b->warn = o->warn;
    int rc = b->r ? walk(b, m->mtp.loaded, err)
                  : qx_fail(err, QX_E_CONFIG, "config-missing", "generation needs a checkpoint directory");
    if (!rc && m->has_ple) {
        rc = bind_table(b);
        rc = rc ? rc : bind_hash(b, err);
    }
    if (!rc && b->first.code) {
        if (err) {
            *err = b->first;
            size_t n = strlen(err->msg);
            if (b->n_missing && n < sizeof err->msg) {
                snprintf(err->msg + n, sizeof err->msg - n, " (and %llu more problems)",
                         (unsigned long long)b->n_missing);
            }
        }
        rc = -(int)b->first.code;
    }
    if (rc) {
        qx_bind_destroy(b);
        return rc;
    }
    b->weight_bytes = b->arena_bytes;
    if (b->n_no_input_scale && b->warn) {
        warn_input_scales(b);
    }
    *out = b;
    return 0;
}

void qx_bind_sizes(const struct qx_bind *b, struct qx_bind_sizes *out)
{
    *out = (struct qx_bind_sizes){b->weight_bytes, b->table_bytes, b->read_bytes};
}

int qx_bind_load(struct qx_bind *b, const struct qx_model_opts *o, struct qx_error *err)
{
    struct qx_model *m = b->m;
    b->loading = true;
    b->arena_bytes = 0;
    if (!m->be->host_memory) {
        QX_TRY(qx_model_mem(m, &b->arena, b->weight_bytes, err));
    }
    QX_TRY(walk(b, m->mtp.loaded, err));
    if (m->be->host_memory) {
        qx_model_note_bytes(m, b->weight_bytes); /* mapped, but as much a part of the plan */
    }
    QX_TRY(qx_load_pieces(b, o, err));
    return m->has_ple ? qx_load_table(b, o, err) : 0;
}

void qx_bind_destroy(struct qx_bind *b)
{
    if (!b) {
        return;
    }
    for (size_t i = 0; i < b->n_owned; ++i) {
        qx_free(b->owned[i]);
    }
    qx_free(b->owned);
    qx_free(b->pieces);
    qx_free(b);
}
