/* ref_gdn.c: Gated DeltaNet core (model 6.1): causal convolution, gates, delta rule, gated norm.
 * Recurrent form: S is rounded to f32 after every token, so that cutting a prompt into chunks changes no
 * bit. Chunked form: the triangular form of the model description, for comparison and prefill tests. */
#include "ref.h"

#include <string.h>

#define GDN_MAX_DIM 512
#define GDN_MAX_CHUNK 64

static uint32_t gdn_channels(const struct qx_op_gdn *a)
{
    return 2 * a->k_heads * a->k_dim + a->v_heads * a->v_dim;
}

/* Pre-conv value of channel ch at t rows after the run's first row; t < 0 reaches into the history. */
static const float *gdn_tap(const struct qx_op_gdn *a, uint32_t first, int64_t t, uint32_t channels)
{
    static const float zero[1] = {0.0f};
    if (t >= 0) {
        return a->in + (first + (uint64_t)t) * a->in_stride;
    }
    int32_t slot = a->step->state_in[first];
    if (slot < 0) {
        return zero;
    }
    return a->conv_state + (uint64_t)slot * a->conv_slot_stride
           + (uint64_t)((int64_t)a->conv_kernel - 1 + t) * channels;
}

static void conv_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_gdn *a = user;
    uint32_t n = gdn_channels(a), kernel = a->conv_kernel;
    const struct qx_step *s = a->step;
    (void)q;
    if (s->pos[r] < 0) {
        return;
    }
    uint32_t first = (uint32_t)s->first[r];
    float *out = a->scratch + r * n;
    for (uint32_t ch = 0; ch < n; ++ch) {
        double sum = 0.0;
        for (uint32_t j = 0; j < kernel; ++j) {
            int64_t t = (int64_t)r - first - (kernel - 1) + j;
            if (t >= 0 || s->state_in[first] >= 0) {
                /* NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): a state slot is there, so the tap is a whole row */
                sum += (double)a->conv_w[(size_t)ch * kernel + j] * (double)gdn_tap(a, first, t, n)[ch];
            }
        }
        out[ch] = (float)ref_silu(sum);
    }
}

static void conv_save(const struct qx_op_gdn *a, uint32_t r)
{
    const struct qx_step *s = a->step;
    uint32_t n = gdn_channels(a), first = (uint32_t)s->first[r];
    float *dst = a->conv_state + (uint64_t)s->state_out[r] * a->conv_slot_stride;
    /* Rows move towards the front, so ascending order is right also in place. */
    for (uint32_t i = 0; i + 1 < a->conv_kernel; ++i, dst += n) {
        int64_t t = (int64_t)r - first - (a->conv_kernel - 2) + i;
        if (t < 0 && s->state_in[first] < 0) {
            memset(dst, 0, 4 * (size_t)n);
        } else {
            memmove(dst, gdn_tap(a, first, t, n), 4 * (size_t)n);
        }
    }
}

struct gdn_head {
    double q[GDN_MAX_DIM], k[GDN_MAX_DIM];
    double beta, g;
};

/* Normalised query and key of value head h at row r, and its gates. */
static void gdn_gates(const struct qx_queue *q, const struct qx_op_gdn *a, uint64_t r, uint32_t h,
                      struct gdn_head *o)
{
    uint32_t n = gdn_channels(a), group = a->v_heads / a->k_heads, kd = a->k_dim;
    const float *in = a->in + r * a->in_stride;
    const float *qr = a->scratch + r * n + (size_t)(h / group) * kd;
    const float *kr = qr + (size_t)a->k_heads * kd;
    double qs = 1.0 / sqrt(q->dot(qr, qr, kd) + 1e-6) / sqrt((double)kd);
    double ks = 1.0 / sqrt(q->dot(kr, kr, kd) + 1e-6);
    for (uint32_t i = 0; i < kd; ++i) {
        o->q[i] = (double)qr[i] * qs;
        o->k[i] = (double)kr[i] * ks;
    }
    size_t gates = n + (size_t)a->v_heads * a->v_dim;
    double x = (double)in[gates + a->v_heads + h] + (double)a->dt_bias[h];
    double softplus = x > 20.0 ? x : log1p(exp(x));
    o->beta = ref_sigmoid((double)in[gates + h]);
    o->g = -exp((double)a->a_log[h]) * softplus;
}

