/* num.c: owns nothing; strict text to number and back. Never depends on the process locale. */
#include "num.h"

#include "alloc.h"

#include <errno.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool qx_parse_u64(const char *s, size_t n, uint64_t *out)
{
    uint64_t v = 0;
    if (n == 0) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (s[i] < '0' || s[i] > '9' || !qx_mul_u64(v, 10, &v) ||
            !qx_add_u64(v, (uint64_t)(s[i] - '0'), &v)) {
            return false;
        }
    }
    *out = v;
    return true;
}

bool qx_parse_i64(const char *s, size_t n, int64_t *out)
{
    uint64_t v;
    bool minus = n > 0 && s[0] == '-';
    if (!qx_parse_u64(s + minus, n - minus, &v) || v > (uint64_t)INT64_MAX + minus) {
        return false;
    }
    *out = minus ? (int64_t)(0 - v) : (int64_t)v;
    return true;
}

bool qx_parse_f64(const char *s, size_t n, double *out)
{
    char text[512];
    if (n == 0 || n >= sizeof text || !memchr("+-.0123456789", s[0], 13)) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '\0' || !strchr("+-.eE0123456789", s[i])) { /* no hexadecimal, no words */
            return false;
        }
    }
    memcpy(text, s, n);
    text[n] = '\0';
    /* glibc hands out a constant object for "C": nothing to free. */
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c_locale) {
        return false;
    }
    char *end;
    double v = strtod_l(text, &end, c_locale);
    freelocale(c_locale);
    if (end != text + n || !isfinite(v)) {
        return false;
    }
    *out = v;
    return true;
}

int qx_parse_size(const char *s, uint64_t *out, struct qx_error *err)
{
    size_t digits = strspn(s, "0123456789");
    const char *unit = s + digits;
    uint64_t v;
    if (digits == 0) {
        return qx_fail(err, QX_E_USAGE, "usage", "'%s' is not a size: write 4096, 64KiB or 2GiB", s);
    }
    if (!qx_parse_u64(s, digits, &v)) {
        return qx_fail(err, QX_E_USAGE, "usage", "size '%s' is too large", s);
    }
    static const char letters[] = "KMGTP";
    const char *letter = *unit ? strchr(letters, *unit) : NULL;
    if (*unit && strcmp(unit, "B") != 0) {
        if (letter && strcmp(unit + 1, "B") == 0) {
            return qx_fail(err, QX_E_USAGE, "usage", "size '%s': write %.*s%ciB (powers of 1024)", s,
                           (int)digits, s, *letter);
        }
        if (!letter || (unit[1] && strcmp(unit + 1, "iB") != 0)) {
            return qx_fail(err, QX_E_USAGE, "usage", "'%s' is not a size: write 4096, 64KiB or 2GiB", s);
        }
        for (ptrdiff_t i = 0; i <= letter - letters; i++) {
            if (!qx_mul_u64(v, 1024, &v)) {
                return qx_fail(err, QX_E_USAGE, "usage", "size '%s' is too large", s);
            }
        }
    }
    *out = v;
    return 0;
}

void qx_u64_list_fini(struct qx_u64_list *l)
{
    if (l) {
        qx_free(l->v);
        *l = (struct qx_u64_list){0};
    }
}

/* A range may name a great many numbers: bounds what one short argument can make us hold. */
#define MAX_LIST_ITEMS ((uint64_t)1 << 24) /* 128 MiB */

struct list_builder {
    struct qx_u64_list list;
    size_t cap;
};

static int list_range(struct list_builder *b, uint64_t lo, uint64_t hi, struct qx_error *err)
{
    uint64_t n = hi - lo;
    if (n >= MAX_LIST_ITEMS || b->list.n + n + 1 > MAX_LIST_ITEMS) {
        return qx_fail(err, QX_E_USAGE, "usage", "list holds more than %llu numbers; ask for them in parts",
                       (unsigned long long)MAX_LIST_ITEMS);
    }
    void *p = b->list.v;
    if (!qx_grow(&p, &b->cap, b->list.n + (size_t)n + 1, sizeof *b->list.v)) {
        return qx_fail_nomem(err);
    }
    b->list.v = p;
    for (uint64_t i = 0; i <= n; i++) {
        b->list.v[b->list.n++] = lo + i;
    }
    return 0;
}

static int list_item(struct list_builder *b, const char *s, size_t n, const char *range_kind,
                     bool ranges, struct qx_error *err)
{
    int shown = n > 60 ? 60 : (int)n;
    if (n > 1 && s[0] == '-' && strspn(s + 1, "0123456789") >= n - 1) {
        return qx_fail(err, QX_E_RANGE, range_kind, "%.*s is negative, counts start at 0", shown, s);
    }
    const char *dash = ranges ? memchr(s, '-', n) : NULL;
    uint64_t lo, hi;
    size_t head = dash ? (size_t)(dash - s) : n;
    if (!qx_parse_u64(s, head, &lo)) {
        return qx_fail(err, QX_E_USAGE, "usage", "'%.*s' is not a number%s", shown, s,
                       ranges ? " or a range such as 3-9" : "");
    }
    hi = lo;
    if (dash && !qx_parse_u64(dash + 1, n - head - 1, &hi)) {
        return qx_fail(err, QX_E_USAGE, "usage", "'%.*s' is not a range such as 3-9", shown, s);
    }
    if (hi < lo) {
        return qx_fail(err, QX_E_USAGE, "usage", "range '%.*s' ends before it begins", shown, s);
    }
    return list_range(b, lo, hi, err);
}

static int finish(struct list_builder *b, int rc, struct qx_u64_list *out)
{
    *out = (struct qx_u64_list){0};
    if (rc) {
        qx_free(b->list.v);
        return rc;
    }
    *out = b->list;
    return 0;
}

int qx_parse_list(const char *s, const char *range_kind, struct qx_u64_list *out, struct qx_error *err)
{
    struct list_builder b = {0};
    int rc = 0;
    for (;;) {
        size_t n = strcspn(s, ",");
        rc = list_item(&b, s, n, range_kind, true, err);
        if (rc || !s[n]) {
            break;
        }
        s += n + 1;
    }
    return finish(&b, rc, out);
}

static bool separates(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f' || c == ',';
}

int qx_parse_list_text(const char *s, size_t n, const char *range_kind, struct qx_u64_list *out,
                       struct qx_error *err)
{
    struct list_builder b = {0};
    int rc = 0;
    for (size_t i = 0; i < n && !rc;) {
        if (separates(s[i])) {
            i++;
            continue;
        }
        size_t end = i;
        while (end < n && !separates(s[end])) {
            end++;
        }
        rc = list_item(&b, s + i, end - i, range_kind, true, err);
        i = end;
    }
    return finish(&b, rc, out);
}

const char *qx_size_text(uint64_t bytes, char out[32])
{
    static const char *const unit[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024) {
        snprintf(out, 32, "%u B", (unsigned)bytes);
        return out;
    }
    size_t u = 0;
    double v = (double)bytes / 1024;
    while (v >= 1023.995 && u + 1 < QX_ARRAY_LEN(unit)) {
        v /= 1024;
        u++;
    }
    snprintf(out, 32, "%.2f %s", v, unit[u]);
    return out;
}

const char *qx_count_text(uint64_t n, char out[32])
{
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    int at = 0;
    for (int i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0) {
            out[at++] = ',';
        }
        out[at++] = digits[i];
    }
    out[at] = '\0';
    return out;
}
