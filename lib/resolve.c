/* resolve.c: owns the list of modules and the n-gram table as they are stored. One pass over the
 * sorted tensors; only a module's own name is copied. Metadata is resolve_meta.c's. */
#include "resolve.h"

#include "pack.h"
#include "ple_hash.h"
#include "resolve_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const component_names[QX_C_COUNT] = {
    "embed",         "lm_head",   "hyper_connections",
    "linear_attn",   "self_attn", "router",
    "shared_expert", "experts",   "ple",
    "ple_table",     "mtp",       "vision",
    "other",
};
static const char *const source_names[] = {
    "map",     "ple_embedding_dtype",    "modules_to_convert",
    "ignore",  "modules_to_not_convert", "default",
    "storage",
};

const char *qx_component_name(enum qx_component c)
{
    return component_names[c];
}

const char *qx_source_name(enum qx_source s)
{
    return source_names[s];
}

bool qx_format_quantised(enum qx_format f)
{
    return f == QX_F_FP8 || f == QX_F_FP8_BLOCK || f == QX_F_MXFP8 || f == QX_F_NVFP4 ||
           f == QX_F_W4A16_NVFP4;
}

enum qx_dtype qx_format_weight_dtype(enum qx_format f)
{
    switch (f) {
    case QX_F_BF16:
        return QX_DT_BF16;
    case QX_F_F16:
        return QX_DT_F16;
    case QX_F_F32:
        return QX_DT_F32;
    case QX_F_I64:
        return QX_DT_I64;
    case QX_F_FP8:
    case QX_F_FP8_BLOCK:
    case QX_F_MXFP8:
        return QX_DT_F8_E4M3;
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        return QX_DT_U8;
    default:
        return QX_DT_UNKNOWN;
    }
}

uint32_t qx_format_group(enum qx_format f)
{
    switch (f) {
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        return 16;
    case QX_F_MXFP8:
        return 32;
    case QX_F_FP8_BLOCK:
        return 128;
    default:
        return 0;
    }
}

static enum qx_format plain_format(enum qx_dtype t)
{
    switch (t) {
    case QX_DT_BF16:
        return QX_F_BF16;
    case QX_DT_F16:
        return QX_F_F16;
    case QX_DT_F32:
        return QX_F_F32;
    case QX_DT_I64:
        return QX_F_I64;
    default:
        return QX_F_NONE;
    }
}

static bool is_float(const struct qx_tensor *t)
{
    return t->dtype == QX_DT_BF16 || t->dtype == QX_DT_F16 || t->dtype == QX_DT_F32;
}

/* ---- form of a module ------------------------------------------------------------------------ */

/* Stored scale dimensions against [stack, rows, cols]; leading 1s of the stack may be missing. */
static bool scale_is(const struct qx_tensor *s, uint64_t stack, uint64_t rows, uint64_t cols)
{
    if (s->n_dims == 2) {
        return stack == 1 && s->shape[0] == rows && s->shape[1] == cols;
    }
    if (s->n_dims == 3) {
        return s->shape[0] == stack && s->shape[1] == rows && s->shape[2] == cols;
    }
    return false;
}

/* [blocks_out, 1, blocks_in, 1] is met as well. */
static bool block_scale_is(const struct qx_tensor *s, uint64_t stack, uint64_t rows, uint64_t cols)
{
    return scale_is(s, stack, rows, cols) ||
           (s->n_dims == 4 && stack == 1 && s->shape[0] == rows && s->shape[1] == 1 &&
            s->shape[2] == cols && s->shape[3] == 1);
}

static bool one_element(const struct qx_tensor *t)
{
    if (t->n_dims > 2 || t->n_elems != 1) {
        return false;
    }
    return true;
}

