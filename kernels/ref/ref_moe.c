/* ref_moe.c: router and experts (model 8). Rows are grouped by expert so that an expert's codes are
 * decoded once a step; the sum over slots is taken per row in slot order. */
#include "ref.h"

#include <string.h>

static void route_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_moe_route *a = user;
    const float *l = a->logits + r * a->n_experts;
    int32_t *pick = a->expert + r * a->k;
    float *weight = a->weight + r * a->k;
    (void)q;
    /* Insertion into a list kept in descending order; a later expert passes only with a larger logit.
     * NaN compares as larger than anything, so that it is seen. */
    uint32_t n = 0;
    for (uint32_t e = 0; e < a->n_experts; ++e) {
        uint32_t i = n;
        while (i && !(l[pick[i - 1]] >= l[e]) && !isnan(l[pick[i - 1]])) {
            --i;
        }
        if (i >= a->k) {
            continue;
        }
        n = n < a->k ? n + 1 : n;
        for (uint32_t j = n - 1; j > i; --j) {
            pick[j] = pick[j - 1];
        }
        pick[i] = (int32_t)e;
    }
    double top = (double)l[pick[0]], sum = 0.0;
    if (a->norm) {
        for (uint32_t i = 0; i < n; ++i) {
            sum += exp((double)l[pick[i]] - top);
        }
    } else {
        for (uint32_t e = 0; e < a->n_experts; ++e) {
            sum += exp((double)l[e] - top);
        }
    }
    for (uint32_t i = 0; i < n; ++i) {
        weight[i] = (float)(exp((double)l[pick[i]] - top) / sum);
    }
}

int ref_moe_route(struct qx_queue *q, const struct qx_op_moe_route *a)
{
    ref_matmul(q, &a->gate, a->m, a->hidden, a->n_rows, a->logits, a->n_experts, false, false);
    ref_for(q, a->n_rows, (uint64_t)a->n_experts * 4, route_row, (void *)(uintptr_t)a);
    return 0;
}

struct moe_job {
    const struct qx_op_moe *a;
    float *h, *d, *sh, *sd, *sg;        /* [pairs, inter], [pairs, hidden], [rows, s_inter], .. */
    int32_t *start, *pair;              /* pairs of expert e: pair[start[e] .. start[e + 1]) */
    uint32_t n_blocks;                  /* of output rows of the phase */
};

static void moe_gate_up(const struct qx_queue *q, void *user, uint64_t t)
{
    const struct moe_job *j = user;
    const struct qx_op_moe *a = j->a;
    uint32_t e = (uint32_t)(t / j->n_blocks), r0 = (uint32_t)(t % j->n_blocks) * REF_BLOCK;
    uint32_t nr = a->experts.inter - r0 < REF_BLOCK ? a->experts.inter - r0 : REF_BLOCK;
    double g[REF_BLOCK][REF_TILE], u[REF_BLOCK][REF_TILE];
    for (int32_t p = j->start[e]; p < j->start[e + 1]; p += REF_TILE) {
        int32_t left = j->start[e + 1] - p;
        uint32_t nx = left < REF_TILE ? (uint32_t)left : REF_TILE;
        ref_block(q, &a->experts.gate[e], r0, nr, a->m, a->experts.hidden, j->pair + p, a->k, nx,
                  a->act_bf16, g);
        ref_block(q, &a->experts.up[e], r0, nr, a->m, a->experts.hidden, j->pair + p, a->k, nx,
                  a->act_bf16, u);
        for (uint32_t i = 0; i < nx; ++i) {
            float *h = j->h + (size_t)j->pair[(uint32_t)p + i] * a->experts.inter + r0;
            for (uint32_t r = 0; r < nr; ++r) {
                h[r] = (float)(ref_silu(g[r][i]) * u[r][i]);
            }
        }
    }
}

static void moe_down(const struct qx_queue *q, void *user, uint64_t t)
{
    const struct moe_job *j = user;
    const struct qx_op_moe *a = j->a;
    uint32_t e = (uint32_t)(t / j->n_blocks), r0 = (uint32_t)(t % j->n_blocks) * REF_BLOCK;
    uint32_t nr = a->experts.hidden - r0 < REF_BLOCK ? a->experts.hidden - r0 : REF_BLOCK;
    double y[REF_BLOCK][REF_TILE];
    for (int32_t p = j->start[e]; p < j->start[e + 1]; p += REF_TILE) {
        int32_t left = j->start[e + 1] - p;
        uint32_t nx = left < REF_TILE ? (uint32_t)left : REF_TILE;
        ref_block(q, &a->experts.down[e], r0, nr, j->h, a->experts.inter, j->pair + p, 1, nx,
                  a->act_bf16, y);
        for (uint32_t i = 0; i < nx; ++i) {
            float *d = j->d + (size_t)j->pair[(uint32_t)p + i] * a->experts.hidden + r0;
            for (uint32_t r = 0; r < nr; ++r) {
                d[r] = (float)y[r][i];
            }
        }
    }
}

