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
    bool color_out, color_err, tty_out, tty_err, progress;
    unsigned width_cols;   /* terminal width of stdout, 0 when piped */
};
/* After opt_parse. Ignores SIGPIPE's death message: a closed stdout ends quietly. */
void ui_init(struct ui *ui, const char *program, const struct opt_common *c);
void ui_note(const struct ui *ui, const char *fmt, ...) QX_PRINTF(2, 3);  /* hidden by -q */
void ui_warn(const struct ui *ui, const char *fmt, ...) QX_PRINTF(2, 3);  /* hidden by -q */
void ui_error(const struct ui *ui, const char *fmt, ...) QX_PRINTF(2, 3); /* always */
/* Reports err on stderr ("qx-run: kind: message (file, tensor, byte)"), with --json (and unless it is a
 * usage error) also one qx.error/1 object on stdout. Returns the exit code. */
int ui_fail(const struct ui *ui, const struct qx_error *err);
/* Writes n bytes to stdout; a failure is remembered for ui_finish. */
void ui_out(const void *p, size_t n);
void ui_out_str(const char *s);
/* Ends with `code`, or 4 when stdout could not be written. EPIPE is quiet. */
int ui_finish(const struct ui *ui, int code);

#endif
