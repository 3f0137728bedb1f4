/* fixture.h: reading checkpoints with expected results (tests/data/README.md): npy arrays and
 * expected.json. Test code: a failure ends the test. */
#ifndef QX_TEST_FIXTURE_H
#define QX_TEST_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "qx.h"
#include "rel.h"

/* An array of a .npy file: little-endian f4, f8, i8 or u2, C order. */
struct npy { char type[4]; size_t shape[4], n_dims, n; void *data; };

static inline char *fx_read(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        return NULL;
    }
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    char *p = malloc((size_t)size + 1);
    assert_non_null(p);
    assert_int_equal(fread(p, 1, (size_t)size, f), (size_t)size);
    p[size] = '\0';
    *n = (size_t)size;
    fclose(f);
    return p;
}

static inline bool npy_load(struct npy *a, const char *fmt, ...)
{
    char path[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(path, sizeof path, fmt, ap);
    va_end(ap);
    size_t n;
    char *p = fx_read(path, &n);
    memset(a, 0, sizeof *a);
    if (!p) {
        return false;
    }
    assert_true(n > 10 && memcmp(p, "\x93NUMPY\x01", 7) == 0);
    size_t head = 10 + ((unsigned char)p[8] | (size_t)(unsigned char)p[9] << 8);
    const char *descr = strstr(p + 10, "'<");
    assert_non_null(descr);
    memcpy(a->type, descr + 2, 2);
    char *s = strstr(p + 10, "'shape': (");
    assert_non_null(s);
    s += strlen("'shape': (");
    a->n = 1;
    while (*s != ')') {
        a->shape[a->n_dims] = strtoull(s, &s, 10);
        a->n *= a->shape[a->n_dims++];
        while (*s == ',' || *s == ' ') {
            ++s;
        }
    }
    size_t bytes = a->n * (size_t)(a->type[1] - '0');
    assert_true(head + bytes <= n);
    a->data = malloc(bytes + 1);
    memcpy(a->data, p + head, bytes);
    free(p);
    return true;
}

static inline cJSON *fx_json(const char *path)
{
    size_t n;
    char *p = fx_read(path, &n);
    assert_non_null(p);
    cJSON *j = cJSON_Parse(p);
    assert_non_null(j);
    free(p);
    return j;
}

/* A JSON array of whole numbers as ids; the caller frees. */
static inline uint32_t *fx_ids(const cJSON *list, size_t *n)
{
    *n = (size_t)cJSON_GetArraySize(list);
    uint32_t *ids = malloc((*n + 1) * sizeof *ids);
    size_t i = 0;
    for (const cJSON *e = list->child; e; e = e->next) {
        ids[i++] = (uint32_t)e->valuedouble;
    }
    return ids;
}

static inline size_t fx_argmax(const float *a, size_t n)
{
    size_t b = 0;
    for (size_t i = 1; i < n; ++i) {
        b = a[i] > a[b] ? i : b;
    }
    return b;
}

/* Folders of all fixtures at hand: the micro ones from QX_TEST_DATA, the trained ones from a shared
 * folder beside the repository if there is one (QX_SHARED may name it). Says aloud what is left out. */
static inline size_t fx_folders(char out[16][1024])
{
    static const char *const micro[] = {"bf16", "fp8", "mixed", "nvfp4", "nvfp4-ple"};
    static const char *const trained[] = {"bf16", "mixed", "nvfp4-ple"};
    const char *data = getenv("QX_TEST_DATA"), *shared = getenv("QX_SHARED"), *sample = getenv("QX_SAMPLE");
    size_t n = 0;
    for (size_t i = 0; data && i < 5; ++i) {
        snprintf(out[n++], 1024, "%s/micro/%s", data, micro[i]);
    }
    for (size_t i = 0; i < 3; ++i) {
        char path[1024];
        if (shared) {
            snprintf(path, sizeof path, "%s/fixtures/trained/%s", shared, trained[i]);
        } else if (sample) {
            snprintf(path, sizeof path, "%s/../../shared/fixtures/trained/%s", sample, trained[i]);
        } else {
            continue;
        }
        if (access(path, R_OK) == 0) {
            memcpy(out[n++], path, sizeof path);
        } else {
            print_message("left out: trained/%s is not at %s\n", trained[i], path);
        }
    }
    return n;
}

static inline void fx_ok(int rc, const struct qx_error *err)
{
    if (rc) {
        print_error("%d %s: %s (%s, %s)\n", rc, err->kind, err->msg, err->file, err->tensor);
        fail();
    }
}

/* A checkpoint and a model on it. */
struct fx_model { struct qx_ckpt *ck; struct qx_model *m; struct qx_gen *g; struct qx_model_info info; };

static inline struct fx_model fx_open(const char *path, struct qx_model_opts o)
{
    struct fx_model f = {0};
    struct qx_error err;
    struct qx_open how = QX_OPEN_DEFAULT;
    const char *device = getenv("QX_TEST_DEVICE"); /* tests by hand on a GPU */
    o.device = o.device ? o.device : device ? device : "cpu";
    fx_ok(qx_ckpt_open(&f.ck, path, &how, &err), &err);
    fx_ok(qx_model_load(&f.m, f.ck, &o, &err), &err);
    fx_ok(qx_gen_create(&f.g, f.m, &err), &err);
    qx_model_info(f.m, &f.info);
    return f;
}

static inline void fx_close(struct fx_model *f)
{
    qx_gen_destroy(f->g);
    qx_model_free(f->m);
    qx_ckpt_close(f->ck);
}

#endif
