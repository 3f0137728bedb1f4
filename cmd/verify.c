/* verify.c: qx verify: is a checkpoint whole and sound. Prints the findings of qx_verify_run as text or
 * JSON; looks after manifests on disk. */
#include "exit_code.h"
#include "opt.h"
#include "progress.h"
#include "signals.h"
#include "ui.h"

#include "alloc.h"
#include "file_out.h"
#include "qx.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define LINES_A_KIND 20u
#define MAX_MANIFEST_BYTES (UINT64_C(4) << 30)

static const char *const levels[] = {"headers", "scales", "full", NULL};
static const char *const severities[] = {"note", "warning", "error"};

static struct {
    struct opt_common common;
    const char *level, *tensor, *device, *decoder, *manifest, *write_manifest;
    uint64_t sample, seed, decoder_timeout_s, max_header;
    bool sha256, force, hub;
} o = {.sample = 64, .decoder_timeout_s = 60, .max_header = 100000000};

static const struct opt options[] = {
    {OPT_GROUP, 0, 0, 0, 0, 0, "Checks", 0, 0},
    {OPT_CHOICE, 'l', "level", "LEVEL", &o.level, 0,
     "headers, scales (default: also scales and a sample of rows) or full (every byte)", levels, 0},
    {OPT_U64, 0, "sample", "N", &o.sample, 0, "rows a tensor decoded twice (default 64, 0: none)", 0, 0},
    {OPT_U64, 0, "seed", "N", &o.seed, 0, "of the sample (default 0)", 0, 0},
    {OPT_STR, 't', "tensor", "GLOB", &o.tensor, 0, "decode only these tensors twice (default: all)", 0, 0},
    {OPT_STR, 0, "device", "DEVICE", &o.device, 0, "ordinary decoder: cpu (default) or cuda[:N]", 0, 0},
    {OPT_STR, 0, "decoder", "CMD", &o.decoder, 0, "second decoder: an external program", 0, 0},
    {OPT_U64, 0, "decoder-timeout", "SECONDS", &o.decoder_timeout_s, 0,
     "give the external decoder up after so long without an answer (default 60)", 0, 0},
    {OPT_SIZE, 0, "max-header", "SIZE", &o.max_header, 0,
     "read headers up to this size (default 100000000)", 0, 0},
    {OPT_GROUP, 0, 0, 0, 0, 0, "Manifests", 0, 0},
    {OPT_STR, 0, "manifest", "FILE", &o.manifest, 0, "compare with this list of checksums (- for stdin)", 0,
     0},
    {OPT_FLAG, 0, "hub", 0, &o.hub, 0, "compare with the checksums a download from the Hugging Face hub left", 0, 0},
    {OPT_STR, 0, "write-manifest", "FILE", &o.write_manifest, 0, "write such a list (- for stdout)", 0, 0},
    {OPT_FLAG, 0, "sha256", 0, &o.sha256, 0, "with SHA-256 of files, too", 0, 0},
    {OPT_FLAG, 0, "force", 0, &o.force, 0, "replace an existing list", 0, 0},
    OPT_COMMON(o.common),
    {OPT_END, 0, 0, 0, 0, 0, 0, 0, 0},
};

static const struct opt_command command = {
    .name = "verify",
    .synopsis = "qx verify PATH [--level LEVEL] [--device DEVICE] [--decoder CMD] [OPTION]...\n"
                "qx verify PATH --manifest FILE [OPTION]...\n"
                "qx verify PATH --hub [OPTION]...\n"
                "qx verify PATH --write-manifest FILE [--sha256] [OPTION]...",
    .summary = "Checks that a checkpoint is whole and sound.",
    .examples = "  qx verify sample\n"
                "  qx verify sample --level full --json\n"
                "  qx verify sample --write-manifest - > sums.txt\n"
                "  qx verify sample --manifest sums.txt\n",
    .opts = options,
    .min_args = 1,
    .max_args = 1,
};

struct job {
    struct ui ui;
    struct progress bar;
    const char *phase;       /* of the bar, NULL before the first */
    struct qx_file_out *out; /* manifest on disk */
    struct qx_error out_err;
    char *manifest;
    size_t manifest_bytes;
};

/* ---- reading and writing lists ------------------------------------------------------------ */