static void decide_fp8(struct qx_module *m, enum qx_format claim)
{
    const struct qx_tensor *inv = m->scale_is_inv ? m->scale : m->other_scale;
    const struct qx_tensor *plain = m->scale_is_inv ? m->other_scale : m->scale;
    uint64_t bo = qx_ceil_div(m->rows, 128);
    uint64_t bi = qx_ceil_div(m->cols, 128);
    bool claims_fp8 = claim == QX_F_FP8 || claim == QX_F_FP8_BLOCK || claim == QX_F_MXFP8;
    if (inv && (!plain || claim != QX_F_FP8)) {
        m->form = QX_F_FP8_BLOCK;
        m->scale = inv;
        m->other_scale = plain;
        m->scale_is_inv = true;
        if (is_float(inv) && block_scale_is(inv, m->n_stacked, bo, bi)) {
            m->format = m->form;
        }
        return;
    }
    m->scale = plain;
    m->other_scale = inv;
    m->scale_is_inv = false;
    if (!plain) {
        m->form = claims_fp8 ? claim : QX_F_FP8;
        return;
    }
    bool byte_scale = plain->dtype == QX_DT_U8 || plain->dtype == QX_DT_F8_E8M0;
    if (byte_scale && (claim == QX_F_MXFP8 || (claim != QX_F_FP8 && plain->n_dims >= 2))) {
        m->form = QX_F_MXFP8;
        if (m->cols % 32 == 0 && scale_is(plain, m->n_stacked, m->rows, m->cols / 32)) {
            m->format = m->form;
        }
        return;
    }
    /* A block scale under the other name: several elements in the shape of blocks (case A15), or
     * one where the configuration says block. */
    if ((plain->n_elems > 1 || claim == QX_F_FP8_BLOCK) && is_float(plain) &&
        block_scale_is(plain, m->n_stacked, bo, bi)) {
        m->form = QX_F_FP8_BLOCK;
        m->scale_variant = true;
        m->format = m->form;
        return;
    }
    m->form = claims_fp8 ? claim : QX_F_FP8;
    if (m->form == QX_F_FP8 && one_element(plain) && is_float(plain) && m->n_stacked == 1) {
        m->format = m->form;
    }
}

static void decide_nvfp4(struct qx_module *m, enum qx_format claim)
{
    bool w4a16 = claim == QX_F_W4A16_NVFP4 || (claim != QX_F_NVFP4 && !m->input_scale);
    m->form = w4a16 && !m->input_scale ? QX_F_W4A16_NVFP4 : QX_F_NVFP4;
    if (m->scale_is_inv) {
        m->other_scale = m->scale;
        m->scale = NULL;
        m->scale_is_inv = false;
    }
    const struct qx_tensor *s = m->scale;
    if (s && m->scale_2 && s->dtype == QX_DT_F8_E4M3 && m->cols % 16 == 0 &&
        scale_is(s, m->n_stacked, m->rows, m->cols / 16) && m->scale_2->dtype == QX_DT_F32 &&
        (m->n_stacked == 1 ? one_element(m->scale_2) : m->scale_2->n_elems == m->n_stacked)) {
        m->format = m->form;
    }
}

void qx_module_decide(struct qx_module *m, const struct qx_claim *claim)
{
    const struct qx_tensor *w = m->weight;
    enum qx_format cf = claim->kind == QX_CL_FORMAT && !claim->soft ? claim->format : QX_F_NONE;
    m->claimed = claim->kind == QX_CL_FORMAT ? claim->format : QX_F_NONE;
    m->claim_soft = claim->soft;
    m->format = m->form = QX_F_NONE;
    m->rows = m->cols = 0;
    m->n_stacked = 1;
    if (!w || m->foreign) {
        return;
    }
    if (w->n_dims == 0) {
        m->rows = m->cols = 1;
    } else if (w->n_dims == 1) {
        m->rows = 1;
        m->cols = w->shape[0];
    } else {
        bool stack = w->n_dims == 3 && w->shape[1] != 1;
        m->n_stacked = stack ? w->shape[0] : 1;
        m->rows = stack ? w->shape[1] : w->shape[0];
        m->cols = m->rows && m->n_stacked ? w->n_elems / m->rows / m->n_stacked : 0;
    }
    m->form = plain_format((enum qx_dtype)w->dtype);
    if (m->form != QX_F_NONE) {
        m->format = m->form;
    } else if (w->dtype == QX_DT_F8_E4M3) {
        decide_fp8(m, claim->kind == QX_CL_FORMAT ? claim->format : QX_F_NONE);
    } else if (w->dtype == QX_DT_U8) {
        m->cols *= 2;
        decide_nvfp4(m, cf);
    }
    if (!w->readable && m->format != QX_F_NONE) {
        m->format = m->form; /* a damaged file is found at the read, with its place */
    }
    m->group_size = qx_format_group(m->form);
}

