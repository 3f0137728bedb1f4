/* model.c: loading a model: checks, plan, placement; and what the device holds for it. */
#include "engine.h"

#include "alloc.h"
#include "num.h"
#include "plan.h"
#include "resolve.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- memory ------------------------------------------------------------------------------- */

static int remember(struct qx_model *m, void *p, bool host, struct qx_error *err)
{
    struct qx_alloc_list *l = &m->allocs;
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 64;
        void **np = qx_realloc(l->p, cap * sizeof *np);
        if (np) {
            l->p = np;
        }
        bool *nh = np ? qx_realloc(l->host, cap * sizeof *nh) : NULL;
        if (!nh) {
            if (host) {
                m->be->host_free(m->be, p);
            } else {
                m->be->mem_free(m->be, p);
            }
            return qx_fail_nomem(err);
        }
        l->host = nh;
        l->cap = cap;
    }
    l->p[l->n] = p;
    l->host[l->n++] = host;
    return 0;
}

void qx_model_note_bytes(struct qx_model *m, uint64_t n)
{
    m->info.device_bytes += n;
    if (m->info.device_bytes > m->info.device_peak_bytes) {
        m->info.device_peak_bytes = m->info.device_bytes;
    }
}

int qx_model_mem(struct qx_model *m, void *out_ptr, uint64_t n_bytes, struct qx_error *err)
{
    void *p = NULL;
    int rc = m->be->mem_alloc(m->be, &p, n_bytes ? n_bytes : 1, err);
    rc = rc ? rc : remember(m, p, false, err);
    if (!rc) {
        memcpy(out_ptr, &p, sizeof p);
        qx_model_note_bytes(m, n_bytes);
    }
    return rc;
}

int qx_model_host_mem_mapped(struct qx_model *m, void *out_ptr, void *dev_ptr, uint64_t n_bytes,
                             struct qx_error *err)
{
    void *p = NULL, *dev = NULL;
    int rc = m->be->host_alloc(m->be, &p, &dev, n_bytes ? n_bytes : 1, err);
    rc = rc ? rc : remember(m, p, true, err);
    if (!rc) {
        memcpy(out_ptr, &p, sizeof p);
        memcpy(dev_ptr, &dev, sizeof dev);
    }
    return rc;
}

int qx_model_host_mem(struct qx_model *m, void *out_ptr, uint64_t n_bytes, struct qx_error *err)
{
    void *dev;
    return qx_model_host_mem_mapped(m, out_ptr, &dev, n_bytes, err);
}

int qx_model_op_failed(struct qx_model *m, const char *op, int rc, struct qx_error *err)
{
    struct qx_error detail = {0};
    (void)rc;
    if (m->be->queue_error && m->be->queue_error(m->q, &detail) && detail.code) {
        if (err) {
            *err = detail;
        }
        return -(int)detail.code;
    }
    return qx_fail(err, QX_E_DEVICE, "device", "%s cannot do '%s' with these shapes", m->be->name, op);
}

/* ---- options and checks ------------------------------------------------------------------- */

int qx_model_open_device(struct qx_model *m, const struct qx_model_opts *o, struct qx_error *err)
{
    const char *d = o->device ? o->device : qx_backend_cuda_count() > 0 ? "cuda" : "cpu";
    if (strcmp(d, "cpu") == 0) {
        return qx_backend_cpu_create(&m->be, o->n_threads, err);
    }
    uint64_t index = 0;
    if (strncmp(d, "cuda", 4) == 0
        && (d[4] == '\0' || (d[4] == ':' && qx_parse_u64(d + 5, strlen(d + 5), &index) && index < 1024))) {
        return qx_backend_cuda_create(&m->be, (int)index, err);
    }
    return qx_fail(err, QX_E_USAGE, "usage", "unknown device '%s': expected cpu, cuda or cuda:N", d);
}

int qx_model_open_queue(struct qx_model *m, struct qx_error *err)
{
    struct qx_device_info info;
    int rc = m->be->info(m->be, &info, err);
    m->free_at_open = rc || m->be->host_memory ? 0 : info.memory_free_bytes;
    rc = rc ? rc : m->be->queue_create(m->be, &m->q, err);
    if (!rc) {
        qx_model_note_bytes(m, m->be->queue_bytes);
    }
    return rc;
}

