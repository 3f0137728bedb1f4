/* both.h: what the two fault loops share. */
#ifndef QX_TEST_OOM_BOTH_H
#define QX_TEST_OOM_BOTH_H

#include <dirent.h>
#include <stdio.h>
#include <string.h>

#include "qx.h"

/* Loads the checkpoint on the cpu and generates two tokens; *out is there on success only. */
static int model_round(const struct qx_ckpt *ck, uint32_t out[2], size_t *n_out, struct qx_error *err)
{
    struct qx_model *m = NULL;
    struct qx_gen *g = NULL;
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    o.device = "cpu";
    o.ctx_tokens = 16;
    static const uint32_t ids[] = {1, 2, 3};
    struct qx_gen_params p = QX_GEN_PARAMS_DEFAULT;
    struct qx_gen_stats stats;
    p.n_max = 2;
    int rc = qx_model_load(&m, ck, &o, err);
    rc = rc ? rc : qx_gen_create(&g, m, err);
    rc = rc ? rc : qx_gen_prefill(g, ids, 3, NULL, NULL, err);
    rc = rc ? rc : qx_gen_generate(g, &p, &stats, err);
    *n_out = rc ? 0 : qx_gen_n_tokens(g) < 2 ? qx_gen_n_tokens(g) : 2;
    if (*n_out) {
        memcpy(out, qx_gen_tokens(g), *n_out * sizeof *out);
    }
    qx_gen_destroy(g);
    qx_model_free(m);
    return rc;
}

static void remove_tree(const char *path)
{
    DIR *d = opendir(path);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char name[800];
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            snprintf(name, sizeof name, "%.300s/%.400s", path, e->d_name);
            remove_tree(name);
        }
    }
    if (d) {
        closedir(d);
    }
    (void)remove(path);
}

#endif
