/* blocks.c: which blocks of keys the sparse attention layers of a checkpoint choose for a prompt, one line a
 * layer and position: "LAYER POSITION BLOCK...". For comparison with another engine.
 *
 * usage: blocks PATH DEVICE TOKENS FIRST [precise]
 * TOKENS is a file of ids separated by white space; positions from FIRST on are shown. */
#include "qx.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t first;

static bool want(void *user, uint64_t pos)
{
    (void)user;
    return pos >= first;
}

static void show(void *user, uint32_t layer, uint64_t pos, const int32_t *block, uint32_t n)
{
    (void)user;
    printf("%u %llu", layer, (unsigned long long)pos);
    for (uint32_t i = 0; i < n; ++i) {
        printf(" %d", block[i]);
    }
    putchar('\n');
}

static int fail(const struct qx_error *err)
{
    fprintf(stderr, "blocks: %s: %s\n", err->kind ? err->kind : "error", err->msg);
    return 1;
}

int main(int argc, char **argv)
{
    struct qx_error err = {0};
    struct qx_ckpt *ck = NULL;
    struct qx_model *m = NULL;
    struct qx_gen *g = NULL;
    if (argc < 5) {
        fprintf(stderr, "usage: blocks PATH DEVICE TOKENS FIRST [precise]\n");
        return 2;
    }
    FILE *f = fopen(argv[3], "r");
    uint32_t *ids = malloc(sizeof *ids << 20);
    size_t n = 0;
    while (f && ids && n < (size_t)1 << 20 && fscanf(f, "%u", &ids[n]) == 1) {
        ++n;
    }
    first = strtoull(argv[4], NULL, 10);
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    o.device = argv[2];
    o.ctx_tokens = n + 8;
    o.precise = argc > 5 && strcmp(argv[5], "precise") == 0;
    struct qx_gen_hooks h = {.want_blocks = want, .blocks = show};
    int rc = qx_ckpt_open(&ck, argv[1], NULL, &err);
    rc = rc ? rc : qx_model_load(&m, ck, &o, &err);
    rc = rc ? rc : qx_gen_create(&g, m, &err);
    if (!rc) {
        qx_gen_set_hooks(g, &h);
        rc = qx_gen_prefill(g, ids, n, NULL, NULL, &err);
    }
    int code = rc || !n ? fail(&err) : 0;
    qx_gen_destroy(g);
    qx_model_free(m);
    qx_ckpt_close(ck);
    free(ids);
    if (f) {
        fclose(f);
    }
    return code;
}
