/* kerncheck.c: every op of a backend against the reference backend: results, repeatability, guard bytes.
 * With --bench also the time of an op. Exit 0 all passed, 1 something differs, 2 usage, 77 no such device. */
#include "kern.h"

#include <fnmatch.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const double op_bounds[QX_OP_COUNT] = {
#define QX_EXACT 0.0
#define QX_REL(x) (x)
#define OP(name, bound) [QX_OP_##name] = bound,
#include "ops.def"
#undef OP
};

/* ---- numbers ------------------------------------------------------------------------------ */

uint64_t kern_u64(struct kern_ctx *c)
{
    uint64_t v = c->rng += 0x9E3779B97F4A7C15u;
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
    v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
    return v ^ (v >> 31);
}
uint32_t kern_below(struct kern_ctx *c, uint32_t n)
{
    return (uint32_t)((kern_u64(c) >> 32) * n >> 32);
}
float kern_uniform(struct kern_ctx *c)
{
    return (float)(int32_t)(kern_u64(c) >> 32) * 0x1p-31f;
}
float kern_normal(struct kern_ctx *c)
{
    double s = 0.0; /* twelve uniforms: close enough, and cheap */
    uint64_t a = kern_u64(c), b = kern_u64(c), d = kern_u64(c);
    for (int i = 0; i < 4; ++i) {
        s += (double)(a >> (16 * i) & 0xffff) + (double)(b >> (16 * i) & 0xffff)
             + (double)(d >> (16 * i) & 0xffff);
    }
    return (float)(s / 65536.0 - 6.0);
}

/* ---- buffers ------------------------------------------------------------------------------ */

static void die(const char *what)
{
    fprintf(stderr, "kerncheck: %s\n", what);
    exit(4);
}

static void check(struct kern_ctx *c, int rc, const char *what)
{
    if (rc) {
        struct qx_error e = {0};
        c->be->queue_error(c->q, &e);
        fprintf(stderr, "kerncheck: %s: %s\n", what, e.msg);
        exit(4);
    }
}

void *kern_new(struct kern_ctx *c, size_t n)
{
    struct qx_error e = {0};
    if (c->n_bufs == KERN_MAX_BUFS) {
        die("too many buffers");
    }
    void *p;
    if (c->be->mem_alloc(c->be, &p, n + 2 * KERN_GUARD, &e)) {
        die(e.msg);
    }
    struct kern_buf *b = &c->bufs[c->n_bufs++];
    b->base = p;
    b->n = n;
    /* very large buffers (sparse tables) only get their guards */
    if (n < (1u << 30)) {
        check(c, c->be->fill(c->q, b->base, 0xa5, n + 2 * KERN_GUARD), "fill");
    } else {
        check(c, c->be->fill(c->q, b->base, 0xa5, KERN_GUARD), "fill");
        check(c, c->be->fill(c->q, b->base + KERN_GUARD + n, 0xa5, KERN_GUARD), "fill");
    }
    return b->base + KERN_GUARD;
}

void *kern_put(struct kern_ctx *c, const void *src, size_t n)
{
    void *p = kern_new(c, n);
    check(c, c->be->upload(c->q, p, src, n), "upload");
    check(c, c->be->wait(c->q, NULL), "wait");
    return p;
}

float *kern_f32(struct kern_ctx *c, size_t n, float scale)
{
    float *h = malloc(n * 4 + 4);
    if (!h) {
        die("no memory");
    }
    for (size_t i = 0; i < n; ++i) {
        h[i] = scale * kern_normal(c);
    }
    float *p = kern_put(c, h, n * 4);
    free(h);
    return p;
}

float *kern_const(struct kern_ctx *c, size_t n, float v)
{
    float *h = malloc(n * 4 + 4);
    if (!h) {
        die("no memory");
    }
    for (size_t i = 0; i < n; ++i) {
        h[i] = v;
    }
    float *p = kern_put(c, h, n * 4);
    free(h);
    return p;
}

void kern_fetch(struct kern_ctx *c, void *dst, const void *dev, size_t n)
{
    check(c, c->be->download(c->q, dst, dev, n), "download");
    check(c, c->be->wait(c->q, NULL), "wait");
}

