/* inspect_diff.c: what differs between two checkpoints, tensor by tensor and setting by setting;
 * with values, byte by byte. Both lists of tensors are sorted, so one walk over both suffices. */
#include "alloc.h"
#include "ckpt.h"
#include "findings.h"
#include "json_doc.h"
#include "layout.h"
#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PIECE (1u << 20)

struct differ {
    const struct qx_ckpt *a, *b;
    struct qx_findings *fs;
    uint8_t *x, *y; /* PIECE bytes each, when values are compared */
};

static void only_in(struct differ *d, const struct qx_tensor *t, bool in_a)
{
    char shape[96];
    char what[128];
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): one of the two is there */
    snprintf(what, sizeof what, "%s %s", qx_dtype_name((enum qx_dtype)t->dtype),
             qx_shape_text(t->shape, t->n_dims, shape));
    qx_findings_add(d->fs,
                    &QX_REPORT(in_a ? "diff-removed" : "diff-added", QX_NOTE, .tensor = t->name,
                               .expected = in_a ? what : NULL, .found = in_a ? NULL : what,
                               .text = in_a ? "only in the first checkpoint"
                                            : "only in the second checkpoint"));
}

static int compare_values(struct differ *d, const struct qx_tensor *s, const struct qx_tensor *t,
                          struct qx_error *err)
{
    uint64_t n_diff = 0;
    uint64_t first = 0;
    for (uint64_t off = 0; off < s->size_bytes; off += PIECE) {
        uint64_t n = s->size_bytes - off < PIECE ? s->size_bytes - off : PIECE;
        int rc = qx_ckpt_read(d->a, s, off, d->x, n, err);
        rc = rc ? rc : qx_ckpt_read(d->b, t, off, d->y, n, err);
        if (rc) {
            return rc;
        }
        if (memcmp(d->x, d->y, n) == 0) {
            continue;
        }
        for (uint64_t i = 0; i < n; i++) {
            if (d->x[i] != d->y[i]) {
                first = n_diff ? first : off + i;
                n_diff++;
            }
        }
    }
    if (n_diff) {
        char found[64];
        char text[160];
        snprintf(found, sizeof found, "%" PRIu64 " of %" PRIu64 " bytes", n_diff, s->size_bytes);
        snprintf(text, sizeof text, "%s differ, the first at byte %" PRIu64 " of the tensor", found,
                 first);
        struct qx_report r =
            QX_REPORT("diff-values", QX_NOTE, .tensor = s->name, .found = found, .text = text);
        r.off = first;
        qx_findings_add(d->fs, &r);
    }
    return 0;
}

static int compare_tensor(struct differ *d, const struct qx_tensor *s, const struct qx_tensor *t,
                          struct qx_error *err)
{
    char x[96];
    char y[96];
    bool shape = s->n_dims == t->n_dims;
    for (unsigned i = 0; shape && i < s->n_dims; i++) {
        shape = s->shape[i] == t->shape[i];
    }
    if (s->dtype != t->dtype) {
        qx_findings_add(d->fs, &QX_REPORT("diff-dtype", QX_NOTE, .tensor = s->name,
                                          .expected = qx_dtype_name((enum qx_dtype)s->dtype),
                                          .found = qx_dtype_name((enum qx_dtype)t->dtype),
                                          .text = "the dtypes differ"));
    }
    if (!shape) {
        qx_findings_add(d->fs, &QX_REPORT("diff-shape", QX_NOTE, .tensor = s->name,
                                          .expected = qx_shape_text(s->shape, s->n_dims, x),
                                          .found = qx_shape_text(t->shape, t->n_dims, y),
                                          .text = "the shapes differ"));
    }
    if (s->dtype != t->dtype || !shape || !d->x) {
        return 0;
    }
    if (!s->readable || !t->readable) {
        qx_findings_add(d->fs, &QX_REPORT("diff-values", QX_NOTE, .tensor = s->name,
                                          .text = "one of the two cannot be read whole"));
        return 0;
    }
    return compare_values(d, s, t, err);
}

static void config_differs(struct differ *d, const char *path, const struct qx_json *a,
                           const struct qx_json *b)
{
    char x[48];
    char y[48];
    qx_findings_add(d->fs, &QX_REPORT("diff-config", QX_NOTE, .file = "config.json", .key = path,
                                      .expected = a ? qx_json_brief(a, x) : NULL,
                                      .found = b ? qx_json_brief(b, y) : NULL,
                                      .text = !a   ? "only in the second configuration"
                                              : !b ? "only in the first configuration"
                                                   : "the settings differ"));
}

