/* tok_split.c: the split expression of model 12 as a hand-written matcher:
 *
 *   (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+ | \p{N}
 *   | ?[^\s\p{L}\p{M}\p{N}]+[\r\n]* | \s*[\r\n]+ | \s+(?!\S) | \s+
 *
 * Every character is a letter, mark, number, space or something else, so some alternative always
 * matches, and each is decided by one look at the run of equal classes that follows. */
#include "tok.h"

#include "utf8.h"

#include <utf8proc.h>

enum cls { C_OTHER, C_LETTER, C_MARK, C_NUMBER, C_SPACE };

static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
           c == 0x3000;
}

static enum cls class_of(uint32_t c)
{
    if (c < 0x80) {
        if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') {
            return C_LETTER;
        }
        return c >= '0' && c <= '9' ? C_NUMBER : is_space(c) ? C_SPACE : C_OTHER;
    }
    if (is_space(c)) {
        return C_SPACE;
    }
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
        return C_LETTER;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
        return C_MARK;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        return C_NUMBER;
    default:
        return C_OTHER;
    }
}

/* The character at p and its class; returns its length, 0 at the end. */
static size_t next_char(const char *p, size_t n, uint32_t *c, enum cls *k)
{
    if (n == 0) {
        return 0;
    }
    int len = qx_utf8_decode(p, n, c);
    if (len <= 0) { /* not valid UTF-8 after all: one byte of its own */
        *c = 0xfffd;
        *k = C_OTHER;
        return 1;
    }
    *k = class_of(*c);
    return (size_t)len;
}

/* Length of the contraction at p, 0 if none. U+017F folds to 's'. */
static size_t contraction(const char *p, size_t n)
{
    if (n < 2 || p[0] != '\'') {
        return 0;
    }
    char a = (char)(p[1] | 0x20);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return 2;
    }
    if (n >= 3) {
        char b = (char)(p[2] | 0x20);
        if (((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l')) {
            return 3;
        }
        if ((uint8_t)p[1] == 0xc5 && (uint8_t)p[2] == 0xbf) {
            return 3;
        }
    }
    return 0;
}

static size_t run_of(const char *p, size_t n, size_t at, enum cls a, enum cls b)
{
    uint32_t c;
    enum cls k;
    for (size_t len; (len = next_char(p + at, n - at, &c, &k)) > 0 && (k == a || k == b);) {
        at += len;
    }
    return at;
}

/* A run of white space of n bytes at most: alternatives 5 to 7. */
static size_t spaces(const char *p, size_t n)
{
    size_t at = 0, last = 0, after_newline = 0;
    uint32_t c;
    enum cls k;
    for (size_t len; (len = next_char(p + at, n - at, &c, &k)) > 0 && k == C_SPACE;) {
        last = at;
        at += len;
        if (c == '\r' || c == '\n') {
            after_newline = at;
        }
    }
    if (after_newline) {
        return after_newline;
    }
    /* Text follows: the last space stays for the next piece, unless it is the only one. */
    return at < n && last > 0 ? last : at;
}

size_t qx_tok_split(const char *p, size_t n)
{
    uint32_t c, c2;
    enum cls k, k2;
    size_t len = next_char(p, n, &c, &k), len2, at;
    if (len == 0) {
        return 0;
    }
    at = contraction(p, n);
    if (at) {
        return at;
    }
    if (k == C_LETTER || k == C_MARK) {
        return run_of(p, n, len, C_LETTER, C_MARK);
    }
    if (k == C_NUMBER) {
        return len;
    }
    len2 = next_char(p + len, n - len, &c2, &k2);
    if (c != '\r' && c != '\n' && len2 && (k2 == C_LETTER || k2 == C_MARK)) {
        return run_of(p, n, len + len2, C_LETTER, C_MARK);
    }
    if (k == C_OTHER || (c == ' ' && len2 && k2 == C_OTHER)) {
        at = run_of(p, n, len, C_OTHER, C_OTHER);
        while (at < n && (p[at] == '\r' || p[at] == '\n')) {
            at++;
        }
        return at;
    }
    return spaces(p, n);
}
