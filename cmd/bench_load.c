/* bench_load.c: the published kind of workload (a shared prefix, a suffix and an output a request) in one
 * table: time to first token, speed, latency. */
#include "bench_load.h"

#include "table.h"

#include <stdio.h>
#include <stdlib.h>

static int by_latency(const void *a, const void *b)
{
    double x = ((const struct qx_bench_load *)a)->latency_mean_s, y = ((const struct qx_bench_load *)b)->latency_mean_s;
    return (x > y) - (x < y);
}

static void put_json(const struct bench_load_opts *o, const struct qx_bench_load *r)
{
    struct qx_json_out w;
    qx_json_out_init(&w, false);
    qx_json_obj(&w, NULL);
    qx_json_str(&w, "schema", "qx.bench/1");
    qx_json_str(&w, "kind", "workload");
    qx_json_str(&w, "device", o->device);
    qx_json_str(&w, "layout", o->layout);
    qx_json_u64(&w, "streams", r->streams);
    qx_json_u64(&w, "shared", r->shared);
    qx_json_u64(&w, "prompt", r->suffix);
    qx_json_u64(&w, "output", r->output);
    qx_json_u64(&w, "runs", o->repeat);
    qx_json_u64(&w, "shared_tokens", r->shared_tokens);
    qx_json_f64(&w, "first_ttft_s", r->first_s);
    qx_json_f64(&w, "ttft_s", r->ttft_mean_s);
    qx_json_f64(&w, "ttft_max_s", r->ttft_max_s);
    qx_json_f64(&w, "latency_s", r->latency_mean_s);
    qx_json_f64(&w, "latency_max_s", r->latency_max_s);
    qx_json_f64(&w, "stream_tok_s", r->stream_tok_s);
    qx_json_f64(&w, "tok_s", r->total_tok_s);
    qx_json_obj_end(&w);
    ui_out(w.buf.p, w.buf.n);
    ui_out_str("\n");
    qx_json_out_fini(&w);
}

static void put_csv(const struct qx_bench_load *r)
{
    char line[320];
    snprintf(line, sizeof line, "workload,%u,%llu,%llu,%llu,%.5f,%.5f,%.5f,%.5f,%.5f,%.3f,%.3f\n", r->streams,
             (unsigned long long)r->shared, (unsigned long long)r->suffix, (unsigned long long)r->output, r->first_s,
             r->ttft_mean_s, r->ttft_max_s, r->latency_mean_s, r->latency_max_s, r->stream_tok_s, r->total_tok_s);
    ui_out_str(line);
}

static void put_row(struct table *t, const struct qx_bench_load *r)
{
    table_cell(t, "%u", r->streams);
    table_cell(t, "%llu", (unsigned long long)r->shared);
    table_cell(t, "%llu", (unsigned long long)r->suffix);
    table_cell(t, "%llu", (unsigned long long)r->output);
    table_cell(t, "%.1f", r->first_s * 1e3);
    table_cell(t, "%.1f", r->ttft_mean_s * 1e3);
    table_cell(t, "%.1f", r->ttft_max_s * 1e3);
    table_cell(t, "%.1f", r->stream_tok_s);
    table_cell(t, "%.1f", r->total_tok_s);
    table_cell(t, "%.3f", r->latency_mean_s);
    table_cell(t, "%.3f", r->latency_max_s);
}

int bench_load(struct ui *ui, struct qx_model *m, const struct bench_load_opts *o, struct qx_error *err)
{
    static const struct table_col cols[] = {
        {"streams", true, false}, {"prefix", true, false},  {"suffix", true, false},      {"output", true, false},
        {"first ms", true, false}, {"TTFT ms", true, false}, {"max ms", true, false},      {"tok/s each", true, false},
        {"tok/s all", true, false}, {"latency s", true, false}, {"max s", true, false}};
    struct qx_bench_load run[16];
    uint64_t repeat = o->repeat < 1 ? 1 : o->repeat < 16 ? o->repeat : 16;
    struct table t;
    int rc = 0;
    table_init(&t, cols, QX_ARRAY_LEN(cols));
    if (o->csv) {
        ui_out_str("kind,streams,shared,prompt,output,first_ttft_s,ttft_s,ttft_max_s,latency_s,latency_max_s,"
                   "stream_tok_s,tok_s\n");
    }
    for (size_t i = 0; i < o->n_streams && !rc; ++i) {
        for (uint64_t k = 0; k < repeat && !rc; ++k) {
            rc = qx_bench_workload(m, (uint32_t)o->streams[i], o->shared, o->suffix, o->output, &run[k], err);
        }
        if (rc) {
            break;
        }
        qsort(run, repeat, sizeof *run, by_latency);
        const struct qx_bench_load *r = &run[repeat / 2];
        if (ui->json) {
            put_json(o, r);
        } else if (o->csv) {
            put_csv(r);
        } else {
            put_row(&t, r);
        }
    }
    if (!ui->json && !o->csv && !rc) {
        table_print(&t, ui, 0);
        ui_note(ui, "first: a request that reads the prefix; the others start from it. Latency: from a request's start "
                    "to its last token");
    }
    table_fini(&t);
    return rc;
}
