/* utf8.h: strict UTF-8 (no surrogates, no overlong forms, at most U+10FFFF) and widths on a terminal. */
#ifndef QX_UTF8_H
#define QX_UTF8_H

#include "base.h"

/* Decodes the character at p (n > 0 bytes there). Returns its length 1..4 and sets *cp; 0 when the
 * bytes can never begin a character; -1 when they are the beginning of one that is not complete. */
int qx_utf8_decode(const char *p, size_t n, uint32_t *cp);
/* Writes the 1..4 bytes of a code point; returns their number. cp must be valid. */
size_t qx_utf8_encode(uint32_t cp, char out[4]);
bool qx_utf8_valid(const char *p, size_t n);
/* Number of bytes (0..3) at the end of p that begin a character without completing it. */
size_t qx_utf8_incomplete(const char *p, size_t n);
/* Columns that the text takes on a terminal; invalid bytes count one each, controls none. */
size_t qx_utf8_width(const char *p, size_t n);

#endif
