/* ui.c: owns the two output streams: what failed on stdout, and the transient line on stderr. */
#include "ui.h"

#include "signals.h"

#include "exit_code.h"
#include "str.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int out_errno; /* first failure of stdout, 0 if none */
static pthread_mutex_t err_lock = PTHREAD_MUTEX_INITIALIZER;
static bool status_shown;

static bool is_tty(int fd, const char *fake, const char *word)
{
    return isatty(fd) || (fake && strstr(fake, word));
}

static unsigned columns(int fd)
{
    struct winsize w;
    const char *env = getenv("COLUMNS");
    uint64_t n;
    if (ioctl(fd, TIOCGWINSZ, &w) == 0 && w.ws_col > 0) {
        return w.ws_col;
    }
    if (env && qx_parse_u64(env, strlen(env), &n) && n > 0 && n < 10000) {
        return (unsigned)n;
    }
    return 80;
}

static bool pick(const char *when, bool automatic)
{
    if (when && !strcmp(when, "always")) {
        return true;
    }
    if (when && !strcmp(when, "never")) {
        return false;
    }
    return automatic;
}

void ui_init(struct ui *ui, const char *program, const struct opt_common *c)
{
    const char *fake = getenv("QX_FAKE_TTY"), *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    bool plain_term = (term && !strcmp(term, "dumb")) || (no_color && no_color[0]);
    memset(ui, 0, sizeof *ui);
    ui->program = program;
    ui->json = c->json;
    ui->quiet = c->quiet;
    ui->verbose = c->verbose;
    ui->tty_in = is_tty(STDIN_FILENO, fake, "in");
    ui->tty_out = is_tty(STDOUT_FILENO, fake, "out");
    ui->tty_err = is_tty(STDERR_FILENO, fake, "err");
    ui->color_out = pick(c->color, ui->tty_out && !plain_term);
    ui->color_err = pick(c->color, ui->tty_err && !plain_term);
    ui->progress_always = c->progress && !strcmp(c->progress, "always");
    bool foreground = !isatty(STDERR_FILENO) || tcgetpgrp(STDERR_FILENO) == getpgrp();
    ui->progress = !c->quiet && pick(c->progress, ui->tty_err && foreground &&
                                                      !(term && !strcmp(term, "dumb")));
    ui->width_cols = ui->tty_out ? columns(STDOUT_FILENO) : 0;
    ui->width_err = columns(STDERR_FILENO);
    signal(SIGPIPE, SIG_IGN);
    signals_json_errors(c->json);
}

const char *ui_style(bool on, enum ui_style s)
{
    static const char *const code[] = {"\033[0m", "\033[1m", "\033[2m", "\033[31m", "\033[33m",
                                       "\033[32m"};
    return on ? code[s] : "";
}

/* ---- stderr ---------------------------------------------------------------------------------- */

static void clear_status(void)
{
    if (status_shown) {
        fputs("\r\033[K", stderr);
        status_shown = false;
    }
}

void ui_status_line(const char *text)
{
    pthread_mutex_lock(&err_lock);
    clear_status();
    if (text) {
        fputs(text, stderr);
        status_shown = true;
    }
    fflush(stderr);
    pthread_mutex_unlock(&err_lock);
}

/* One write, so that lines of several threads or programs do not mix. */
static void put_err(const char *p, size_t n)
{
    pthread_mutex_lock(&err_lock);
    clear_status();
    fflush(stderr);
    fwrite(p, 1, n, stderr);
    fflush(stderr);
    pthread_mutex_unlock(&err_lock);
}

static void message(const struct ui *ui, const char *label, enum ui_style style, const char *text)
{
    struct qx_buf b = {0};
    if (ui) {
        qx_buf_fmt(&b, "%s: ", ui->program);
    }
    if (label[0]) {
        qx_buf_fmt(&b, "%s%s%s", ui_style(ui && ui->color_err, style), label,
                   ui_style(ui && ui->color_err, UI_PLAIN));
    }
    /* Several lines may be meant (a memory plan); every other control character is a stranger's. */
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, "\n");
        qx_buf_escaped(&b, p, n);
        p += n;
        if (*p) {
            qx_buf_chr(&b, '\n');
            p++;
        }
    }
    qx_buf_chr(&b, '\n');
    put_err(b.p ? b.p : "", b.n);
    qx_buf_fini(&b);
}

static void vmessage(const struct ui *ui, const char *label, enum ui_style style, const char *fmt,
                     va_list ap)
{
    char text[8192];
    vsnprintf(text, sizeof text, fmt, ap);
    message(ui, label, style, text);
}

void ui_note(const struct ui *ui, const char *fmt, ...)
{
    va_list ap;
    if (ui->quiet) {
        return;
    }
    va_start(ap, fmt);
    vmessage(ui, "", UI_PLAIN, fmt, ap);
    va_end(ap);
}