/* ---- gathering ------------------------------------------------------------------------------- */

static struct qx_module *module_for(struct qx_resolved *r, const struct qx_name *nm,
                                    const char *name)
{
    /* Tensors of a module follow each other, but for strangers such as weight_quantizer.* between
     * weight and weight_scale, which are modules of their own here. */
    for (size_t i = r->n; i > 0 && r->n - i < 16; --i) {
        struct qx_module *m = &r->modules[i - 1];
        if (strncmp(m->name, name, nm->module_len) == 0 && m->name[nm->module_len] == '\0') {
            return m;
        }
    }
    if (!qx_grow((void **)&r->modules, &r->cap, r->n + 1, sizeof *r->modules)) {
        return NULL;
    }
    struct qx_module *m = &r->modules[r->n];
    memset(m, 0, sizeof *m);
    m->name = qx_arena_strndup(r->arena, name, nm->module_len);
    if (!m->name) {
        return NULL;
    }
    r->n++;
    m->component = (enum qx_component)nm->component;
    m->layer = nm->component == QX_C_VISION ? -1 : nm->layer;
    m->expert = nm->expert;
    m->is_mtp = nm->is_mtp;
    m->layout = nm->entry;
    m->spelling = nm->spelling;
    m->is_linear = nm->entry && (nm->entry->kind == QX_K_LINEAR || nm->entry->kind == QX_K_FUSED ||
                                 nm->entry->kind == QX_K_EXPERT);
    m->n_stacked = 1;
    return m;
}

static void put_tensor(struct qx_module *m, const struct qx_name *nm, const struct qx_tensor *t)
{
    switch ((enum qx_leaf)nm->leaf) {
    case QX_LEAF_BARE:
    case QX_LEAF_WEIGHT:
        if (!m->weight) {
            m->weight = t;
        }
        break;
    case QX_LEAF_SCALE:
        if (m->scale_is_inv) {
            m->other_scale = t;
        } else {
            m->scale = t;
        }
        break;
    case QX_LEAF_SCALE_INV:
        if (m->scale) {
            m->other_scale = t;
        } else {
            m->scale = t;
            m->scale_is_inv = true;
        }
        break;
    case QX_LEAF_SCALE_2:
        m->scale_2 = t;
        break;
    case QX_LEAF_INPUT_SCALE:
        m->input_scale = t;
        break;
    case QX_LEAF_BIAS:
        m->bias = t;
        break;
    case QX_LEAF_FOREIGN:
        /* The weight itself stands for the module when it is there. */
        if (!m->foreign || strcmp(nm->leaf_text, "weight_packed") == 0 ||
            strcmp(nm->leaf_text, "qweight") == 0 || strcmp(nm->leaf_text, "trellis") == 0) {
            m->foreign = t;
        }
        break;
    case QX_LEAF_KV_SCALE:
        break;
    }
}

static bool is_table_layer(const struct qx_config *c, int32_t layer)
{
    return c->n_ple_layers > 0 && layer == (int32_t)c->ple_layer[0];
}

