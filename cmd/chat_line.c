/* chat_line.c: libedit's own interface (histedit.h), or plain reading. */
#include "chat_line.h"

#include "alloc.h"
#include "qx_build.h"
#include "signals.h"

#include <errno.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>
#if QX_HAVE_EDITLINE
#include <histedit.h>
#endif

struct chat_input {
    const char *prompt;
    bool plain;
#if QX_HAVE_EDITLINE
    EditLine *el;
    History *hist;
    HistEvent ev;
#endif
};

/* One byte of the terminal: 1, 0 at its end, -1 after a signal or a failure. It waits in short pieces, so
 * that a signal that comes just before waiting is noticed too. */
static int read_byte(char *c)
{
    for (;;) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        if (signals_pending()) {
            return -1;
        }
        int r = poll(&p, 1, 100);
        if (r < 0 && errno != EINTR) {
            return -1;
        }
        if (r <= 0) {
            continue;
        }
        ssize_t n = read(STDIN_FILENO, c, 1);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        return n > 0 ? 1 : (int)n;
    }
}

#if QX_HAVE_EDITLINE
/* A whole character for libedit; bytes that begin none are dropped. */
static int read_character(EditLine *el, wchar_t *wc)
{
    mbstate_t part;
    char c;
    int n;
    (void)el;
    memset(&part, 0, sizeof part);
    while ((n = read_byte(&c)) > 0) {
        size_t k = mbrtowc(wc, &c, 1, &part);
        if (k == (size_t)-1) {
            memset(&part, 0, sizeof part);
        } else if (k != (size_t)-2) {
            return 1;
        }
    }
    return n;
}

static char *show_prompt(EditLine *el)
{
    struct chat_input *in = NULL;
    el_get(el, EL_CLIENTDATA, &in);
    return (char *)(uintptr_t)(in ? in->prompt : "");
}
#endif

struct chat_input *chat_input_open(bool plain)
{
    struct chat_input *in = qx_calloc(1, sizeof *in);
    if (!in) {
        return NULL;
    }
    in->prompt = "";
    in->plain = plain;
#if QX_HAVE_EDITLINE
    if (!plain) {
        /* libedit reads characters by the locale; text here is UTF-8 whatever that says. */
        if (!setlocale(LC_CTYPE, "") || strcmp(nl_langinfo(CODESET), "UTF-8") != 0) {
            setlocale(LC_CTYPE, "C.UTF-8");
        }
        in->el = el_init("qx-run", stdin, stdout, stderr);
        in->hist = history_init();
        if (!in->el || !in->hist) {
            chat_input_close(in);
            return NULL;
        }
        el_set(in->el, EL_CLIENTDATA, in);
        el_set(in->el, EL_PROMPT, show_prompt);
        el_set(in->el, EL_EDITOR, "emacs");
        el_set(in->el, EL_SIGNAL, 0);
        el_set(in->el, EL_GETCFN, read_character);
        history(in->hist, &in->ev, H_SETSIZE, 500);
        el_set(in->el, EL_HIST, history, in->hist);
    }
#endif
    return in;
}

void chat_input_close(struct chat_input *in)
{
    if (!in) {
        return;
    }
#if QX_HAVE_EDITLINE
    if (in->hist) {
        history_end(in->hist);
    }
    if (in->el) {
        el_end(in->el);
    }
#endif
    qx_free(in);
}

static enum chat_line plain_line(const char *prompt, struct qx_buf *out)
{
    fputs(prompt, stdout);
    fflush(stdout);
    for (;;) {
        char c;
        int n = read_byte(&c);
        if (n < 0 && signals_pending()) {
            fputs("\n", stdout);
            return CHAT_LINE_INTERRUPTED;
        }
        if (n <= 0) {
            return out->n ? CHAT_LINE_OK : CHAT_LINE_END;
        }
        if (c == '\n') {
            return CHAT_LINE_OK;
        }
        qx_buf_chr(out, c);
    }
}

enum chat_line chat_input_line(struct chat_input *in, const char *prompt, struct qx_buf *out)
{
    out->n = 0;
#if QX_HAVE_EDITLINE
    if (!in->plain) {
        int n = 0;
        in->prompt = prompt;
        errno = 0;
        const char *s = el_gets(in->el, &n);
        if (!s || n <= 0) {
            if (signals_pending()) {
                fputs("\n", stdout);
                return CHAT_LINE_INTERRUPTED;
            }
            return CHAT_LINE_END;
        }
        size_t len = strlen(s);
        while (len && (s[len - 1] == '\n' || s[len - 1] == '\r')) {
            len--;
        }
        qx_buf_add(out, s, len);
        if (len) {
            history(in->hist, &in->ev, H_ENTER, s);
        }
        return CHAT_LINE_OK;
    }
#endif
    return plain_line(prompt, out);
}
