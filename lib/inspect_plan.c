/* inspect_plan.c: what a checkpoint of one of the five layouts would hold for a configuration: the
 * plan before a download. Component sizes are those of formats 1.2 for the released geometry. */
#include "inspect_impl.h"

#include <string.h>

struct layout_forms {
    const char *name;
    enum qx_format experts, mtp_experts, table, linear, vision;
};

static const struct layout_forms layouts[] = {
    {"bf16", QX_F_BF16, QX_F_BF16, QX_F_BF16, QX_F_BF16, QX_F_BF16},
    {"fp8", QX_F_FP8_BLOCK, QX_F_FP8_BLOCK, QX_F_FP8, QX_F_BF16, QX_F_BF16},
    {"mixed", QX_F_NVFP4, QX_F_FP8_BLOCK, QX_F_FP8, QX_F_BF16, QX_F_BF16},
    {"nvfp4", QX_F_NVFP4, QX_F_BF16, QX_F_FP8, QX_F_BF16, QX_F_BF16},
    {"nvfp4-ple", QX_F_NVFP4, QX_F_W4A16_NVFP4, QX_F_NVFP4, QX_F_MXFP8, QX_F_MXFP8},
};

/* Tensors and bytes of a matrix of rows x cols in a format. */
static void sizes(enum qx_format f, uint64_t rows, uint64_t cols, uint64_t *tensors, uint64_t *code,
                  uint64_t *scalar)
{
    *tensors = 1;
    *scalar = 0;
    *code = 2 * rows * cols;
    switch (f) {
    case QX_F_FP8_BLOCK:
        *tensors = 2;
        *code = rows * cols + 2 * qx_ceil_div(rows, 128) * qx_ceil_div(cols, 128);
        break;
    case QX_F_MXFP8:
        *tensors = 2;
        *code = rows * cols + rows * qx_ceil_div(cols, 32);
        break;
    case QX_F_NVFP4:
        *tensors = 4;
        *code = rows * cols / 2 + rows * (cols / 16);
        *scalar = 8;
        break;
    case QX_F_W4A16_NVFP4:
        *tensors = 3;
        *code = rows * cols / 2 + rows * (cols / 16);
        *scalar = 4;
        break;
    default:
        break;
    }
}

static void put(struct inspection *x, enum qx_component c, enum qx_format f, uint64_t n,
                uint64_t rows, uint64_t cols)
{
    uint64_t tensors, code, scalar;
    sizes(f, rows, cols, &tensors, &code, &scalar);
    x->tensors[c] += n * tensors;
    x->bytes[c] += n * (code + scalar);
    x->params[c] += n * rows * cols;
    x->cells[c][f].modules += n;
    x->cells[c][f].params += n * rows * cols;
    x->cells[c][f].bytes += n * code;
    x->cells[c][f].by_source[1][QX_SRC_DEFAULT] += n * code;
}

static bool is_mxfp8_part(const struct qx_layout_entry *e)
{
    return e->kind == QX_K_LINEAR &&
           (e->component == QX_C_LINEAR_ATTN || e->component == QX_C_SELF_ATTN ||
            (e->component == QX_C_SHARED_EXPERT &&
             strcmp(e->suffix, "mlp.shared_expert_gate") != 0));
}

static void put_entry(struct inspection *x, const struct layout_forms *l,
                      const struct qx_layout_entry *e, bool is_mtp)
{
    uint64_t s[QX_LAYOUT_MAX_DIMS];
    enum qx_component c = is_mtp ? QX_C_MTP : (enum qx_component)e->component;
    enum qx_format f = QX_F_BF16;
    if (e->kind == QX_K_UNUSED || !qx_layout_shape(e, x->c, s)) {
        return;
    }
    uint64_t rows = s[0];
    uint64_t cols = 1;
    for (unsigned i = 1; i < e->n_dims; i++) {
        cols *= s[i];
    }
    if (e->kind == QX_K_BUFFER) {
        x->tensors[c]++;
        x->bytes[c] += 8 * rows;
        x->params[c] += rows;
        x->cells[c][QX_F_I64].modules++;
        x->cells[c][QX_F_I64].params += rows;
        x->cells[c][QX_F_I64].bytes += 8 * rows;
        return;
    }
    if (e->kind == QX_K_FUSED) {
        f = is_mtp ? l->mtp_experts : l->experts;
        if (f == QX_F_BF16) {
            put(x, c, f, 1, rows, cols);
            return;
        }
        uint64_t moe = x->c->moe_intermediate_size;
        bool gate_up = strstr(e->suffix, "gate_up") != NULL;
        put(x, c, f, gate_up ? 2 * rows : rows, gate_up ? moe : s[1], s[2]);
        return;
    }
    if (c == QX_C_VISION && e->kind == QX_K_LINEAR) {
        f = l->vision == QX_F_MXFP8 && strcmp(e->suffix, "mlp.linear_fc2") == 0 ? QX_F_W4A16_NVFP4
                                                                                : l->vision;
    } else if (!is_mtp && is_mxfp8_part(e)) {
        f = l->linear;
    }
    put(x, c, f, 1, rows, cols);
    if (e->bias) {
        x->tensors[c]++;
        x->bytes[c] += 2 * rows;
        x->params[c] += rows;
    }
}

