/* line.h: lines of text being generated: what gen.c (one) and batch.c (many) share. A line knows its
 * sequence's ids; those not yet consumed are consumed by rounds. A round is one pass of the main model
 * over rows of all lines: a chunk of known ids, or the pending id and its drafts. */
#ifndef QX_LINE_H
#define QX_LINE_H

#include "engine.h"

struct qx_line {
    int32_t seq;
    bool consume_only;          /* stop when all known ids are consumed, choose nothing */
    bool done;
    bool overrun;               /* line_free.c: a step ran past its end */
    struct qx_error *error;     /* batches: a line's own failure ends it alone; NULL: it ends the round */
    struct qx_gen_params p;
    const struct qx_gen_hooks *hooks; /* NULL: none */
    struct qx_gen_stats stats;
    uint64_t t_start_ns, t_first_ns;
    bool counted;               /* stats of decoding are final */

    /* drafts */
    uint32_t draft_ids[QX_DRAFT_MAX];
    uint32_t n_drafts;          /* of this round */
    bool has_next;              /* the draft head already gave the first draft of the next round */
    uint32_t next_id;
    float next_prob;
    int32_t next_row;           /* its row in the draft head's last step */
    /* measured K: time and tokens by number of drafts */
    double auto_ns[QX_DRAFT_MAX + 1], auto_tokens[QX_DRAFT_MAX + 1];
    uint32_t auto_n[QX_DRAFT_MAX + 1], auto_round;

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
/* One round over n lines that are not done (n x (draft_max + 1) <= n_logit_rows). Lines in prefill share
 * what rows the others leave. */
int qx_line_round(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err);
/* Whether all lines only decode, without drafts and without anything for the host to look at: then
 * qx_line_free runs them step after step on the device until one is done. */
bool qx_line_can_free(const struct qx_model *m, struct qx_line *const *lines, uint32_t n);
int qx_line_free(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err);
uint64_t qx_now_ns(void);
/* gen.c: the sequence behind a public object, for snap.c. */
struct qx_seq *qx_gen_seq(struct qx_gen *g, struct qx_model **m, int32_t *seq);

#endif