const char *kern_fmt_name(uint8_t f)
{
    static const char *const names[] = {"none", "f32", "f16", "bf16", "fp8", "fp8-block", "mxfp8", "nvfp4"};
    return f < QX_ARRAY_LEN(names) ? names[f] : "?";
}

static size_t code_bytes(uint8_t fmt, uint64_t n)
{
    return fmt == QX_W_NVFP4 ? n / 2 : fmt == QX_W_F32 ? n * 4 : fmt == QX_W_F16 || fmt == QX_W_BF16 ? n * 2 : n;
}

struct qx_weight kern_weight_rows(const struct qx_weight *w, uint32_t row, uint32_t n)
{
    struct qx_weight s = *w;
    uint64_t row_codes = w->fmt == QX_W_BF16 ? 2ull * w->cols : w->fmt == QX_W_NVFP4 ? w->cols / 2 : w->cols;
    uint64_t row_scales = w->fmt == QX_W_NVFP4 ? w->cols / 16 : w->fmt == QX_W_MXFP8 ? w->cols / 32 : 0;
    s.rows = n;
    s.codes = (const uint8_t *)w->codes + row * row_codes;
    s.scale = row_scales ? (const uint8_t *)w->scale + row * row_scales : w->scale;
    s.row0 = w->fmt == QX_W_FP8_BLOCK ? w->row0 + row : 0;
    return s;
}

uint64_t kern_weight_bytes(const struct qx_weight *w)
{
    uint64_t n = (uint64_t)w->rows * w->cols, b = code_bytes(w->fmt, n);
    return b + (w->fmt == QX_W_NVFP4 ? n / 16 : w->fmt == QX_W_MXFP8 ? n / 32 : 0);
}

struct qx_weight kern_weight(struct kern_ctx *c, uint8_t fmt, uint32_t rows, uint32_t cols, int kind)
{
    struct qx_weight w = {.rows = rows, .cols = cols, .fmt = fmt, .global = 1.0f};
    uint64_t n = (uint64_t)rows * cols;
    size_t nb = code_bytes(fmt, n);
    uint8_t *h = malloc(nb + 8);
    if (!h) {
        die("no memory");
    }
    float s = 1.0f / sqrtf((float)cols);
    if (fmt == QX_W_F32 || fmt == QX_W_F16 || fmt == QX_W_BF16) {
        for (uint64_t i = 0; i < n; ++i) {
            float v = s * kern_normal(c);
            if (fmt == QX_W_F32) {
                memcpy(h + 4 * i, &v, 4);
            } else {
                uint16_t u = fmt == QX_W_BF16 ? qx_f32_to_bf16(v)
                                              : (uint16_t)((kern_u64(c) & 0x83ff) | 0x2400); /* +-[2^-6, 2^-5) */
                if (kind == 1 && i < 65536 && (i & 0x7f80) != 0x7f80 && (i & 0x7c00) != 0x7c00) {
                    u = (uint16_t)i & 0xbfff; /* every mantissa, no huge exponents */
                }
                memcpy(h + 2 * i, &u, 2);
            }
        }
        if (kind == 3) {
            memset(h + nb / rows, 0xff, 4);
        }
    } else {
        for (size_t i = 0; i < nb; i += 8) {
            uint64_t v = kern_u64(c);
            memcpy(h + i, &v, nb - i < 8 ? nb - i : 8);
        }
        for (size_t i = 0; i < nb && fmt != QX_W_NVFP4; ++i) {
            if (kind == 1) {
                h[i] = (uint8_t)(i + 37 * (i / cols)); /* rows differ: one sum that cancels is not all of them */
            }
            h[i] = (h[i] & 0x7f) == 0x7f ? 0x3f : h[i]; /* no NaN */
            if (kind != 1) {
                h[i] &= 0xbf; /* below 2 */
            }
        }
        for (size_t i = 0; i < nb && fmt == QX_W_NVFP4 && kind == 1; ++i) {
            h[i] = (uint8_t)(i + 37 * (i / (cols / 2)));
        }
        if (kind == 3 && fmt != QX_W_NVFP4) {
            h[cols + 3] = 0x7f;
        }
    }
    w.codes = kern_put(c, h, nb);
    free(h);
    size_t ns = fmt == QX_W_NVFP4 ? n / 16 : fmt == QX_W_MXFP8 ? n / 32 : 0;
    if (ns) {
        uint8_t *sc = malloc(ns);
        if (!sc) {
            die("no memory");
        }
        for (size_t i = 0; i < ns; ++i) {
            sc[i] = fmt == QX_W_NVFP4 ? (uint8_t)(0x30 + kern_below(c, 24)) : (uint8_t)(118 + kern_below(c, 8));
            if (kind == 1 && fmt == QX_W_NVFP4) {
                sc[i] = (uint8_t)((i + i / (cols / 16)) % 127);
            }
            if (kind == 1 && fmt == QX_W_MXFP8) {
                sc[i] = (uint8_t)(60 + (i + i / (cols / 32)) % 80);
            }
            if (kind == 2 && i % 3 == 0) {
                sc[i] = 0;
            }
        }
        if (kind == 3) {
            sc[ns / rows] = fmt == QX_W_NVFP4 ? 0x7f : 0xff;
        }
        w.scale = kern_put(c, sc, ns);
        free(sc);
    }
    if (fmt == QX_W_FP8_BLOCK) {
        w.row0 = kern_below(c, 3) * 40;
        w.scale_bf16 = (uint8_t)(kern_u64(c) & 1);
        size_t nr = (w.row0 + rows + 127) / 128, nc = (cols + 127) / 128;
        uint16_t *b = malloc(nr * nc * 2);
        float *f = malloc(nr * nc * 4);
        if (!b || !f) {
            die("no memory");
        }
        for (size_t i = 0; i < nr * nc; ++i) {
            f[i] = kind == 2 && i % 3 == 0 ? 0.0f : s * (0.5f + fabsf(kern_uniform(c)));
            b[i] = qx_f32_to_bf16(f[i]);
        }
        w.scale = w.scale_bf16 ? kern_put(c, b, nr * nc * 2) : kern_put(c, f, nr * nc * 4);
        free(b);
        free(f);
    }
    if (fmt == QX_W_FP8 || fmt == QX_W_NVFP4) {
        w.global = s * (0.5f + fabsf(kern_uniform(c)));
    }
    return w;
}

