/* draft_head.c: the rows of the head that choose drafts: all of them, or a copy of some, which is less to
 * read. Rows are in ascending order of id, so that ties go to the lower id as in the whole head; the copy
 * keeps the stored format where rows stand alone, and is BF16 where they do not (FP8_BLOCK). Drafts never
 * change the text, so neither does any choice of rows. */
#include "engine.h"

#include "alloc.h"

#include <stdlib.h>
#include <string.h>

/* Bytes of a row's codes and of its scales; false where rows cannot be copied one by one. */
static bool row_bytes(const struct qx_weight *w, uint32_t *codes, uint32_t *scale)
{
    uint32_t c = w->cols;
    *scale = w->fmt == QX_W_MXFP8 ? c / 32 : w->fmt == QX_W_NVFP4 ? c / 16 : 0;
    *codes = w->fmt == QX_W_F32 ? 4 * c : w->fmt == QX_W_NVFP4 ? c / 2
             : w->fmt == QX_W_FP8 || w->fmt == QX_W_MXFP8 ? c : 2 * c;
    return w->fmt != QX_W_FP8_BLOCK && *codes % 4 == 0 && *scale % 4 == 0;
}

uint64_t qx_draft_head_bytes(const struct qx_weight *head, uint32_t n)
{
    uint32_t codes, scale = 0;
    if (!n || n >= head->rows) {
        return 0;
    }
    if (!row_bytes(head, &codes, &scale)) {
        codes = 2 * head->cols;
        scale = 0;
    }
    return (uint64_t)n * ((uint64_t)codes + scale + sizeof(int32_t) + sizeof(int64_t));
}

/* Copies rows `map` of the head, in slices that every backend takes. */
static int copy_rows(struct qx_model *m, const void *from, uint32_t bytes, void *to, struct qx_error *err)
{
    for (uint32_t i = 0; i < m->draft_head.rows; i += 32768) {
        uint32_t n = m->draft_head.rows - i < 32768 ? m->draft_head.rows - i : 32768;
        QX_RUN(m, pick, (&(struct qx_op_pick){.in = from, .index = m->draft_map + i, .n = n, .width = bytes / 4,
                                              .out = (void *)((char *)to + (uint64_t)i * bytes)}), err);
    }
    return 0;
}