/* Containers, index and configuration must be sound where generation stands on them. */
static int check_ckpt(struct qx_model *m, struct qx_error *err)
{
    int rc = qx_ckpt_config_status(m->ck, err);
    if (rc) {
        return rc;
    }
    const struct qx_findings *fs = qx_ckpt_findings(m->ck);
    for (size_t i = 0; i < qx_findings_count(fs); ++i) {
        const struct qx_finding *f = qx_findings_at(fs, i);
        if (f->severity == QX_ERROR && strncmp(f->kind, "json-", 5) == 0) {
            rc = qx_fail(err, QX_E_FORMAT, f->kind, "%s", f->text ? f->text : "broken JSON");
            qx_error_at(err, f->file, f->tensor, f->off);
            return rc;
        }
    }
    m->cfg = qx_ckpt_config(m->ck);
    if (!m->cfg) {
        return qx_fail(err, QX_E_CONFIG, "config-missing", "generation needs a config.json");
    }
    const struct qx_config *c = m->cfg;
    if (strcmp(c->rope_type, "default") != 0 && strcmp(c->rope_type, "yarn") != 0) {
        return qx_fail(err, QX_E_UNSUPPORTED, "rope-unsupported",
                       "rope_type '%s' is not known: expected 'default' or 'yarn'", c->rope_type);
    }
    if (c->output_gate_type[0] && strcmp(c->output_gate_type, "sigmoid") != 0) {
        return qx_fail(err, QX_E_UNSUPPORTED, "config-value",
                       "output_gate_type '%s' is not known: expected 'sigmoid'", c->output_gate_type);
    }
    if (c->gdn_v_heads % c->gdn_k_heads || c->n_heads % c->n_kv_heads || c->rotary_dim % 2
        || c->rotary_dim > c->head_dim || c->rotary_dim > c->indexer_head_dim
        || c->n_experts_per_tok > c->n_experts || c->indexer_budget < c->indexer_compress_ratio
        || c->n_ple_layers > 1 || (c->n_ple_layers && c->ple_layer[0] >= c->n_layers)
        || c->n_mtp_layers > 1) {
        return qx_fail(err, QX_E_UNSUPPORTED, "config-value",
                       "head counts, rotary dimensions, experts, indexer budget or PLE layers do not fit "
                       "together");
    }
    return 0;
}

int qx_model_describe(struct qx_model *m, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    m->layers = qx_calloc(c->n_layers, sizeof *m->layers);
    if (!m->layers) {
        return qx_fail_nomem(err);
    }
    m->has_ple = c->n_ple_layers > 0;
    m->ple_layer = m->has_ple ? c->ple_layer[0] : 0;
    for (uint32_t i = 0; i < c->n_layers; ++i) {
        struct qx_layer *l = &m->layers[i];
        l->type = c->layer_type[i];
        l->kind_index = l->type == QX_LAYER_GDN ? m->n_gdn++ : m->n_qsa++;
        l->has_ple = m->has_ple && i == m->ple_layer;
    }
    m->mtp.layer.type = QX_LAYER_QSA;
    return m->has_ple ? qx_ple_hash_init(&m->hash, c, 0, err) : 0;
}

/* Whether the checkpoint has a draft head at all; a part of one is caught when it is bound. */
static bool has_mtp(const struct qx_model *m)
{
    return m->cfg->n_mtp_layers > 0 && qx_ckpt_find(m->ck, "mtp.pre_fc_norm_hidden.weight");
}

void qx_model_take_plan(struct qx_model *m, const struct qx_plan *plan, const struct qx_device_info *info)
{
    m->budget = plan->budget;
    m->place = plan->table;
    memcpy(m->parts, plan->parts, sizeof plan->parts);
    m->info.n_parts = plan->n_parts;
    m->head_copied = plan->head_copy;
    m->info.planned_device_bytes = plan->device_bytes;
    m->info.planned_host_bytes = plan->host_bytes;
    m->info.bandwidth_bytes_s = info->bandwidth_bytes_s;
    m->info.reach_bytes_s = info->reach_bytes_s;
    m->info.reach_flops_s = info->reach_flops_s;
    snprintf(m->info.device, sizeof m->info.device, "%s", info->name);
    snprintf(m->info.variants, sizeof m->info.variants, "%s", info->variants);
}

