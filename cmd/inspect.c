/* inspect.c: qx inspect: what a checkpoint holds and how each part will be read. Options and the
 * choice of what to print; the printers are inspect_text.c, inspect_json.c and inspect_more.c. */
#include "inspect.h"

#include "alloc.h"
#include "backend.h"
#include "error.h"
#include "exit_code.h"
#include "str.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const char *const table_places[] = {"auto", "device", "host", "disk", NULL};
static const char *const layout_names[] = {"bf16", "fp8", "mixed", "nvfp4", "nvfp4-ple", NULL};

static struct {
    struct opt_common common;
    const char *tensors, *why, *stats, *svg, *diff, *fit, *table, *layout;
    bool has_tensors, has_why, has_stats, has_diff, has_fit, has_ctx, has_streams, has_draft,
        has_table;
    bool values, force;
    uint64_t ctx, streams, draft, max_header;
} o = {.max_header = 100000000, .table = "auto"};

static const struct opt options[] = {
    {OPT_GROUP, 0, 0, 0, 0, 0, "What to show", 0, 0},
    {OPT_OPTSTR, 0, "tensors", "GLOB", &o.tensors, &o.has_tensors,
     "a line per tensor: dtype, shape, bytes, data offsets, file", 0, 0},
    {OPT_STR, 0, "why", "NAME", &o.why, &o.has_why,
     "how a tensor, module or container was resolved: every rule and entry consulted", 0, 0},
    {OPT_STR, 0, "stats", "GLOB", &o.stats, &o.has_stats,
     "minimum, maximum, mean, zeros, NaN count and a histogram of values or scales", 0, 0},
    {OPT_STR, 0, "svg", "FILE", &o.svg, 0, "with --stats: the histograms as SVG, too", 0, 0},
    {OPT_STR, 0, "diff", "OTHER", &o.diff, &o.has_diff,
     "what differs from another checkpoint; exit 1 if anything does", 0, 0},
    {OPT_FLAG, 0, "values", 0, &o.values, 0, "with --diff: compare every byte", 0, 0},
    {OPT_FLAG, 0, "force", 0, &o.force, 0, "overwrite an existing --svg file", 0, 0},
    {OPT_GROUP, 0, 0, 0, 0, 0, "Memory plan", 0, 0},
    {OPT_STR, 0, "fit", "DEVICE", &o.fit, &o.has_fit, "does it fit: a size (128GiB), or cuda[:N]",
     0, 0},
    {OPT_U64, 0, "ctx", "N", &o.ctx, &o.has_ctx, "tokens of context a sequence (default 32768)", 0,
     0},
    {OPT_U64, 0, "streams", "N", &o.streams, &o.has_streams, "sequences at once (default 1)", 0, 0},
    {OPT_U64, 0, "draft", "K", &o.draft, &o.has_draft, "MTP drafts a round (default 0)", 0, 0},
    {OPT_CHOICE, 0, "table", "PLACE", &o.table, &o.has_table,
     "place of the n-gram table: auto, device, host or disk", table_places, 0},
    {OPT_CHOICE, 0, "layout", "NAME", &o.layout, 0,
     "plan for a layout from config.json alone: bf16, fp8, mixed, nvfp4 or nvfp4-ple", layout_names,
     0},
    {OPT_GROUP, 0, 0, 0, 0, 0, "Reading", 0, 0},
    {OPT_SIZE, 0, "max-header", "SIZE", &o.max_header, 0,
     "read safetensors headers up to this size (default 100000000 bytes)", 0, 0},
    OPT_COMMON(o.common),
    {OPT_END, 0, 0, 0, 0, 0, 0, 0, 0},
};

static const struct opt_command command = {
    .name = "inspect",
    .synopsis = "qx inspect PATH [--tensors[=GLOB]] [--why NAME] [OPTION]...\n"
                "qx inspect PATH --stats GLOB [--svg FILE]\n"
                "qx inspect PATH --diff OTHER [--values]\n"
                "qx inspect PATH --fit DEVICE [--ctx N] [--streams N] [--draft K] [--table PLACE]\n"
                "qx inspect config.json --layout NAME [--fit DEVICE]",
    .summary = "Shows what a checkpoint holds and how each part will be read.",
    .examples = "  qx inspect sample\n"
                "  qx inspect sample --why model.language_model.layers.0.mlp.experts\n"
                "  qx inspect sample --tensors='*ngram_embedding*'\n"
                "  qx inspect sample --fit 1GiB --ctx 1024\n",
    .opts = options,
    .min_args = 1,
    .max_args = 2,
};

/* "--tensors NAME": the value of an optional argument may stand apart when nothing else wants it.
 * after_tensors is what followed the option on the command line. */
static bool take_glob(const char *after_tensors, char **args, int *n_args)
{
    if (*n_args != 2) {
        return true;
    }
    for (int k = 0; k < 2 && after_tensors && o.tensors && o.tensors[0] == '\0'; k++) {
        if (args[k] == after_tensors) {
            o.tensors = args[k];
            args[0] = args[1 - k];
            *n_args = 1;
            return true;
        }
    }
    return false;
}

static int check(const struct ui *ui)
{
    int modes = o.has_tensors + o.has_why + o.has_stats + o.has_diff;
    bool plan = o.has_ctx || o.has_streams || o.has_draft || o.has_table;
    if (modes > 1) {
        return ui_usage(ui, "usage", "only one of --tensors, --why, --stats and --diff at a time");
    }
    if (plan && !o.has_fit) {
        return ui_usage(ui, "usage", "--ctx, --streams, --draft and --table belong to --fit DEVICE");
    }
    if (o.svg && !o.has_stats) {
        return ui_usage(ui, "usage", "--svg belongs to --stats");
    }
    if (o.values && !o.has_diff) {
        return ui_usage(ui, "usage", "--values belongs to --diff");
    }
    if (o.draft > QX_DRAFT_MAX || o.streams > UINT32_MAX) {
        return ui_usage(ui, "usage", "--draft takes at most 8, --streams at most 4294967295");
    }
    if ((o.has_ctx && o.ctx == 0) || (o.has_streams && o.streams == 0)) {
        return ui_usage(ui, "usage", "'%s' wants at least 1", o.has_ctx && o.ctx == 0 ? "--ctx" : "--streams");
    }
    return -1;
}

