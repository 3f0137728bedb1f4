/* repack.c: qx repack: a new checkpoint with parts stored differently, an archive, or what an
 * archive held. */
#include "exit_code.h"
#include "opt.h"
#include "progress.h"
#include "signals.h"
#include "ui.h"

#include "num.h"
#include "qx.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

static const char *const layouts[] = {"row", NULL};

static struct {
    struct opt_common common;
    const char *output, *table, *experts, *rank, *drop, *layout;
    uint64_t table_shards, max_shard;
    bool has_shards, has_max, canonical, archive, dry_run, resume, force, verify, plain;
} o = {.resume = true};

static const struct opt options[] = {
    {OPT_GROUP, 0, 0, 0, 0, 0, "What to store differently", 0, 0},
    {OPT_STR, 0, "table", "FORMAT", &o.table, 0, "the n-gram table as bf16, fp8 or nvfp4", 0, 0},
    {OPT_STR, 0, "experts", "FORMAT", &o.experts, 0, "the experts as nvfp4, fp8-block or bf16", 0,
     0},
    {OPT_U64, 0, "table-shards", "N", &o.table_shards, &o.has_shards, "cut the table into N shards",
     0, 0},
    {OPT_STR, 0, "rank", "R/N", &o.rank, 0, "only the table rows that rank R of N owns", 0, 0},
    {OPT_CHOICE, 0, "layout", "NAME", &o.layout, 0,
     "row: each table row contiguous, for direct reads (see qx-pack(5))", layouts, 0},
    {OPT_FLAG, 0, "canonical-names", 0, &o.canonical, 0,
     "preview names of the model become final ones", 0, 0},
    {OPT_STR, 0, "drop", "LIST", &o.drop, 0, "leave out vision, mtp or both", 0, 0},
    {OPT_SIZE, 0, "max-shard", "SIZE", &o.max_shard, &o.has_max,
     "regroup into files of at most SIZE", 0, 0},
    {OPT_FLAG, 0, "plain-scales", 0, &o.plain, 0, "amax scales, no search for better ones", 0, 0},
    {OPT_FLAG, 0, "archive", 0, &o.archive, 0,
     "compress for transport; qx repack ARCHIVE -o OUT restores", 0, 0},
    {OPT_GROUP, 0, 0, 0, 0, 0, "Output", 0, 0},
    {OPT_STR, 'o', "output", "OUT", &o.output, 0, "the directory to make", 0, 0},
    {OPT_FLAG, 0, "dry-run", 0, &o.dry_run, 0, "print the plan and stop", 0, 0},
    {OPT_FLAG, 0, "resume", 0, &o.resume, 0, "go on with an unfinished OUT.part (default)", 0, 0},
    {OPT_FLAG, 0, "force", 0, &o.force, 0, "replace an existing output", 0, 0},
    {OPT_FLAG, 0, "verify", 0, &o.verify, 0, "read everything again and compare", 0, 0},
    OPT_COMMON(o.common),
    {OPT_END, 0, 0, 0, 0, 0, 0, 0, 0},
};

static const struct opt_command command = {
    .name = "repack",
    .synopsis = "qx repack PATH -o OUT [OPTION]...",
    .summary =
        "Writes a new checkpoint with the table, and if asked other parts, stored differently.",
    .examples = "  qx repack sample -o out --table nvfp4\n"
                "  qx repack sample -o rank0 --rank 0/4\n"
                "  qx repack sample -o sample.qxa --archive\n",
    .opts = options,
    .min_args = 1,
    .max_args = 1,
};

struct job {
    struct ui ui;
    const char *path;
    struct qx_ckpt *ck;
    struct qx_repack *plan;
    struct progress progress;
    bool started;
    uint64_t begin_ns;
};

static int on_progress(void *user, uint64_t done, uint64_t total)
{
    struct job *j = user;
    if (!j->started) {
        progress_start(&j->progress, &j->ui, "writing", total, PROGRESS_BYTES);
        j->started = true;
    }
    progress_update(&j->progress, done);
    return signals_pending();
}

