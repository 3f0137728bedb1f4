/* exec_impl.h: shared by exec.c (running steps) and exec_fill.c (what they read). */
#ifndef QX_EXEC_IMPL_H
#define QX_EXEC_IMPL_H

#include "engine.h"

/* Host images of control blocks; nothing is uploaded. */
void qx_fill_rows(const struct qx_model *m, struct qx_ctl *c, const struct qx_row *rows, uint32_t n);
void qx_fill_logit_rows(struct qx_ctl *c, const struct qx_row *rows, const struct qx_want *w);
void qx_fill_chains(struct qx_ctl *c, const struct qx_row *rows, const struct qx_want *w);
/* Lists of penalties, made and uploaded. */
bool qx_want_penalties(const struct qx_want *w);
uint32_t qx_penalty_ids(const struct qx_model *m);
int qx_fill_penalties(struct qx_model *m, const struct qx_row *rows, const struct qx_want *w,
                      struct qx_error *err);
/* Reads the table rows of a step from disk into pinned memory. */
int qx_fill_table_rows(struct qx_model *m, const struct qx_row *rows, uint32_t n, struct qx_error *err);

#endif
