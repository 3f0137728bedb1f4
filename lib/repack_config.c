/* repack_config.c: the config texts and the index of the output.
 *
 * config.json is edited member by member, so that everything that has nothing to do with the change
 * stays as its author wrote it. The quantisation block is written anew whenever what is quantised
 * changes, from the modules as they will be stored: nothing when no matrix is, the fp8 method's
 * block when only experts are and all of them as FP8_BLOCK, else a ModelOpt map (formats 8). A
 * table that is the only quantised part is declared by ple_embedding_dtype alone. */
#include "repack_impl.h"

#include "json_edit.h"
#include "json_out.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- modules as they will be stored ------------------------------------------------------- */

struct module {
    const char *name; /* a module, or a container of experts */
    enum qx_format format;
    bool linear, experts;
};
struct modules {
    struct module *v;
    size_t n, cap;
    enum qx_format table; /* QX_F_NONE: none */
    const char *table_name;
};

static bool quantised(enum qx_format f)
{
    return f == QX_F_FP8 || f == QX_F_FP8_BLOCK || f == QX_F_MXFP8 || f == QX_F_NVFP4 ||
           f == QX_F_W4A16_NVFP4;
}

static bool put(struct modules *m, const char *name, enum qx_format f, bool linear, bool experts)
{
    if (!qx_grow((void **)&m->v, &m->cap, m->n + 1, sizeof *m->v)) {
        return false;
    }
    m->v[m->n++] = (struct module){name, f, linear, experts};
    return true;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct module *)a)->name, ((const struct module *)b)->name);
}

static const struct rp_container *converted(const struct qx_repack *r, const char *name)
{
    for (size_t i = 0; i < r->n_c; i++) {
        size_t n = strlen(r->c[i].prefix);
        if (r->c[i].convert && strncmp(name, r->c[i].prefix, n) == 0 && name[n] == '.') {
            return &r->c[i];
        }
    }
    return NULL;
}

/* Modules of the output; experts of one format are one entry under their container's name. */
static int collect(struct qx_repack *r, struct modules *m, struct qx_error *err)
{
    const struct qx_resolved *res = qx_ckpt_resolved(r->ck);
    const struct qx_table *tab = qx_resolved_table(res);
    bool ok = true;
    for (size_t i = 0; ok && i < r->n_c; i++) {
        if (r->c[i].convert) {
            /* Activation scales are not invented: converted experts are weight-only. */
            enum qx_format f = r->c[i].to == QX_F_NVFP4 ? QX_F_W4A16_NVFP4 : r->c[i].to;
            ok = put(m, r->c[i].prefix, f, true, true);
        }
    }
    for (size_t i = 0; ok && i < qx_resolved_n_modules(res); i++) {
        const struct qx_module *x = qx_resolved_module(res, i);
        const char *p = strstr(x->name, ".mlp.experts.");
        if (rp_dropped(r, x->name) || converted(r, x->name) != NULL) {
            continue;
        }
        if (p == NULL) {
            ok = put(m, x->name, x->format, x->is_linear, false);
            continue;
        }
        size_t n = (size_t)(p - x->name) + strlen(".mlp.experts");
        struct module *last = m->n > 0 ? &m->v[m->n - 1] : NULL;
        if (last != NULL && last->experts && strlen(last->name) == n &&
            strncmp(last->name, x->name, n) == 0) {
            if (last->format == x->format) {
                continue;
            }
            /* Not of one format: an entry for each. */
            ok = put(m, x->name, x->format, true, false);
            continue;
        }
        const char *name = qx_arena_strndup(r->arena, x->name, n);
        ok = name != NULL && put(m, name, x->format, true, true);
    }
    if (!ok) {
        return qx_fail_nomem(err);
    }
    if (m->n > 1) {
        qsort(m->v, m->n, sizeof *m->v, by_name);
    }
    m->table = QX_F_NONE;
    if (tab != NULL && tab->present) {
        m->table = r->table.changed ? r->table.to : tab->format;
        m->table_name = tab->module;
    }
    return 0;
}

/* ---- blocks ------------------------------------------------------------------------------- */

static const char *algo(enum qx_format f, uint64_t *group)
{
    switch (f) {
    case QX_F_FP8:
        *group = 0;
        return "FP8";
    case QX_F_FP8_BLOCK:
        *group = 128;
        return "FP8_BLOCK_SCALES";
    case QX_F_MXFP8:
        *group = 32;
        return "MXFP8";
    case QX_F_NVFP4:
        *group = 16;
        return "NVFP4";
    default:
        *group = 16;
        return "W4A16_NVFP4";
    }
}