/* Tensors of the table are gathered apart; its shards are slices of one matrix. */
struct gather {
    const struct qx_tensor *scale, *scale_2, *packed, *foreign;
    const char *foreign_what;
    uint64_t n_shard_tensors;
};

static bool grow_shards(struct qx_resolved *r, uint32_t n, size_t *cap)
{
    size_t old = *cap;
    if (n <= r->table.n_shards) {
        return true;
    }
    if (!qx_grow((void **)&r->shards, cap, n, sizeof *r->shards)) {
        return false;
    }
    if (*cap > old) {
        memset(r->shards + old, 0, (*cap - old) * sizeof *r->shards);
    }
    r->table.n_shards = n;
    return true;
}

static int put_shard(struct qx_resolved *r, const struct qx_name *nm, const struct qx_tensor *t,
                     struct gather *g, size_t *cap)
{
    if (nm->leaf == QX_LEAF_FOREIGN) {
        g->foreign = t;
        return 0;
    }
    if (nm->leaf != QX_LEAF_WEIGHT && nm->leaf != QX_LEAF_SCALE) {
        return 0;
    }
    if (nm->shard >= QX_MAX_TABLE_SHARDS) {
        return 0; /* reported by the table's rules */
    }
    uint32_t k = (uint32_t)nm->shard;
    if (!grow_shards(r, k + 1, cap)) {
        return -1;
    }
    if (nm->leaf == QX_LEAF_WEIGHT) {
        r->shards[k].weight = t;
    } else {
        r->shards[k].scale = t;
    }
    g->n_shard_tensors++;
    return 0;
}

static int put_table_tensor(struct qx_resolved *r, const struct qx_name *nm,
                            const struct qx_tensor *t, struct gather *g, size_t *cap)
{
    if (nm->foreign_shard) {
        return 0;
    }
    if (nm->shard >= 0) {
        return put_shard(r, nm, t, g, cap);
    }
    if (nm->leaf == QX_LEAF_SCALE) {
        g->scale = t;
    } else if (nm->leaf == QX_LEAF_SCALE_2) {
        g->scale_2 = t;
    } else if (nm->leaf == QX_LEAF_FOREIGN) {
        g->foreign = t;
    } else if (strcmp(nm->leaf_text, QX_PACK_LEAF) == 0) {
        g->packed = t;
    }
    return 0;
}

/* Which other convention a shard follows, by dtype and columns (formats 5.2). */
static const char *foreign_form(const struct qx_tensor *w, const struct qx_tensor *s,
                                uint64_t width)
{
    if (w->n_dims != 2) {
        return NULL;
    }
    uint64_t cols = w->shape[1];
    if (w->dtype == QX_DT_U8 && cols == width / 2 + 4) {
        return "NF4";
    }
    if (w->dtype == QX_DT_U32) {
        return "MLX affine 4-bit";
    }
    if (w->dtype == QX_DT_I8) {
        return "INT8 per row";
    }
    if (w->dtype == QX_DT_F8_E4M3 && s && s->n_elems == w->shape[0]) {
        return "FP8 per row";
    }
    return NULL;
}

uint64_t qx_table_shard_rows(const struct qx_table *t, uint64_t i)
{
    uint64_t begin;
    if (!qx_mul_u64(i, t->rows_per_shard, &begin) || begin >= t->n_rows) {
        return 0;
    }
    return t->n_rows - begin < t->rows_per_shard ? t->n_rows - begin : t->rows_per_shard;
}

/* Shards that only the index knows, in a file that is not there. */
static bool count_absent(struct qx_resolved *r, size_t *cap)
{
    for (size_t i = 0; i < qx_ckpt_n_absent(r->ck); i++) {
        const char *name = qx_ckpt_absent(r->ck, i)->name;
        struct qx_name nm;
        qx_layout_parse(&nm, r->c, name, strlen(name));
        if (nm.in_table && nm.spelling == QX_SP_DISK && is_table_layer(r->c, nm.layer) &&
            !nm.foreign_shard && nm.shard >= 0 && nm.shard < QX_MAX_TABLE_SHARDS &&
            !grow_shards(r, (uint32_t)nm.shard + 1, cap)) {
            return false;
        }
    }
    return true;
}