void kern_moe_rest(struct kern_ctx *c, struct qx_op_moe *a, uint8_t fmt)
{
    const struct qx_experts *x = &a->experts;
    size_t n = a->n_rows;
    a->s_gate = kern_weight(c, fmt, a->s_inter, x->hidden, 0);
    a->s_up = kern_weight(c, fmt, a->s_inter, x->hidden, 0);
    a->s_down = kern_weight(c, fmt, x->hidden, a->s_inter, 0);
    a->s_gate_vec = kern_weight(c, QX_W_BF16, 1, x->hidden, 0);
    a->y = kern_new(c, n * x->hidden * 4);
    a->scratch = kern_new(c, n * (a->k * (x->inter + x->hidden) + a->s_inter + x->hidden + 1) * 4);
    a->iscratch = kern_new(c, (n * a->k + 3 * x->n_experts + 8) * 4);
}

struct qx_step *kern_step(struct kern_ctx *c, const struct kern_run *runs, unsigned n_runs, uint32_t vocab,
                          uint32_t *n_slots)
{
    static struct qx_step steps[4];
    static unsigned next;
    uint32_t n = 0;
    for (unsigned i = 0; i < n_runs; ++i) {
        n += (uint32_t)(runs[i].len < 0 ? 1 : runs[i].len);
    }
    int32_t *h = calloc((size_t)n * 6 + 1, 4);
    if (!h) {
        die("no memory");
    }
    int32_t *id = h, *pos = h + n, *seq = h + 2 * n, *first = h + 3 * n, *in = h + 4 * n, *out = h + 5 * n;
    uint32_t slots = 0, r = 0;
    for (unsigned i = 0; i < n_runs; ++i) {
        if (runs[i].state_in >= (int)slots) {
            slots = (uint32_t)runs[i].state_in + 1;
        }
    }
    for (unsigned i = 0; i < n_runs; ++i) {
        int len = runs[i].len < 0 ? 1 : runs[i].len;
        uint32_t r0 = r;
        for (int j = 0; j < len; ++j, ++r) {
            id[r] = (int32_t)kern_below(c, vocab);
            pos[r] = runs[i].len < 0 ? -1 : runs[i].pos0 + j;
            seq[r] = runs[i].seq;
            first[r] = (int32_t)r0;
            in[r] = runs[i].state_in;
            out[r] = runs[i].out == 2 ? (int32_t)slots++
                     : j + 1 < len    ? -1
                     : runs[i].out == 1 ? runs[i].state_in
                     : runs[i].out == 3 ? (int32_t)slots++ : -1;
        }
    }
    struct qx_step *s = &steps[next++ % 4];
    *s = (struct qx_step){.n_rows = n};
    s->id = kern_put(c, id, n * 4);
    s->pos = kern_put(c, pos, n * 4);
    s->seq = kern_put(c, seq, n * 4);
    s->first = kern_put(c, first, n * 4);
    s->state_in = kern_put(c, in, n * 4);
    s->state_out = kern_put(c, out, n * 4);
    if (n_slots) {
        *n_slots = slots ? slots : 1;
    }
    free(h);
    return s;
}