static int fail(struct job *j, const struct qx_error *err)
{
    if (j->started) {
        progress_finish(&j->progress);
    }
    if (err->code == QX_E_INTERRUPTED && signals_pending() != 0) {
        ui_error(&j->ui, "%s", err->msg);
        signals_reraise(signals_pending());
    }
    int code = ui_fail(&j->ui, err);
    if (code == EXIT_RESOURCE && j->started) {
        ui_note(&j->ui, "what was done is in '%s.part'; the same command goes on from there",
                o.output);
    }
    return code;
}

/* ---- options ------------------------------------------------------------------------------ */

static const struct {
    const char *word;
    enum qx_format f;
    bool table, experts;
} forms[] = {
    {"bf16", QX_F_BF16, true, true},
    {"fp8", QX_F_FP8, true, false},
    {"nvfp4", QX_F_NVFP4, true, true},
    {"fp8-block", QX_F_FP8_BLOCK, false, true},
};

static int read_form(struct job *j, const char *word, bool experts, enum qx_format *out)
{
    if (word == NULL) {
        return -1;
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(forms); i++) {
        if (strcasecmp(word, forms[i].word) == 0 && (experts ? forms[i].experts : forms[i].table)) {
            *out = forms[i].f;
            return -1;
        }
    }
    return ui_usage(&j->ui, "format-unsupported", "%s cannot be stored as '%s': choose %s",
                 experts ? "experts" : "the table", word,
                 experts ? "nvfp4, fp8-block or bf16" : "bf16, fp8 or nvfp4");
}

static int read_rank(struct job *j, struct qx_repack_opts *q)
{
    uint64_t r, n;
    const char *slash = o.rank != NULL ? strchr(o.rank, '/') : NULL;
    if (o.rank == NULL) {
        return -1;
    }
    if (slash == NULL || !qx_parse_u64(o.rank, (size_t)(slash - o.rank), &r) ||
        !qx_parse_u64(slash + 1, strlen(slash + 1), &n) || n == 0 || n > 65536 || r >= n) {
        return ui_usage(&j->ui, "rank", "'--rank' wants R/N with R from 0 to N - 1, not '%s'", o.rank);
    }
    q->rank = (uint32_t)r;
    q->n_ranks = (uint32_t)n;
    return -1;
}

static int read_drop(struct job *j, struct qx_repack_opts *q)
{
    if (o.drop != NULL && *o.drop == 0) {
        return ui_usage(&j->ui, "usage", "'--drop' lists nothing: it knows vision and mtp");
    }
    for (const char *p = o.drop; p != NULL && *p != 0;) {
        size_t n = strcspn(p, ",");
        if (n == 6 && memcmp(p, "vision", 6) == 0) {
            q->drop_vision = true;
        } else if (n == 3 && memcmp(p, "mtp", 3) == 0) {
            q->drop_mtp = true;
        } else {
            return ui_usage(&j->ui, "usage", "'--drop' knows vision and mtp, not '%.*s'", (int)n, p);
        }
        p += n;
        p += *p == ',';
    }
    return -1;
}

static int read_options(struct job *j, struct qx_repack_opts *q)
{
    int rc = read_form(j, o.table, false, &q->table);
    rc = rc < 0 ? read_form(j, o.experts, true, &q->experts) : rc;
    rc = rc < 0 ? read_rank(j, q) : rc;
    rc = rc < 0 ? read_drop(j, q) : rc;
    if (rc >= 0) {
        return rc;
    }
    if (o.output == NULL) {
        return ui_usage(&j->ui, "usage", "give -o OUT, the directory to make");
    }
    if (o.output[0] == '-' || o.output[0] == 0) {
        return ui_usage(&j->ui, "usage",
                     "option '-o' wants a value (OUT), not '%s'; a name that begins with a dash "
                     "is written ./%s",
                     o.output, o.output);
    }
    if (o.has_shards && o.table_shards == 0) {
        return ui_usage(&j->ui, "table-shards", "a table has at least one shard");
    }
    if (o.has_max && o.max_shard < 1024) {
        return ui_usage(&j->ui, "usage", "'--max-shard' wants at least 1KiB");
    }
    bool changes = o.table || o.experts || o.rank || o.drop || o.layout || o.canonical ||
                   o.has_shards || o.has_max || o.plain;
    if (o.archive && changes) {
        return ui_usage(&j->ui, "usage", "--archive keeps every byte: it goes with no other change");
    }
    q->table_shards = o.table_shards;
    q->max_shard_bytes = o.max_shard;
    q->row_layout = o.layout != NULL;
    q->canonical_names = o.canonical;
    q->plain_scales = o.plain;
    q->force = o.force;
    q->resume = o.resume;
    q->verify = o.verify;
    q->n_threads = (uint32_t)o.common.threads;
    q->progress = on_progress;
    q->user = j;
    return -1;
}