static void put_map(struct qx_json_out *o, const struct modules *m)
{
    qx_json_obj(o, "quantized_layers");
    bool table_done = !quantised(m->table);
    for (size_t i = 0; i <= m->n; i++) {
        if (!table_done && (i == m->n || strcmp(m->table_name, m->v[i].name) < 0)) {
            uint64_t group = 0;
            qx_json_obj(o, m->table_name);
            qx_json_str(o, "quant_algo", algo(m->table, &group));
            if (group > 0) {
                qx_json_u64(o, "group_size", group);
            }
            qx_json_obj_end(o);
            table_done = true;
        }
        if (i < m->n && quantised(m->v[i].format)) {
            uint64_t group = 0;
            qx_json_obj(o, m->v[i].name);
            qx_json_str(o, "quant_algo", algo(m->v[i].format, &group));
            if (group > 0) {
                qx_json_u64(o, "group_size", group);
            }
            qx_json_obj_end(o);
        }
    }
    qx_json_obj_end(o);
}

static void put_plain(struct qx_json_out *o, const char *key, const struct modules *m)
{
    qx_json_arr(o, key);
    for (size_t i = 0; i < m->n; i++) {
        if (m->v[i].linear && !quantised(m->v[i].format)) {
            qx_json_str(o, NULL, m->v[i].name);
        }
    }
    qx_json_arr_end(o);
}

static void put_producer(struct qx_json_out *o)
{
    qx_json_obj(o, "producer");
    qx_json_str(o, "name", "modelopt"); /* the convention followed; loaders choose by it */
    qx_json_str(o, "version", "qx " QX_VERSION);
    qx_json_obj_end(o);
}

enum style { NOTHING, FP8_METHOD, MAP };

static enum style choose_style(const struct modules *m)
{
    bool any = false, only_block = true;
    for (size_t i = 0; i < m->n; i++) {
        if (quantised(m->v[i].format)) {
            any = true;
            only_block = only_block && m->v[i].format == QX_F_FP8_BLOCK && m->v[i].experts;
        }
    }
    /* The fp8 method covers every expert; one plain set of experts needs the map. */
    for (size_t i = 0; i < m->n; i++) {
        only_block = only_block && (!m->v[i].experts || m->v[i].format == QX_F_FP8_BLOCK);
    }
    return !any ? NOTHING : only_block ? FP8_METHOD : MAP;
}

static void put_quant(struct qx_json_out *o, enum style style, const struct modules *m)
{
    qx_json_obj(o, NULL);
    if (style == FP8_METHOD) {
        qx_json_str(o, "quant_method", "fp8");
        qx_json_str(o, "activation_scheme", "dynamic");
        qx_json_bool(o, "weight_per_tensor", false);
        qx_json_bool(o, "act_per_tensor", false);
        qx_json_arr(o, "weight_block_size");
        qx_json_u64(o, NULL, 128);
        qx_json_u64(o, NULL, 128);
        qx_json_arr_end(o);
        put_plain(o, "modules_to_not_convert", m);
        if (m->table == QX_F_FP8) {
            const char *p = strstr(m->table_name, ".ple.");
            qx_json_arr(o, "modules_to_convert");
            qx_json_str(o, NULL, p != NULL ? p + 1 : m->table_name);
            qx_json_arr_end(o);
        }
    } else {
        qx_json_str(o, "quant_method", "modelopt");
        qx_json_str(o, "quant_algo", "MIXED_PRECISION");
        put_producer(o);
        put_plain(o, "ignore", m);
        put_map(o, m);
    }
    qx_json_obj_end(o);
}

static void put_hf_quant(struct qx_json_out *o, const struct modules *m)
{
    qx_json_obj(o, NULL);
    put_producer(o);
    qx_json_obj(o, "quantization");
    qx_json_str(o, "quant_algo", "MIXED_PRECISION");
    qx_json_null(o, "kv_cache_quant_algo");
    qx_json_u64(o, "group_size", 16);
    put_plain(o, "exclude_modules", m);
    put_map(o, m);
    qx_json_obj_end(o);
    qx_json_obj_end(o);
    qx_buf_chr(&o->buf, '\n');
}

/* ---- edits -------------------------------------------------------------------------------- */

struct alias {
    const char *path, *from, *to;
};

