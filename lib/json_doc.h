/* json_doc.h: a small JSON text (a config) as a tree. Built in one pass over the strict pull
 * reader, so that depth, positions, exact integers and duplicate keys are those of json_pull. Keys
 * keep their order; of equal keys the last wins, as in every JSON library. */
#ifndef QX_JSON_DOC_H
#define QX_JSON_DOC_H

#include "base.h"
#include "error.h"
#include "findings.h"
#include "json_pull.h"

struct qx_json {
    enum qx_json_type type; /* OBJECT, ARRAY, STRING, NUMBER, TRUE, FALSE or NULL */
    const char *key;        /* member of an object, NUL-terminated; NULL in arrays and at the top */
    const char *str;        /* STRING: NUL-terminated, may hold further NULs; NUMBER: its text */
    size_t str_n;
    bool is_int, negative, is_nonfinite, shadowed; /* shadowed: a later equal key wins */
    uint64_t uint_value;
    int64_t int_value;
    double f64;
    uint64_t off; /* byte position in the text */
    const struct qx_json *child, *next;
    size_t n_children;
};

struct qx_json_doc {
    struct qx_arena *arena;
    const struct qx_json *root;
};

/* Parses text. Words NaN and Infinity are accepted as numbers (a note json-nonfinite each).
 * Duplicate keys: finding json-duplicate-key, error when the values differ, else note. fs may be
 * NULL. Errors (QX_E_FORMAT): json-syntax, json-utf8, json-too-deep, json-bom, with file, line and
 * column. */
int qx_json_doc_parse(struct qx_json_doc *doc, const char *text, size_t n, const char *file,
                      struct qx_findings *fs, struct qx_error *err);
void qx_json_doc_fini(struct qx_json_doc *doc);

/* Member by key, NULL if o is NULL, no object, or lacks it. Linear: for objects of known keys. */
const struct qx_json *qx_json_get(const struct qx_json *o, const char *key);
/* The next member or element that no later equal key shadows; start with NULL. */
const struct qx_json *qx_json_each(const struct qx_json *o, const struct qx_json *prev);
/* "an object", "a string", "a number", ...; "nothing" for NULL. */
const char *qx_json_type_name(const struct qx_json *v);
/* Equality of values; objects by key, whatever the order. */
bool qx_json_equal(const struct qx_json *a, const struct qx_json *b);
/* A short text of the value for messages: scalars as written, containers by kind. */
const char *qx_json_brief(const struct qx_json *v, char out[48]);

#endif
