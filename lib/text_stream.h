/* text_stream.h: from token bytes to what may be shown: stop texts, whole characters, safe terminals. */
#ifndef QX_TEXT_STREAM_H
#define QX_TEXT_STREAM_H

#include "base.h"
#include "str.h"

/* Finds stop texts across pieces. Zeroed (with stops set) is the start. */
struct qx_stop_texts {
    const char *const *v; /* [n], none empty; the caller's */
    size_t n;
    struct qx_buf held;   /* could still be the beginning of one */
    bool stopped;
};
/* Appends to out what is now certain to be text. Returns true once a stop text has been met: what came
 * before it is in out, it and what follows is dropped. */
bool qx_stop_texts_push(struct qx_stop_texts *s, const char *p, size_t n, struct qx_buf *out);
/* Appends what is still held. */
void qx_stop_texts_end(struct qx_stop_texts *s, struct qx_buf *out);
void qx_stop_texts_fini(struct qx_stop_texts *s);

/* Joins pieces to whole characters, keeping at most three bytes back. With `terminal` set, bytes that
 * can never be valid become U+FFFD, escape sequences and control characters other than newline and tab
 * are dropped; else every byte passes. Zeroed is the start. */
struct qx_text_stream {
    bool terminal;
    char held[4];
    uint8_t n_held;
    uint8_t escape; /* where in an escape sequence */
};
void qx_text_stream_push(struct qx_text_stream *s, const char *p, size_t n, struct qx_buf *out);
void qx_text_stream_end(struct qx_text_stream *s, struct qx_buf *out);

/* Standard base64 with padding. */
void qx_buf_base64(struct qx_buf *b, const void *p, size_t n);

#endif