/* Preview names to final ones (formats 10). */
static bool canonical(struct qx_buf *b)
{
    static const struct alias list[] = {
        {"model_type", "\"qwen3_8_flash_next\"", "\"qwen4_exp\""},
        {"text_config/model_type", "\"qwen3_8_flash_next_text\"", "\"qwen4_exp_text\""},
        {"vision_config/model_type", "\"qwen3_5_vision\"", "\"qwen4_exp_vision\""},
    };
    static const struct alias words[] = {
        {NULL, "Qwen3_8FlashNextForConditionalGeneration", "Qwen4ExpForConditionalGeneration"},
        {NULL, "Qwen3_8_FlashNextForConditionalGeneration", "Qwen4ExpForConditionalGeneration"},
        {NULL, "Qwen3_8FlashNextForCausalLM", "Qwen4ExpForCausalLM"},
    };
    struct qx_view v;
    bool ok = true;
    for (size_t i = 0; ok && i < QX_ARRAY_LEN(list); i++) {
        if (qx_json_edit_find(b, list[i].path, &v) && v.n == strlen(list[i].from) &&
            memcmp(v.p, list[i].from, v.n) == 0) {
            ok = qx_json_edit_set(b, list[i].path, list[i].to);
        }
    }
    for (size_t i = 0; ok && i < QX_ARRAY_LEN(words); i++) {
        if (!qx_json_edit_find(b, "architectures", &v)) {
            break;
        }
        size_t n = strlen(words[i].from);
        const char *hit = memmem(v.p, v.n, words[i].from, n);
        if (hit != NULL && hit > v.p && hit[-1] == '"' && hit[n] == '"') {
            struct qx_buf text = {0};
            qx_buf_add(&text, v.p, (size_t)(hit - v.p));
            qx_buf_str(&text, words[i].to);
            qx_buf_add(&text, hit + n, v.n - n - (size_t)(hit - v.p));
            ok = qx_buf_cstr(&text) != NULL && qx_json_edit_set(b, "architectures", text.p);
            qx_buf_fini(&text);
        }
    }
    return ok;
}

static bool set_u64(struct qx_buf *b, const char *path, uint64_t v)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, v);
    return qx_json_edit_set(b, path, text);
}

static bool drop_parts(const struct qx_repack *r, struct qx_buf *b)
{
    static const char *const vision[] = {"vision_config", "image_token_id", "video_token_id",
                                         "vision_start_token_id", "vision_end_token_id"};
    bool ok = true;
    for (size_t i = 0; ok && r->o.drop_vision && i < QX_ARRAY_LEN(vision); i++) {
        ok = qx_json_edit_remove(b, vision[i]);
    }
    struct qx_view v;
    if (r->o.drop_mtp) {
        ok = ok && qx_json_edit_remove(b, "text_config/mtp");
        if (qx_json_edit_find(b, "text_config/mtp_num_hidden_layers", &v)) {
            ok = ok && set_u64(b, "text_config/mtp_num_hidden_layers", 0);
        }
    }
    return ok;
}

/* Indented value text moved below a member at the first level. */
static bool set_block(struct qx_buf *b, const char *path, struct qx_json_out *o)
{
    struct qx_buf text = {0};
    for (size_t i = 0; i < o->buf.n; i++) {
        qx_buf_chr(&text, o->buf.p[i]);
        if (o->buf.p[i] == '\n') {
            qx_buf_str(&text, "  ");
        }
    }
    bool ok = qx_buf_cstr(&text) != NULL && !o->buf.failed && qx_json_edit_set(b, path, text.p);
    qx_buf_fini(&text);
    return ok;
}

static bool edit_table(const struct qx_repack *r, struct qx_buf *b)
{
    const struct rp_table *t = &r->table;
    struct qx_view v;
    bool ok = true;
    if (!t->changed) {
        return true;
    }
    if (!t->packed && qx_json_edit_find(b, "text_config/split_ngram_parts", &v)) {
        ok = set_u64(b, "text_config/split_ngram_parts", t->n_shards);
    }
    if (r->o.n_ranks > 0) {
        char text[256];
        snprintf(
            text, sizeof text,
            "{\"rank\": %" PRIu32 ", \"of\": %" PRIu32 ", \"base_row\": %" PRIu64
            ", \"rows\": %" PRIu64 ", \"padding_rows\": %" PRIu64 ", \"stored_rows\": %" PRIu64 "}",
            r->o.rank, r->o.n_ranks, t->row0, t->n_rows,
            t->row0 + t->n_rows > t->src_rows ? t->row0 + t->n_rows - t->src_rows : 0, t->src_rows);
        ok = ok && qx_json_edit_set(b, "qx_rank", text);
    }
    if (t->convert) {
        const char *dtype = t->to == QX_F_FP8     ? "\"float8_e4m3fn\""
                            : t->to == QX_F_NVFP4 ? "\"nvfp4\""
                                                  : NULL;
        ok = ok && (dtype != NULL ? qx_json_edit_set(b, "text_config/ple_embedding_dtype", dtype)
                                  : qx_json_edit_remove(b, "text_config/ple_embedding_dtype"));
    }
    return ok;
}