static int by_id(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Makes `ids` (draft_head.rows of them, all different) the rows that choose drafts. */
static int set_rows(struct qx_model *m, uint32_t *ids, struct qx_error *err)
{
    uint32_t n = m->draft_head.rows, codes, scale;
    qsort(ids, n, sizeof *ids, by_id);
    int rc = m->be->upload(m->q, m->draft_map, ids, n * sizeof *ids);
    if (rc) {
        return qx_model_op_failed(m, "upload", rc, err);
    }
    if (row_bytes(&m->head, &codes, &scale)) {
        rc = copy_rows(m, m->head.codes, codes, m->draft_codes, err);
        rc = rc || !scale ? rc : copy_rows(m, m->head.scale, scale, m->draft_scale, err);
        return rc ? rc : m->be->wait(m->q, err);
    }
    int64_t *wide = qx_malloc(n * sizeof *wide);
    if (!wide) {
        return qx_fail_nomem(err);
    }
    for (uint32_t i = 0; i < n; ++i) {
        wide[i] = ids[i];
    }
    const struct qx_op_decode_rows a = {.weight = m->head, .row = m->draft_rows, .n = n, .bf16 = true,
                                        .out = m->draft_codes};
    rc = m->be->upload(m->q, m->draft_rows, wide, n * sizeof *wide);
    rc = rc ? rc : m->be->ops->decode_rows(m->q, &a);
    rc = rc ? qx_model_op_failed(m, "decode_rows", rc, err) : m->be->wait(m->q, err);
    qx_free(wide);
    return rc;
}

struct count { uint32_t id, n; };

static int by_count(const void *pa, const void *pb)
{
    const struct count *a = pa, *b = pb;
    return a->n != b->n ? (a->n > b->n ? -1 : 1) : a->id < b->id ? -1 : a->id > b->id;
}

/* The most frequent ids of a text, then the lowest: byte-level BPE numbers frequent pieces low. */
int qx_model_learn_drafts(struct qx_model *m, const uint32_t *ids, size_t n, struct qx_error *err)
{
    uint32_t rows = m->draft_head.rows, vocab = m->head.rows, n_seen = 0;
    if (!m->draft_map || m->draft_fixed) {
        return 0;
    }
    struct count *c = qx_calloc(vocab, sizeof *c);
    uint32_t *best = qx_malloc(rows * sizeof *best);
    int rc = c && best ? 0 : qx_fail_nomem(err);
    for (uint32_t i = 0; i < vocab && !rc; ++i) {
        c[i].id = i;
    }
    for (size_t i = 0; i < n && !rc; ++i) {
        if (ids[i] < vocab) {
            n_seen += c[ids[i]].n == 0;
            ++c[ids[i]].n;
        }
    }
    if (!rc) {
        if (n_seen) {
            qsort(c, vocab, sizeof *c, by_count); /* those not seen stay in order, behind */
        }
        for (uint32_t i = 0; i < rows; ++i) {
            best[i] = c[i].id;
        }
        rc = qx_exec_wait(m, err); /* nothing reads the rows while they change */
        rc = rc ? rc : set_rows(m, best, err);
    }
    qx_free(best);
    qx_free(c);
    return rc;
}

/* The first of `list` that are different and in the vocabulary, rows of them at most. */
static uint32_t distinct(const uint32_t *list, size_t n, uint32_t *out, uint32_t rows, uint32_t vocab, bool *seen)
{
    uint32_t k = 0;
    for (size_t i = 0; i < n && k < rows; ++i) {
        if (list[i] < vocab && !seen[list[i]]) {
            seen[list[i]] = true;
            out[k++] = list[i];
        }
    }
    return k;
}

uint32_t qx_draft_head_rows(const struct qx_model_opts *o, uint32_t vocab)
{
    uint64_t n = o->draft_ids ? o->n_draft_ids : o->draft_vocab;
    n = o->draft_ids && o->draft_vocab && o->draft_vocab < n ? o->draft_vocab : n;
    return n && n < vocab ? (uint32_t)n : 0;
}

int qx_draft_head_init(struct qx_model *m, const struct qx_model_opts *o, struct qx_error *err)
{
    uint32_t n = m->mtp.loaded ? qx_draft_head_rows(o, m->head.rows) : 0, codes, scale;
    uint32_t *ids = n ? qx_malloc(n * sizeof *ids) : NULL;
    bool *seen = n ? qx_calloc(m->head.rows, sizeof *seen) : NULL;
    m->draft_head = m->head;
    if (!n || !ids || !seen) {
        qx_free(ids);
        qx_free(seen);
        return n ? qx_fail_nomem(err) : 0;
    }
    m->draft_fixed = o->draft_ids != NULL;
    if (m->draft_fixed) {
        n = distinct(o->draft_ids, o->n_draft_ids, ids, n, m->head.rows, seen);
    }
    for (uint32_t i = 0; i < n && !m->draft_fixed; ++i) {
        ids[i] = i;
    }
    bool plain = row_bytes(&m->head, &codes, &scale);
    int rc = n ? 0 : qx_fail(err, QX_E_USAGE, "usage", "the list of ids for drafts has none of the vocabulary");
    rc = rc ? rc : qx_model_mem(m, &m->draft_map, n * sizeof *m->draft_map, err);
    rc = rc || plain ? rc : qx_model_mem(m, &m->draft_rows, n * sizeof *m->draft_rows, err);
    rc = rc ? rc : qx_model_mem(m, &m->draft_codes, (uint64_t)n * (plain ? codes : 2 * m->head.cols), err);
    rc = rc || !plain || !scale ? rc : qx_model_mem(m, &m->draft_scale, (uint64_t)n * scale, err);
    m->draft_head.rows = n;
    m->draft_head.row0 = 0;
    m->draft_head.codes = m->draft_codes;
    m->draft_head.scale = m->draft_scale;
    if (!plain) {
        m->draft_head.fmt = QX_W_BF16;
        m->draft_head.scale = NULL;
    }
    rc = rc ? rc : set_rows(m, ids, err);
    qx_free(seen);
    qx_free(ids);
    return rc;
}
