/* table.h: aligned columns. On a terminal the widest flexible column is cut to fit; piped text is never
 * cut. Cells come from strangers and are escaped. */
#ifndef QX_CMD_TABLE_H
#define QX_CMD_TABLE_H

#include "base.h"
#include "str.h"
#include "ui.h"

struct table_col {
    const char *title;
    bool right;  /* numbers */
    bool flex;   /* may be cut on a terminal */
};

struct table {
    const struct table_col *cols;
    size_t n_cols;
    char **cells; /* row after row */
    size_t n_cells, cap;
    bool failed;
};

/* The columns must outlive the table. */
void table_init(struct table *t, const struct table_col *cols, size_t n_cols);
void table_fini(struct table *t);
/* The next cell; a row ends by itself after n_cols cells. */
void table_cell(struct table *t, const char *fmt, ...) QX_PRINTF(2, 3);
/* Prints to stdout, each line behind `indent` spaces; a title row when any title is not empty. */
void table_print(const struct table *t, const struct ui *ui, unsigned indent);

#endif
