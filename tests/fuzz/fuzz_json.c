/* Any JSON text through the pull reader, the tree and the writer: the reader's events, written and read
 * again, are the same events; the tree accepts what the reader accepts and nothing else. */
#include "fuzz.h"

#include "json_doc.h"
#include "json_out.h"
#include "json_pull.h"
#include "utf8.h"

#include <math.h>

/* Copies a text event for event; false when the reader fails. */
static bool rewrite(const char *text, size_t n, bool words, struct qx_json_out *o, size_t *events)
{
    struct qx_json_pull j;
    char *key = NULL;
    bool nul = false, ok = true;
    qx_json_out_init(o, false);
    qx_json_pull_init(&j, text, n);
    j.allow_nonfinite = words;
    *events = 0;
    for (enum qx_json_type t = qx_json_next(&j); t != QX_JSON_END; t = qx_json_next(&j)) {
        if (t == QX_JSON_ERROR) {
            CHECK(j.err.kind && j.err.msg[0] && j.err.off <= n);
            CHECK(qx_json_next(&j) == QX_JSON_ERROR);
            ok = false;
            break;
        }
        ++*events;
        CHECK(j.off < n && j.depth <= QX_JSON_MAX_DEPTH);
        if (t == QX_JSON_KEY || t == QX_JSON_STRING) {
            CHECK(qx_utf8_valid(j.text.p, j.text.n));
        }
        switch (t) {
        case QX_JSON_KEY:
            free(key);
            key = fuzz_copy((const uint8_t *)j.text.p, j.text.n + 0);
            key = realloc(key, j.text.n + 1);
            CHECK(key);
            key[j.text.n] = '\0';
            nul |= memchr(j.text.p, 0, j.text.n) != NULL;
            continue;
        case QX_JSON_OBJECT:
            qx_json_obj(o, key);
            break;
        case QX_JSON_ARRAY:
            qx_json_arr(o, key);
            break;
        case QX_JSON_OBJECT_END:
            qx_json_obj_end(o);
            break;
        case QX_JSON_ARRAY_END:
            qx_json_arr_end(o);
            break;
        case QX_JSON_STRING:
            qx_json_strn(o, key, j.text.p, j.text.n);
            break;
        case QX_JSON_NUMBER:
            if (j.is_int && j.negative && j.int_value) { /* -0 is no integer that could be written */
                qx_json_i64(o, key, j.int_value);
            } else if (j.is_int && !j.negative) {
                qx_json_u64(o, key, j.uint_value);
            } else if (isfinite(j.f64)) {
                qx_json_f64(o, key, j.f64);
            } else {
                CHECK(j.is_nonfinite);
                qx_json_str(o, key, "no number");
            }
            break;
        case QX_JSON_TRUE:
        case QX_JSON_FALSE:
            qx_json_bool(o, key, t == QX_JSON_TRUE);
            break;
        default:
            qx_json_null(o, key);
        }
        free(key);
        key = NULL;
    }
    free(key);
    qx_json_pull_fini(&j);
    if (nul) {
        *events = 0; /* the writer's keys are C strings: do not compare */
    }
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    char *text = fuzz_copy(data, size);
    struct qx_json_out a, b, c;
    size_t n, m;
    bool strict = rewrite(text, size, false, &a, &n);
    bool words = rewrite(text, size, true, &b, &m);
    CHECK(words || !strict);
    struct qx_json_doc doc;
    struct qx_findings *fs = qx_findings_create();
    struct qx_error err = {0};
    bool tree = qx_json_doc_parse(&doc, text, size, "f", fs, &err) == 0;
    CHECK(tree == words);
    CHECK(tree || (err.kind && strncmp(err.kind, "json-", 5) == 0));
    if (tree) {
        CHECK(qx_json_equal(doc.root, doc.root) || strstr(b.buf.p, "no number"));
        qx_json_doc_fini(&doc);
    }
    qx_findings_destroy(fs);
    if (strict && a.buf.n && !a.buf.failed) {
        CHECK(rewrite(a.buf.p, a.buf.n, false, &c, &m));
        CHECK(n == 0 || (n == m && c.buf.n == a.buf.n && memcmp(c.buf.p, a.buf.p, a.buf.n) == 0));
        qx_json_out_fini(&c);
    }
    qx_json_out_fini(&a);
    qx_json_out_fini(&b);
    free(text);
    CHECK(qx_alloc_live() == live);
    return 0;
}
