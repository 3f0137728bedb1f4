/* error.c: owns nothing; fills the caller's struct qx_error. */
#include "error.h"
#undef qx_fail
#undef qx_fail_errno
#undef qx_fail_nomem

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void copy_tail(char *dst, size_t cap, const char *s)
{
    size_t n = strlen(s);
    if (n >= cap) {
        s += n - (cap - 1);
    }
    snprintf(dst, cap, "%s", s);
}

static void reset(struct qx_error *err, enum qx_code code, int sys, const char *kind)
{
    err->code = code;
    err->sys = sys;
    err->kind = kind;
    err->file[0] = '\0';
    err->tensor[0] = '\0';
    err->off = QX_NO_OFF;
    err->msg[0] = '\0';
}

int qx_fail(struct qx_error *err, enum qx_code code, const char *kind, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        reset(err, code, 0, kind);
        va_start(ap, fmt);
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
    }
    return -(int)code;
}

int qx_fail_errno(struct qx_error *err, enum qx_code code, int sys, const char *kind, const char *fmt,
                  ...)
{
    if (sys == ENOMEM) {
        code = QX_E_NOMEM;
    } else if (sys == ENOSPC || sys == EDQUOT) {
        code = QX_E_NOSPACE;
    }
    if (err) {
        va_list ap;
        char reason[128];
        reset(err, code, sys, kind);
        va_start(ap, fmt);
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
        size_t n = strlen(err->msg);
        /* the GNU strerror_r: it returns the text, which need not be in the buffer */
        snprintf(err->msg + n, sizeof err->msg - n, ": %s", strerror_r(sys, reason, sizeof reason));
    }
    return -(int)code;
}

int qx_fail_nomem(struct qx_error *err)
{
    return qx_fail(err, QX_E_NOMEM, "out-of-memory", "out of memory");
}

int qx_error_at(struct qx_error *err, const char *file, const char *tensor, uint64_t off)
{
    if (!err) {
        return -(int)QX_E_IO;
    }
    if (file && !err->file[0]) {
        copy_tail(err->file, sizeof err->file, file);
    }
    if (tensor && !err->tensor[0]) {
        copy_tail(err->tensor, sizeof err->tensor, tensor);
    }
    if (off != QX_NO_OFF && err->off == QX_NO_OFF) {
        err->off = off;
    }
    return -(int)err->code;
}

int qx_error_exit_code(const struct qx_error *err)
{
    if (err->code == QX_OK) {
        return 0;
    }
    if (err->code < 10) {
        return 2;
    }
    return err->code < 60 ? 3 : 4;
}
