/* utf8.c: pure functions over bytes. Widths come from utf8proc. */
#include "utf8.h"

#include <utf8proc.h>

int qx_utf8_decode(const char *p, size_t n, uint32_t *cp)
{
    const uint8_t *s = (const uint8_t *)p;
    uint8_t b = s[0];
    if (b < 0x80) {
        *cp = b;
        return 1;
    }
    if (b < 0xc2 || b > 0xf4) {
        return 0;
    }
    int len = b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
    /* The second byte's range also excludes overlong forms, surrogates and what exceeds U+10FFFF. */
    uint8_t lo = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80;
    uint8_t hi = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
    uint32_t v = b & (len == 2 ? 0x1fu : len == 3 ? 0x0fu : 0x07u);
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n) {
            return -1;
        }
        if (s[i] < lo || s[i] > hi) {
            return 0;
        }
        v = v << 6 | (s[i] & 0x3fu);
        lo = 0x80;
        hi = 0xbf;
    }
    *cp = v;
    return len;
}

size_t qx_utf8_encode(uint32_t cp, char out[4])
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

bool qx_utf8_valid(const char *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = qx_utf8_decode(p + i, n - i, &cp);
        if (len <= 0) {
            return false;
        }
        i += (size_t)len;
    }
    return true;
}

size_t qx_utf8_incomplete(const char *p, size_t n)
{
    for (size_t k = 1; k <= 3 && k <= n; k++) {
        uint8_t b = (uint8_t)p[n - k];
        if (b < 0x80) {
            return 0;
        }
        if (b >= 0xc0) {
            uint32_t cp;
            return qx_utf8_decode(p + n - k, k, &cp) == -1 ? k : 0;
        }
    }
    return 0;
}

size_t qx_utf8_width(const char *p, size_t n)
{
    size_t w = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = qx_utf8_decode(p + i, n - i, &cp);
        if (len <= 0) {
            w++;
            i++;
            continue;
        }
        int cw = utf8proc_charwidth((utf8proc_int32_t)cp);
        w += cw > 0 ? (size_t)cw : 0;
        i += (size_t)len;
    }
    return w;
}
