/* json_pull.h: a strict pull reader over one JSON text in memory (RFC 8259, UTF-8 only).
 *
 * Exact 64-bit integers, byte positions, a depth limit, no recursion, no allocation but for strings
 * with escapes. Duplicate keys are the caller's to see: it gets every key in order.
 * A byte-order mark is an error of its own kind (json-bom). */
#ifndef QX_JSON_PULL_H
#define QX_JSON_PULL_H

#include "base.h"
#include "error.h"
#include "str.h"

#define QX_JSON_MAX_DEPTH 128

enum qx_json_type {
    QX_JSON_END = 0, /* after the top-level value and trailing white space */
    QX_JSON_OBJECT, QX_JSON_OBJECT_END, QX_JSON_ARRAY, QX_JSON_ARRAY_END,
    QX_JSON_KEY, QX_JSON_STRING, QX_JSON_NUMBER, QX_JSON_TRUE, QX_JSON_FALSE, QX_JSON_NULL,
    QX_JSON_ERROR
};

struct qx_json_pull {
    const char *p, *end, *begin;
    uint32_t depth;
    bool allow_nonfinite;   /* accept NaN, Infinity, -Infinity as numbers (configs) */
    enum qx_json_type type; /* of the current event */
    /* KEY, STRING: decoded bytes, valid until the next event. NUMBER: its text. */
    struct qx_view text;
    bool is_int;            /* NUMBER without '.', 'e', that fits int64 or uint64 */
    bool negative;
    bool is_nonfinite;
    uint64_t uint_value;    /* NUMBER, is_int && !negative */
    int64_t int_value;      /* NUMBER, is_int and fits int64 */
    double f64;             /* NUMBER */
    uint64_t off;           /* byte position of the current event from the start of the text */
    struct qx_buf scratch;
    uint64_t is_array[QX_JSON_MAX_DEPTH / 64]; /* a bit per open container */
    uint8_t state;
    struct qx_error err;    /* set on QX_JSON_ERROR: kind one of json-syntax, json-utf8, json-too-deep,
                               json-bom; off is the position in the text */
};

/* The text stays the caller's and must outlive the reader. */
void qx_json_pull_init(struct qx_json_pull *j, const char *text, size_t n);
void qx_json_pull_fini(struct qx_json_pull *j);
enum qx_json_type qx_json_next(struct qx_json_pull *j);
/* After OBJECT or ARRAY or KEY: skips to the end of that value (for KEY: of its value). Returns false
 * on error. After a scalar does nothing. */
bool qx_json_skip(struct qx_json_pull *j);
/* 1-based line and column of a byte position. */
void qx_json_line_col(const char *text, size_t n, uint64_t off, uint64_t *line, uint64_t *col);

#endif