static void moe_shared(const struct qx_queue *q, void *user, uint64_t b)
{
    const struct moe_job *j = user;
    const struct qx_op_moe *a = j->a;
    uint32_t r0 = (uint32_t)b * REF_BLOCK;
    uint32_t nr = a->s_inter - r0 < REF_BLOCK ? a->s_inter - r0 : REF_BLOCK;
    double g[REF_BLOCK][REF_TILE], u[REF_BLOCK][REF_TILE];
    for (uint32_t i0 = 0; i0 < a->n_rows; i0 += REF_TILE) {
        uint32_t nx = a->n_rows - i0 < REF_TILE ? a->n_rows - i0 : REF_TILE;
        const float *m = a->m + (size_t)i0 * a->experts.hidden;
        ref_block(q, &a->s_gate, r0, nr, m, a->experts.hidden, NULL, 1, nx, a->act_bf16, g);
        ref_block(q, &a->s_up, r0, nr, m, a->experts.hidden, NULL, 1, nx, a->act_bf16, u);
        for (uint32_t i = 0; i < nx; ++i) {
            for (uint32_t r = 0; r < nr; ++r) {
                j->sh[(size_t)(i0 + i) * a->s_inter + r0 + r] = (float)(ref_silu(g[r][i]) * u[r][i]);
            }
        }
    }
}

static void moe_sum(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct moe_job *j = user;
    const struct qx_op_moe *a = j->a;
    uint32_t hidden = a->experts.hidden;
    double s = ref_sigmoid((double)j->sg[r]);
    (void)q;
    for (uint32_t d = 0; d < hidden; ++d) {
        double y = 0.0;
        for (uint32_t k = 0; k < a->k; ++k) {
            size_t p = r * a->k + k;
            if (a->expert[p] >= 0) {
                y += (double)a->weight[p] * (double)j->d[p * hidden + d];
            }
        }
        a->y[r * hidden + d] = (float)(y + s * (double)j->sd[r * hidden + d]);
    }
}

int ref_moe(struct qx_queue *q, const struct qx_op_moe *a)
{
    const struct qx_experts *x = &a->experts;
    size_t pairs = (size_t)a->n_rows * a->k;
    struct moe_job j = {.a = a, .h = a->scratch};
    j.d = j.h + pairs * x->inter;
    j.sh = j.d + pairs * x->hidden;
    j.sd = j.sh + (size_t)a->n_rows * a->s_inter;
    j.sg = j.sd + (size_t)a->n_rows * x->hidden;
    j.start = a->iscratch;
    j.pair = j.start + x->n_experts + 1;
    int32_t *next = j.pair + pairs;

    memset(j.start, 0, sizeof *j.start * ((size_t)x->n_experts + 1));
    for (size_t p = 0; p < pairs; ++p) {
        if (a->expert[p] >= 0) {
            ++j.start[a->expert[p] + 1];
        }
    }
    for (uint32_t e = 0; e < x->n_experts; ++e) {
        j.start[e + 1] += j.start[e];
        next[e] = j.start[e];
    }
    for (size_t p = 0; p < pairs; ++p) {
        if (a->expert[p] >= 0) {
            j.pair[next[a->expert[p]]++] = (int32_t)p;
        }
    }

    /* Average cost of an expert; empty ones return at once. */
    uint64_t each = x->n_experts > 0 ? qx_ceil_div(pairs, x->n_experts) : 0;
    j.n_blocks = (uint32_t)qx_ceil_div(x->inter, REF_BLOCK);
    ref_for(q, (uint64_t)x->n_experts * j.n_blocks, 2ull * REF_BLOCK * x->hidden * each, moe_gate_up, &j);
    j.n_blocks = (uint32_t)qx_ceil_div(x->hidden, REF_BLOCK);
    ref_for(q, (uint64_t)x->n_experts * j.n_blocks, (uint64_t)REF_BLOCK * x->inter * each, moe_down, &j);

    ref_for(q, qx_ceil_div(a->s_inter, REF_BLOCK), 2ull * REF_BLOCK * x->hidden * a->n_rows, moe_shared,
            &j);
    ref_matmul(q, &a->s_down, j.sh, a->s_inter, a->n_rows, j.sd, x->hidden, false,
               a->act_bf16);
    ref_matmul(q, &a->s_gate_vec, a->m, x->hidden, a->n_rows, j.sg, 1, false, false);
    ref_for(q, a->n_rows, (uint64_t)x->hidden * (a->k + 1), moe_sum, &j);
    return 0;
}