/* ---- output ------------------------------------------------------------------------------- */

/* What is free where the output goes, and whether it is enough. */
static void put_free(struct qx_buf *b, uint64_t need, uint64_t have)
{
    char x[32];
    if (have == UINT64_MAX) {
        qx_buf_str(b, "free space unknown\n");
    } else if (need > have) {
        qx_buf_fmt(b, "free space %s: ", qx_size_text(have, x));
        qx_buf_fmt(b, "not enough, %s are missing\n", qx_size_text(need - have, x));
    } else {
        qx_buf_fmt(b, "free space %s\n", qx_size_text(have, x));
    }
}

static void put_plan(const struct qx_repack_info *i, struct qx_buf *b)
{
    char x[32];
    qx_buf_fmt(b, "input      %s in weight files\n", qx_size_text(i->bytes_in, x));
    qx_buf_fmt(b, "output     %s in %" PRIu64 " files\n", qx_size_text(i->bytes_out, x),
               i->n_files);
    qx_buf_fmt(b, "tensors    %" PRIu64 " copied, %" PRIu64 " written anew, %" PRIu64 " left out\n",
               i->n_copied, i->n_converted, i->n_dropped);
    qx_buf_fmt(b, "memory     %s at most\n", qx_size_text(i->peak_bytes, x));
    put_free(b, i->bytes_out, i->free_bytes);
}

static void json_plan(struct qx_json_out *out, const struct qx_repack_info *i)
{
    qx_json_obj(out, "plan");
    qx_json_u64(out, "bytes_in", i->bytes_in);
    qx_json_u64(out, "bytes_out", i->bytes_out);
    qx_json_u64(out, "files", i->n_files);
    qx_json_u64(out, "tensors", i->n_tensors);
    qx_json_u64(out, "tensors_copied", i->n_copied);
    qx_json_u64(out, "tensors_converted", i->n_converted);
    qx_json_u64(out, "tensors_dropped", i->n_dropped);
    qx_json_u64(out, "peak_memory_bytes", i->peak_bytes);
    qx_json_u64(out, "free_bytes", i->free_bytes);
    qx_json_obj_end(out);
}

static void json_reports(struct qx_json_out *out, const struct qx_repack_info *i)
{
    qx_json_arr(out, "errors");
    for (size_t k = 0; k < i->n_reports; k++) {
        const struct qx_quant_report *q = &i->reports[k];
        qx_json_obj(out, NULL);
        qx_json_str(out, "name", q->name);
        qx_json_str(out, "from", q->from);
        qx_json_str(out, "to", q->to);
        qx_json_u64(out, "values", q->n_values);
        qx_json_u64(out, "rows", q->n_rows);
        qx_json_f64(out, "bits_per_weight", q->bits_per_weight);
        qx_json_f64(out, "relative_rms", q->rel_rms);
        qx_json_f64(out, "largest_error", q->max_err);
        qx_json_f64(out, "row_threshold", q->row_limit);
        qx_json_u64(out, "rows_above", q->rows_above);
        qx_json_obj(out, "plain");
        qx_json_f64(out, "relative_rms", q->plain_rel_rms);
        qx_json_f64(out, "largest_error", q->plain_max_err);
        qx_json_u64(out, "rows_above", q->plain_rows_above);
        qx_json_obj_end(out);
        qx_json_obj_end(out);
    }
    qx_json_arr_end(out);
}