static int by_tensor(const void *a, const void *b)
{
    return strcmp(((const struct qx_st_place *)a)->tensor, ((const struct qx_st_place *)b)->tensor);
}

static int write_index(struct qx_repack *r, struct qx_buf *b, struct qx_error *err)
{
    struct qx_st_place *p = qx_calloc(r->n_t + 1, sizeof *p);
    uint64_t total = 0;
    if (p == NULL) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; i < r->n_t; i++) {
        p[i] = (struct qx_st_place){r->t[i].name, r->f[r->t[i].file].name};
        total += r->t[i].size;
    }
    qsort(p, r->n_t, sizeof *p, by_tensor);
    int rc = qx_st_index(b, p, r->n_t, total, err);
    qx_free(p);
    return rc;
}

static struct qx_buf *small(struct qx_repack *r, const char *name)
{
    struct rp_text *t = &r->small[r->n_small++];
    t->name = name;
    return &t->text;
}

int rp_plan_config(struct qx_repack *r, struct qx_error *err)
{
    const struct qx_blob *config = qx_ckpt_config_text(r->ck), *hf = qx_ckpt_hf_quant_text(r->ck);
    struct modules m = {0};
    bool experts = false;
    for (size_t i = 0; i < r->n_c; i++) {
        experts = experts || r->c[i].convert;
    }
    bool requant = experts || (r->table.changed && r->table.convert) || r->n_dropped > 0;
    struct qx_buf *b = small(r, "config.json");
    qx_buf_add(b, config->text, config->n);
    bool ok = !b->failed && edit_table(r, b) && drop_parts(r, b) &&
              (!r->o.canonical_names || canonical(b));
    int rc = ok ? 0 : qx_fail_nomem(err);
    enum style style = NOTHING;
    struct qx_view v;
    bool had = qx_json_edit_find(b, "quantization_config", &v) || hf->present;
    if (rc == 0 && requant && (had || experts)) {
        rc = collect(r, &m, err);
        style = choose_style(&m);
        if (rc == 0 && style == NOTHING) {
            ok = qx_json_edit_remove(b, "quantization_config");
            if (quantised(m.table)) {
                ok =
                    ok && qx_json_edit_set(b, "text_config/ple_embedding_dtype",
                                           m.table == QX_F_FP8 ? "\"float8_e4m3fn\"" : "\"nvfp4\"");
            }
        } else if (rc == 0) {
            struct qx_json_out o;
            qx_json_out_init(&o, true);
            put_quant(&o, style, &m);
            ok = set_block(b, "quantization_config", &o);
            if (ok && style == FP8_METHOD && m.table == QX_F_NVFP4) {
                ok = qx_json_edit_set(b, "text_config/ple_embedding_dtype", "\"nvfp4\"");
            }
            qx_json_out_fini(&o);
        }
        rc = rc == 0 && !ok ? qx_fail_nomem(err) : rc;
        if (rc == 0 && style == MAP) {
            struct qx_json_out o;
            qx_json_out_init(&o, true);
            put_hf_quant(&o, &m);
            struct qx_buf *h = small(r, "hf_quant_config.json");
            qx_buf_add(h, o.buf.p, o.buf.n);
            rc = o.buf.failed || h->failed ? qx_fail_nomem(err) : 0;
            qx_json_out_fini(&o);
        }
    } else if (rc == 0 && hf->present) {
        struct qx_buf *h = small(r, "hf_quant_config.json");
        qx_buf_add(h, hf->text, hf->n);
        rc = h->failed ? qx_fail_nomem(err) : 0;
    }
    qx_free(m.v);
    return rc == 0 ? write_index(r, small(r, "model.safetensors.index.json"), err) : rc;
}
