/* bench.c: qx bench: how fast a model runs here, against what the memory of the device allows. */
#include "bench_load.h"
#include "exit_code.h"
#include "opt.h"
#include "table.h"
#include "ui.h"

#include "alloc.h"
#include "bench.h"
#include "ckpt.h"
#include "file_out.h"
#include "findings.h"
#include "synth.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const layouts[] = {"mixed", "nvfp4", "nvfp4-ple", "fp8", "bf16", NULL};
static const char *const tables[] = {"device", "host", "disk", NULL};

static struct {
    struct opt_common common;
    const char *geometry, *layout, *table, *device, *svg;
    struct qx_u64_list prompt, depth, streams;
    struct qx_u64_list draft;
    double accept;
    uint64_t shared, draft_vocab;
    bool has_accept, has_shared, force;
    bool has_draft, has_prompt, has_depth, has_streams, kernels, csv, precise, has_n, has_repeat;
    uint64_t n, repeat, ctx, chunk, gpus, memory;
} o;

static uint64_t default_depth = 4096;

static const struct opt options[] = {
    {OPT_GROUP, 0, 0, 0, 0, 0, "What to run", 0, 0},
    {OPT_STR, 0, "geometry", "NAME", &o.geometry, 0, "random weights made on the device: 'released', or a config.json", 0, 0},
    {OPT_CHOICE, 0, "layout", "NAME", &o.layout, 0, "how random weights are stored: mixed (default), nvfp4, nvfp4-ple, fp8, bf16", layouts, 0},
    {OPT_LIST, 0, "depth", "LIST", &o.depth, &o.has_depth, "decode with so many tokens of context before (default 4096)", 0, "depth"},
    {OPT_LIST, 0, "streams", "LIST", &o.streams, &o.has_streams, "sequences that decode together (default 1)", 0, "streams"},
    {OPT_U64, 'n', "tokens", "N", &o.n, &o.has_n, "decode steps a run (default 64)", 0, 0},
    {OPT_LIST, 0, "prompt", "LIST", &o.prompt, &o.has_prompt, "prefill prompts of so many tokens", 0, "prompt"},
    {OPT_LIST, 0, "draft", "LIST", &o.draft, &o.has_draft, "rounds of so many drafts, 1 to 8, on one sequence", 0, "draft"},
    {OPT_F64, 0, "accept", "A", &o.accept, &o.has_accept, "tokens a round of drafts keeps, whatever was chosen (default 1)", 0, 0},
    {OPT_U64, 0, "draft-vocab", "N", &o.draft_vocab, 0, "choose drafts among N ids", 0, 0},
    {OPT_U64, 0, "shared", "N", &o.shared, &o.has_shared, "a workload instead: requests of N ids in common and --prompt of their own", 0, 0},
    {OPT_U64, 0, "repeat", "R", &o.repeat, &o.has_repeat, "runs of each row (default 5)", 0, 0},
    {OPT_FLAG, 0, "kernels", 0, &o.kernels, 0, "also time each op of a decode step, and of rounds of drafts, alone against its own floor", 0, 0},
    {OPT_GROUP, 0, 0, 0, 0, 0, "Device and memory", 0, 0},
    {OPT_STR, 0, "device", "DEV", &o.device, 0, "cpu, cuda or cuda:N (default: cuda if there is one)", 0, 0},
    {OPT_U64, 0, "gpus", "N", &o.gpus, 0, "number of devices (1)", 0, 0},
    {OPT_CHOICE, 0, "table", "PLACE", &o.table, 0, "where the n-gram table lies: device, host or disk", tables, 0},
    {OPT_SIZE, 0, "device-memory", "SIZE", &o.memory, 0, "plan within this much device memory", 0, 0},
    {OPT_U64, 0, "ctx", "N", &o.ctx, 0, "context in tokens (default: what the rows need)", 0, 0},
    {OPT_U64, 0, "chunk", "N", &o.chunk, 0, "tokens of a prefill step", 0, 0},
    {OPT_FLAG, 0, "precise", 0, &o.precise, 0, "f32 activations and caches", 0, 0},
    {OPT_GROUP, 0, 0, 0, 0, 0, "Output", 0, 0},
    {OPT_FLAG, 0, "csv", 0, &o.csv, 0, "comma-separated values", 0, 0},
    {OPT_STR, 0, "svg", "FILE", &o.svg, 0, "plot decode speed over depth", 0, 0},
    {OPT_FLAG, 0, "force", 0, &o.force, 0, "replace an existing plot", 0, 0},
    OPT_COMMON(o.common),
    {OPT_END, 0, 0, 0, 0, 0, 0, 0, 0},
};