static int make_plan(struct qx_model *m, const struct qx_model_opts *o, const struct qx_bind *b,
                     struct qx_error *err)
{
    struct qx_bind_sizes sizes;
    struct qx_device_info info;
    struct qx_plan plan;
    qx_bind_sizes(b, &sizes);
    int rc = m->be->info(m->be, &info, err);
    if (rc) {
        return rc;
    }
    const struct qx_table *t = qx_resolved_table(qx_ckpt_resolved(m->ck));
    struct qx_plan_request r = {
        .weight_bytes = sizes.weight_bytes + (t ? 16ull * t->n_shards + 16 : 0), .table_bytes = sizes.table_bytes, .table = o->table,
        .packed_table = t && t->packed_rows, .host_device = m->be->host_memory,
        .device_bytes = o->device_memory_bytes ? o->device_memory_bytes
                        : m->be->host_memory   ? 0
                                               : m->free_at_open,
        .workspace_bytes = m->be->queue_bytes,
        .host_bytes = qx_host_memory_bytes(),
        .ctx_tokens = o->ctx_tokens, .chunk_rows = o->chunk_rows, .max_seqs = o->max_seqs,
        .draft_max = o->draft_max, .mtp = m->mtp.loaded, .kv_bf16 = m->kv_bf16,
        .draft_head_bytes = m->mtp.loaded
                                ? qx_draft_head_bytes(&m->head, qx_draft_head_rows(o, m->cfg->vocab_size)) : 0,
        .head_copy_bytes = qx_head_copy_bytes(m, &info)};
    rc = qx_plan_make(&plan, m->cfg, &r, err);
    if (rc) {
        return rc;
    }
    if (!plan.fits) {
        return qx_plan_fail(&plan, err);
    }
    qx_model_take_plan(m, &plan, &info);
    m->info.weight_bytes = sizes.weight_bytes + (plan.table == QX_TABLE_DISK ? 0 : sizes.table_bytes);
    return 0;
}

/* ---- constants ---------------------------------------------------------------------------- */

/* Frequencies of the rotary pairs, yarn included (model 2, 14). */
static void rope_frequencies(const struct qx_config *c, float *freq, float *scale)
{
    const double pi = 3.14159265358979323846;
    uint32_t half = c->rotary_dim / 2;
    bool yarn = strcmp(c->rope_type, "yarn") == 0 && c->rope_factor > 1.0;
    double dim = (double)c->rotary_dim, original = (double)c->rope_original_max_position;
    double low = 0.0, high = 0.0;
    if (yarn) {
        low = floor(dim * log(original / (c->yarn_beta_fast * 2 * pi)) / (2 * log(c->rope_theta)));
        high = ceil(dim * log(original / (c->yarn_beta_slow * 2 * pi)) / (2 * log(c->rope_theta)));
        low = low < 0.0 ? 0.0 : low;
        high = high > dim - 1 ? dim - 1 : high;
        high = high <= low ? low + 0.001 : high;
    }
    for (uint32_t i = 0; i < half; ++i) {
        double f = pow(c->rope_theta, -2.0 * i / dim);
        if (yarn) {
            double ramp = (i - low) / (high - low);
            ramp = ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp;
            f = (1.0 - ramp) * f + ramp * f / c->rope_factor;
        }
        freq[i] = (float)f;
    }
    *scale = yarn ? (float)(0.1 * log(c->rope_factor) + 1.0) : 1.0f;
}

int qx_model_constants(struct qx_model *m, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    uint32_t half = c->rotary_dim / 2;
    float *freq = qx_malloc(half * sizeof *freq), *dev = NULL;
    if (!freq) {
        return qx_fail_nomem(err);
    }
    m->rope.rotary_dim = c->rotary_dim;
    rope_frequencies(c, freq, &m->rope.scale);
    int rc = qx_model_mem(m, &dev, half * sizeof *freq, err);
    rc = rc ? rc : m->be->upload(m->q, dev, freq, half * sizeof *freq);
    m->rope.freq = dev;
    if (!rc && m->has_ple) {
        size_t heads = m->hash.n_heads * sizeof(uint64_t);
        rc = qx_model_mem(m, &m->mult_dev, m->hash.ngram_size * sizeof(uint64_t), err);
        rc = rc ? rc : qx_model_mem(m, &m->size_dev, heads, err);
        rc = rc ? rc : qx_model_mem(m, &m->offset_dev, heads, err);
        rc = rc ? rc : m->be->upload(m->q, m->mult_dev, m->hash.multiplier,
                                     m->hash.ngram_size * sizeof(uint64_t));
        rc = rc ? rc : m->be->upload(m->q, m->size_dev, m->hash.size, heads);
        rc = rc ? rc : m->be->upload(m->q, m->offset_dev, m->hash.offset, heads);
    }
    rc = rc ? rc : m->be->wait(m->q, err);
    qx_free(freq);
    return rc;
}