/* How many rows there are and how many a shard has. The configuration's numbers count when a stored
 * shard has as many rows as they give it; else what is stored. */
static bool settle_rows(struct qx_resolved *r, size_t *cap)
{
    struct qx_table *t = &r->table;
    const struct qx_config *c = r->c;
    struct qx_ple_hash h;
    uint64_t parts = c->split_ngram_parts ? c->split_ngram_parts : t->n_shards;
    uint32_t first = UINT32_MAX, last = 0;
    if (!t->is_slice && parts >= t->n_shards && parts <= QX_MAX_TABLE_SHARDS &&
        qx_ple_hash_init(&h, c, 0, NULL) == 0) {
        t->n_rows = h.n_rows_padded;
        t->rows_per_shard = qx_ceil_div(t->n_rows, parts);
        for (uint32_t i = 0; i < t->n_shards; i++) {
            const struct qx_tensor *w = r->shards[i].weight;
            if (w && w->n_dims == 2 && w->shape[0] && w->shape[0] == qx_table_shard_rows(t, i)) {
                return grow_shards(r, (uint32_t)parts, cap);
            }
        }
    }
    for (uint32_t i = 0; i < t->n_shards; i++) {
        const struct qx_tensor *w = r->shards[i].weight;
        if (w && w->n_dims == 2 && w->shape[0]) {
            first = first < i ? first : i;
            last = i;
        }
    }
    t->n_rows = t->rows_per_shard = 0;
    if (first == UINT32_MAX) {
        return true;
    }
    uint64_t per = r->shards[first].weight->shape[0], rows = r->shards[last].weight->shape[0], n;
    bool gone = false; /* a shard behind the last stored one is missing: it is taken for whole */
    for (uint32_t i = last + 1; i < t->n_shards; i++) {
        gone = gone || !r->shards[i].weight;
    }
    bool ok = gone || rows > per ? qx_mul_u64(per, gone ? t->n_shards : last + 1, &n)
                                 : qx_mul_u64(per, last, &n) && qx_add_u64(n, rows, &n);
    if (ok) {
        t->rows_per_shard = per;
        t->n_rows = n;
    }
    return true;
}

static bool global_ok(const struct qx_tensor *g, bool nvfp4)
{
    if (!g || !one_element(g)) {
        return false;
    }
    return nvfp4 ? g->dtype == QX_DT_F32 : is_float(g);
}

static void finish_table_form(struct qx_resolved *r, const struct gather *g)
{
    struct qx_table *t = &r->table;
    const struct qx_tensor *w = NULL;
    const struct qx_table_shard *first = NULL;
    bool same = true;
    bool scales_ok = true;
    uint64_t width = r->c->ple_row_width;
    for (uint32_t i = 0; i < t->n_shards; i++) {
        const struct qx_table_shard *s = &r->shards[i];
        if (!s->weight) {
            continue;
        }
        if (!w) {
            w = s->weight;
            first = s;
        }
        same = same && s->weight->dtype == w->dtype && s->weight->n_dims == 2 && w->n_dims == 2 &&
               s->weight->shape[1] == w->shape[1] &&
               s->weight->shape[0] == qx_table_shard_rows(t, i);
        scales_ok = scales_ok && s->scale && s->scale->dtype == QX_DT_F8_E4M3 && width % 16 == 0 &&
                    scale_is(s->scale, 1, s->weight->shape[0], width / 16);
    }
    if (!w || w->n_dims != 2 || !t->rows_per_shard) {
        return;
    }
    t->width = (uint32_t)width;
    t->foreign = foreign_form(w, first->scale, width);
    if (t->foreign) {
        return;
    }
    enum qx_format plain = plain_format((enum qx_dtype)w->dtype);
    if (plain != QX_F_NONE && plain != QX_F_I64 && w->shape[1] == width) {
        t->form = plain;
        t->format = same ? plain : QX_F_NONE;
    } else if (w->dtype == QX_DT_F8_E4M3 && w->shape[1] == width) {
        t->form = QX_F_FP8;
        t->global = g->scale;
        t->format = same && global_ok(g->scale, false) ? QX_F_FP8 : QX_F_NONE;
    } else if (w->dtype == QX_DT_U8 && w->shape[1] * 2 == width) {
        t->form = QX_F_NVFP4;
        t->global = g->scale_2;
        t->format = same && scales_ok && global_ok(g->scale_2, true) ? QX_F_NVFP4 : QX_F_NONE;
    }
}