/* out = o rsqrt(mean o^2 + eps) w sigmoid(z) for head h of row r. */
static void gated_norm(const struct qx_op_gdn *a, uint64_t r, uint32_t h, const double *o)
{
    uint32_t vd = a->v_dim;
    const float *z = a->in + r * a->in_stride + gdn_channels(a) + (size_t)h * vd;
    float *out = a->out + (r * a->v_heads + h) * vd;
    double sq = 0.0;
    for (uint32_t d = 0; d < vd; ++d) {
        sq += o[d] * o[d];
    }
    double scale = 1.0 / sqrt(sq / vd + (double)a->eps);
    for (uint32_t d = 0; d < vd; ++d) {
        out[d] = (float)(o[d] * scale * (double)a->norm[d] * ref_sigmoid((double)z[d]));
    }
}

static void recurrent_token(const struct qx_queue *q, const struct qx_op_gdn *a, uint64_t r, uint32_t h,
                            float *s)
{
    uint32_t kd = a->k_dim, vd = a->v_dim;
    const float *v = a->scratch + r * gdn_channels(a) + 2 * (size_t)a->k_heads * kd + (size_t)h * vd;
    struct gdn_head t;
    double u[GDN_MAX_DIM], o[GDN_MAX_DIM];
    gdn_gates(q, a, r, h, &t);
    double decay = exp(t.g);
    memset(u, 0, sizeof *u * vd);
    memset(o, 0, sizeof *o * vd);
    for (uint32_t k = 0; k < kd; ++k) {
        const float *row = s + (size_t)k * vd;
        double f = decay * t.k[k];
        for (uint32_t d = 0; d < vd; ++d) {
            u[d] += (double)row[d] * f;
        }
    }
    for (uint32_t d = 0; d < vd; ++d) {
        u[d] = t.beta * ((double)v[d] - u[d]);
    }
    for (uint32_t k = 0; k < kd; ++k) {
        float *row = s + (size_t)k * vd;
        double kk = t.k[k], qq = t.q[k];
        for (uint32_t d = 0; d < vd; ++d) {
            row[d] = (float)((double)row[d] * decay + kk * u[d]);
            o[d] += (double)row[d] * qq;
        }
    }
    gated_norm(a, r, h, o);
}

/* Rows [r, r + n) of one run in the chunked form; S in s, updated. */
static void chunk_tokens(const struct qx_queue *q, const struct qx_op_gdn *a, uint64_t r, uint32_t n,
                         uint32_t h, float *s)
{
    uint32_t kd = a->k_dim, vd = a->v_dim;
    struct gdn_head t[GDN_MAX_CHUNK];
    double gamma[GDN_MAX_CHUNK], vp[GDN_MAX_CHUNK][GDN_MAX_DIM], o[GDN_MAX_DIM];
    double sum = 0.0;
    for (uint32_t i = 0; i < n; ++i) {
        gdn_gates(q, a, r + i, h, &t[i]);
        sum += t[i].g;
        gamma[i] = sum;
    }
    /* V' solves (I + A) V' = diag(beta) V - diag(beta e^gamma) K S_in by forward substitution, which is
     * Û - Ŵ S_in with both solves taken together. */
    for (uint32_t i = 0; i < n; ++i) {
        const float *v = a->scratch + (r + i) * gdn_channels(a) + 2 * (size_t)a->k_heads * kd
                         + (size_t)h * vd;
        double decay = exp(gamma[i]);
        for (uint32_t d = 0; d < vd; ++d) {
            vp[i][d] = t[i].beta * (double)v[d];
        }
        for (uint32_t k = 0; k < kd; ++k) {
            double f = t[i].beta * decay * t[i].k[k];
            for (uint32_t d = 0; d < vd; ++d) {
                vp[i][d] -= f * (double)s[(size_t)k * vd + d];
            }
        }
        for (uint32_t j = 0; j < i; ++j) {
            double kk = 0.0;
            for (uint32_t k = 0; k < kd; ++k) {
                kk += t[i].k[k] * t[j].k[k];
            }
            double f = t[i].beta * kk * exp(gamma[i] - gamma[j]);
            for (uint32_t d = 0; d < vd; ++d) {
                vp[i][d] -= f * vp[j][d];
            }
        }
    }
    for (uint32_t i = 0; i < n; ++i) {
        double decay = exp(gamma[i]);
        memset(o, 0, sizeof *o * vd);
        for (uint32_t k = 0; k < kd; ++k) {
            double f = decay * t[i].q[k];
            for (uint32_t d = 0; d < vd; ++d) {
                o[d] += f * (double)s[(size_t)k * vd + d];
            }
        }
        for (uint32_t j = 0; j <= i; ++j) {
            double qk = 0.0;
            for (uint32_t k = 0; k < kd; ++k) {
                qk += t[i].q[k] * t[j].k[k];
            }
            double f = qk * exp(gamma[i] - gamma[j]);
            for (uint32_t d = 0; d < vd; ++d) {
                o[d] += f * vp[j][d];
            }
        }
        gated_norm(a, r + i, h, o);
    }
    for (uint32_t k = 0; k < kd; ++k) {
        double decay = exp(gamma[n - 1]);
        for (uint32_t d = 0; d < vd; ++d) {
            o[d] = decay * (double)s[(size_t)k * vd + d];
        }
        for (uint32_t j = 0; j < n; ++j) {
            double f = exp(gamma[n - 1] - gamma[j]) * t[j].k[k];
            for (uint32_t d = 0; d < vd; ++d) {
                o[d] += f * vp[j][d];
            }
        }
        for (uint32_t d = 0; d < vd; ++d) {
            s[(size_t)k * vd + d] = (float)o[d];
        }
    }
}