static void text_reports(const struct qx_repack_info *i)
{
    for (size_t k = 0; k < i->n_reports; k++) {
        const struct qx_quant_report *q = &i->reports[k];
        struct qx_buf b = {0};
        qx_buf_fmt(&b, "%s: %s to %s, %.3g bits a weight\n", q->name, q->from, q->to,
                   q->bits_per_weight);
        qx_buf_fmt(&b, "  relative RMS error    %.6f (plain amax scaling %.6f)\n", q->rel_rms,
                   q->plain_rel_rms);
        qx_buf_fmt(&b, "  largest error         %.6g (%.6g)\n", q->max_err, q->plain_max_err);
        qx_buf_fmt(&b, "  rows above %.2g        %" PRIu64 " of %" PRIu64 " (%" PRIu64 ")\n",
                   q->row_limit, q->rows_above, q->n_rows, q->plain_rows_above);
        ui_out(b.p != NULL ? b.p : "", b.n);
        qx_buf_fini(&b);
    }
}

static void finish_line(struct job *j, uint64_t in, uint64_t out, uint64_t files)
{
    char a[32], b[32], c[32];
    double s = (double)(progress_now_ns() - j->begin_ns) / 1e9;
    ui_note(&j->ui, "read %s, wrote %s in %" PRIu64 " files in %.1f s (%s/s)", qx_size_text(in, a),
            qx_size_text(out, b), files, s,
            qx_size_text((uint64_t)((double)out / (s > 0 ? s : 1)), c));
}

/* ---- the two kinds of work ---------------------------------------------------------------- */

static int repack(struct job *j, const struct qx_repack_opts *q)
{
    struct qx_error err = {0};
    struct qx_open how = QX_OPEN_DEFAULT;
    struct qx_repack_info info;
    struct qx_json_out json;
    how.n_threads = (uint32_t)o.common.threads;
    int rc = qx_ckpt_open(&j->ck, j->path, &how, &err);
    rc = rc == 0 ? qx_repack_plan(&j->plan, j->ck, o.output, q, &err) : rc;
    if (rc != 0) {
        return fail(j, &err);
    }
    qx_repack_info(j->plan, &info);
    struct qx_buf text = {0};
    put_plan(&info, &text);
    if (o.dry_run && !j->ui.json) {
        ui_out(text.p != NULL ? text.p : "", text.n);
    } else if (!o.dry_run && qx_buf_cstr(&text) != NULL) {
        ui_stat(&j->ui, "%.*s", (int)text.n - 1, text.p);
    }
    qx_buf_fini(&text);
    if (!o.dry_run) {
        rc = qx_repack_run(j->plan, &err);
        if (rc != 0) {
            return fail(j, &err);
        }
        if (j->started) {
            progress_finish(&j->progress);
        }
        qx_repack_info(j->plan, &info);
    }
    if (j->ui.json) {
        qx_json_out_init(&json, true);
        qx_json_obj(&json, NULL);
        qx_json_str(&json, "schema", "qx.repack/1");
        qx_json_str(&json, "path", j->path);
        qx_json_str(&json, "output", o.output);
        qx_json_str(&json, "mode", "repack");
        qx_json_bool(&json, "dry_run", o.dry_run);
        json_plan(&json, &info);
        qx_json_u64(&json, "resumed_bytes", info.resumed_bytes);
        qx_json_bool(&json, "verified", o.verify && !o.dry_run);
        json_reports(&json, &info);
        qx_json_obj_end(&json);
        qx_buf_chr(&json.buf, '\n');
        ui_out(json.buf.p != NULL ? json.buf.p : "", json.buf.n);
        qx_json_out_fini(&json);
    } else if (!o.dry_run) {
        text_reports(&info);
    }
    if (!o.dry_run) {
        finish_line(j, info.bytes_in, info.bytes_out, info.n_files);
    }
    return EXIT_OK;
}