void kern_shape(struct kern_ctx *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->shape, sizeof c->shape, fmt, ap);
    va_end(ap);
}

void kern_out(struct kern_ctx *c, const char *name, char type, const void *dev, size_t n, double bound)
{
    if (c->n_outs == KERN_MAX_OUTS) {
        die("too many outputs");
    }
    c->outs[c->n_outs++] = (struct kern_out){.name = name, .type = type, .n = n, .bound = bound, .dev = dev};
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

void kern_begin(struct kern_ctx *c)
{
    c->be->wait(c->q, NULL);
    c->ns = now_ns();
}

void kern_end(struct kern_ctx *c)
{
    int rc = c->be->wait(c->q, &c->err);
    c->rc = c->rc ? c->rc : rc;
    c->ns = (now_ns() - c->ns) / (c->repeats ? c->repeats : 1);
}

void kern_same(struct kern_ctx *c, const void *a, const void *b, size_t n)
{
    int rc = c->be->wait(c->q, &c->err);
    c->rc = c->rc ? c->rc : rc;
    uint8_t *x = malloc(n), *y = malloc(n);
    if (!x || !y) {
        die("no memory");
    }
    if (!c->rc) {
        kern_fetch(c, x, a, n);
        kern_fetch(c, y, b, n);
        if (memcmp(x, y, n)) {
            c->rc = qx_fail(&c->err, QX_E_DEVICE, "test", "a row's bits depend on how many rows there are");
        }
    }
    free(x);
    free(y);
}

/* ---- comparing ---------------------------------------------------------------------------- */

static size_t elem_size(char type)
{
    return type == 'l' ? 8 : type == 'h' || type == 'b' ? 2 : 4;
}

static double value_of(const struct kern_out *o, size_t i)
{
    return o->type == 'b' ? (double)qx_bf16_to_f32(((const uint16_t *)o->data)[i])
                          : (double)((const float *)o->data)[i];
}

/* NULL when equal within the bound, else what is wrong. *err_out: the error met. */
static const char *differs(const struct kern_out *a, const struct kern_out *b, double bound, double *err_out)
{
    static char msg[256];
    *err_out = 0.0;
    if (a->type != 'f' && a->type != 'b') {
        size_t sz = elem_size(a->type);
        for (size_t i = 0; i < a->n; ++i) {
            if (memcmp((char *)a->data + i * sz, (char *)b->data + i * sz, sz)) {
                int64_t x = 0, y = 0;
                memcpy(&x, (char *)a->data + i * sz, sz);
                memcpy(&y, (char *)b->data + i * sz, sz);
                if (sz == 4) {
                    x = (int32_t)x, y = (int32_t)y;
                }
                snprintf(msg, sizeof msg, "%s[%zu] is %" PRId64 ", not %" PRId64, a->name, i, y, x);
                return msg;
            }
        }
        return NULL;
    }
    double num = 0.0, den = 0.0, worst = -1.0;
    size_t at = 0;
    for (size_t i = 0; i < a->n; ++i) {
        double x = value_of(a, i), y = value_of(b, i);
        if (isnan(x) || isnan(y) || isinf(x) || isinf(y)) {
            if (!(isnan(x) && isnan(y)) && x != y) {
                snprintf(msg, sizeof msg, "%s[%zu] is %g, not %g", a->name, i, y, x);
                *err_out = INFINITY;
                return msg;
            }
            continue;
        }
        double d = fabs(x - y);
        num += d * d;
        den += x * x;
        if (d > worst) {
            worst = d;
            at = i;
        }
    }
    double e = den > 0.0 ? sqrt(num / den) : num > 0.0 ? INFINITY : 0.0;
    *err_out = e;
    if (e <= bound) {
        return NULL;
    }
    snprintf(msg, sizeof msg, "%s: relative error %.3g above %.3g, worst at [%zu]: %.9g, not %.9g", a->name, e,
             bound, at, value_of(b, at), value_of(a, at));
    return msg;
}

/* ---- running cases ------------------------------------------------------------------------ */

static const struct kern_case *const suites[] = {kern_cases_rows, kern_cases_matmul, kern_cases_moe, kern_cases_gdn,
                                                 kern_cases_qsa, kern_cases_ple, kern_cases_sample,
                                                 kern_cases_draft};

static void clear(struct kern_ctx *c)
{
    for (unsigned i = 0; i < c->n_bufs; ++i) {
        c->be->mem_free(c->be, c->bufs[i].base);
    }
    for (unsigned i = 0; i < c->n_outs; ++i) {
        free(c->outs[i].data);
    }
    c->n_bufs = c->n_outs = 0;
}

/* Runs a case; outputs to host; true when guards held. */
static bool run_case(struct kern_ctx *c, const struct kern_case *k, uint64_t seed)
{
    c->rng = seed * 0x9E3779B97F4A7C15u + (uint64_t)k->variant * 977u;
    c->rc = 0;
    c->bytes = 0;
    c->shape[0] = 0;
    k->fn(c, k->variant);
    if (c->rc) {
        return true;
    }
    for (unsigned i = 0; i < c->n_outs; ++i) {
        struct kern_out *o = &c->outs[i];
        o->data = malloc(o->n * elem_size(o->type) + 8);
        if (!o->data) {
            die("no memory");
        }
        kern_fetch(c, o->data, o->dev, o->n * elem_size(o->type));
    }
    for (unsigned i = 0; i < c->n_bufs && !c->repeats; ++i) {
        uint8_t g[2 * KERN_GUARD];
        kern_fetch(c, g, c->bufs[i].base, KERN_GUARD);
        kern_fetch(c, g + KERN_GUARD, c->bufs[i].base + KERN_GUARD + c->bufs[i].n, KERN_GUARD);
        for (unsigned j = 0; j < sizeof g; ++j) {
            if (g[j] != 0xa5) {
                return false;
            }
        }
    }
    return true;
}

static int op_index(const char *name)
{
    for (int i = 0; i < QX_OP_COUNT; ++i) {
        if (!strcmp(qx_op_names[i], name)) {
            return i;
        }
    }
    die("a case names an unknown op");
    return 0;
}

struct options { const char *op, *backend; uint64_t seed; unsigned repeat; bool list, bench, json, verbose; unsigned as, part, parts; uint64_t most; };

enum verdict { SAME, DIFFERENT, LARGE };

static enum verdict check_case(struct kern_ctx *ref, struct kern_ctx *dev, const struct kern_case *k,
                       const struct options *o)
{
    char fail[400] = "";
    double worst = 0.0, def = op_bounds[op_index(k->op)];
    bool ok = run_case(ref, k, o->seed);
    uint64_t bytes = 0;
    for (unsigned i = 0; i < ref->n_bufs; ++i) {
        bytes += ref->bufs[i].n;
    }
    if (o->most && bytes > o->most) {
        clear(ref);
        return LARGE;
    }
    if (!ok || ref->rc) {
        snprintf(fail, sizeof fail, "reference failed (%d)%s", ref->rc, ok ? "" : ", guard bytes");
    }
    for (int pass = 0; pass < 2 && !fail[0]; ++pass) {
        static struct kern_out prev[KERN_MAX_OUTS];
        bool guards = run_case(dev, k, o->seed);
        if (dev->rc) {
            snprintf(fail, sizeof fail, "failed: %.300s", dev->err.msg);
            break;
        }
        if (!guards) {
            snprintf(fail, sizeof fail, "wrote outside its outputs");
            break;
        }
        for (unsigned i = 0; i < dev->n_outs && !fail[0]; ++i) {
            double e, bound = ref->outs[i].bound > 0.0 ? ref->outs[i].bound : def;
            const char *m = differs(&ref->outs[i], &dev->outs[i], bound, &e);
            worst = e > worst ? e : worst;
            if (m) {
                snprintf(fail, sizeof fail, "%.380s", m);
            } else if (pass == 1 && memcmp(prev[i].data, dev->outs[i].data,
                                           dev->outs[i].n * elem_size(dev->outs[i].type))) {
                snprintf(fail, sizeof fail, "%s: two runs differ", dev->outs[i].name);
            }
        }
        if (pass == 0) {
            /* keep the first run's outputs past clear() */
            for (unsigned i = 0; i < dev->n_outs; ++i) {
                prev[i] = dev->outs[i];
                dev->outs[i].data = NULL;
            }
            unsigned n = dev->n_outs;
            clear(dev);
            if (fail[0]) {
                for (unsigned i = 0; i < n; ++i) {
                    free(prev[i].data);
                }
            }
        } else {
            for (unsigned i = 0; i < dev->n_outs; ++i) {
                free(prev[i].data);
            }
        }
    }
    if (o->json) {
        printf("{\"schema\":\"qx.kerncheck/1\",\"op\":\"%s\",\"case\":\"%s\",\"variant\":%d,\"shape\":\"%s\",\"ok\":%s,"
               "\"error\":%.6g}\n",
               k->op, k->name, k->variant, ref->shape, fail[0] ? "false" : "true", isfinite(worst) ? worst : -1.0);
    } else if (fail[0]) {
        printf("FAIL %s/%s/%d seed %" PRIu64 " (%s): %s\n", k->op, k->name, k->variant, o->seed, ref->shape, fail);
    } else if (o->verbose) {
        printf("ok   %s/%s/%d (%s): %.2g\n", k->op, k->name, k->variant, ref->shape, worst);
    }
    fflush(stdout);
    clear(ref);
    clear(dev);
    return fail[0] ? DIFFERENT : SAME;
}

static void bench_case(struct kern_ctx *dev, const struct kern_case *k, const struct options *o)
{
    dev->repeats = 200;
    run_case(dev, k, o->seed);
    if (dev->rc) {
        printf("%s/%s/%d: %s\n", k->op, k->name, k->variant, dev->err.msg);
    } else if (o->json) {
        printf("{\"schema\":\"qx.kerncheck/1\",\"op\":\"%s\",\"case\":\"%s\",\"variant\":%d,\"shape\":\"%s\",\"ns\":%.0f,"
               "\"bytes\":%" PRIu64 "}\n",
               k->op, k->name, k->variant, dev->shape, dev->ns, dev->bytes);
    } else {
        printf("%-12s %-10s %3d %-44s %10.2f us  %8.1f GB/s\n", k->op, k->name, k->variant, dev->shape,
               dev->ns * 1e-3, (double)dev->bytes / dev->ns);
    }
    fflush(stdout);
    clear(dev);
    dev->repeats = 0;
}

static bool open_ctx(struct kern_ctx *c, const char *name, uint32_t threads)
{
    int rc = !strcmp(name, "cpu") ? qx_backend_cpu_create(&c->be, threads, &c->err)
                                  : qx_backend_cuda_create(&c->be, name[4] == ':' ? atoi(name + 5) : 0, &c->err);
    if (!rc) {
        rc = c->be->queue_create(c->be, &c->q, &c->err);
    }
    return !rc;
}

static int usage(void)
{
    fprintf(stderr, "usage: kerncheck [--list] [--op GLOB] [--backend cpu|cuda[:N]] [--seed N] [--repeat N]\n"
                    "                 [--bench] [--json] [--as CAPABILITY] [--part I/N] [--most BYTES] [-v]\n"
                    "--as 120: with the variants that such a device would get (90: one that runs PTX)\n"
                    "--part 0/4: every fourth case, from the first on\n"
                    "--most: leaves out cases whose buffers take more bytes\n");
    return 2;
}

int main(int argc, char **argv)
{
    struct options o = {.op = "*", .backend = "cuda", .seed = 1, .repeat = 1};
    static const struct option longs[] = {
        {"list", 0, 0, 'l'}, {"op", 1, 0, 'o'}, {"backend", 1, 0, 'b'}, {"seed", 1, 0, 's'}, {"repeat", 1, 0, 'r'},
        {"bench", 0, 0, 'B'}, {"json", 0, 0, 'j'}, {"as", 1, 0, 'a'}, {"part", 1, 0, 'p'},
        {"most", 1, 0, 'm'}, {0, 0, 0, 0}};
    int ch;
    while ((ch = getopt_long(argc, argv, "v", longs, NULL)) != -1) {
        switch (ch) {
        case 'l': o.list = true; break;
        case 'o': o.op = optarg; break;
        case 'b': o.backend = optarg; break;
        case 's': o.seed = strtoull(optarg, NULL, 10); break;
        case 'r': o.repeat = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'B': o.bench = true; break;
        case 'j': o.json = true; break;
        case 'a': o.as = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'p':
            if (sscanf(optarg, "%u/%u", &o.part, &o.parts) != 2 || o.part >= o.parts) {
                return usage();
            }
            break;
        case 'm': o.most = strtoull(optarg, NULL, 10); break;
        case 'v': o.verbose = true; break;
        default: return usage();
        }
    }
    if (strcmp(o.backend, "cpu") && strncmp(o.backend, "cuda", 4)) {
        return usage();
    }
    static struct kern_ctx ref, dev;
    if (!o.list) {
        if (!open_ctx(&dev, o.backend, 0)) {
            fprintf(stderr, "kerncheck: %s\n", dev.err.msg);
            return dev.err.code == QX_E_DEVICE ? 77 : 4;
        }
        if (o.as && dev.be->queue_limit) {
            dev.be->queue_limit(dev.q, o.as);
            dev.as = o.as;
        }
        if (!open_ctx(&ref, "cpu", strcmp(o.backend, "cpu") ? 0 : 1)) {
            die(ref.err.msg);
        }
    }
    unsigned n = 0, bad = 0, at = 0;
    bool seen[QX_OP_COUNT] = {false};
    for (size_t s = 0; s < QX_ARRAY_LEN(suites); ++s) {
        for (const struct kern_case *k = suites[s]; k->op; ++k) {
            seen[op_index(k->op)] = true;
            if (fnmatch(o.op, k->op, 0) || (!o.list && (k->bench != 0) != o.bench)) {
                continue;
            }
            if (o.parts && at++ % o.parts != o.part) {
                continue;
            }
            if (o.list) {
                printf("%s/%s/%d%s\n", k->op, k->name, k->variant, k->bench ? " (bench)" : "");
            } else if (o.bench) {
                bench_case(&dev, k, &o);
            } else {
                for (unsigned r = 0; r < o.repeat; ++r) {
                    struct options t = o;
                    t.seed = o.seed + r;
                    enum verdict got = check_case(&ref, &dev, k, &t);
                    n += got != LARGE;
                    bad += got == DIFFERENT;
                }
            }
        }
    }
    for (int i = 0; i < QX_OP_COUNT; ++i) {
        if (!seen[i]) {
            printf("FAIL op %s has no case\n", qx_op_names[i]);
            ++bad;
        }
    }
    if (!o.list) {
        if (!o.bench && !o.json) {
            printf("%u cases, %u failed (%s)\n", n, bad, o.backend);
        }
        ref.be->queue_destroy(ref.q);
        dev.be->queue_destroy(dev.q);
        ref.be->destroy(ref.be);
        dev.be->destroy(dev.be);
    }
    return bad != 0;
}
