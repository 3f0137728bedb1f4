/* run_logits.c: --logits and --draft-logits. Rows arrive in ascending order of position. When they are
 * asked for in that order too they go straight to the file; else they wait in memory. */
#include "run.h"

#include "alloc.h"
#include "error.h"
#include "file_out.h"
#include "npy_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sink {
    const char *path;          /* NULL: not asked for */
    struct qx_file_out *f;
    uint64_t *asked;           /* positions in the order given; NULL: the default */
    size_t n_asked;
    uint64_t *sorted;          /* distinct, ascending */
    size_t n_sorted;
    bool ascending;            /* asked == sorted */
    uint64_t first;            /* default: rows from here on */
    uint64_t last;             /* default: and up to here */
    bool only_newest;          /* default of the draft head: the last row alone */
    float **kept;              /* [n_sorted] rows waiting, or kept[0] for only_newest */
    uint64_t newest;
    bool has_newest;
    uint64_t *written;         /* positions, in file order */
    size_t n_written, cap_written;
    int rc;
};

struct run_logits {
    struct run *r;
    size_t vocab;
    struct sink main, draft;
};

static int cmp_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* end: first position whose row can never exist. */
static int sink_open(struct sink *s, struct run *r, const char *path, uint64_t end, const char *what)
{
    const struct qx_u64_list *list = &r->o.positions;
    char header[QX_NPY_HEADER_BYTES] = {0};
    s->path = path;
    if (r->o.positions_given) {
        s->n_asked = list->n;
        s->asked = qx_malloc((list->n + 1) * sizeof *s->asked);
        s->sorted = qx_malloc((list->n + 1) * sizeof *s->sorted);
        s->kept = qx_calloc(list->n + 1, sizeof *s->kept);
        if (!s->asked || !s->sorted || !s->kept) {
            return qx_fail_nomem(&r->err);
        }
        s->ascending = true;
        for (size_t i = 0; i < list->n; i++) {
            if (list->v[i] >= end) {
                return qx_fail(&r->err, QX_E_RANGE, "position-range",
                               "position %llu can have no %s, the last that can is %lld",
                               (unsigned long long)list->v[i], what, (long long)end - 1);
            }
            s->asked[i] = s->sorted[i] = list->v[i];
            s->ascending = s->ascending && (i == 0 || list->v[i] > list->v[i - 1]);
        }
        qsort(s->sorted, list->n, sizeof *s->sorted, cmp_u64);
        for (size_t i = 0; i < list->n; i++) {
            if (i == 0 || s->sorted[i] != s->sorted[i - 1]) {
                s->sorted[s->n_sorted++] = s->sorted[i];
            }
        }
    } else {
        s->ascending = true;
        s->kept = qx_calloc(1, sizeof *s->kept);
        if (!s->kept) {
            return qx_fail_nomem(&r->err);
        }
    }
    int rc = qx_file_out_create(&s->f, path, r->o.force, &r->err);
    return rc ? rc : qx_file_out_write(s->f, header, sizeof header, &r->err);
}

static size_t sorted_index(const struct sink *s, uint64_t pos)
{
    size_t lo = 0, hi = s->n_sorted;
    while (lo < hi) {
        size_t m = lo + (hi - lo) / 2;
        if (s->sorted[m] < pos) {
            lo = m + 1;
        } else {
            hi = m;
        }
    }
    return lo < s->n_sorted && s->sorted[lo] == pos ? lo : SIZE_MAX;
}

static bool sink_wants(const struct sink *s, uint64_t pos)
{
    if (!s->path) {
        return false;
    }
    return s->asked ? sorted_index(s, pos) != SIZE_MAX : pos >= s->first && pos <= s->last;
}

static int sink_put(struct sink *s, uint64_t pos, const float *row, size_t vocab, struct qx_error *err)
{
    void *p = s->written;
    if (!qx_grow(&p, &s->cap_written, s->n_written + 1, sizeof *s->written)) {
        return qx_fail_nomem(err);
    }
    s->written = p;
    s->written[s->n_written++] = pos;
    return qx_file_out_write(s->f, row, vocab * sizeof *row, err);
}

static int keep_row(float **slot, const float *row, size_t vocab, struct qx_error *err)
{
    if (!*slot) {
        *slot = qx_malloc(vocab * sizeof **slot);
    }
    if (!*slot) {
        return qx_fail_nomem(err);
    }
    memcpy(*slot, row, vocab * sizeof **slot);
    return 0;
}

static void sink_row(struct run_logits *l, struct sink *s, uint64_t pos, const float *row)
{
    struct qx_error *err = &l->r->err;
    if (s->rc) {
        return;
    }
    if (s->only_newest) {
        s->rc = keep_row(&s->kept[0], row, l->vocab, err);
        s->newest = pos;
        s->has_newest = true;
    } else if (s->ascending) {
        s->rc = sink_put(s, pos, row, l->vocab, err);
    } else {
        s->rc = keep_row(&s->kept[sorted_index(s, pos)], row, l->vocab, err);
    }
}

