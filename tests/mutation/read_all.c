/* read_all.c: everything that a reader gets out of a checkpoint, as one line: a hash over the names, types,
 * shapes and decoded f32 values of all tensors and of the n-gram table, and over the constants of its
 * hash. Tensors that cannot be decoded contribute the kind of the error. For the mutation test. */
#include "alloc.h"
#include "ckpt.h"
#include "ple_open.h"
#include "resolve.h"
#include "rows.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

static XXH3_state_t *state;

static void put(const void *p, size_t n)
{
    XXH3_128bits_update(state, p, n);
}

static void put_rows(struct qx_rows *r, int rc, const struct qx_error *err)
{
    if (rc == 0) {
        uint64_t n = qx_rows_count(r), width = qx_rows_width(r);
        float *v = qx_malloc((size_t)(width ? width : 1) * sizeof *v);
        for (uint64_t i = 0; v && i < n; ++i) {
            struct qx_error e = {0};
            if (qx_rows_read(r, &i, 1, QX_ROW_F32, v, &e) != 0) {
                put(e.kind, strlen(e.kind));
            } else {
                put(v, (size_t)width * sizeof *v);
            }
        }
        qx_free(v);
        qx_rows_close(r);
    } else {
        put(err->kind, strlen(err->kind));
    }
}

int main(int argc, char **argv)
{
    struct qx_error err = {0};
    struct qx_ckpt *ck = NULL;
    struct qx_rows *r = NULL;
    struct qx_ple_hash h;
    XXH128_hash_t d;
    int rc;
    if (argc != 2 || qx_ckpt_open(&ck, argv[1], NULL, &err) != 0) {
        printf("unreadable %s\n", err.kind ? err.kind : "");
        return 1;
    }
    state = XXH3_createState();
    XXH3_128bits_reset(state);
    for (size_t i = 0; i < qx_ckpt_n_tensors(ck); ++i) {
        const struct qx_tensor *t = qx_ckpt_tensor(ck, i);
        put(t->name, t->name_len);
        put(&t->dtype, 1);
        put(t->shape, t->n_dims * sizeof *t->shape);
        rc = qx_rows_open_tensor(&r, ck, t->name, &err);
        put_rows(r, rc, &err);
    }
    rc = qx_rows_open_table(&r, ck, &err);
    put_rows(r, rc, &err);
    memset(&h, 0, sizeof h);
    if (qx_ple_hash_open(&h, ck, &err) == 0) {
        put(&h, sizeof h);
    } else {
        put(err.kind, strlen(err.kind));
    }
    d = XXH3_128bits_digest(state);
    printf("%016llx%016llx\n", (unsigned long long)d.high64, (unsigned long long)d.low64);
    XXH3_freeState(state);
    qx_ckpt_close(ck);
    return 0;
}