/* Memory of the device that --fit names. */
static int device_bytes(uint64_t *out, struct qx_error *err)
{
    uint64_t n = 0;
    if (strncmp(o.fit, "cuda", 4) != 0) {
        if (qx_parse_size(o.fit, out, NULL) == 0 && *out > 0) {
            return 0;
        }
        return qx_fail(err, QX_E_USAGE, "usage",
                       "--fit wants a size such as 128GiB, or cuda[:N], not '%s'", o.fit);
    }
    if (o.fit[4] != '\0' &&
        (o.fit[4] != ':' || !qx_parse_u64(o.fit + 5, strlen(o.fit + 5), &n) || n > 1023)) {
        return qx_fail(err, QX_E_USAGE, "usage",
                       "--fit wants a size such as 128GiB, or cuda[:N], not '%s'", o.fit);
    }
    struct qx_backend *be = NULL;
    int rc = qx_backend_cuda_create(&be, (int)n, err);
    if (rc == 0) {
        struct qx_device_info info;
        rc = be->info(be, &info, err);
        *out = rc ? 0 : info.memory_free_bytes; /* what run plans within */
        be->destroy(be);
    }
    return rc;
}

static int plan(struct inspect_job *j, struct qx_fit *fit, struct qx_error *err)
{
    struct qx_fit_request r = {
        .ctx_tokens = o.ctx, .n_streams = (uint32_t)o.streams, .draft = (uint32_t)o.draft};
    for (int i = 0; table_places[i]; i++) {
        if (strcmp(o.table, table_places[i]) == 0) {
            r.table = (enum qx_table_place)i;
        }
    }
    int rc = device_bytes(&r.device_bytes, err);
    rc = rc ? rc : qx_fit(fit, j->ck, j->in, &r, err);
    if (rc == 0) {
        j->fit = fit;
    }
    return rc;
}

static int print(struct inspect_job *j)
{
    char *why = NULL;
    struct qx_error err = {0};
    int code = EXIT_OK;
    if (o.has_why && qx_inspect_why(j->ck, o.why, &why, &err) != 0) {
        return ui_fail(&j->ui, &err);
    }
    j->why = why;
    j->tensors_glob = !o.has_tensors ? NULL : o.tensors[0] ? o.tensors : "*";
    if (o.has_stats) {
        code = inspect_stats_read(j, o.stats, o.svg, o.force);
    }
    if (code != EXIT_OK) {
        /* told already */
    } else if (j->ui.json) {
        inspect_print_json(j);
    } else if (o.has_tensors) {
        if (!inspect_print_tensors(j, j->tensors_glob)) {
            ui_note(&j->ui, "no tensor has a name like '%s'", j->tensors_glob);
        }
    } else if (o.has_why) {
        ui_out_str(why);
    } else if (o.has_stats) {
        inspect_print_stats(j);
    } else {
        inspect_print_text(j);
    }
    qx_free((void *)(uintptr_t)j->stats);
    qx_text_free(why);
    return code;
}

int main(int argc, char **argv)
{
    struct inspect_job j = {0};
    struct qx_ckpt *ck = NULL;
    struct qx_ckpt *other = NULL;
    struct qx_inspection *in = NULL;
    struct qx_fit fit;
    struct qx_error err = {0};
    char **args;
    int n_args;
    const char *after_tensors = NULL;
    for (int i = 1; i + 1 < argc; i++) {
        after_tensors = strcmp(argv[i], "--tensors") == 0 ? argv[i + 1] : after_tensors;
    }
    int code = opt_parse(&command, argc, argv, &args, &n_args);
    if (code >= 0) {
        return code;
    }
    ui_init(&j.ui, "qx-inspect", &o.common);
    if (!take_glob(after_tensors, args, &n_args)) {
        return ui_usage(&j.ui, "usage", "unexpected argument '%.150s'", args[1]);
    }
    code = check(&j.ui);
    if (code >= 0) {
        return code;
    }
    struct qx_open how = QX_OPEN_DEFAULT;
    how.n_threads = (uint32_t)o.common.threads;
    how.max_header_bytes = o.max_header;
    j.path = args[0];
    int rc = qx_ckpt_open(&ck, j.path, &how, &err);
    j.ck = ck;
    if (rc == 0 && o.has_diff) {
        rc = qx_ckpt_open(&other, o.diff, &how, &err);
    } else if (rc == 0 && o.layout && qx_ckpt_n_tensors(ck) > 0) {
        rc = qx_fail(&err, QX_E_USAGE, "usage",
                     "--layout plans for a configuration without weights; here are %zu tensors",
                     qx_ckpt_n_tensors(ck));
    } else if (rc == 0) {
        rc = qx_inspect(&in, ck, o.layout, &err);
        j.in = in;
        rc = rc == 0 && o.has_fit ? plan(&j, &fit, &err) : rc;
    }
    if (rc != 0) {
        code = ui_fail(&j.ui, &err);
    } else if (o.has_diff) {
        code = inspect_diff(&j, other, o.diff, o.values);
    } else {
        code = print(&j);
    }
    code = ui_finish(&j.ui, code);
    qx_inspection_free(in);
    qx_ckpt_close(other);
    qx_ckpt_close(ck);
    return code;
}
