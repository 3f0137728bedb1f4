/* str.c: owns the growing buffer; everything else is pure. */
#include "str.h"

#include "alloc.h"
#include "utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void qx_buf_fini(struct qx_buf *b)
{
    if (b) {
        qx_free(b->p);
        *b = (struct qx_buf){0};
    }
}

/* Room for n more bytes and a NUL. */
static bool reserve(struct qx_buf *b, size_t n)
{
    size_t need;
    if (b->failed || !qx_add_size(b->n, n, &need) || !qx_add_size(need, 1, &need)) {
        b->failed = true;
        return false;
    }
    void *p = b->p;
    if (!qx_grow(&p, &b->cap, need, 1)) {
        b->failed = true;
        return false;
    }
    b->p = p;
    return true;
}

void qx_buf_add(struct qx_buf *b, const void *p, size_t n)
{
    if (reserve(b, n) && n) {
        memcpy(b->p + b->n, p, n);
        b->n += n;
    }
}

void qx_buf_str(struct qx_buf *b, const char *s)
{
    qx_buf_add(b, s, strlen(s));
}

void qx_buf_chr(struct qx_buf *b, char c)
{
    if (b->n + 1 < b->cap && !b->failed) {
        b->p[b->n++] = c;
        return;
    }
    qx_buf_add(b, &c, 1);
}

void qx_buf_fmt(struct qx_buf *b, const char *fmt, ...)
{
    va_list ap, again;
    char small[256];
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(small, sizeof small, fmt, ap);
    va_end(ap);
    if (n < 0) {
        b->failed = true;
    } else if ((size_t)n < sizeof small) {
        qx_buf_add(b, small, (size_t)n);
    } else if (reserve(b, (size_t)n)) {
        vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
}

const char *qx_buf_cstr(struct qx_buf *b)
{
    if (!reserve(b, 0)) {
        return NULL;
    }
    b->p[b->n] = '\0';
    return b->p;
}

static bool changes_direction_or_hides(uint32_t cp)
{
    return (cp >= 0x80 && cp <= 0x9f) || cp == 0x200e || cp == 0x200f || cp == 0x061c ||
           (cp >= 0x202a && cp <= 0x202e) || (cp >= 0x2066 && cp <= 0x2069) || cp == 0x2028 ||
           cp == 0x2029 || cp == 0xfeff;
}

void qx_buf_escaped(struct qx_buf *b, const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        uint32_t cp;
        int len = qx_utf8_decode(s + i, n - i, &cp);
        if (c == '\n') {
            qx_buf_str(b, "\\n");
        } else if (c == '\t') {
            qx_buf_str(b, "\\t");
        } else if (c == '\r') {
            qx_buf_str(b, "\\r");
        } else if (len <= 0 || c < 0x20 || c == 0x7f) {
            qx_buf_fmt(b, "\\x%02x", c);
            len = 1;
        } else if (changes_direction_or_hides(cp)) {
            qx_buf_fmt(b, "\\u{%x}", (unsigned)cp);
        } else {
            qx_buf_add(b, s + i, (size_t)len);
        }
        i += (size_t)len;
    }
}

bool qx_glob_match(const char *pattern, const char *s)
{
    /* Only the last '*' is ever retried: what an earlier one took can only grow by giving way to it. */
    const char *star = NULL, *resume = NULL;
    while (*s) {
        if (*pattern == '*') {
            star = pattern++;
            resume = s;
        } else if (*pattern == '?' || *pattern == *s) {
            if (*pattern == '?') { /* one character, not one byte */
                uint32_t cp;
                int len = qx_utf8_decode(s, strnlen(s, 4), &cp);
                s += len > 0 ? len : 1;
            } else {
                s++;
            }
            pattern++;
        } else if (star) {
            pattern = star + 1;
            s = ++resume;
        } else {
            return false;
        }
    }
    while (*pattern == '*') {
        pattern++;
    }
    return *pattern == '\0';
}

bool qx_str_starts(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

bool qx_str_ends(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && memcmp(s + n - m, suffix, m) == 0;
}

unsigned qx_str_distance(const char *a, const char *b)
{
    enum { MOST = 64 }; /* option and command names; longer strings are simply "far" */
    size_t n = strlen(a), m = strlen(b);
    if (n > MOST || m > MOST) {
        return strcmp(a, b) == 0 ? 0 : MOST;
    }
    unsigned row[3][MOST + 1];
    for (size_t j = 0; j <= m; j++) {
        row[0][j] = (unsigned)j;
    }
    for (size_t i = 1; i <= n; i++) {
        unsigned *cur = row[i % 3], *one = row[(i + 2) % 3], *two = row[(i + 1) % 3];
        cur[0] = (unsigned)i;
        for (size_t j = 1; j <= m; j++) {
            unsigned best = one[j - 1] + (a[i - 1] != b[j - 1]);
            best = one[j] + 1 < best ? one[j] + 1 : best;
            best = cur[j - 1] + 1 < best ? cur[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                two[j - 2] + 1 < best) {
                best = two[j - 2] + 1;
            }
            cur[j] = best;
        }
    }
    return row[n % 3][m];
}