/* A table that misses ops is refused at once, all of them named. */
static int check_ops(const struct qx_model *m, struct qx_error *err)
{
    char names[300] = "";
    size_t n = 0;
#define OP(name, bound)                                                                            \
    if (!m->be->ops->name && n < sizeof names) {                                                   \
        n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", #name);          \
    }
#include "ops.def"
#undef OP
    return n ? qx_fail(err, QX_E_DEVICE, "missing-ops", "the %s backend lacks: %s", m->be->name, names) : 0;
}

/* ---- public ------------------------------------------------------------------------------- */

int qx_model_load(struct qx_model **out, const struct qx_ckpt *ck, const struct qx_model_opts *opts,
                  struct qx_error *err)
{
    *out = NULL;
    struct timespec t0, t1;
    struct qx_bind *b = NULL;
    struct qx_model *m = qx_calloc(1, sizeof *m);
    if (!m) {
        return qx_fail_nomem(err);
    }
    clock_gettime(CLOCK_MONOTONIC, &t0);
    m->ck = ck;
    int rc = check_ckpt(m, err);
    rc = rc ? rc : qx_model_describe(m, err);
    rc = rc ? rc : qx_model_open_device(m, opts, err);
    rc = rc ? rc : qx_model_open_queue(m, err);
    rc = rc ? rc : check_ops(m, err);
    if (rc) {
        goto out;
    }
    m->kv_bf16 = m->act_bf16 = !m->be->host_memory && !opts->precise;
    m->gdn_chunk = m->be->host_memory ? 0 : 64;
    m->mtp.loaded = (opts->mtp || opts->draft_max) && has_mtp(m);
    if (opts->draft_max && !m->mtp.loaded) {
        rc = qx_fail(err, QX_E_MISSING, "no-mtp", "drafts were asked for, the checkpoint has no MTP head");
        goto out;
    }
    rc = qx_bind_create(&b, m, opts, err);
    rc = rc ? rc : make_plan(m, opts, b, err);
    rc = rc ? rc : qx_bind_load(b, opts, err);
    rc = rc ? rc : qx_model_constants(m, err);
    rc = rc ? rc : qx_state_alloc(m, err);
    rc = rc ? rc : qx_draft_head_init(m, opts, err);
    rc = rc ? rc : qx_head_copy_init(m, err);
    if (rc) {
        goto out;
    }
    struct qx_bind_sizes sizes;
    qx_bind_sizes(b, &sizes);
    m->info.loaded_bytes = sizes.read_bytes;
    clock_gettime(CLOCK_MONOTONIC, &t1);
    m->info.load_ns = (uint64_t)((t1.tv_sec - t0.tv_sec) * 1000000000ll + (t1.tv_nsec - t0.tv_nsec));
out:
    if (b && m->be && m->be->host_memory) {
        m->bind = b; /* owns the converted values that the descriptors point to */
    } else {
        qx_bind_destroy(b);
    }
    if (rc) {
        qx_model_free(m);
        return rc;
    }
    *out = m;
    return 0;
}

void qx_model_free(struct qx_model *m)
{
    if (!m) {
        return;
    }
    if (m->be) {
        if (m->q) {
            m->be->wait(m->q, NULL);
        }
        for (uint32_t i = 0; i < m->n_graphs; ++i) {
            if (m->graphs[i].graph) {
                m->be->graph_destroy(m->be, m->graphs[i].graph);
            }
        }
        for (size_t i = m->allocs.n; i-- > 0;) {
            if (m->allocs.host[i]) {
                m->be->host_free(m->be, m->allocs.p[i]);
            } else {
                m->be->mem_free(m->be, m->allocs.p[i]);
            }
        }
        if (m->q) {
            m->be->queue_destroy(m->q);
        }
    }
    qx_state_free(m);
    qx_rows_close(m->table_rows);
    qx_bind_destroy(m->bind);
    qx_free(m->allocs.p);
    qx_free(m->allocs.host);
    qx_free(m->layers);
    if (m->be) {
        m->be->destroy(m->be);
    }
    qx_free(m);
}

void qx_model_info(const struct qx_model *m, struct qx_model_info *out)
{
    *out = m->info;
    out->ctx_tokens = m->budget.ctx_tokens;
    out->vocab_size = m->cfg->vocab_size;
    out->hidden_size = m->cfg->hidden_size;
    out->n_layers = m->cfg->n_layers;
    out->n_streams = m->cfg->hc_count;
    out->chunk_rows = m->budget.chunk_rows;
    out->max_seqs = m->budget.max_seqs;
    out->draft_max = m->budget.draft_max;
    out->has_mtp = m->mtp.loaded;
    out->table = m->place;
    out->parts = m->parts;
    struct qx_device_info info;
    if (m->free_at_open && m->be->info(m->be, &info, NULL) == 0 && info.memory_free_bytes < m->free_at_open) {
        out->device_used_bytes = m->free_at_open - info.memory_free_bytes;
    }
}

uint64_t qx_ckpt_context_limit(const struct qx_ckpt *ck)
{
    const struct qx_config *c = qx_ckpt_config(ck);
    return c ? qx_config_context_limit(c) : 0;
}

uint64_t qx_ckpt_vocab_size(const struct qx_ckpt *ck)
{
    const struct qx_config *c = qx_ckpt_config(ck);
    return c ? c->vocab_size : 0;
}
