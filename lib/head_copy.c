/* head_copy.c: a copy of the head in six bits a value, with which a device finds the largest logit of a row: the copy
 * is read, and of the head only the rows that may have it (ops.h, head_best). What is chosen is what the whole head
 * chooses, bit for bit: so some steps may use the copy and others, whose logits are wanted, not. */
#include "engine.h"

/* Rows of logits from which the whole head, read once for all of them, takes less time. */
#define COPY_ROWS 16

uint64_t qx_head_copy_bytes(const struct qx_model *m, const struct qx_device_info *info)
{
    const struct qx_weight *h = &m->head;
    bool of_use = info->capability >= 90 && info->capability < 120 && m->act_bf16 && h->fmt == QX_W_BF16
                  && h->cols % 8 == 0;
    return of_use ? QX_HEAD_COPY_BYTES(h->rows, h->cols) + (uint64_t)h->rows * sizeof(float) : 0;
}

int qx_head_copy_init(struct qx_model *m, struct qx_error *err)
{
    const struct qx_weight *h = &m->head;
    if (!m->head_copied) {
        return 0;
    }
    QX_TRY(qx_model_mem(m, &m->head_codes, QX_HEAD_COPY_BYTES(h->rows, h->cols), err));
    QX_TRY(qx_model_mem(m, &m->head_off, h->rows * sizeof *m->head_off, err));
    QX_RUN(m, head_copy, (&(struct qx_op_head_copy){.from = *h, .codes = m->head_codes, .off = m->head_off}), err);
    return m->be->wait(m->q, err); /* kernels read weights before they wait for what is before them */
}

bool qx_head_by_copy(const struct qx_model *m, uint32_t n)
{
    return m->head_copied && n && n <= COPY_ROWS;
}

int qx_graph_best(struct qx_model *m, uint32_t n, bool draft, int32_t *told, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    QX_RUN(m, head_best, (&(struct qx_op_head_best){.n_rows = n, .head = m->head, .codes = m->head_codes,
                                                    .off = m->head_off, .x = b->h, .near = b->logits, .id = b->out_id,
                                                    .value = draft ? b->out_value : NULL,
                                                    .prob = draft ? b->out_prob : NULL, .finite = !draft, .told = told,
                                                    .scratch = b->sample_scratch}), err);
    return 0;
}
