/* snap.c: the whole state of a sequence (model 15) to and from host memory, and its digest. */
#include "line.h"

#include "alloc.h"

#include <string.h>
#include <xxhash.h>


/* One run of device bytes that belongs to the state, with what of it counts for the digest. */
struct region { char *dev; size_t n, n_digest; };

struct qx_snapshot {
    const struct qx_model *m;
    uint64_t n_done, n_mtp;
    bool held, has_state;
    uint32_t *ids;
    size_t n_ids;
    char *bytes;
    size_t n_bytes;
};

typedef int (*region_fn)(void *user, const struct region *r, struct qx_error *err);

#define VISIT(p, n_, n_dig)                                                               \
    do {                                                                                  \
        struct region r_ = {(char *)(p), (n_), (n_dig)};                                  \
        int rc_ = fn(user, &r_, err);                                                     \
        if (rc_) {                                                                        \
            return rc_;                                                                   \
        }                                                                                 \
    } while (0)

/* Calls fn for every region of the state in a fixed order. `digest`: only what decides the main model's
 * future. */
static int visit(struct qx_model *m, int32_t seq, bool digest, region_fn fn, void *user,
                 struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_seq *s = &m->seqs[seq];
    if (s->cur >= 0) {
        uint64_t slot = (uint64_t)s->cur;
        for (uint32_t i = 0; i < m->n_gdn; ++i) {
            VISIT(m->gdn_s[i] + slot * m->gdn_s_stride, 4 * m->gdn_s_stride, 4 * m->gdn_s_stride);
            VISIT(m->gdn_conv[i] + slot * m->gdn_conv_stride, 4 * m->gdn_conv_stride,
                  4 * m->gdn_conv_stride);
        }
        if (m->has_ple) {
            VISIT(m->ple_conv + slot * m->ple_conv_stride, 4 * m->ple_conv_stride, 4 * m->ple_conv_stride);
            VISIT(m->ple_prev + slot * m->ple_prev_stride, 4 * m->ple_prev_stride,
                  4 * (size_t)(c->ngram_size - 1));
        }
    }
    size_t elem = m->kv_bf16 ? 2 : 4, pt = m->budget.page_tokens, ratio = c->indexer_compress_ratio;
    size_t kv = (size_t)c->n_kv_heads * c->head_dim * elem, raw = c->indexer_head_dim * elem;
    uint32_t n_layers = m->n_qsa + (m->mtp.loaded && !digest ? 1 : 0);
    for (uint32_t i = 0; i < n_layers; ++i) {
        const struct qx_kv_layer *l = &m->kv[i];
        for (uint64_t p = 0; p * pt < s->n_done; ++p) {
            size_t page = (size_t)s->pages[p];
            size_t rows = s->n_done - p * pt < pt ? (size_t)(s->n_done - p * pt) : pt;
            VISIT((char *)l->k + page * pt * kv, pt * kv, rows * kv);
            VISIT((char *)l->v + page * pt * kv, pt * kv, rows * kv);
            VISIT((char *)l->raw + page * pt * raw, pt * raw, rows * raw);
            VISIT((char *)l->pooled + page * (pt / ratio) * raw, pt / ratio * raw, rows / ratio * raw);
        }
    }
    if (!digest) {
        size_t wide = (size_t)c->hc_count * c->hidden_size;
        VISIT(m->b.hold + (size_t)seq * wide, wide * 4, wide * 4);
    }
    return 0;
}

static int add_size(void *user, const struct region *r, struct qx_error *err)
{
    (void)err;
    *(size_t *)user += r->n;
    return 0;
}

struct cursor { struct qx_model *m; char *p; bool restore; };

static int copy_region(void *user, const struct region *r, struct qx_error *err)
{
    struct cursor *c = user;
    int rc = c->restore ? c->m->be->upload(c->m->q, r->dev, c->p, r->n)
                        : c->m->be->download(c->m->q, c->p, r->dev, r->n);
    c->p += r->n;
    return rc ? qx_model_op_failed(c->m, "copy", rc, err) : 0;
}