static void put_place(struct inspection *x, const struct layout_forms *l, enum qx_place place,
                      bool is_mtp, uint32_t layer)
{
    size_t n;
    const struct qx_layout_entry *e = qx_layout_entries(place, &n);
    for (size_t i = 0; i < n; i++) {
        if (place != QX_P_LAYER || qx_layout_applies(&e[i], x->c, is_mtp, layer)) {
            put_entry(x, l, &e[i], is_mtp);
        }
    }
}

static int put_table(struct inspection *x, const struct layout_forms *l, struct qx_error *err)
{
    struct qx_ple_hash h;
    int rc = qx_ple_hash_init(&h, x->c, 0, err);
    if (rc) {
        return rc;
    }
    uint64_t rows = h.n_rows_padded;
    uint64_t width = x->c->ple_row_width;
    uint64_t shards = x->c->split_ngram_parts ? x->c->split_ngram_parts : 1;
    uint64_t per_row = l->table == QX_F_BF16  ? 2 * width
                       : l->table == QX_F_FP8 ? width
                                              : width / 2 + width / 16;
    uint64_t bytes;
    if (!qx_mul_u64(rows, per_row, &bytes)) {
        return qx_fail(err, QX_E_CONFIG, "config-value", "the table's size is over 2^64 bytes");
    }
    struct cell *cell = &x->cells[QX_C_PLE_TABLE][l->table];
    cell->modules = 1;
    cell->params = rows * width;
    cell->bytes = bytes;
    cell->by_source[1][QX_SRC_DEFAULT] = bytes;
    x->params[QX_C_PLE_TABLE] = rows * width;
    x->tensors[QX_C_PLE_TABLE] = l->table == QX_F_BF16  ? shards
                                 : l->table == QX_F_FP8 ? shards + 1
                                                        : 2 * shards + 1;
    x->bytes[QX_C_PLE_TABLE] = bytes + (l->table == QX_F_FP8 ? 2 : l->table == QX_F_NVFP4 ? 4 : 0);
    return 0;
}

int inspect_plan_layout(struct inspection *x, const char *layout, struct qx_error *err)
{
    const struct layout_forms *l = NULL;
    for (size_t i = 0; i < QX_ARRAY_LEN(layouts); i++) {
        if (strcmp(layouts[i].name, layout) == 0) {
            l = &layouts[i];
        }
    }
    if (!l) {
        return qx_fail(err, QX_E_USAGE, "usage",
                       "layout '%s' is not known; known are bf16, fp8, mixed, nvfp4, nvfp4-ple",
                       layout);
    }
    if (!x->c) {
        return qx_ckpt_config_status(x->ck, err);
    }
    x->pub.planned = true;
    x->pub.layout = l->name;
    put_place(x, l, QX_P_ROOT, false, 0);
    put_place(x, l, QX_P_TEXT, false, 0);
    for (uint32_t i = 0; i < x->c->n_layers; i++) {
        put_place(x, l, QX_P_LAYER, false, i);
    }
    if (x->c->n_mtp_layers) {
        put_place(x, l, QX_P_MTP, true, 0);
        for (uint32_t i = 0; i < x->c->n_mtp_layers; i++) {
            put_place(x, l, QX_P_LAYER, true, i);
        }
    }
    if (x->c->has_vision_config) {
        put_place(x, l, QX_P_VISION, false, 0);
        for (uint32_t i = 0; i < x->c->vision.depth && i < 4096; i++) {
            put_place(x, l, QX_P_VBLOCK, false, i);
        }
    }
    int rc = x->c->n_ple_layers ? put_table(x, l, err) : 0;
    for (int c = 0; c < QX_C_COUNT; c++) {
        x->pub.n_tensors += x->tensors[c];
        x->pub.payload_bytes += x->bytes[c];
    }
    return rc;
}
