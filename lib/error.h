/* error.h: setting and extending struct qx_error (qx.h). The lowest layer that knows the cause calls
 * qx_fail; upper layers only add place. All accept err == NULL and return the negative code. */
#ifndef QX_ERROR_H
#define QX_ERROR_H

#include "base.h"
#include "qx.h"

/* Sets code, kind, formatted message; clears place. Returns -code. */
int qx_fail(struct qx_error *err, enum qx_code code, const char *kind, const char *fmt, ...)
    QX_PRINTF(4, 5);
/* The same from an errno value: appends ": strerror" and sets sys. ENOMEM, ENOSPC, EDQUOT map to the
 * resource family whatever `code` says. */
int qx_fail_errno(struct qx_error *err, enum qx_code code, int sys, const char *kind, const char *fmt,
                  ...) QX_PRINTF(5, 6);
int qx_fail_nomem(struct qx_error *err);
#ifdef __clang_analyzer__
/* It sees one file at a time: without this it goes on with a failure that returned 0. */
#define qx_fail(...) ((void)qx_fail(__VA_ARGS__), -1)
#define qx_fail_errno(...) ((void)qx_fail_errno(__VA_ARGS__), -1)
#define qx_fail_nomem(err) ((void)qx_fail_nomem(err), -1)
#endif
/* Adds place where none is set yet. NULL or QX_NO_OFF leave a part alone. Returns -err->code. */
int qx_error_at(struct qx_error *err, const char *file, const char *tensor, uint64_t off);
/* Exit code of a program for this error: 2, 3 or 4 (0 for QX_OK). */
int qx_error_exit_code(const struct qx_error *err);

#endif