int qx_gen_save(struct qx_gen *g, struct qx_snapshot **out, struct qx_error *err)
{
    struct qx_model *m;
    int32_t seq;
    struct qx_seq *s = qx_gen_seq(g, &m, &seq);
    *out = NULL;
    struct qx_snapshot *n = qx_calloc(1, sizeof *n);
    if (!n) {
        return qx_fail_nomem(err);
    }
    *n = (struct qx_snapshot){.m = m, .n_done = s->n_done, .n_mtp = s->n_mtp, .held = s->held,
                              .has_state = s->cur >= 0, .n_ids = s->n_ids};
    visit(m, seq, false, add_size, &n->n_bytes, err);
    n->bytes = qx_malloc(n->n_bytes ? n->n_bytes : 1);
    n->ids = qx_malloc(s->n_ids * sizeof *n->ids + 1);
    struct cursor c = {m, n->bytes, false};
    int rc = n->bytes && n->ids ? visit(m, seq, false, copy_region, &c, err) : qx_fail_nomem(err);
    rc = rc ? rc : m->be->wait(m->q, err);
    if (rc) {
        qx_snapshot_destroy(n);
        return rc;
    }
    if (s->n_ids) {
        memcpy(n->ids, s->ids, s->n_ids * sizeof *n->ids);
    }
    *out = n;
    return 0;
}

int qx_gen_restore(struct qx_gen *g, const struct qx_snapshot *n, struct qx_error *err)
{
    struct qx_model *m;
    int32_t seq;
    struct qx_seq *s = qx_gen_seq(g, &m, &seq);
    if (n->m != m) {
        return qx_fail(err, QX_E_USAGE, "usage", "a snapshot belongs to the model that made it");
    }
    qx_seq_reset(m, seq);
    int rc = qx_seq_reserve(m, seq, n->n_done, err);
    for (size_t i = 0; i < n->n_ids && !rc; ++i) {
        rc = qx_seq_push(m, seq, n->ids[i], err);
    }
    if (rc) {
        qx_seq_reset(m, seq);
        return rc;
    }
    s->cur = n->has_state ? s->slots[0] : -1;
    s->n_done = n->n_done;
    s->n_mtp = n->n_mtp;
    s->held = n->held;
    struct cursor c = {m, n->bytes, true};
    rc = visit(m, seq, false, copy_region, &c, err);
    return rc ? rc : m->be->wait(m->q, err);
}

void qx_snapshot_destroy(struct qx_snapshot *s)
{
    if (s) {
        qx_free(s->ids);
        qx_free(s->bytes);
        qx_free(s);
    }
}

struct hasher { struct qx_model *m; XXH3_state_t *x; };

static int hash_region(void *user, const struct region *r, struct qx_error *err)
{
    struct hasher *h = user;
    char *p = qx_malloc(r->n_digest ? r->n_digest : 1);
    if (!p) {
        return qx_fail_nomem(err);
    }
    int rc = h->m->be->download(h->m->q, p, r->dev, r->n_digest);
    rc = rc ? qx_model_op_failed(h->m, "download", rc, err) : h->m->be->wait(h->m->q, err);
    if (!rc) {
        XXH3_128bits_update(h->x, p, r->n_digest);
    }
    qx_free(p);
    return rc;
}

int qx_gen_digest(struct qx_gen *g, uint8_t out[16], struct qx_error *err)
{
    struct qx_model *m;
    int32_t seq;
    struct qx_seq *s = qx_gen_seq(g, &m, &seq);
    struct hasher h = {m, XXH3_createState()};
    if (!h.x) {
        return qx_fail_nomem(err);
    }
    XXH3_128bits_reset(h.x);
    XXH3_128bits_update(h.x, &s->n_done, sizeof s->n_done);
    int rc = visit(m, seq, true, hash_region, &h, err);
    if (!rc) {
        XXH128_canonical_t c;
        XXH128_canonicalFromHash(&c, XXH3_128bits_digest(h.x));
        memcpy(out, c.digest, 16);
    }
    XXH3_freeState(h.x);
    return rc;
}