static int archive(struct job *j, bool create)
{
    struct qx_error err = {0};
    struct qx_archive_result a = {0};
    struct qx_archive_opts q = {.force = o.force,
                                .resume = o.resume,
                                .n_threads = (uint32_t)o.common.threads,
                                .dry_run = o.dry_run,
                                .progress = on_progress,
                                .user = j};
    int rc = create ? qx_archive_create(j->path, o.output, &q, &a, &err)
                    : qx_archive_restore(j->path, o.output, &q, &a, &err);
    if (rc != 0) {
        return fail(j, &err);
    }
    if (j->started) {
        progress_finish(&j->progress);
    }
    if (j->ui.json) {
        struct qx_json_out json;
        qx_json_out_init(&json, true);
        qx_json_obj(&json, NULL);
        qx_json_str(&json, "schema", "qx.repack/1");
        qx_json_str(&json, "path", j->path);
        qx_json_str(&json, "output", o.output);
        qx_json_str(&json, "mode", create ? "archive" : "restore");
        qx_json_bool(&json, "dry_run", o.dry_run);
        qx_json_obj(&json, "plan");
        qx_json_u64(&json, "bytes_in", a.bytes_in);
        qx_json_u64(&json, "bytes_out", a.bytes_out);
        qx_json_u64(&json, "files", a.n_files);
        qx_json_u64(&json, "peak_memory_bytes", a.peak_bytes);
        qx_json_u64(&json, "free_bytes", a.free_bytes);
        qx_json_obj_end(&json);
        qx_json_u64(&json, "resumed_bytes", a.resumed_bytes);
        qx_json_arr(&json, "components");
        for (size_t i = 0; i < a.n_components; i++) {
            const struct qx_archive_component *c = &a.components[i];
            qx_json_obj(&json, NULL);
            qx_json_str(&json, "name", c->name);
            qx_json_u64(&json, "bytes", c->bytes);
            qx_json_u64(&json, "packed_bytes", c->packed_bytes);
            qx_json_f64(&json, "ratio",
                        (double)c->packed_bytes / (double)(c->bytes > 0 ? c->bytes : 1));
            qx_json_obj_end(&json);
        }
        qx_json_arr_end(&json);
        qx_json_obj_end(&json);
        qx_buf_chr(&json.buf, '\n');
        ui_out(json.buf.p != NULL ? json.buf.p : "", json.buf.n);
        qx_json_out_fini(&json);
    } else {
        struct qx_buf b = {0};
        char x[32], y[32];
        for (size_t i = 0; i < a.n_components; i++) {
            const struct qx_archive_component *c = &a.components[i];
            qx_buf_fmt(&b, "%-18s %12s -> %12s  %5.1f %%\n", c->name, qx_size_text(c->bytes, x),
                       qx_size_text(c->packed_bytes, y),
                       100.0 * (double)c->packed_bytes / (double)(c->bytes > 0 ? c->bytes : 1));
        }
        if (o.dry_run) {
            qx_buf_fmt(&b, "input      %s in %" PRIu64 " files\n", qx_size_text(a.bytes_in, x),
                       a.n_files);
            qx_buf_fmt(&b, "output     %s at most\n", qx_size_text(a.bytes_out, x));
            qx_buf_fmt(&b, "memory     %s at most\n", qx_size_text(a.peak_bytes, x));
            put_free(&b, a.bytes_out, a.free_bytes);
        }
        ui_out(b.p != NULL ? b.p : "", b.n);
        qx_buf_fini(&b);
    }
    if (!o.dry_run) {
        finish_line(j, a.bytes_in, a.bytes_out, a.n_files);
    }
    return EXIT_OK;
}

int main(int argc, char **argv)
{
    struct job j = {0};
    struct qx_repack_opts q = QX_REPACK_DEFAULT;
    char **args;
    int n_args;
    int code = opt_parse(&command, argc, argv, &args, &n_args);
    if (code >= 0) {
        return code;
    }
    ui_init(&j.ui, "qx-repack", &o.common);
    code = read_options(&j, &q);
    if (code >= 0) {
        return code;
    }
    signals_init();
    j.path = args[0];
    j.begin_ns = progress_now_ns();
    bool restore = qx_is_archive(j.path);
    if (restore && (o.archive || o.table || o.experts || o.rank || o.drop || o.layout ||
                    o.canonical || o.has_shards || o.has_max)) {
        code =
            ui_usage(&j.ui, "usage",
                  "'%s' is an archive: it is restored as it was; convert what comes out", j.path);
    } else {
        code = restore || o.archive ? archive(&j, !restore) : repack(&j, &q);
    }
    qx_repack_destroy(j.plan);
    qx_ckpt_close(j.ck);
    return code == EXIT_USAGE ? code : ui_finish(&j.ui, code);
}
