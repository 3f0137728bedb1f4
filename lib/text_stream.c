/* text_stream.c: small state machines over bytes; no allocation but in the caller's buffers. */
#include "text_stream.h"

#include "utf8.h"

#include <string.h>

/* ---- stop texts ---------------------------------------------------------------------------------- */

/* Start of the first stop text in p, n if there is none. */
static size_t find_stop(const struct qx_stop_texts *s, const char *p, size_t n)
{
    size_t best = n;
    for (size_t i = 0; i < s->n; i++) {
        const char *hit = n ? memmem(p, n, s->v[i], strlen(s->v[i])) : NULL;
        if (hit && (size_t)(hit - p) < best) {
            best = (size_t)(hit - p);
        }
    }
    return best;
}

/* Length of the longest end of p that begins a stop text. */
static size_t open_end(const struct qx_stop_texts *s, const char *p, size_t n)
{
    size_t best = 0;
    for (size_t i = 0; i < s->n; i++) {
        size_t len = strlen(s->v[i]), k = len - 1 < n ? len - 1 : n;
        for (; k > best; k--) {
            if (!memcmp(p + n - k, s->v[i], k)) {
                best = k;
            }
        }
    }
    return best;
}

bool qx_stop_texts_push(struct qx_stop_texts *s, const char *p, size_t n, struct qx_buf *out)
{
    if (s->stopped) {
        return true;
    }
    if (s->n == 0) {
        qx_buf_add(out, p, n);
        return false;
    }
    qx_buf_add(&s->held, p, n);
    size_t at = find_stop(s, s->held.p, s->held.n);
    if (at < s->held.n) {
        qx_buf_add(out, s->held.p, at);
        s->held.n = 0;
        s->stopped = true;
        return true;
    }
    size_t keep = open_end(s, s->held.p, s->held.n), emit = s->held.n - keep;
    qx_buf_add(out, s->held.p, emit);
    if (keep) {
        memmove(s->held.p, s->held.p + emit, keep);
    }
    s->held.n = keep;
    return false;
}

void qx_stop_texts_end(struct qx_stop_texts *s, struct qx_buf *out)
{
    qx_buf_add(out, s->held.p, s->held.n);
    s->held.n = 0;
}

void qx_stop_texts_fini(struct qx_stop_texts *s)
{
    qx_buf_fini(&s->held);
    s->stopped = false;
}

/* ---- characters ------------------------------------------------------------------------------------ */

enum { E_NONE, E_ESC, E_CSI, E_STRING, E_STRING_ESC };

/* True when the character is part of an escape sequence or a control that a terminal would act on. */
static bool swallowed(struct qx_text_stream *s, uint32_t c)
{
    switch (s->escape) {
    case E_ESC:
        s->escape = c == '[' ? E_CSI
                    : c == ']' || c == 'P' || c == 'X' || c == '^' || c == '_' ? E_STRING
                    : c >= 0x20 && c <= 0x2f ? E_ESC /* intermediate bytes */
                                             : E_NONE;
        return true;
    case E_CSI:
        if (c == '\n' || c >= 0x80) { /* no sequence after all */
            s->escape = E_NONE;
            break;
        }
        s->escape = c >= 0x40 && c <= 0x7e ? E_NONE : E_CSI;
        return true;
    case E_STRING:
        if (c == '\n') {
            s->escape = E_NONE;
            break;
        }
        s->escape = c == 0x07 || c == 0x9c ? E_NONE : c == 0x1b ? E_STRING_ESC : E_STRING;
        return true;
    case E_STRING_ESC:
        s->escape = c == '\\' ? E_NONE : E_STRING;
        return true;
    default:
        break;
    }
    if (c == 0x1b) {
        s->escape = E_ESC;
        return true;
    }
    if (c == 0x9b) {
        s->escape = E_CSI;
        return true;
    }
    return (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7f && c <= 0x9f);
}

static void emit(struct qx_text_stream *s, const char *p, size_t n, uint32_t c, struct qx_buf *out)
{
    if (!s->terminal || !swallowed(s, c)) {
        qx_buf_add(out, p, n);
    }
}

static void invalid(struct qx_text_stream *s, const char *p, size_t n, struct qx_buf *out)
{
    if (s->terminal) {
        qx_buf_str(out, "\xef\xbf\xbd");
    } else {
        qx_buf_add(out, p, n);
    }
}

void qx_text_stream_push(struct qx_text_stream *s, const char *p, size_t n, struct qx_buf *out)
{
    for (size_t i = 0; i < n;) {
        uint32_t c;
        int len;
        if (s->n_held) {
            s->held[s->n_held++] = p[i];
            len = qx_utf8_decode(s->held, s->n_held, &c);
            if (len > 0) {
                emit(s, s->held, s->n_held, c, out);
                s->n_held = 0;
                i++;
            } else if (len == 0) { /* the new byte does not continue: it is looked at again */
                invalid(s, s->held, (size_t)s->n_held - 1, out);
                s->n_held = 0;
            } else {
                i++;
            }
            continue;
        }
        len = qx_utf8_decode(p + i, n - i, &c);
        if (len > 0) {
            emit(s, p + i, (size_t)len, c, out);
            i += (size_t)len;
        } else if (len == 0) { /* as much as began a character counts as one, as when it comes in pieces */
            size_t k = 1;
            while (k < n - i && qx_utf8_decode(p + i, k + 1, &c) < 0) {
                k++;
            }
            k = qx_utf8_decode(p + i, 1, &c) < 0 ? k : 1;
            invalid(s, p + i, k, out);
            i += k;
        } else {
            s->n_held = (uint8_t)(n - i);
            memcpy(s->held, p + i, n - i);
            i = n;
        }
    }
}

void qx_text_stream_end(struct qx_text_stream *s, struct qx_buf *out)
{
    if (s->n_held) {
        invalid(s, s->held, s->n_held, out);
        s->n_held = 0;
    }
}

void qx_buf_base64(struct qx_buf *b, const void *p, size_t n)
{
    static const char code[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *s = p;
    for (size_t i = 0; i < n; i += 3) {
        uint32_t v = (uint32_t)s[i] << 16 | (i + 1 < n ? (uint32_t)s[i + 1] << 8 : 0) |
                     (i + 2 < n ? s[i + 2] : 0u);
        qx_buf_chr(b, code[v >> 18]);
        qx_buf_chr(b, code[v >> 12 & 63]);
        qx_buf_chr(b, i + 1 < n ? code[v >> 6 & 63] : '=');
        qx_buf_chr(b, i + 2 < n ? code[v & 63] : '=');
    }
}