static void compare_json(struct differ *d, struct qx_buf *path, const struct qx_json *a,
                         const struct qx_json *b)
{
    size_t mark = path->n;
    if (qx_json_equal(a, b)) {
        return;
    }
    if (!a || !b || a->type != QX_JSON_OBJECT || b->type != QX_JSON_OBJECT) {
        const char *p = qx_buf_cstr(path);
        config_differs(d, p ? p : "", a, b);
        return;
    }
    for (int side = 0; side < 2; side++) {
        const struct qx_json *o = side ? b : a;
        for (const struct qx_json *v = qx_json_each(o, NULL); v; v = qx_json_each(o, v)) {
            const struct qx_json *w = qx_json_get(side ? a : b, v->key);
            if (side && w) {
                continue;
            }
            qx_buf_str(path, mark ? "." : "");
            qx_buf_str(path, v->key);
            compare_json(d, path, side ? NULL : v, side ? v : w);
            path->n = path->failed ? path->n : mark;
        }
    }
}

static int compare_configs(struct differ *d, struct qx_error *err)
{
    const struct qx_blob *a = qx_ckpt_config_text(d->a);
    const struct qx_blob *b = qx_ckpt_config_text(d->b);
    struct qx_json_doc x;
    struct qx_json_doc y;
    struct qx_buf path = {0};
    if (!a->present || !b->present) {
        if (a->present != b->present) {
            qx_findings_add(d->fs,
                            &QX_REPORT("diff-config", QX_NOTE, .file = "config.json",
                                       .text = a->present ? "only the first has a configuration"
                                                          : "only the second has a configuration"));
        }
        return 0;
    }
    if (a->n == b->n && memcmp(a->text, b->text, a->n) == 0) {
        return 0;
    }
    int rc = qx_json_doc_parse(&x, a->text, a->n, "config.json", NULL, err);
    if (rc) {
        return rc;
    }
    rc = qx_json_doc_parse(&y, b->text, b->n, "config.json", NULL, err);
    if (!rc) {
        compare_json(d, &path, x.root, y.root);
        qx_json_doc_fini(&y);
    }
    qx_json_doc_fini(&x);
    qx_buf_fini(&path);
    return rc;
}

int qx_ckpt_diff(struct qx_findings **out, const struct qx_ckpt *a, const struct qx_ckpt *b,
                 bool with_values, struct qx_error *err)
{
    struct differ d = {.a = a, .b = b, .fs = qx_findings_create()};
    int rc = d.fs ? 0 : qx_fail_nomem(err);
    *out = NULL;
    if (!rc && with_values) {
        d.x = qx_malloc(PIECE);
        d.y = qx_malloc(PIECE);
        rc = d.x && d.y ? 0 : qx_fail_nomem(err);
    }
    size_t i = 0;
    size_t k = 0;
    while (!rc && (i < qx_ckpt_n_tensors(a) || k < qx_ckpt_n_tensors(b))) {
        const struct qx_tensor *s = i < qx_ckpt_n_tensors(a) ? qx_ckpt_tensor(a, i) : NULL;
        const struct qx_tensor *t = k < qx_ckpt_n_tensors(b) ? qx_ckpt_tensor(b, k) : NULL;
        int c = !s ? 1 : !t ? -1 : strcmp(s->name, t->name);
        if (c < 0) {
            only_in(&d, s, true);
            i++;
        } else if (c > 0) {
            only_in(&d, t, false);
            k++;
        } else {
            rc = compare_tensor(&d, s, t, err);
            i++;
            k++;
        }
    }
    rc = rc ? rc : compare_configs(&d, err);
    if (!rc && qx_findings_failed(d.fs)) {
        rc = qx_fail_nomem(err);
    }
    qx_free(d.x);
    qx_free(d.y);
    if (rc) {
        qx_findings_destroy(d.fs);
        return rc;
    }
    qx_findings_sort(d.fs);
    *out = d.fs;
    return 0;
}

void qx_findings_free(struct qx_findings *fs)
{
    qx_findings_destroy(fs);
}