void ui_stat(const struct ui *ui, const char *fmt, ...)
{
    va_list ap;
    if (ui->quiet) {
        return;
    }
    va_start(ap, fmt);
    vmessage(NULL, "", UI_PLAIN, fmt, ap);
    va_end(ap);
}

void ui_warn(const struct ui *ui, const char *fmt, ...)
{
    va_list ap;
    if (ui->quiet) {
        return;
    }
    va_start(ap, fmt);
    vmessage(ui, "warning: ", UI_YELLOW, fmt, ap);
    va_end(ap);
}

void ui_error(const struct ui *ui, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vmessage(ui, "", UI_RED, fmt, ap);
    va_end(ap);
}

void ui_error_text(struct qx_buf *b, const struct qx_error *err)
{
    const char *sep = " (";
    if (err->kind && err->kind[0]) {
        qx_buf_fmt(b, "%s: ", err->kind);
    }
    qx_buf_str(b, err->msg);
    if (err->tensor[0] && !strstr(err->msg, err->tensor)) {
        qx_buf_fmt(b, "%stensor '%s'", sep, err->tensor);
        sep = ", ";
    }
    if (err->file[0] && !strstr(err->msg, err->file)) {
        qx_buf_fmt(b, "%s%s", sep, err->file);
        sep = ", ";
    }
    if (err->off != QX_NO_OFF) {
        qx_buf_fmt(b, "%sbyte %llu", sep, (unsigned long long)err->off);
        sep = ", ";
    }
    if (sep[0] == ',') {
        qx_buf_chr(b, ')');
    }
}

int ui_usage(const struct ui *ui, const char *kind, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    ui_error(ui, "%s: %s", kind, text);
    return EXIT_USAGE;
}

int ui_fail(const struct ui *ui, const struct qx_error *err)
{
    int code = qx_error_exit_code(err);
    struct qx_buf b = {0};
    ui_error_text(&b, err);
    message(ui, "", UI_PLAIN, qx_buf_cstr(&b) ? b.p : err->msg);
    qx_buf_fini(&b);
    if (ui->json && code != EXIT_USAGE) {
        struct qx_json_out o;
        qx_json_out_init(&o, false);
        qx_json_obj(&o, NULL);
        qx_json_str(&o, "schema", "qx.error/1");
        qx_json_str(&o, "kind", err->kind);
        qx_json_str(&o, "text", err->msg);
        qx_json_str(&o, "file", err->file[0] ? err->file : NULL);
        qx_json_str(&o, "tensor", err->tensor[0] ? err->tensor : NULL);
        if (err->off == QX_NO_OFF) {
            qx_json_null(&o, "offset");
        } else {
            qx_json_u64(&o, "offset", err->off);
        }
        qx_json_obj_end(&o);
        ui_out(o.buf.p ? o.buf.p : "", o.buf.n);
        ui_out_str("\n");
        qx_json_out_fini(&o);
    }
    return code;
}

/* ---- stdout ---------------------------------------------------------------------------------- */

void ui_out(const void *p, size_t n)
{
    if (!out_errno && n > 0 && fwrite(p, 1, n, stdout) != n) {
        out_errno = errno ? errno : EIO;
    }
}

void ui_out_str(const char *s)
{
    ui_out(s, strlen(s));
}

void ui_out_flush(void)
{
    if (!out_errno && fflush(stdout) != 0) {
        out_errno = errno ? errno : EIO;
    }
}

bool ui_out_failed(void)
{
    return out_errno != 0 || ferror(stdout);
}

int ui_finish(const struct ui *ui, int code)
{
    ui_status_line(NULL);
    ui_out_flush();
    if (!out_errno && ferror(stdout)) {
        out_errno = EIO;
    }
    if (out_errno == EPIPE) {
        return code;
    }
    if (out_errno) {
        char reason[128];
        ui_error(ui, "cannot write standard output: %s",
                 strerror_r(out_errno, reason, sizeof reason));
        return code == EXIT_OK || code == EXIT_FINDINGS ? EXIT_RESOURCE : code;
    }
    return code;
}

void ui_json_finding(struct qx_json_out *o, const char *key, const struct qx_finding *f)
{
    static const char *const severity[] = {"note", "warning", "error"};
    qx_json_obj(o, key);
    qx_json_str(o, "kind", f->kind);
    qx_json_str(o, "severity", severity[f->severity]);
    qx_json_str(o, "file", f->file);
    qx_json_str(o, "tensor", f->tensor);
    qx_json_str(o, "key", f->key);
    if (f->off == QX_NO_OFF) {
        qx_json_null(o, "offset");
    } else {
        qx_json_u64(o, "offset", f->off);
    }
    qx_json_str(o, "expected", f->expected);
    qx_json_str(o, "found", f->found);
    qx_json_str(o, "text", f->text);
    qx_json_u64(o, "count", f->count);
    qx_json_arr(o, "examples");
    for (uint32_t i = 0; i < f->n_examples; i++) {
        qx_json_str(o, NULL, f->examples[i]);
    }
    qx_json_arr_end(o);
    qx_json_obj_end(o);
}
