/* str.h: byte views, a growing byte buffer, and escaping for display. */
#ifndef QX_STR_H
#define QX_STR_H

#include "base.h"

struct qx_view { const char *p; size_t n; };

/* A growing buffer. Zeroed is empty. After a failed allocation `failed` is set, further writes do
 * nothing, and the content stays a valid prefix; callers check once at the end. */
struct qx_buf { char *p; size_t n, cap; bool failed; };
void qx_buf_fini(struct qx_buf *b);
void qx_buf_add(struct qx_buf *b, const void *p, size_t n);
void qx_buf_str(struct qx_buf *b, const char *s);
void qx_buf_chr(struct qx_buf *b, char c);
void qx_buf_fmt(struct qx_buf *b, const char *fmt, ...) QX_PRINTF(2, 3);
/* NUL-terminated content (not counted in n), or NULL when failed. */
const char *qx_buf_cstr(struct qx_buf *b);

/* Appends s with control characters, DEL, C1 controls, invalid UTF-8 and bidi overrides shown as
 * \n, \t, \xNN or \u{N}; printable text is kept. Names and metadata come from strangers. */
void qx_buf_escaped(struct qx_buf *b, const char *s, size_t n);

/* Glob over a whole string: '*' any run (dots too), '?' one character, no brackets, no escapes.
 * Linear backtracking: never exponential. */
bool qx_glob_match(const char *pattern, const char *s);
bool qx_str_starts(const char *s, const char *prefix);
bool qx_str_ends(const char *s, const char *suffix);
/* Edit distance (insert, delete, replace, swap of neighbours) for "did you mean". */
unsigned qx_str_distance(const char *a, const char *b);

#endif