static const struct opt_command command = {
    .name = "bench",
    .synopsis = "qx bench PATH [OPTION]...\n"
                "qx bench --geometry released|CONFIG [--layout NAME] [OPTION]...",
    .summary = "Measures decode and prefill speed against the limit of the device's memory.",
    .examples = "  qx bench sample --device cpu -n 4 --depth 16 --repeat 2\n"
                "  qx bench --geometry released --layout mixed --depth 4096,32768 --streams 1,4,8\n"
                "  qx bench --geometry released --prompt 1024,8192 --kernels --json\n"
                "  qx bench --geometry released --shared 32768 --prompt 2048 -n 256 --streams 1,4,8\n",
    .opts = options,
    .min_args = 0,
    .max_args = 1,
};

/* The published workload of --shared: what each request brings and what it asks for. */
static uint64_t load_suffix(void)
{
    return o.prompt.n ? o.prompt.v[0] : 2048;
}

static uint64_t load_output(void)
{
    return o.has_n ? o.n : 256;
}

struct job {
    struct ui ui;
    struct qx_model *m;
    double bandwidth, floor_bandwidth;
    double floor_flops;        /* bf16 products a second that the floor takes; 0: unknown */
    char layout[32], device[160];
    struct qx_bench_row *done; /* decode rows with one stream, for the plot */
    size_t n_done;
    struct table t;
};

static const struct table_col cols[] = {{"what", false, false},     {"streams", true, false}, {"depth", true, false},
                                        {"tok/s", true, false},     {"spread", true, false},  {"ms/step", true, false},
                                        {"GB/step", true, false},   {"floor", true, false},   {"experts", true, false},
                                        {"nodes", true, false}};

static const char *rate_text(double bytes_s, char out[32])
{
    snprintf(out, 32, bytes_s >= 1e11 ? "%.2f TB/s" : "%.1f GB/s", bytes_s * (bytes_s >= 1e11 ? 1e-12 : 1e-9));
    return out;
}

