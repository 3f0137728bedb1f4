/* inspect_more.c: the other views of qx inspect: --tensors, --stats, --diff. */
#include "exit_code.h"
#include "inspect.h"

#include "alloc.h"
#include "error.h"
#include "file_out.h"
#include "num.h"
#include "plot.h"
#include "str.h"
#include "table.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { STATS_MAX = 1000, BAR_LINES = 16, BAR_COLS = 40 };

static void shape_text(const struct qx_tensor *t, char out[128])
{
    size_t at = 0;
    out[at++] = '[';
    for (unsigned i = 0; i < t->n_dims && at < 96; i++) {
        int w = snprintf(out + at, 128 - at, "%s%" PRIu64, i ? ", " : "", t->shape[i]);
        at += w > 0 ? (size_t)w : 0;
    }
    snprintf(out + at, 128 - at, "]");
}

/* Name, dtype, shape, bytes, data offsets (begin-end, as in the header), file; in the order of
 * names. Lines are written as they come: a table would have to hold 300,000 rows for its widths. */
bool inspect_print_tensors(const struct inspect_job *j, const char *glob)
{
    bool any = false;
    for (size_t i = 0; i < qx_ckpt_n_tensors(j->ck) && !ui_out_failed(); i++) {
        const struct qx_tensor *t = qx_ckpt_tensor(j->ck, i);
        const struct qx_file *f = qx_ckpt_file(j->ck, t->file);
        struct qx_buf b = {0};
        char shape[128];
        if (!qx_glob_match(glob, t->name)) {
            continue;
        }
        any = true;
        shape_text(t, shape);
        qx_buf_escaped(&b, t->name, t->name_len);
        for (size_t pad = b.n; pad < 72; pad++) {
            qx_buf_chr(&b, ' ');
        }
        uint64_t begin = t->off >= f->data_off ? t->off - f->data_off : 0;
        qx_buf_fmt(&b, "  %-7s %-18s %13" PRIu64 "  %" PRIu64 "-%" PRIu64 "  ",
                   qx_dtype_name((enum qx_dtype)t->dtype), shape, t->size_bytes, begin,
                   begin + t->size_bytes);
        qx_buf_escaped(&b, f->name, strlen(f->name));
        qx_buf_str(&b, t->readable ? "\n" : "  (not readable)\n");
        if (!b.failed) {
            ui_out(b.p, b.n);
        }
        qx_buf_fini(&b);
    }
    return any;
}

/* ---- stats --------------------------------------------------------------------------------------
 */

static void put_stats(const struct qx_tensor *t, const struct qx_value_stats *s)
{
    struct qx_buf b = {0};
    char shape[128];
    char n[32];
    char z[32];
    shape_text(t, shape);
    qx_buf_escaped(&b, t->name, t->name_len);
    qx_buf_fmt(&b, "\n  %s %s, %s values, %s zero, %" PRIu64 " NaN, %" PRIu64 " infinite\n",
               qx_dtype_name((enum qx_dtype)t->dtype), shape, qx_count_text(s->n, n),
               qx_count_text(s->n_zero, z), s->n_nan, s->n_inf);
    qx_buf_fmt(&b, "  minimum %.9g  maximum %.9g  mean %.9g  rms %.9g\n", s->min, s->max, s->mean,
               s->rms);
    if (s->n > 1 && s->max > s->min) {
        qx_buf_str(&b, "  ");
        qx_plot_spark(&b, s->bin, QX_STATS_BINS, false);
        qx_buf_chr(&b, '\n');
        qx_plot_bars(&b, s->bin, QX_STATS_BINS, s->bin_lo, s->bin_hi, BAR_LINES, BAR_COLS, false);
    }
    qx_buf_chr(&b, '\n');
    if (!b.failed) {
        ui_out(b.p, b.n);
    }
    qx_buf_fini(&b);
}

static int write_svg(const struct inspect_job *j, const struct qx_svg *svg, const char *path,
                     bool force)
{
    struct qx_error err = {0};
    struct qx_file_out *f = NULL;
    if (svg->buf.failed) {
        qx_fail_nomem(&err);
        return ui_fail(&j->ui, &err);
    }
    int rc = qx_file_out_create(&f, path, force, &err);
    if (rc == 0 && (rc = qx_file_out_write(f, svg->buf.p, svg->buf.n, &err)) != 0) {
        qx_file_out_abort(f);
    }
    rc = rc == 0 ? qx_file_out_commit(f, &err) : rc;
    return rc == 0 ? EXIT_OK : ui_fail(&j->ui, &err);
}

