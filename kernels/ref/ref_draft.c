/* ref_draft.c: drafts that stay on the device: kept for the next round, and chained into the rows that
 * verify them (model 10.2). */
#include "ref.h"

#include <string.h>

static void in_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_draft_in *a = user;
    float *e = a->e + r * a->table.cols, *y = a->y + r * a->width;
    ref_zrms(q, e, a->norm_e, a->table.cols, (double)a->eps, e);
    memset(y, 0, 4 * (size_t)a->width);
    for (int i = 0; i < 2; ++i) {
        int64_t at = !a->wide[i] ? -1 : a->row[i] ? a->row[i][r] : (int64_t)r;
        if (at >= 0) {
            ref_zrms(q, a->wide[i] + (uint64_t)at * a->width, a->norm_wide, a->width, (double)a->eps, y);
            break;
        }
    }
}

int ref_draft_in(struct qx_queue *q, const struct qx_op_draft_in *a)
{
    ref_embed(q, &(struct qx_op_embed){.step = a->step, .table = a->table, .n_streams = 1, .x = a->e});
    ref_for(q, a->step->n_rows, (uint64_t)a->width * 2, in_row, (void *)(uintptr_t)a);
    return 0;
}

int ref_draft_keep(struct qx_queue *q, const struct qx_op_draft_keep *a)
{
    (void)q;
    for (uint32_t j = 0; j < a->n; ++j) {
        size_t row = (size_t)a->row[j], s = (size_t)a->step->seq[row];
        memcpy(a->hold + s * a->width, a->wide + row * a->width, 4 * (size_t)a->width);
        a->next_id[s] = a->map ? a->map[a->id[j]] : a->id[j];
        a->next_prob[s] = a->prob[j];
    }
    return 0;
}

int ref_draft_next(struct qx_queue *q, const struct qx_op_draft_next *a)
{
    const struct qx_step *c = a->chain, *s = a->step;
    (void)q;
    for (uint32_t i = 0; i < a->n; ++i) {
        if (c->pos[i] < 0) {
            continue;
        }
        int32_t at = a->by_seq ? c->seq[i] : (int32_t)i, nth = (int32_t)a->nth;
        if (nth <= a->count[i] && !(a->prob[at] < a->min_prob[i])) {
            int32_t id = a->map ? a->map[a->id[at]] : a->id[at];
            s->id[a->base[i] + nth] = c->id[i] = id;
            if (a->told_id) {
                a->told_id[a->base[i] + nth] = id;
            }
            c->pos[i] = nth == a->count[i] ? -1 : c->pos[i] + (nth > 1);
            continue;
        }
        c->pos[i] = -1;
        for (int32_t r = a->base[i] + nth; r <= a->base[i] + a->count[i]; ++r) {
            s->pos[r] = s->state_out[r] = -1;
            s->first[r] = r;
            if (a->told_pos) {
                a->told_pos[r] = -1;
            }
        }
    }
    return 0;
}

int ref_draft_accept(struct qx_queue *q, const struct qx_op_draft_accept *o)
{
    const struct qx_step *s = o->step, *f = o->feed;
    uint32_t a = 0;
    (void)q;
    while (a + 1 < o->n && s->pos[a + 1] >= 0 && (s->id[a + 1] == o->id[a] || (int32_t)a < *o->forced)) {
        ++a;
    }
    for (uint32_t t = 0; t < o->n; ++t) {
        bool kept = t + 1 + a >= o->n;
        uint32_t from = kept ? t + 1 + a - o->n : 0;
        f->id[t] = !kept ? 0 : from < a ? s->id[from + 1] : o->id[a];
        f->pos[t] = kept ? s->pos[0] + (int32_t)from : -1;
        f->seq[t] = s->seq[0];
        f->first[t] = kept ? (int32_t)(o->n - 1 - a) : (int32_t)t;
        f->state_in[t] = f->state_out[t] = -1;
        o->src[t] = kept ? (int32_t)from : -1;
    }
    o->pick[0] = 0;
    return 0;
}