static void finish_packed(struct qx_resolved *r, const struct gather *g)
{
    struct qx_table *t = &r->table;
    struct qx_pack_info p;
    t->packed = g->packed;
    t->packed_rows = true;
    t->n_shards = 1;
    t->form = t->format = QX_F_NONE;
    if (qx_pack_read(&p, r->ck, g->packed, NULL) != 0) {
        return; /* rows and rules read it again and say why not */
    }
    t->width = p.width;
    t->n_rows = t->rows_per_shard = p.n_rows;
    t->row_base = p.row_base;
    t->form = p.format;
    t->global = p.format == QX_F_FP8 ? g->scale : p.format == QX_F_NVFP4 ? g->scale_2 : NULL;
    t->format =
        !p.has_global || global_ok(t->global, p.format == QX_F_NVFP4) ? p.format : QX_F_NONE;
}

/* The note that repack --rank leaves in config.json: the slice's first row. */
static uint64_t rank_row_base(const struct qx_resolved *r, bool *is_slice)
{
    const struct qx_blob *b = qx_ckpt_config_text(r->ck);
    struct qx_json_doc doc;
    uint64_t base = 0;
    if (!b || !b->present || !strstr(b->text, "qx_rank") ||
        qx_json_doc_parse(&doc, b->text, b->n, "config.json", NULL, NULL) != 0) {
        return 0;
    }
    const struct qx_json *v = qx_json_get(qx_json_get(doc.root, "qx_rank"), "base_row");
    if (v && v->type == QX_JSON_NUMBER && v->is_int && !v->negative) {
        base = v->uint_value;
        *is_slice = true;
    }
    qx_json_doc_fini(&doc);
    return base;
}

static int finish_table(struct qx_resolved *r, const struct gather *g, size_t *cap)
{
    struct qx_table *t = &r->table;
    const struct qx_config *c = r->c;
    char name[160];
    if (c->n_ple_layers == 0) {
        return 0;
    }
    snprintf(name, sizeof name,
             "model.language_model.layers.%" PRIu32 ".ple.ple_embedding.ngram_embedding",
             c->ple_layer[0]);
    t->module = qx_arena_strndup(r->arena, name, strlen(name));
    if (!t->module) {
        return -1;
    }
    t->present = t->n_shards > 0 || g->packed != NULL || g->foreign != NULL;
    t->source = QX_SRC_STORAGE;
    if (g->packed && t->n_shards == 0) {
        finish_packed(r, g);
        (void)rank_row_base(r, &t->is_slice);
        return 0;
    }
    t->row_base = rank_row_base(r, &t->is_slice);
    if (t->n_shards > 0 && (!count_absent(r, cap) || !settle_rows(r, cap))) {
        return -1;
    }
    t->shards = r->shards;
    finish_table_form(r, g);
    if (g->foreign) {
        const char *leaf = strrchr(g->foreign->name, '.') + 1;
        bool int6 = strcmp(leaf, "weight_packed") == 0 && g->foreign->n_dims == 2 &&
                    g->foreign->shape[1] * 4 == (uint64_t)c->ple_row_width * 3;
        t->foreign = int6 ? "INT6 in groups of 32"
                     : strcmp(leaf, "trellis") == 0 || strcmp(leaf, "head_bias") == 0 ? "EXL3"
                     : strcmp(leaf, "scales") == 0 || strcmp(leaf, "biases") == 0     ? "MLX"
                     : strcmp(leaf, "qweight") == 0                                   ? "GPTQ"
                                                    : "compressed-tensors";
        t->form = t->format = QX_F_NONE;
    }
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct qx_module *)a)->name, ((const struct qx_module *)b)->name);
}

