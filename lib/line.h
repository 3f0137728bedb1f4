/* line.h: lines of text being generated: what gen.c (one) and batch.c (many) share. A line knows its
 * sequence's ids; those not yet consumed are consumed by rounds. A round is at most one decode step (the
 * pending id and the drafts of every line that decodes) and one prompt step (chunks of lines that read).
 * What a line reads is cut at multiples of the chunk size from where the reading began, whatever runs
 * beside it: the two kinds of steps may sum in different orders (ops.h), and a line's rows are always of
 * the same kind and in the same chunks. */
#ifndef QX_LINE_H
#define QX_LINE_H

#include "engine.h"

struct qx_line {
    int32_t seq;
    bool consume_only;          /* stop when all known ids are consumed, choose nothing */
    bool done;
    bool overrun;               /* line_free.c: a step ran past its end */
    /* reading: ids before read_to are a prompt's, in chunks counted from read_from; a chunk also ends at cut,
       where at_cut is told (the step's wide states are still there) */
    uint64_t read_from, read_to, cut;
    int (*at_cut)(void *user, struct qx_line *l, struct qx_error *err);
    void *cut_user;
    struct qx_error *error;     /* batches: a line's own failure ends it alone; NULL: it ends the round */
    struct qx_gen_params p;
    const struct qx_gen_hooks *hooks; /* NULL: none */
    struct qx_gen_stats stats;
    uint64_t t_start_ns, t_first_ns;
    bool counted;               /* stats of decoding are final */

    /* drafts */
    uint32_t draft_ids[QX_DRAFT_MAX];
    uint32_t n_drafts;          /* of this round: asked for, then made */
    bool chained;               /* they are made by the draft head, on the device */
    uint32_t n_forced;          /* measuring: so many drafts are kept whatever the main model chose */
    bool has_next;              /* the device has the first draft of the next round */
    /* measured K: time and tokens by number of drafts */
    double auto_ns[QX_DRAFT_MAX + 1], auto_tokens[QX_DRAFT_MAX + 1];
    uint32_t auto_n[QX_DRAFT_MAX + 1], auto_round;
    uint64_t t_round_ns;        /* end of the decode step before, when the last round had no other step */

    /* of the step in progress */
    uint32_t row0, n_rows, n_known; /* rows in the step; n_known of them are ids known before */
    uint32_t logit0, n_logits;
    uint32_t n_kept;            /* rows consumed for good */
};

/* Reads clocks and checks parameters; sampling from an empty sequence is refused. */
int qx_line_start(struct qx_model *m, struct qx_line *l, struct qx_error *err);
/* Chooses the first token from the held wide state when every known id is consumed. */
int qx_line_first(struct qx_model *m, struct qx_line *l, struct qx_error *err);
/* Appends a chosen id and hands it out; `row` its logits, NULL if not on the host. Sets done. */
int qx_line_emit(struct qx_model *m, struct qx_line *l, int32_t id, const float *row,
                 struct qx_error *err);
/* Ends the time and counts of decoding in the line's stats. */
void qx_line_count(const struct qx_model *m, struct qx_line *l);
/* One round over n lines that are not done (n x (draft_max + 1) <= n_logit_rows). A prompt step takes whole
 * chunks of lines that read, in their order, as long as they fit. */
int qx_line_round(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err);
/* Whether all lines only decode, without drafts and without anything for the host to look at: then
 * qx_line_free runs them step after step on the device until one is done. */
bool qx_line_can_free(const struct qx_model *m, struct qx_line *const *lines, uint32_t n);
int qx_line_free(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err);
uint64_t qx_now_ns(void);
/* gen.c: the sequence behind a public object, for snap.c. */
struct qx_seq *qx_gen_seq(struct qx_gen *g, struct qx_model **m, int32_t *seq);

#endif
