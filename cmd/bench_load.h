/* bench_load.h: the rows of `qx bench --shared`. */
#ifndef QX_CMD_BENCH_LOAD_H
#define QX_CMD_BENCH_LOAD_H

#include "num.h"
#include "ui.h"

#include "bench.h"

struct bench_load_opts {
    const uint64_t *streams;
    size_t n_streams;
    uint64_t shared, suffix, output, repeat;
    const char *device, *layout;
    bool csv;
};
/* Runs the workload for every number of streams and writes its rows. */
int bench_load(struct ui *ui, struct qx_model *m, const struct bench_load_opts *o, struct qx_error *err);

#endif
