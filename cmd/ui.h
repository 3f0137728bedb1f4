/* ui.h: who may write where. Messages go to stderr with the program's name in front, results to stdout;
 * stdout is flushed and checked once at the end. */
#ifndef QX_CMD_UI_H
#define QX_CMD_UI_H

#include "base.h"
#include "error.h"
#include "json_out.h"
#include "opt.h"

struct ui {
    const char *program;   /* "qx-inspect" */
    bool json, quiet;
    unsigned verbose;
    bool color_out, color_err, tty_in, tty_out, tty_err, progress;
    bool progress_always;  /* asked for: no delay on a terminal, plain lines elsewhere */
    unsigned width_cols;   /* terminal width of stdout, 0 when piped */
    unsigned width_err;    /* of stderr, 80 when unknown */
};
/* After opt_parse. Ignores SIGPIPE's death message: a closed stdout ends quietly.
 * QX_FAKE_TTY=in,out,err in the environment makes tests see terminals (COLUMNS wide). */
void ui_init(struct ui *ui, const char *program, const struct opt_common *c);
void ui_note(const struct ui *ui, const char *fmt, ...) QX_PRINTF(2, 3);  /* hidden by -q */
void ui_warn(const struct ui *ui, const char *fmt, ...) QX_PRINTF(2, 3);  /* hidden by -q */
void ui_error(const struct ui *ui, const char *fmt, ...) QX_PRINTF(2, 3); /* always */
/* A line of a statistics block: no program name, hidden by -q. */
void ui_stat(const struct ui *ui, const char *fmt, ...) QX_PRINTF(2, 3);
/* Reports err on stderr ("qx-run: kind: message (file, tensor, byte)"), with --json (and unless it is a
 * usage error) also one qx.error/1 object on stdout. Returns the exit code. */
int ui_fail(const struct ui *ui, const struct qx_error *err);
/* Appends the same text as ui_fail prints, without the program's name. */
void ui_error_text(struct qx_buf *b, const struct qx_error *err);
/* A wrong command line found after parsing: one line "qx-NAME: kind: message". Returns EXIT_USAGE. */
int ui_usage(const struct ui *ui, const char *kind, const char *fmt, ...) QX_PRINTF(3, 4);
/* Writes n bytes to stdout; a failure is remembered for ui_finish. */
void ui_out(const void *p, size_t n);
void ui_out_str(const char *s);
void ui_out_flush(void);
/* True once stdout could not be written, for whatever reason: more output is pointless. */
bool ui_out_failed(void);
/* Ends with `code`, or 4 when stdout could not be written. EPIPE is quiet. */
int ui_finish(const struct ui *ui, int code);
/* Adds a finding as the object of cli.md (JSON). key NULL inside an array. */
void ui_json_finding(struct qx_json_out *o, const char *key, const struct qx_finding *f);

/* The one transient line at the bottom of stderr; messages clear it first. text NULL clears. */
void ui_status_line(const char *text);

/* One name for each style, "" when colour is off for that stream. */
enum ui_style { UI_PLAIN, UI_BOLD, UI_DIM, UI_RED, UI_YELLOW, UI_GREEN };
const char *ui_style(bool on, enum ui_style s);

#endif