static int read_manifest(struct job *j, struct qx_error *err)
{
    bool in = strcmp(o.manifest, "-") == 0;
    FILE *f = in ? stdin : fopen(o.manifest, "rb");
    size_t cap = 0, n = 0, got;
    int rc = 0;
    if (!f) {
        qx_fail_errno(err, errno == ENOENT ? QX_E_NOT_FOUND : QX_E_IO, errno, "not-found",
                      "cannot open the manifest");
        return qx_error_at(err, o.manifest, NULL, QX_NO_OFF);
    }
    do {
        if (n > MAX_MANIFEST_BYTES || !qx_grow((void **)&j->manifest, &cap, n + 65536, 1)) {
            rc = qx_fail_nomem(err);
            break;
        }
        got = fread(j->manifest + n, 1, cap - n, f);
        n += got;
    } while (got > 0);
    if (rc == 0 && ferror(f)) {
        qx_fail_errno(err, QX_E_IO, errno, "unreadable-file", "cannot read the manifest");
        rc = qx_error_at(err, o.manifest, NULL, QX_NO_OFF);
    }
    if (!in) {
        fclose(f);
    }
    j->manifest_bytes = n;
    return rc;
}

static int manifest_out(void *user, const char *text, uint64_t n)
{
    struct job *j = user;
    if (!j->out) {
        ui_out(text, (size_t)n);
        return ui_out_failed();
    }
    return qx_file_out_write(j->out, text, (size_t)n, &j->out_err);
}

/* ---- progress ----------------------------------------------------------------------------- */

static int on_progress(void *user, const char *phase, uint64_t done, uint64_t total)
{
    struct job *j = user;
    if (!j->phase || strcmp(j->phase, phase) != 0) {
        if (j->phase) {
            progress_finish(&j->bar);
        }
        j->phase = phase;
        progress_start(&j->bar, &j->ui, phase, total,
                       strcmp(phase, "decoding") == 0 ? PROGRESS_COUNT : PROGRESS_BYTES);
    }
    progress_update(&j->bar, done);
    return signals_pending() != 0;
}

/* ---- text --------------------------------------------------------------------------------- */

/* Does the text name it already? Then the line need not repeat it. */
static bool says(const struct qx_finding *f, const char *what)
{
    return !what || (f->text && strstr(f->text, what));
}

static void add_line(const struct ui *ui, struct qx_buf *b, const struct qx_finding *f)
{
    static const enum ui_style style[] = {UI_DIM, UI_YELLOW, UI_RED};
    bool color = ui->color_out;
    const char *sep = " (";
    qx_buf_fmt(b, "%s%s%s: %s: ", ui_style(color, style[f->severity]), severities[f->severity],
               ui_style(color, UI_PLAIN), f->kind);
    if (f->text) {
        qx_buf_escaped(b, f->text, strlen(f->text));
    }
    if (!says(f, f->file)) {
        qx_buf_str(b, sep);
        qx_buf_escaped(b, f->file, strlen(f->file));
        sep = ", ";
    }
    if (!says(f, f->tensor) && f->count == 1) {
        qx_buf_str(b, sep);
        qx_buf_escaped(b, f->tensor, strlen(f->tensor));
        sep = ", ";
    }
    if (!says(f, f->key)) {
        qx_buf_str(b, sep);
        qx_buf_escaped(b, f->key, strlen(f->key));
        sep = ", ";
    }
    if (!says(f, f->expected) && strlen(f->expected) < 200) {
        qx_buf_fmt(b, "%sexpected ", sep);
        qx_buf_escaped(b, f->expected, strlen(f->expected));
        sep = ", ";
    }
    if (!says(f, f->found) && strlen(f->found) < 200) {
        qx_buf_fmt(b, "%sfound ", sep);
        qx_buf_escaped(b, f->found, strlen(f->found));
        sep = ", ";
    }
    if (f->off != QX_NO_OFF) {
        qx_buf_fmt(b, "%sbyte %" PRIu64, sep, f->off);
        sep = ", ";
    }
    if (f->count > 1) {
        qx_buf_fmt(b, "%s%" PRIu64 " in all", sep, f->count);
        uint32_t shown = f->n_examples < 2 || ui->verbose ? f->n_examples : 2;
        for (uint32_t i = 0; i < shown; ++i) {
            qx_buf_str(b, i ? ", " : ": ");
            qx_buf_escaped(b, f->examples[i], strlen(f->examples[i]));
        }
        if (shown && shown < f->count) {
            qx_buf_fmt(b, " ... and %" PRIu64 " more", f->count - shown);
        }
        sep = ", ";
    }
    qx_buf_str(b, sep[0] == ',' ? ")\n" : "\n");
}

static void add_counts(struct qx_buf *b, const struct qx_findings *fs)
{
    size_t e = qx_findings_count_severity(fs, QX_ERROR), w = qx_findings_count_severity(fs, QX_WARNING),
           n = qx_findings_count_severity(fs, QX_NOTE);
    qx_buf_fmt(b, "%zu error%s, %zu warning%s, %zu note%s", e, e == 1 ? "" : "s", w, w == 1 ? "" : "s", n,
               n == 1 ? "" : "s");
}