/* One head through all runs of the step. The last row's slot is the working copy of a run; a run that
 * keeps nothing works on the stack. */
static void gdn_head_runs(const struct qx_queue *q, void *user, uint64_t h)
{
    const struct qx_op_gdn *a = user;
    const struct qx_step *st = a->step;
    size_t size = (size_t)a->k_dim * a->v_dim;
    for (uint32_t r0 = 0; r0 < st->n_rows;) {
        uint32_t r1 = r0 + 1;
        while (r1 < st->n_rows && st->first[r1] == (int32_t)r0 && st->pos[r1] >= 0) {
            ++r1;
        }
        if (st->pos[r0] < 0) {
            r0 = r1;
            continue;
        }
        float own[GDN_MAX_DIM * GDN_MAX_DIM];
        int32_t last = st->state_out[r1 - 1];
        float *work = last < 0 ? own : a->s + (uint64_t)last * a->s_slot_stride + h * size;
        if (st->state_in[r0] < 0) {
            memset(work, 0, 4 * size);
        } else if (st->state_in[r0] != last) {
            memcpy(work, a->s + (uint64_t)st->state_in[r0] * a->s_slot_stride + h * size, 4 * size);
        }
        uint32_t chunk = a->chunk < GDN_MAX_CHUNK ? a->chunk : GDN_MAX_CHUNK;
        for (uint32_t r = r0; r < r1;) {
            uint32_t n = 1;
            while (n < chunk && r + n < r1 && st->state_out[r + n - 1] < 0) {
                ++n;
            }
            if (n == 1) {
                recurrent_token(q, a, r, (uint32_t)h, work);
            } else {
                chunk_tokens(q, a, r, n, (uint32_t)h, work);
            }
            r += n;
            if (r < r1 && st->state_out[r - 1] >= 0) {
                memcpy(a->s + (uint64_t)st->state_out[r - 1] * a->s_slot_stride + h * size, work, 4 * size);
            }
        }
        r0 = r1;
    }
}

int ref_gdn(struct qx_queue *q, const struct qx_op_gdn *a)
{
    const struct qx_step *s = a->step;
    void *user = (void *)(uintptr_t)a;
    if (a->k_dim > GDN_MAX_DIM || a->v_dim > GDN_MAX_DIM) {
        return -1;
    }
    ref_for(q, s->n_rows, (uint64_t)gdn_channels(a) * 16, conv_row, user);
    for (uint32_t r = 0; r < s->n_rows; ++r) {
        if (s->pos[r] >= 0 && s->state_out[r] >= 0) {
            conv_save(a, r);
        }
    }
    ref_for(q, a->v_heads, (uint64_t)a->k_dim * a->v_dim * 3 * s->n_rows, gdn_head_runs, user);
    return 0;
}