static void emit(struct job *j, const struct qx_bench_row *r)
{
    bool prefill = r->prompt != 0;
    double tokens = prefill ? (double)r->prompt : r->drafts ? r->tokens : (double)r->streams, rate = tokens / r->median_s;
    double spread = (r->high_s - r->low_s) / r->median_s, floor_s = fmax(r->bytes / j->floor_bandwidth, j->floor_flops > 0.0 ? r->flops / j->floor_flops : 0.0);
    if (j->ui.json) {
        struct qx_json_out w;
        qx_json_out_init(&w, false);
        qx_json_obj(&w, NULL);
        qx_json_str(&w, "schema", "qx.bench/1");
        qx_json_str(&w, "kind", prefill ? "prefill" : r->drafts ? "round" : "decode");
        qx_json_str(&w, "device", j->device);
        qx_json_str(&w, "layout", j->layout);
        qx_json_str(&w, "geometry", o.geometry ? o.geometry : "checkpoint");
        qx_json_u64(&w, "streams", r->streams);
        qx_json_u64(&w, "depth", r->depth);
        qx_json_u64(&w, "prompt", r->prompt);
        qx_json_u64(&w, "draft", r->drafts);
        qx_json_f64(&w, "tok_s", rate);
        qx_json_f64(&w, "spread", spread);
        qx_json_f64(&w, "step_ms", r->median_s * 1e3);
        qx_json_u64(&w, "runs", r->n_runs);
        qx_json_f64(&w, "step_bytes", r->bytes);
        qx_json_f64(&w, "unique_experts", r->unique_experts);
        qx_json_f64(&w, "read_bytes_s", j->bandwidth);
        qx_json_f64(&w, "floor_bytes_s", j->floor_bandwidth);
        if (r->flops > 0.0) {
            qx_json_f64(&w, "step_flops", r->flops);
            qx_json_f64(&w, "floor_flops_s", j->floor_flops);
        }
        qx_json_f64(&w, "floor_fraction", floor_s / r->median_s);
        qx_json_u64(&w, "nodes", r->n_nodes);
        if (r->n_steps) {
            qx_json_u64(&w, "steps", r->n_steps);
            qx_json_u64(&w, "waits", r->n_waits);
            qx_json_u64(&w, "allocations", r->n_allocs);
        }
        qx_json_obj_end(&w);
        ui_out(w.buf.p, w.buf.n);
        ui_out_str("\n");
        qx_json_out_fini(&w);
    } else if (o.csv) {
        char line[320];
        snprintf(line, sizeof line, "%s,%u,%llu,%llu,%.3f,%.4f,%.5f,%.0f,%.3f,%.0f,%.4f,%llu\n",
                 prefill ? "prefill" : r->drafts ? "round" : "decode", r->streams, (unsigned long long)r->depth,
                 (unsigned long long)r->prompt, rate, spread, r->median_s * 1e3, r->bytes, r->unique_experts,
                 j->floor_bandwidth, floor_s / r->median_s, (unsigned long long)r->n_nodes);
        ui_out_str(line);
    } else {
        if (r->drafts) {
            table_cell(&j->t, "round of %u", r->drafts);
        } else {
            table_cell(&j->t, "%s", prefill ? "prefill" : "decode");
        }
        table_cell(&j->t, "%u", r->streams);
        table_cell(&j->t, "%llu", (unsigned long long)(prefill ? r->prompt : r->depth));
        table_cell(&j->t, "%.1f", rate);
        table_cell(&j->t, "%.1f %%", spread * 100);
        table_cell(&j->t, "%.3f", r->median_s * 1e3);
        table_cell(&j->t, "%.2f", r->bytes * 1e-9);
        table_cell(&j->t, "%.1f %%", 100 * floor_s / r->median_s);
        table_cell(&j->t, r->unique_experts > 0 ? "%.1f" : "-", r->unique_experts);
        table_cell(&j->t, "%llu", (unsigned long long)r->n_nodes);
        if (r->n_steps && j->ui.verbose) {
            ui_note(&j->ui, "%u stream%s at %llu: in %llu steps the host waited for the device %llu times and took "
                            "memory of it %llu times", r->streams, r->streams == 1 ? "" : "s",
                    (unsigned long long)r->depth, (unsigned long long)r->n_steps, (unsigned long long)r->n_waits,
                    (unsigned long long)r->n_allocs);
        }
    }
}

/* `what`: NULL, or the part of a round of k drafts. */
static void print_ops(struct job *j, const struct qx_bench_op ops[QX_OP_COUNT + 1], const char *what, uint32_t k)
{
    static const struct table_col kc[] = {{"op", false, false},    {"nodes", true, false}, {"us/step", true, false},
                                          {"share", true, false},  {"MB", true, false},    {"GB/s", true, false},
                                          {"floor", true, false}};
    double sum = 0.0;
    for (int i = 0; i < QX_OP_COUNT; ++i) {
        sum += ops[i].s;
    }
    struct table t;
    table_init(&t, kc, QX_ARRAY_LEN(kc));
    for (int i = 0; i <= QX_OP_COUNT; ++i) {
        if (!ops[i].n_nodes) {
            continue;
        }
        double f = ops[i].bytes / j->floor_bandwidth;
        if (j->ui.json) {
            struct qx_json_out w;
            qx_json_out_init(&w, false);
            qx_json_obj(&w, NULL);
            qx_json_str(&w, "schema", "qx.bench/1");
            qx_json_str(&w, "kind", "op");
            if (what) {
                qx_json_str(&w, "part", what);
                qx_json_u64(&w, "draft", k);
            }
            qx_json_str(&w, "op", ops[i].name);
            qx_json_u64(&w, "nodes", ops[i].n_nodes);
            qx_json_f64(&w, "us", ops[i].s * 1e6);
            qx_json_f64(&w, "share", ops[i].s / sum);
            qx_json_f64(&w, "bytes", ops[i].bytes);
            qx_json_f64(&w, "floor_fraction", f / ops[i].s);
            qx_json_obj_end(&w);
            ui_out(w.buf.p, w.buf.n);
            ui_out_str("\n");
            qx_json_out_fini(&w);
        } else {
            table_cell(&t, "%s", ops[i].name);
            table_cell(&t, "%llu", (unsigned long long)ops[i].n_nodes);
            table_cell(&t, "%.1f", ops[i].s * 1e6);
            table_cell(&t, "%.1f %%", 100 * ops[i].s / sum);
            table_cell(&t, "%.1f", ops[i].bytes * 1e-6);
            table_cell(&t, "%.0f", ops[i].bytes / ops[i].s * 1e-9);
            table_cell(&t, "%.1f %%", 100 * f / ops[i].s);
        }
    }
    if (!j->ui.json) {
        ui_out_str("\n");
        table_print(&t, &j->ui, 0);
    }
    table_fini(&t);
}

