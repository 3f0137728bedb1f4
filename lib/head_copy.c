/* head_copy.c: a copy of the head in half its size, with which a device finds the largest logit of a row: the copy is
 * read, and of the head only the rows that may have it (ops.h, head_best). What is chosen is what the whole head
 * chooses, bit for bit: so some steps may use the copy and others, whose logits are wanted, not. */
#include "engine.h"

uint64_t qx_head_copy_bytes(const struct qx_model *m, const struct qx_device_info *info)
{
    const struct qx_weight *h = &m->head;
    /* Devices that stream few rows of a linear: only there are the bits those of linear. */
    bool of_use = info->capability >= 90 && info->capability < 120 && m->act_bf16 && h->fmt == QX_W_BF16
                  && h->cols % 32 == 0;
    return of_use ? (uint64_t)h->rows * (h->cols + h->cols / 32 + sizeof(float)) : 0;
}

int qx_head_copy_init(struct qx_model *m, struct qx_error *err)
{
    const struct qx_weight *h = &m->head;
    uint64_t n = (uint64_t)h->rows * h->cols;
    void *codes = NULL, *scale = NULL;
    if (!m->head_copied) {
        return 0;
    }
    QX_TRY(qx_model_mem(m, &codes, n, err));
    QX_TRY(qx_model_mem(m, &scale, n / 32, err));
    QX_TRY(qx_model_mem(m, &m->head_off, h->rows * sizeof *m->head_off, err));
    m->head_copy = (struct qx_weight){.codes = codes, .scale = scale, .global = 1.0f, .rows = h->rows, .cols = h->cols,
                                      .fmt = QX_W_MXFP8};
    QX_RUN(m, head_copy, (&(struct qx_op_head_copy){.from = *h, .codes = codes, .scale = scale, .off = m->head_off}),
           err);
    return m->be->wait(m->q, err); /* kernels read weights before they wait for what is before them */
}

int qx_graph_best(struct qx_model *m, uint32_t n, bool draft, int32_t *told, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    QX_RUN(m, head_best, (&(struct qx_op_head_best){.n_rows = n, .head = m->head, .x = b->h, .near = b->logits,
                                                    .off = m->head_off, .id = b->out_id,
                                                    .value = draft ? b->out_value : NULL,
                                                    .prob = draft ? b->out_prob : NULL, .finite = !draft, .told = told,
                                                    .scratch = b->sample_scratch}), err);
    return 0;
}
