/* inspect.h: what the files of qx-inspect share: the request and the printers. */
#ifndef QX_CMD_INSPECT_H
#define QX_CMD_INSPECT_H

#include "opt.h"
#include "qx.h"
#include "ui.h"

struct inspect_job {
    struct ui ui;
    const struct qx_ckpt *ck;
    const struct qx_inspection *in;
    const struct qx_fit *fit; /* NULL: not asked for */
    const char *path;
    /* Asked for beside the summary; NULL: not. */
    const char *tensors_glob;
    const char *why; /* text of --why */
    const struct inspect_stat *stats;
    size_t n_stats;
};

/* One tensor of --stats. */
struct inspect_stat {
    const struct qx_tensor *t;
    struct qx_value_stats v;
};

void inspect_print_text(const struct inspect_job *j);
void inspect_print_json(const struct inspect_job *j);
/* One line a tensor whose name matches the glob; false when none does. */
bool inspect_print_tensors(const struct inspect_job *j, const char *glob);
/* --stats: reads every tensor whose name matches into j->stats (qx_free), writes the SVG. Returns
 * an exit code. */
int inspect_stats_read(struct inspect_job *j, const char *glob, const char *svg_path, bool force);
void inspect_print_stats(const struct inspect_job *j);
/* --diff: returns an exit code, 1 when anything differs. */
int inspect_diff(const struct inspect_job *j, const struct qx_ckpt *other, const char *other_path,
                 bool values);

#endif