static int round_kernels(struct job *j, uint32_t k, uint64_t depth, struct qx_error *err)
{
    struct qx_bench_op check[QX_OP_COUNT + 1], drafts[QX_OP_COUNT + 1];
    double s;
    int rc = qx_bench_round_ops(j->m, k, o.has_accept ? o.accept : 1.0, depth, check, drafts, &s, err);
    if (rc) {
        return rc;
    }
    char line[160];
    snprintf(line, sizeof line, "\nA round of %u on the device alone: %.3f ms. Its verification:\n", k, s * 1e3);
    ui_out_str(j->ui.json ? "" : line);
    print_ops(j, check, "verification", k);
    ui_out_str(j->ui.json ? "" : "\nIts drafts:\n");
    print_ops(j, drafts, "drafts", k);
    return 0;
}

static int kernels(struct job *j, struct qx_error *err)
{
    struct qx_bench_op ops[QX_OP_COUNT + 1];
    uint64_t depth = o.has_depth ? o.depth.v[0] : default_depth;
    int rc = qx_bench_ops(j->m, (uint32_t)(o.has_streams ? o.streams.v[0] : 1), depth, ops, err);
    if (!rc) {
        print_ops(j, ops, NULL, 0);
    }
    for (size_t i = 0; i < o.draft.n && !rc; ++i) {
        rc = round_kernels(j, (uint32_t)o.draft.v[i], depth, err);
    }
    return rc;
}

static int plot(const struct job *j, struct qx_error *err)
{
    double top = 1.0, far = 1.0;
    for (size_t i = 0; i < j->n_done; ++i) {
        top = fmax(top, 1.0 / j->done[i].median_s);
        far = fmax(far, (double)j->done[i].depth);
    }
    struct qx_buf b = {0};
    qx_buf_str(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"640\" height=\"360\" font-family=\"sans-serif\" "
                   "font-size=\"12\">\n<rect width=\"640\" height=\"360\" fill=\"white\"/>\n"
                   "<path d=\"M60 20V310H620\" fill=\"none\" stroke=\"black\"/>\n<text x=\"60\" y=\"14\">tokens/s by depth</text>\n"
                   "<polyline fill=\"none\" stroke=\"#1f77b4\" stroke-width=\"2\" points=\"");
    for (size_t i = 0; i < j->n_done; ++i) {
        qx_buf_fmt(&b, "%.1f,%.1f ", 60 + 550 * (double)j->done[i].depth / far, 310 - 280 / j->done[i].median_s / top);
    }
    qx_buf_str(&b, "\"/>\n");
    for (size_t i = 0; i < j->n_done; ++i) {
        qx_buf_fmt(&b, "<text x=\"%.1f\" y=\"%.1f\">%.0f @ %llu</text>\n", 60 + 520 * (double)j->done[i].depth / far,
                   300 - 280 / j->done[i].median_s / top, 1.0 / j->done[i].median_s, (unsigned long long)j->done[i].depth);
    }
    qx_buf_str(&b, "</svg>\n");
    struct qx_file_out *f = NULL;
    int rc = b.failed ? qx_fail_nomem(err) : qx_file_out_create(&f, o.svg, o.force, err);
    rc = rc ? rc : qx_file_out_write(f, b.p, b.n, err);
    if (rc) {
        qx_file_out_abort(f);
    } else {
        rc = qx_file_out_commit(f, err);
    }
    qx_buf_fini(&b);
    return rc;
}