static int sink_finish(struct run_logits *l, struct sink *s)
{
    struct qx_error *err = &l->r->err;
    char header[QX_NPY_HEADER_BYTES];
    if (!s->path) {
        return 0;
    }
    int rc = s->rc;
    if (rc == 0 && s->only_newest && s->has_newest) {
        rc = sink_put(s, s->newest, s->kept[0], l->vocab, err);
    }
    for (size_t i = 0; rc == 0 && s->asked && !s->ascending && i < s->n_asked; i++) {
        const float *row = s->kept[sorted_index(s, s->asked[i])];
        rc = row ? sink_put(s, s->asked[i], row, l->vocab, err) : 0;
    }
    uint64_t shape[2] = {s->n_written, l->vocab};
    qx_npy_header(header, "<f4", shape, 2);
    rc = rc ? rc : qx_file_out_rewrite(s->f, 0, header, sizeof header, err);
    if (rc == 0) {
        rc = qx_file_out_commit(s->f, err);
    } else {
        qx_file_out_abort(s->f);
    }
    s->f = NULL;
    return rc;
}

static void sink_fini(struct sink *s)
{
    qx_file_out_abort(s->f);
    for (size_t i = 0; s->kept && i < (s->asked ? s->n_sorted : 1); i++) {
        qx_free(s->kept[i]);
    }
    qx_free(s->kept);
    qx_free(s->asked);
    qx_free(s->sorted);
    qx_free(s->written);
}

int run_logits_create(struct run_logits **out, struct run *r, uint64_t n_prompt, uint64_t n)
{
    uint64_t have = r->o.ctx_given && r->o.ctx < r->limit ? r->o.ctx : r->limit;
    uint64_t end = n == RUN_UNLIMITED ? have : n_prompt + n; /* checked against the context before */
    int rc = 0;
    *out = NULL;
    if (!r->o.logits && !r->o.draft_logits) {
        return 0;
    }
    struct run_logits *l = qx_calloc(1, sizeof *l);
    if (!l) {
        return qx_fail_nomem(&r->err);
    }
    l->r = r;
    l->vocab = (size_t)qx_ckpt_vocab_size(r->ck);
    l->main.first = n_prompt - 1;
    l->main.last = n == 0 ? n_prompt - 1 : end >= 2 ? end - 2 : 0;
    l->draft.first = n_prompt >= 2 ? n_prompt - 2 : 0;
    l->draft.last = UINT64_MAX;
    l->draft.only_newest = !r->o.positions_given;
    if (r->o.logits) {
        rc = sink_open(&l->main, r, r->o.logits, end, "logits");
    }
    if (rc == 0 && r->o.draft_logits) {
        rc = sink_open(&l->draft, r, r->o.draft_logits, end - 1, "draft logits");
    }
    if (rc) {
        run_logits_destroy(l);
        return rc;
    }
    *out = l;
    return 0;
}

void run_logits_destroy(struct run_logits *l)
{
    if (l) {
        sink_fini(&l->main);
        sink_fini(&l->draft);
        qx_free(l);
    }
}

static bool want_logits(void *user, uint64_t pos)
{
    return sink_wants(&((struct run_logits *)user)->main, pos);
}
static void got_logits(void *user, uint64_t pos, const float *row)
{
    struct run_logits *l = user;
    sink_row(l, &l->main, pos, row);
}
static bool want_draft(void *user, uint64_t pos)
{
    return sink_wants(&((struct run_logits *)user)->draft, pos);
}
static void got_draft(void *user, uint64_t pos, const float *row)
{
    struct run_logits *l = user;
    sink_row(l, &l->draft, pos, row);
}

void run_logits_hooks(struct run_logits *l, struct qx_gen_hooks *hooks)
{
    memset(hooks, 0, sizeof *hooks);
    hooks->user = l;
    if (l->main.path) {
        hooks->want_logits = want_logits;
        hooks->logits = got_logits;
    }
    if (l->draft.path) {
        hooks->want_draft_logits = want_draft;
        hooks->draft_logits = got_draft;
    }
}

bool run_logits_wants_last(const struct run_logits *l, uint64_t last_pos)
{
    return sink_wants(&l->main, last_pos) || (last_pos > 0 && sink_wants(&l->draft, last_pos - 1));
}

int run_logits_finish(struct run_logits *l)
{
    int rc = sink_finish(l, &l->main);
    return rc ? rc : sink_finish(l, &l->draft);
}

static void json_positions(struct qx_json_out *o, const char *key, const struct sink *s)
{
    if (!s || !s->path) {
        qx_json_null(o, key);
        return;
    }
    qx_json_arr(o, key);
    for (size_t i = 0; i < s->n_written; i++) {
        qx_json_u64(o, NULL, s->written[i]);
    }
    qx_json_arr_end(o);
}

void run_logits_json(struct qx_json_out *o, const struct run_logits *l)
{
    json_positions(o, "logit_positions", l ? &l->main : NULL);
    json_positions(o, "draft_logit_positions", l ? &l->draft : NULL);
}