/* Counts what matches; 0 after a message when it is nothing or too much. */
static size_t count_matches(const struct inspect_job *j, const char *glob, int *code)
{
    struct qx_error err = {0};
    size_t n = 0;
    for (size_t i = 0; i < qx_ckpt_n_tensors(j->ck); i++) {
        n += qx_glob_match(glob, qx_ckpt_tensor(j->ck, i)->name) ? 1 : 0;
    }
    *code = EXIT_OK;
    if (n == 0) {
        qx_fail(&err, QX_E_NOT_FOUND, "tensor-not-found", "no tensor has a name like '%.300s'",
                glob);
        *code = ui_fail(&j->ui, &err);
    } else if (n > STATS_MAX) {
        qx_fail(&err, QX_E_USAGE, "usage", "--stats takes at most %d tensors, '%.300s' matches %zu",
                STATS_MAX, glob, n);
        *code = ui_fail(&j->ui, &err);
        n = 0;
    }
    return n;
}

int inspect_stats_read(struct inspect_job *j, const char *glob, const char *svg_path, bool force)
{
    struct qx_error err = {0};
    struct qx_svg svg;
    int code;
    size_t n = count_matches(j, glob, &code);
    struct inspect_stat *v = n ? qx_calloc(n, sizeof *v) : NULL;
    if (n == 0) {
        return code;
    }
    if (!v) {
        qx_fail_nomem(&err);
        return ui_fail(&j->ui, &err);
    }
    j->stats = v;
    for (size_t i = 0; i < qx_ckpt_n_tensors(j->ck); i++) {
        const struct qx_tensor *t = qx_ckpt_tensor(j->ck, i);
        if (!qx_glob_match(glob, t->name)) {
            continue;
        }
        v[j->n_stats].t = t;
        if (qx_tensor_stats(j->ck, t->name, &v[j->n_stats].v, &err) != 0) {
            return ui_fail(&j->ui, &err);
        }
        j->n_stats++;
    }
    if (!svg_path) {
        return EXIT_OK;
    }
    qx_svg_begin(&svg, j->path, (uint32_t)j->n_stats);
    for (size_t i = 0; i < j->n_stats; i++) {
        qx_svg_bars(&svg, v[i].t->name, v[i].v.bin, QX_STATS_BINS, v[i].v.bin_lo, v[i].v.bin_hi);
    }
    qx_svg_end(&svg);
    code = write_svg(j, &svg, svg_path, force);
    qx_buf_fini(&svg.buf);
    return code;
}

void inspect_print_stats(const struct inspect_job *j)
{
    for (size_t i = 0; i < j->n_stats; i++) {
        put_stats(j->stats[i].t, &j->stats[i].v);
    }
}

/* ---- diff ------------------------------------------------------------------------------------ */

static void diff_text(const struct qx_findings *fs)
{
    for (size_t i = 0; i < qx_findings_count(fs); i++) {
        const struct qx_finding *f = qx_findings_at(fs, i);
        struct qx_buf b = {0};
        const char *name = f->tensor ? f->tensor : f->key ? f->key : f->file ? f->file : "";
        qx_buf_fmt(&b, "%-13s ", f->kind);
        qx_buf_escaped(&b, name, strlen(name));
        qx_buf_str(&b, ": ");
        if (f->expected && f->found) {
            qx_buf_escaped(&b, f->expected, strlen(f->expected));
            qx_buf_str(&b, " -> ");
            qx_buf_escaped(&b, f->found, strlen(f->found));
        } else {
            qx_buf_escaped(&b, f->text, strlen(f->text));
        }
        qx_buf_chr(&b, '\n');
        if (!b.failed) {
            ui_out(b.p, b.n);
        }
        qx_buf_fini(&b);
    }
}

static void diff_json(const struct inspect_job *j, const char *other_path,
                      const struct qx_findings *fs)
{
    struct qx_json_out o;
    qx_json_out_init(&o, true);
    qx_json_obj(&o, NULL);
    qx_json_str(&o, "schema", "qx.diff/1");
    qx_json_str(&o, "path", j->path);
    qx_json_str(&o, "other", other_path);
    qx_json_bool(&o, "equal", qx_findings_count(fs) == 0);
    qx_json_arr(&o, "differences");
    for (size_t i = 0; i < qx_findings_count(fs); i++) {
        ui_json_finding(&o, NULL, qx_findings_at(fs, i));
    }
    qx_json_arr_end(&o);
    qx_json_obj_end(&o);
    qx_buf_chr(&o.buf, '\n');
    if (!o.buf.failed) {
        ui_out(o.buf.p, o.buf.n);
    }
    qx_json_out_fini(&o);
}

int inspect_diff(const struct inspect_job *j, const struct qx_ckpt *other, const char *other_path,
                 bool values)
{
    struct qx_findings *fs = NULL;
    struct qx_error err = {0};
    if (qx_ckpt_diff(&fs, j->ck, other, values, &err) != 0) {
        return ui_fail(&j->ui, &err);
    }
    size_t n = qx_findings_count(fs);
    if (j->ui.json) {
        diff_json(j, other_path, fs);
    } else {
        diff_text(fs);
        ui_note(&j->ui, "%zu difference%s%s", n, n == 1 ? "" : "s",
                values ? "" : " (values not compared)");
    }
    qx_findings_free(fs);
    return n ? EXIT_FINDINGS : EXIT_OK;
}