static void print_text(struct job *j, const struct qx_findings *fs, const struct qx_verify_stats *st,
                       bool to_stderr)
{
    struct qx_buf b = {0};
    char size[32];
    for (size_t i = 0; i < qx_findings_count(fs);) {
        const struct qx_finding *f = qx_findings_at(fs, i);
        size_t end = i + 1;
        while (end < qx_findings_count(fs) && strcmp(qx_findings_at(fs, end)->kind, f->kind) == 0 &&
               qx_findings_at(fs, end)->severity == f->severity) {
            ++end;
        }
        for (size_t k = i; k < end; ++k) {
            if (k - i == LINES_A_KIND - 1 && end - k > 1) {
                qx_buf_fmt(&b, "%s: %s: ... and %zu more\n", severities[f->severity], f->kind, end - k);
                break;
            }
            add_line(&j->ui, &b, qx_findings_at(fs, k));
        }
        i = end;
    }
    qx_buf_str(&b, qx_findings_count_severity(fs, QX_ERROR) ? "findings: " : "ok: ");
    add_counts(&b, fs);
    qx_buf_fmt(&b, " in %" PRIu64 " file%s, %" PRIu64 " tensors, %s read", st->files,
               st->files == 1 ? "" : "s", st->tensors, qx_size_text(st->bytes, size));
    if (st->rows) {
        qx_buf_fmt(&b, ", %" PRIu64 " rows decoded twice", st->rows);
    }
    qx_buf_chr(&b, '\n');
    if (b.failed) {
        ui_error(&j->ui, "out of memory");
    } else if (to_stderr) {
        fwrite(b.p, 1, b.n, stderr);
    } else {
        ui_out(b.p, b.n);
    }
    qx_buf_fini(&b);
}

/* ---- JSON --------------------------------------------------------------------------------- */

static void print_json(struct job *j, const char *path, const struct qx_findings *fs,
                       const struct qx_verify_stats *st)
{
    struct qx_json_out out;
    qx_json_out_init(&out, true);
    qx_json_obj(&out, NULL);
    qx_json_str(&out, "schema", "qx.verify/1");
    qx_json_str(&out, "path", path);
    qx_json_str(&out, "status", qx_findings_count_severity(fs, QX_ERROR) ? "findings" : "ok");
    qx_json_str(&out, "level", o.level ? o.level : "scales");
    qx_json_obj(&out, "checked");
    qx_json_u64(&out, "files", st->files);
    qx_json_u64(&out, "tensors", st->tensors);
    qx_json_u64(&out, "bytes", st->bytes);
    qx_json_u64(&out, "rows", st->rows);
    qx_json_obj_end(&out);
    qx_json_obj(&out, "counts");
    qx_json_u64(&out, "error", qx_findings_count_severity(fs, QX_ERROR));
    qx_json_u64(&out, "warning", qx_findings_count_severity(fs, QX_WARNING));
    qx_json_u64(&out, "note", qx_findings_count_severity(fs, QX_NOTE));
    qx_json_obj_end(&out);
    qx_json_arr(&out, "findings");
    for (size_t i = 0; i < qx_findings_count(fs); ++i) {
        ui_json_finding(&out, NULL, qx_findings_at(fs, i));
    }
    qx_json_arr_end(&out);
    qx_json_obj_end(&out);
    qx_buf_chr(&out.buf, '\n');
    if (out.buf.failed) {
        ui_error(&j->ui, "out of memory");
    } else {
        ui_out(out.buf.p, out.buf.n);
    }
    qx_json_out_fini(&out);
}

/* ---- main --------------------------------------------------------------------------------- */

static enum qx_verify_level level(void)
{
    for (int i = 0; o.level && levels[i]; ++i) {
        if (strcmp(o.level, levels[i]) == 0) {
            return (enum qx_verify_level)i;
        }
    }
    return QX_VERIFY_SCALES;
}

static int check_request(struct job *j)
{
    bool to_stdout = o.write_manifest && strcmp(o.write_manifest, "-") == 0;
    if (to_stdout && o.common.json) {
        ui_error(&j->ui, "'--write-manifest -' and '--json' both want standard output");
        return EXIT_USAGE;
    }
    if (o.hub && o.manifest) {
        ui_error(&j->ui, "'--hub' and '--manifest' exclude each other");
        return EXIT_USAGE;
    }
    if (o.sha256 && !o.write_manifest) {
        ui_error(&j->ui, "'--sha256' needs '--write-manifest'");
        return EXIT_USAGE;
    }
    if (o.decoder && o.decoder[strspn(o.decoder, " \t")] == 0) {
        ui_error(&j->ui, "'--decoder' names no program");
        return EXIT_USAGE;
    }
    if (o.decoder_timeout_s == 0 || o.decoder_timeout_s > 86400) {
        ui_error(&j->ui, "'--decoder-timeout' must be 1 to 86400");
        return EXIT_USAGE;
    }
    if (o.device && strcmp(o.device, "cpu") != 0 && strncmp(o.device, "cuda", 4) != 0) {
        ui_error(&j->ui, "'--device' wants cpu or cuda[:N], not '%.40s'", o.device);
        return EXIT_USAGE;
    }
    return -1;
}