static int gather(struct qx_resolved *r)
{
    struct gather g = {0};
    size_t cap = 0;
    size_t n = qx_ckpt_n_tensors(r->ck);
    bool sorted = true;
    for (size_t i = 0; i < n; i++) {
        const struct qx_tensor *t = qx_ckpt_tensor(r->ck, i);
        struct qx_name nm;
        qx_layout_parse(&nm, r->c, t->name, t->name_len);
        if (nm.ple_extra) {
            continue;
        }
        if (nm.in_table && nm.spelling == QX_SP_DISK && is_table_layer(r->c, nm.layer)) {
            if (put_table_tensor(r, &nm, t, &g, &cap) != 0) {
                return -1;
            }
            continue;
        }
        if (nm.in_table) {
            continue; /* under another name or layer: never read as the table or a module */
        }
        size_t before = r->n;
        struct qx_module *m = module_for(r, &nm, t->name);
        if (!m) {
            return -1;
        }
        if (r->n > before && r->n > 1) {
            sorted = sorted && strcmp(r->modules[r->n - 2].name, m->name) < 0;
        }
        put_tensor(m, &nm, t);
    }
    if (!sorted) {
        qsort(r->modules, r->n, sizeof r->modules[0], by_name);
    }
    return finish_table(r, &g, &cap);
}

int qx_resolve(struct qx_resolved **out, const struct qx_ckpt *ck, struct qx_findings *fs,
               struct qx_error *err)
{
    *out = NULL;
    struct qx_resolved *r = qx_calloc(1, sizeof *r);
    if (!r) {
        return qx_fail_nomem(err);
    }
    r->ck = ck;
    r->c = qx_ckpt_config(ck);
    r->arena = qx_arena_create();
    int rc = !r->arena || !r->c ? qx_fail_nomem(err) : qx_resolve_read_homes(r, fs, err);
    if (rc == 0 && gather(r) != 0) {
        rc = qx_fail_nomem(err);
    }
    if (rc == 0) {
        rc = qx_resolve_claims(r, fs, err);
    }
    if (rc != 0) {
        qx_resolved_destroy(r);
        return rc;
    }
    *out = r;
    return 0;
}

void qx_resolved_destroy(struct qx_resolved *r)
{
    if (r) {
        qx_free(r->modules);
        qx_free(r->shards);
        qx_arena_destroy(r->arena);
        qx_free(r);
    }
}

size_t qx_resolved_n_modules(const struct qx_resolved *r)
{
    return r->n;
}

const struct qx_module *qx_resolved_module(const struct qx_resolved *r, size_t i)
{
    return &r->modules[i];
}

const struct qx_module *qx_resolved_find(const struct qx_resolved *r, const char *module)
{
    size_t lo = 0;
    size_t hi = r->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(r->modules[mid].name, module);
        if (c == 0) {
            return &r->modules[mid];
        }
        if (c < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return NULL;
}

const struct qx_table *qx_resolved_table(const struct qx_resolved *r)
{
    return &r->table;
}

const struct qx_quant_home *qx_resolved_quant(const struct qx_resolved *r, int home)
{
    return r->home[home].present ? &r->home[home] : NULL;
}

const struct qx_quant_home *qx_resolved_quant_used(const struct qx_resolved *r)
{
    return r->used;
}
