/* rules_cover.c: every tensor that the configuration makes the model have is stored, in exactly one
 * form. What the index lists but no file gives is left to the findings of opening; what is absent
 * otherwise is reported with what is known about where it should be. */
#include "rules_impl.h"

#include "alloc.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum part { PART_TEXT, PART_MTP, PART_VISION };

struct cover {
    struct qx_headers_check *k;
    enum part part;
    uint64_t n_missing;
};

/* Is a name, or one below it, in the index without a readable tensor? */
static bool is_absent(const struct qx_ckpt *ck, const char *module)
{
    size_t lo = 0;
    size_t hi = qx_ckpt_n_absent(ck);
    size_t n = strlen(module);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(qx_ckpt_absent(ck, mid)->name, module) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    if (lo >= qx_ckpt_n_absent(ck)) {
        return false;
    }
    const char *name = qx_ckpt_absent(ck, lo)->name;
    return strncmp(name, module, n) == 0 && (name[n] == '\0' || name[n] == '.');
}

static const struct qx_extra *find_extra(const struct qx_ckpt *ck, const char *name)
{
    size_t lo = 0;
    size_t hi = qx_ckpt_n_extras(ck);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(qx_ckpt_extra(ck, mid)->t.name, name);
        if (c == 0) {
            return qx_ckpt_extra(ck, mid);
        }
        if (c < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return NULL;
}

static bool is_respelled(const struct cover *v, const struct qx_layout_entry *e, int32_t layer,
                         int32_t expert)
{
    for (size_t i = 0; i < v->k->n_respelled; i++) {
        const struct qx_respelled *s = &v->k->respelled[i];
        if (s->entry == e && s->layer == layer && s->expert == expert &&
            s->is_mtp == (v->part == PART_MTP)) {
            return true;
        }
    }
    return false;
}

static void missing(struct cover *v, const char *tensor)
{
    static const char *const kinds[] = {"missing-tensor", "mtp-incomplete", "vision-incomplete"};
    const struct qx_ckpt *ck = v->k->ck;
    const struct qx_extra *x = find_extra(ck, tensor);
    const char *file = x ? qx_ckpt_file(ck, x->t.file)->name : NULL;
    char text[400];
    v->n_missing++;
    if (x) {
        snprintf(text, sizeof text,
                 "the index does not list it; an unindexed copy lies in %.120s, which "
                 "exists and holds %" PRIu64 " tensors, and is not used",
                 file, qx_ckpt_file(ck, x->t.file)->n_tensors);
    } else if (qx_ckpt_has_index(ck)) {
        snprintf(text, sizeof text,
                 "the index does not list it and no file that it names holds it");
    } else {
        snprintf(text, sizeof text, "none of the %zu safetensors files holds it",
                 qx_ckpt_n_files(ck));
    }
    qx_findings_add(v->k->fs,
                    &QX_REPORT(kinds[v->part], QX_ERROR, .file = file, .tensor = tensor,
                               .expected = "the tensor", .found = x ? "unindexed" : "nothing",
                               .text = text, .group = file ? file : ""));
}

/* Stored, listed but absent, or under another spelling: nothing to say here. */
static bool accounted(struct cover *v, const struct qx_layout_entry *e, const char *module,
                      int32_t layer, int32_t expert)
{
    const struct qx_module *m = qx_resolved_find(v->k->r, module);
    if (m && (m->weight || m->foreign)) {
        if (e->kind == QX_K_FUSED || !m->weight) {
            return true;
        }
        /* "A_log.weight" is not "A_log", nor the other way round. */
        size_t n = strlen(m->name);
        return (m->weight->name[n] == '\0') == e->bare;
    }
    return is_absent(v->k->ck, module) || is_respelled(v, e, layer, expert);
}

static void cover_entries(struct cover *v, enum qx_place place, int32_t layer)
{
    size_t n;
    const struct qx_layout_entry *e = qx_layout_entries(place, &n);
    bool is_mtp = v->part == PART_MTP;
    for (size_t i = 0; i < n; i++) {
        char module[256];
        char tensor[256];
        uint32_t l = layer < 0 ? 0 : (uint32_t)layer;
        if (e[i].kind == QX_K_FUSED || e[i].kind == QX_K_UNUSED ||
            (place == QX_P_LAYER && !qx_layout_applies(&e[i], v->k->c, is_mtp, l))) {
            continue;
        }
        if (e[i].place == QX_P_ROOT && v->k->c->tie_word_embeddings) {
            /* The embedding serves as head; one that is stored all the same leaves two answers. */
            if (qx_resolved_find(v->k->r, e[i].suffix)) {
                qx_findings_add(v->k->fs,
                                &QX_REPORT("config-value", QX_WARNING, .file = "config.json",
                                           .key = "tie_word_embeddings", .expected = "false",
                                           .found = "true", .tensor = "lm_head.weight",
                                           .text = "the embedding is declared to serve as head, "
                                                   "and a head is stored"));
            }
            continue;
        }
        qx_layout_module(&e[i], is_mtp, l, 0, module);
        if (!accounted(v, &e[i], module, layer, -1)) {
            qx_layout_tensor(&e[i], is_mtp, l, 0, tensor);
            if (e[i].kind == QX_K_BUFFER) {
                qx_findings_add(v->k->fs,
                                &QX_REPORT("hash-constants-missing", QX_NOTE, .tensor = tensor,
                                           .expected = "the buffer", .found = "nothing",
                                           .text = "the table's constants are not stored; the "
                                                   "configuration determines them",
                                           .group = "all"));
            } else {
                missing(v, tensor);
            }
        }
        if (e[i].bias && !is_absent(v->k->ck, module)) {
            const struct qx_module *m = qx_resolved_find(v->k->r, module);
            if (!m || !m->bias) {
                snprintf(tensor, sizeof tensor, "%.240s.bias", module);
                missing(v, tensor);
            }
        }
    }
}

/* ---- experts ------------------------------------------------------------------------------------
 */

enum { HAS_GATE = 1, HAS_UP = 2, HAS_DOWN = 4, HAS_GATE_UP = 8 };

static const struct qx_layout_entry *expert_entry(size_t i)
{
    size_t n;
    return &qx_layout_entries(QX_P_EXPERT, &n)[i];
}

static void two_forms(struct cover *v, const char *module, const char *a, const char *b)
{
    char text[300];
    snprintf(text, sizeof text, "the experts are stored %s and %s; one form is expected", a, b);
    qx_findings_add(v->k->fs, &QX_REPORT("two-forms", QX_ERROR, .tensor = module, .expected = a,
                                         .found = b, .text = text, .group = b));
}

/* What each expert of a layer has, from the stored modules. */
static void gather_experts(const struct cover *v, uint32_t layer, uint8_t *has, unsigned *fused,
                           bool *any)
{
    char prefix[160];
    snprintf(prefix, sizeof prefix, "%slayers.%" PRIu32 ".mlp.experts.",
             v->part == PART_MTP ? "mtp." : "model.language_model.", layer);
    size_t n = strlen(prefix);
    size_t lo = 0;
    size_t hi = qx_resolved_n_modules(v->k->r);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(qx_resolved_module(v->k->r, mid)->name, prefix) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    for (; lo < qx_resolved_n_modules(v->k->r); lo++) {
        const struct qx_module *m = qx_resolved_module(v->k->r, lo);
        if (strncmp(m->name, prefix, n) != 0) {
            break;
        }
        if (!m->layout || (!m->weight && !m->foreign)) {
            continue;
        }
        if (m->layout->kind == QX_K_FUSED) {
            *fused |= m->layout->suffix[12] == 'g' ? HAS_GATE_UP : HAS_DOWN;
        } else if (m->layout->kind == QX_K_EXPERT && m->expert >= 0 &&
                   (uint32_t)m->expert < v->k->c->n_experts) {
            has[m->expert] |= (uint8_t)(1u << (m->layout - expert_entry(0)));
            *any = true;
        }
    }
}

static void expert_missing(struct cover *v, size_t proj, uint32_t layer, uint32_t expert)
{
    char module[256];
    char tensor[256];
    const struct qx_layout_entry *e = expert_entry(proj);
    bool is_mtp = v->part == PART_MTP;
    qx_layout_module(e, is_mtp, layer, expert, module);
    if (!is_absent(v->k->ck, module) && !is_respelled(v, e, (int32_t)layer, (int32_t)expert)) {
        missing(v, qx_layout_tensor(e, is_mtp, layer, expert, tensor));
    }
}

static void fused_missing(struct cover *v, uint32_t layer, unsigned fused)
{
    size_t n;
    const struct qx_layout_entry *e = qx_layout_entries(QX_P_LAYER, &n);
    bool is_mtp = v->part == PART_MTP;
    for (size_t i = 0; i < n; i++) {
        char module[256];
        if (e[i].kind != QX_K_FUSED ||
            (fused & (e[i].suffix[12] == 'g' ? HAS_GATE_UP : HAS_DOWN)) != 0) {
            continue;
        }
        qx_layout_module(&e[i], is_mtp, layer, 0, module);
        if (!is_absent(v->k->ck, module) && !is_respelled(v, &e[i], (int32_t)layer, -1)) {
            missing(v, module);
        }
    }
}

/* Are the experts of this part expected one by one? Where the layer itself does not show it,
 * another layer does, or the claim of a quantised form, which is always per expert. */
static bool expected_per_expert(const struct cover *v)
{
    bool fused = false;
    for (size_t i = 0; i < qx_resolved_n_modules(v->k->r); i++) {
        const struct qx_module *m = qx_resolved_module(v->k->r, i);
        if (m->is_mtp != (v->part == PART_MTP) || !m->layout) {
            continue;
        }
        if (m->layout->kind == QX_K_EXPERT) {
            return true;
        }
        fused = fused || m->layout->kind == QX_K_FUSED;
    }
    return !fused && qx_resolved_quant_used(v->k->r) != NULL;
}

static void cover_experts(struct cover *v, uint32_t layer)
{
    uint32_t n = v->k->c->n_experts;
    uint8_t *has = qx_calloc(n, 1);
    unsigned fused = 0;
    bool any = false;
    char container[128];
    if (!has) {
        v->k->rc = -(int)QX_E_NOMEM;
        return;
    }
    gather_experts(v, layer, has, &fused, &any);
    snprintf(container, sizeof container, "%slayers.%" PRIu32 ".mlp.experts",
             v->part == PART_MTP ? "mtp." : "model.language_model.", layer);
    if (any && fused) {
        two_forms(v, container, "fused over experts", "one by one");
    } else if (fused || (!any && !expected_per_expert(v))) {
        fused_missing(v, layer, fused);
    } else {
        for (uint32_t e = 0; e < n; e++) {
            if ((has[e] & HAS_GATE_UP) && (has[e] & (HAS_GATE | HAS_UP))) {
                two_forms(v, container, "with gate and up fused", "with gate and up apart");
            }
            if (!(has[e] & HAS_DOWN)) {
                expert_missing(v, 2, layer, e);
            }
            if (!(has[e] & HAS_GATE_UP) && !(has[e] & HAS_GATE)) {
                expert_missing(v, 0, layer, e);
            }
            if (!(has[e] & HAS_GATE_UP) && !(has[e] & HAS_UP)) {
                expert_missing(v, 1, layer, e);
            }
        }
    }
    qx_free(has);
}

/* ---- parts --------------------------------------------------------------------------------------
 */

static void cover_mtp(struct qx_headers_check *k)
{
    struct cover v = {.k = k, .part = PART_MTP};
    uint32_t n = k->c->n_mtp_layers ? k->c->n_mtp_layers : 1;
    if (!k->any_mtp) {
        if (k->c->mentions_mtp && !is_absent(k->ck, "mtp")) {
            qx_findings_add(k->fs,
                            &QX_REPORT("mtp-absent", QX_NOTE, .file = "config.json",
                                       .key = "text_config.mtp_num_hidden_layers",
                                       .expected = "tensors under mtp.", .found = "none",
                                       .text = "the configuration mentions an MTP head; none is "
                                               "stored, so drafts are off"));
        }
        return;
    }
    if (!k->c->mentions_mtp) {
        qx_findings_add(k->fs,
                        &QX_REPORT("mtp-undeclared", QX_NOTE, .file = "config.json",
                                   .key = "text_config.mtp_num_hidden_layers", .expected = "1",
                                   .found = "0",
                                   .text = "an MTP head is stored that the configuration does not "
                                           "mention"));
    }
    cover_entries(&v, QX_P_MTP, -1);
    for (uint32_t l = 0; l < n; l++) {
        cover_entries(&v, QX_P_LAYER, (int32_t)l);
        cover_experts(&v, l);
    }
}

static void cover_vision(struct qx_headers_check *k)
{
    struct cover v = {.k = k, .part = PART_VISION};
    uint32_t depth = k->c->vision.depth ? k->c->vision.depth : k->vision_depth;
    depth = depth > 4096 ? 4096 : depth;
    if (!k->any_vision) {
        if (k->c->has_vision_config && !is_absent(k->ck, "model.visual")) {
            qx_findings_add(
                k->fs,
                &QX_REPORT("vision-absent", QX_NOTE, .file = "config.json", .key = "vision_config",
                           .expected = "tensors under model.visual.", .found = "none",
                           .text = "the configuration describes a vision tower; none is "
                                   "stored"));
        }
        return;
    }
    const uint32_t *size = &k->c->vision.depth;
    for (size_t i = 0; k->c->has_vision_config && i < sizeof k->c->vision / sizeof *size; i++) {
        if (size[i] == 0) {
            qx_findings_add(k->fs,
                            &QX_REPORT("config-value", QX_NOTE, .file = "config.json",
                                       .key = "vision_config", .expected = "all sizes",
                                       .text = "vision_config does not give every size: shapes of "
                                               "the vision tower are checked only in part"));
            break;
        }
    }
    cover_entries(&v, QX_P_VISION, -1);
    for (uint32_t b = 0; b < depth; b++) {
        cover_entries(&v, QX_P_VBLOCK, (int32_t)b);
    }
    if (v.n_missing == 0 && k->c->vision.depth && k->vision_depth > k->c->vision.depth) {
        char found[24];
        snprintf(found, sizeof found, "%" PRIu32, k->vision_depth);
        qx_findings_add(k->fs,
                        &QX_REPORT("layer-range", QX_ERROR, .file = "config.json",
                                   .key = "vision_config.depth", .found = found,
                                   .text = "more vision blocks are stored than the configuration "
                                           "counts"));
    }
}

void qx_check_coverage(struct qx_headers_check *k)
{
    struct cover v = {.k = k, .part = PART_TEXT};
    cover_entries(&v, QX_P_ROOT, -1);
    cover_entries(&v, QX_P_TEXT, -1);
    for (uint32_t l = 0; l < k->c->n_layers; l++) {
        cover_entries(&v, QX_P_LAYER, (int32_t)l);
        cover_experts(&v, l);
    }
    cover_mtp(k);
    cover_vision(k);
}