int main(int argc, char **argv)
{
    struct job j = {0};
    struct qx_error err = {0};
    struct qx_open how = QX_OPEN_DEFAULT;
    struct qx_verify_opts opts = QX_VERIFY_DEFAULT;
    struct qx_verify_stats stats = {0};
    struct qx_ckpt *ck = NULL;
    struct qx_verify *v = NULL;
    bool to_stdout;
    uint64_t t0;
    char **args;
    int n_args, rc = 0, sig;
    int code = opt_parse(&command, argc, argv, &args, &n_args);
    if (code >= 0) {
        return code;
    }
    ui_init(&j.ui, "qx-verify", &o.common);
    code = check_request(&j);
    if (code >= 0) {
        return code;
    }
    signals_init();
    t0 = progress_now_ns();
    to_stdout = o.write_manifest && strcmp(o.write_manifest, "-") == 0;
    how.n_threads = (uint32_t)o.common.threads;
    how.max_header_bytes = o.max_header;
    rc = qx_ckpt_open(&ck, args[0], &how, &err);
    if (rc == 0 && o.manifest) {
        rc = read_manifest(&j, &err);
    }
    if (rc == 0 && o.write_manifest && !to_stdout) {
        rc = qx_file_out_create(&j.out, o.write_manifest, o.force, &err);
    }
    if (rc == 0) {
        opts.level = level();
        opts.sample_rows = o.sample;
        opts.seed = o.seed;
        opts.decode_glob = o.tensor;
        opts.device = o.device;
        opts.decoder = o.decoder;
        opts.decoder_timeout_ms = (uint32_t)o.decoder_timeout_s * 1000;
        opts.manifest = j.manifest;
        opts.manifest_bytes = j.manifest_bytes;
        opts.manifest_name = o.manifest;
        opts.hub = o.hub;
        opts.manifest_out = o.write_manifest ? manifest_out : NULL;
        opts.manifest_out_name = o.write_manifest;
        opts.sha256 = o.sha256;
        opts.n_threads = (uint32_t)o.common.threads;
        opts.user = &j;
        opts.progress = on_progress;
        rc = qx_verify_run(&v, ck, &opts, &err);
    }
    if (j.phase) {
        progress_finish(&j.bar);
    }
    if (rc != 0 && j.out && j.out_err.code != QX_OK) {
        err = j.out_err;
    }
    if (rc != 0 && to_stdout && ui_out_failed() && err.code == QX_E_WRITE) {
        code = EXIT_OK; /* ui_finish knows whether the reader has gone, which is quiet, or says why */
        goto done;
    }
    if (j.out && rc == 0) {
        rc = qx_file_out_commit(j.out, &err);
    } else if (j.out) {
        qx_file_out_abort(j.out);
    }
    sig = signals_pending();
    if (rc != 0 && err.code == QX_E_INTERRUPTED && sig != 0) {
        ui_error(&j.ui, "stopped; nothing was written");
        signals_reraise(sig);
    }
    if (rc == 0) {
        const struct qx_findings *fs = qx_verify_findings(v);
        qx_verify_stats(v, &stats);
        code = qx_findings_count_severity(fs, QX_ERROR) ? EXIT_FINDINGS : EXIT_OK;
        if (o.common.json) {
            print_json(&j, args[0], fs, &stats);
        } else if (!(to_stdout && o.common.quiet && code == EXIT_OK)) {
            print_text(&j, fs, &stats, to_stdout);
        }
        if (stats.read_bytes > (UINT64_C(64) << 20)) {
            char size[32];
            uint64_t ns = stats.read_ns ? stats.read_ns : 1;
            ui_note(&j.ui, "read %s in %.1f s (%.2f GB/s), %.1f s in all",
                    qx_size_text(stats.read_bytes, size), (double)ns * 1e-9,
                    (double)stats.read_bytes / (double)ns, (double)(progress_now_ns() - t0) * 1e-9);
        }
    } else {
        code = ui_fail(&j.ui, &err);
    }
done:
    qx_verify_free(v);
    qx_ckpt_close(ck);
    qx_free(j.manifest);
    return ui_finish(&j.ui, code);
}
