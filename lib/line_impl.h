/* line_impl.h: shared by line.c, line_round.c and line_draft.c. */
#ifndef QX_LINE_IMPL_H
#define QX_LINE_IMPL_H

#include "line.h"

struct qx_seq *qx_line_seq(struct qx_model *m, const struct qx_line *l);

/* line.c: replays the sequence from its start with every layer looked at, for the message; the sequence is
 * unusable afterwards. Returns the error. */
int qx_line_not_finite(struct qx_model *m, struct qx_line *l, uint64_t pos, struct qx_error *err);

/* line_draft.c. Plans the drafts of a decode step (n_drafts of each line; `chained` of those whose drafts the
 * device makes) and gives the draft head the held rows that their chains begin with. */
int qx_line_plan_drafts(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err);
/* Gives the draft head all rows of a step whose next id is known by now; fed: the step did. */
int qx_line_feed(struct qx_model *m, struct qx_line **lines, uint32_t n, bool prompt, bool fed, struct qx_error *err);
/* Time and tokens of a round with k drafts, for measured K. */
void qx_line_auto_note(struct qx_line *l, uint32_t k, double ns, double tokens);

#endif