static int rows(struct job *j, struct qx_error *err)
{
    static uint64_t streams0 = 1;
    const uint64_t *depth = o.has_depth ? o.depth.v : &default_depth, *streams = o.has_streams ? o.streams.v : &streams0;
    size_t nd = o.has_depth ? o.depth.n : 1, ns = o.has_streams ? o.streams.n : 1;
    struct qx_bench_row r;
    int rc = 0;
    if (o.has_shared) {
        struct bench_load_opts l = {.streams = streams, .n_streams = ns, .shared = o.shared,
                                    .suffix = load_suffix(), .output = load_output(),
                                    .repeat = o.has_repeat ? o.repeat : 1, .device = j->device, .layout = j->layout,
                                    .csv = o.csv};
        return bench_load(&j->ui, j->m, &l, err);
    }
    if (o.csv) {
        ui_out_str("kind,streams,depth,prompt,tok_s,spread,step_ms,step_bytes,unique_experts,floor_bytes_s,floor_fraction,nodes\n");
    }
    for (size_t s = 0; s < ns; ++s) {
        for (size_t d = 0; d < nd; ++d) {
            if (o.n) {
                if ((rc = qx_bench_decode(j->m, (uint32_t)streams[s], depth[d], (uint32_t)o.n, (uint32_t)o.repeat, &r, err))) {
                    return rc;
                }
                emit(j, &r);
                if (streams[s] == 1) {
                    j->done[j->n_done++] = r;
                }
            }
        }
    }
    for (size_t i = 0; i < o.draft.n; ++i) {
        for (size_t d = 0; d < nd && o.n; ++d) {
            if ((rc = qx_bench_drafts(j->m, (uint32_t)o.draft.v[i], o.has_accept ? o.accept : 1.0, depth[d], (uint32_t)o.n, (uint32_t)o.repeat, &r, err))) {
                return rc;
            }
            emit(j, &r);
        }
    }
    for (size_t i = 0; i < o.prompt.n && !o.has_shared; ++i) {
        if ((rc = qx_bench_prefill(j->m, o.prompt.v[i], (uint32_t)o.repeat, &r, err))) {
            return rc;
        }
        emit(j, &r);
    }
    return 0;
}

static char *read_text(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *p = f ? qx_malloc(1 << 20) : NULL;
    *n = p ? fread(p, 1, 1 << 20, f) : 0;
    if (f) {
        fclose(f);
    }
    return p;
}

static int config_of(struct qx_config *cfg, struct qx_error *err)
{
    struct qx_findings *fs = qx_findings_create();
    if (!fs) {
        return qx_fail_nomem(err);
    }
    int rc;
    if (strcmp(o.geometry, "released") == 0) {
        rc = qx_config_parse(cfg, qx_released_config, strlen(qx_released_config), "released", fs, err);
    } else {
        size_t n;
        char *text = read_text(o.geometry, &n);
        rc = text ? qx_config_parse(cfg, text, n, o.geometry, fs, err)
                  : qx_fail(err, QX_E_NOT_FOUND, "not-found", "cannot read '%s'", o.geometry);
        qx_free(text);
    }
    qx_findings_destroy(fs);
    return rc;
}

/* Without --depth: 4096, or what the context limit leaves. */
static void choose_depth(uint64_t limit)
{
    uint64_t rest = o.n + 8;
    if (limit && limit < default_depth + rest) {
        default_depth = limit > rest ? limit - rest : 1;
    }
}

static int load(struct job *j, const char *path, struct qx_ckpt **ck, struct qx_config *cfg, struct qx_error *err)
{
    int rc;
    if (path) {
        struct qx_open how = QX_OPEN_DEFAULT;
        rc = qx_ckpt_open(ck, path, &how, err);
        choose_depth(rc ? 0 : qx_ckpt_context_limit(*ck));
    } else {
        rc = config_of(cfg, err);
        choose_depth(rc ? 0 : qx_config_context_limit(cfg));
    }
    if (rc) {
        return rc;
    }
    uint64_t need = default_depth + o.n + 8, most = 1;
    for (size_t i = 0; i < o.depth.n; ++i) {
        need = o.depth.v[i] + o.n + 8 > need || i == 0 ? o.depth.v[i] + o.n + 8 : need;
    }
    for (size_t i = 0; i < o.prompt.n; ++i) {
        need = o.prompt.v[i] > need ? o.prompt.v[i] : need;
    }
    for (size_t i = 0; i < o.streams.n; ++i) {
        most = o.streams.v[i] > most ? o.streams.v[i] : most;
    }
    if (o.has_shared) {
        need = o.shared + load_suffix() + load_output() + 8;
        ++most; /* the request that brings the prefix */
    }
    struct qx_model_opts mo = QX_MODEL_OPTS_DEFAULT;
    mo.draft_vocab = o.draft_vocab < UINT32_MAX ? (uint32_t)o.draft_vocab : UINT32_MAX;
    for (size_t i = 0; i < o.draft.n; ++i) {
        if (o.draft.v[i] < 1 || o.draft.v[i] > QX_DRAFT_MAX) {
            return qx_fail(err, QX_E_USAGE, "usage", "'--draft' wants 1 to %d drafts a round", QX_DRAFT_MAX);
        }
        uint32_t k = (uint32_t)o.draft.v[i];
        mo.draft_max = k > mo.draft_max ? k : mo.draft_max;
    }
    /* rounds move on, a token each and what is accepted */
    need += o.draft.n ? (uint64_t)((double)((o.repeat + 1) * o.n) * (o.has_accept ? o.accept : 1.0)) + QX_DRAFT_MAX : 0;
    mo.device = o.device;
    mo.n_threads = (uint32_t)o.common.threads;
    mo.precise = o.precise;
    mo.ctx_tokens = o.ctx ? o.ctx : need;
    mo.chunk_rows = (uint32_t)o.chunk;
    mo.max_seqs = (uint32_t)most;
    mo.device_memory_bytes = o.memory;
    for (uint32_t i = 0; o.table && i < 3; ++i) {
        if (strcmp(o.table, tables[i]) == 0) {
            mo.table = (enum qx_table_place)(QX_TABLE_DEVICE + i);
        }
    }
    if (path) {
        snprintf(j->layout, sizeof j->layout, "checkpoint");
        return qx_model_load(&j->m, *ck, &mo, err);
    }
    snprintf(j->layout, sizeof j->layout, "%s", o.layout ? o.layout : "mixed");
    return qx_synth_create(&j->m, cfg, j->layout, &mo, err);
}

int main(int argc, char **argv)
{
    char **args;
    int n_args;
    o.n = 64;
    o.repeat = 5;
    int code = opt_parse(&command, argc, argv, &args, &n_args);
    if (code >= 0) {
        return code;
    }
    static struct job j;
    struct qx_error err = {0};
    struct qx_ckpt *ck = NULL;
    struct qx_config *cfg = qx_calloc(1, sizeof *cfg);
    ui_init(&j.ui, "qx-bench", &o.common);
    int rc = 0;
    if ((n_args == 1) == (o.geometry != NULL)) {
        rc = qx_fail(&err, QX_E_USAGE, "usage", "give either a checkpoint or --geometry");
    } else if (o.gpus > 1) {
        rc = qx_fail(&err, QX_E_USAGE, "usage", "one device a run");
    } else if (!cfg) {
        rc = qx_fail_nomem(&err);
    }
    j.done = qx_calloc(o.streams.n * o.depth.n + o.depth.n + o.streams.n + 2, sizeof *j.done);
    rc = rc ? rc : j.done ? 0 : qx_fail_nomem(&err);
    rc = rc ? rc : load(&j, n_args ? args[0] : NULL, &ck, cfg, &err);
    if (!rc) {
        struct qx_model_info info;
        qx_model_info(j.m, &info);
        snprintf(j.device, sizeof j.device, "%s", info.device);
        j.bandwidth = qx_bench_bandwidth(j.m);
        j.floor_bandwidth = fmax(j.bandwidth, (double)info.reach_bytes_s);
        j.floor_flops = (double)info.reach_flops_s;
        j.floor_bandwidth = j.floor_bandwidth > 0.0 ? j.floor_bandwidth : 1.0;
        table_init(&j.t, cols, QX_ARRAY_LEN(cols));
        rc = rows(&j, &err);
        if (!j.ui.json && !o.csv && !o.has_shared) {
            table_print(&j.t, &j.ui, 0);
            char reach[32], takes[32];
            ui_note(&j.ui, "%s, %s; copies reach %s (read and write), the floor takes %s", j.device, j.layout,
                    rate_text(j.bandwidth, reach), rate_text(j.floor_bandwidth, takes));
        }
        table_fini(&j.t);
        rc = rc || !o.kernels ? rc : kernels(&j, &err);
        rc = rc || !o.svg ? rc : plot(&j, &err);
    }
    code = rc ? ui_fail(&j.ui, &err) : EXIT_OK;
    qx_model_free(j.m);
    qx_ckpt_close(ck);
    qx_free(cfg);
    qx_free(j.done);
    qx_u64_list_fini(&o.draft);
    qx_u64_list_fini(&o.prompt);
    qx_u64_list_fini(&o.depth);
    qx_u64_list_fini(&o.streams);
    return ui_finish(&j.ui, code);
}
