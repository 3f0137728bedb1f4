/* decode_rows.c: qx decode-rows: chosen rows of a stored matrix as numbers.
 *
 * Everything that can be wrong with the request is looked at before the first row is printed; rows
 * then pass through in chunks of bounded size, in the order asked for. */
#include "exit_code.h"
#include "opt.h"
#include "signals.h"
#include "ui.h"

#include "alloc.h"
#include "backend.h"
#include "ckpt.h"
#include "file_out.h"
#include "npy_write.h"
#include "ple_open.h"
#include "pool.h"
#include "resolve.h"
#include "rows.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES (16u << 20)
#define CHUNK_ROWS 65536u

enum format { F_TEXT, F_JSONL, F_NPY, F_HEX };

static const char *const dtypes[] = {"f32", "bf16", "raw", NULL};
static const char *const formats[] = {"text", "jsonl", "npy", "hex", NULL};

static struct {
    struct opt_common common;
    struct qx_u64_list rows, tokens, history;
    bool has_rows, has_tokens, has_text, has_history, force;
    const char *text, *tensor, *dtype, *format, *output, *device;
} o;

static const struct opt options[] = {
    {OPT_GROUP, 0, 0, 0, 0, 0, "Rows", 0, 0},
    {OPT_LIST, 0, "rows", "LIST", &o.rows, &o.has_rows, "rows to print, counted from 0", 0,
     "row-out-of-range"},
    {OPT_LIST, 0, "tokens", "LIST", &o.tokens, &o.has_tokens,
     "the table rows that each of these token ids looks up", 0, "token-out-of-range"},
    {OPT_STR, 0, "text", "STRING", &o.text, &o.has_text, "the same for the tokens of a text", 0, 0},
    {OPT_LIST, 0, "history", "LIST", &o.history, &o.has_history,
     "token ids that came before, oldest first (default: a fresh start)", 0, "token-out-of-range"},
    {OPT_STR, 't', "tensor", "NAME", &o.tensor, 0,
     "another tensor than the n-gram table; [E,R,C] has rows e x R + r", 0, 0},
    {OPT_GROUP, 0, 0, 0, 0, 0, "Output", 0, 0},
    {OPT_CHOICE, 0, "dtype", "TYPE", &o.dtype, 0, "f32 (default), bf16, or raw stored codes",
     dtypes, 0},
    {OPT_CHOICE, 0, "format", "FORMAT", &o.format, 0, "text (default), jsonl, npy or hex", formats,
     0},
    {OPT_STR, 'o', "output", "FILE", &o.output, 0, "write there instead of standard output", 0, 0},
    {OPT_FLAG, 0, "force", 0, &o.force, 0, "replace an existing output file", 0, 0},
    {OPT_STR, 0, "device", "DEVICE", &o.device, 0, "decode on cpu (default) or cuda[:N]", 0, 0},
    OPT_COMMON(o.common),
    {OPT_END, 0, 0, 0, 0, 0, 0, 0, 0},
};

static const struct opt_command command = {
    .name = "decode-rows",
    .synopsis = "qx decode-rows PATH --rows LIST [--tensor NAME] [OPTION]...\n"
                "qx decode-rows PATH --tokens LIST | --text STRING [--history LIST] [OPTION]...",
    .summary = "Prints rows of a stored matrix as numbers; by default rows of the n-gram table.",
    .examples = "  qx decode-rows sample --rows 0-3\n"
                "  qx decode-rows sample --tokens 5,7,9 --json\n"
                "  qx decode-rows sample --rows @rows.txt --format npy -o rows.npy\n",
    .opts = options,
    .min_args = 1,
    .max_args = 1,
};

struct job {
    struct ui ui;
    struct qx_ckpt *ck;
    struct qx_rows *rows;
    struct qx_pool *pool;     /* large requests */
    struct qx_backend *be;    /* NULL: in this process */
    struct qx_file_out *file; /* NULL: stdout */
    enum format format;
    enum qx_row_dtype dtype;
    const uint64_t *row;   /* [n] */
    const uint64_t *token; /* [n / heads], NULL for --rows */
    size_t n, heads;
    uint64_t row_base; /* of a rank's slice: what the hash calls row row_base is row 0 here */
    const char *name;
};

static int emit(struct job *j, const void *p, size_t n, struct qx_error *err)
{
    if (j->file == NULL) {
        ui_out(p, n);
        return 0;
    }
    return qx_file_out_write(j->file, p, n, err);
}

/* Shortest text that reads back as the same f32. */
static void add_f32(struct qx_buf *b, float v)
{
    char text[32];
    if (isnan(v)) {
        qx_buf_str(b, "NaN");
        return;
    }
    if (isinf(v)) {
        qx_buf_str(b, v < 0 ? "-Infinity" : "Infinity");
        return;
    }
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)v);
        if (strtof(text, NULL) == v) {
            break;
        }
    }
    qx_buf_str(b, text);
}

static void add_hex(struct qx_buf *b, const uint8_t *p, size_t n, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i += size) {
        if (i > 0) {
            qx_buf_chr(b, ' ');
        }
        for (size_t k = size; k-- > 0;) { /* little-endian bytes as a number */
            char two[2] = {digits[p[i + k] >> 4], digits[p[i + k] & 15]};
            qx_buf_add(b, two, 2);
        }
    }
}

static size_t item_bytes(const struct job *j)
{
    return j->dtype == QX_ROW_F32 ? 4 : j->dtype == QX_ROW_BF16 ? 2 : 1;
}

static size_t row_bytes(const struct job *j)
{
    return j->dtype == QX_ROW_RAW ? qx_rows_raw_bytes(j->rows)
                                  : qx_rows_width(j->rows) * item_bytes(j);
}

static void add_text(struct job *j, struct qx_buf *b, size_t i, const uint8_t *p)
{
    int64_t shard;
    uint64_t local;
    qx_rows_place(j->rows, j->row[i], &shard, &local);
    if (j->token != NULL) {
        qx_buf_fmt(b, "position %zu token %" PRIu64 " head %zu ", i / j->heads,
                   j->token[i / j->heads], i % j->heads);
    }
    qx_buf_fmt(b, "row %" PRIu64, j->row[i]);
    if (shard >= 0) {
        qx_buf_fmt(b, " (shard %" PRId64 " row %" PRIu64 ")", shard, local);
    }
    qx_buf_chr(b, ':');
    if (j->dtype == QX_ROW_F32) {
        for (uint64_t k = 0; k < qx_rows_width(j->rows); k++) {
            float v;
            memcpy(&v, p + 4 * k, 4);
            qx_buf_chr(b, ' ');
            add_f32(b, v);
        }
    } else {
        qx_buf_chr(b, ' ');
        add_hex(b, p, row_bytes(j), item_bytes(j));
    }
    qx_buf_chr(b, '\n');
}

static void add_json(struct job *j, struct qx_json_out *out, size_t i, const uint8_t *p)
{
    int64_t shard;
    uint64_t local;
    qx_rows_place(j->rows, j->row[i], &shard, &local);
    qx_json_obj(out, NULL);
    qx_json_str(out, "schema", "qx.rows/1");
    qx_json_str(out, "tensor", j->name);
    qx_json_u64(out, "row", j->row[i]);
    if (shard >= 0) {
        qx_json_i64(out, "shard", shard);
    } else {
        qx_json_null(out, "shard");
    }
    qx_json_u64(out, "local_row", local);
    if (j->token != NULL) {
        qx_json_u64(out, "token", j->token[i / j->heads]);
        qx_json_u64(out, "position", i / j->heads);
        qx_json_u64(out, "head", i % j->heads);
    } else {
        qx_json_null(out, "token");
        qx_json_null(out, "position");
        qx_json_null(out, "head");
    }
    if (j->dtype == QX_ROW_F32) {
        qx_json_arr(out, "values");
        for (uint64_t k = 0; k < qx_rows_width(j->rows); k++) {
            float v;
            memcpy(&v, p + 4 * k, 4);
            qx_json_f32(out, NULL, v);
        }
        qx_json_arr_end(out);
    } else {
        struct qx_buf hex = {0};
        add_hex(&hex, p, row_bytes(j), item_bytes(j));
        qx_json_str(out, "hex", qx_buf_cstr(&hex));
        out->buf.failed = out->buf.failed || hex.failed;
        qx_buf_fini(&hex);
    }
    qx_json_obj_end(out);
    out->need_comma[0] = false; /* a document a line */
    qx_buf_chr(&out->buf, '\n');
}

/* One decoded chunk in the chosen form. */
static int print_chunk(struct job *j, size_t first, size_t n, const uint8_t *data,
                       struct qx_error *err)
{
    size_t bytes = row_bytes(j);
    int rc = 0;
    if (j->format == F_NPY) {
        return emit(j, data, n * bytes, err);
    }
    struct qx_json_out json;
    struct qx_buf text = {0};
    qx_json_out_init(&json, false);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        const uint8_t *p = data + i * bytes;
        if (j->format == F_JSONL) {
            add_json(j, &json, first + i, p);
        } else if (j->format == F_TEXT) {
            add_text(j, &text, first + i, p);
        } else {
            qx_buf_fmt(&text, "%" PRIu64 " ", j->row[first + i]);
            add_hex(&text, p, bytes, item_bytes(j));
            qx_buf_chr(&text, '\n');
        }
        struct qx_buf *b = j->format == F_JSONL ? &json.buf : &text;
        if (b->failed) {
            rc = qx_fail_nomem(err);
        } else if (b->n > CHUNK_BYTES / 16 || i + 1 == n) {
            rc = emit(j, b->p, b->n, err);
            b->n = 0;
        }
    }
    qx_json_out_fini(&json);
    qx_buf_fini(&text);
    return rc;
}

static int print_rows(struct job *j, struct qx_error *err)
{
    size_t bytes = row_bytes(j), chunk = CHUNK_BYTES / (bytes + 1) + 1;
    chunk = chunk < CHUNK_ROWS ? chunk : CHUNK_ROWS;
    chunk = chunk < j->n ? chunk : j->n;
    size_t total;
    uint8_t *data = qx_mul_size(chunk, bytes, &total) ? qx_malloc(total + 1) : NULL;
    int rc = data == NULL ? qx_fail_nomem(err) : 0;
    if (rc == 0 && j->format == F_NPY) {
        char header[QX_NPY_HEADER_BYTES];
        uint64_t shape[2] = {j->n, bytes / item_bytes(j)};
        qx_npy_header(header,
                      j->dtype == QX_ROW_F32    ? "<f4"
                      : j->dtype == QX_ROW_BF16 ? "<u2"
                                                : "|u1",
                      shape, 2);
        /* The header waits for the first rows, so that a failure there leaves stdout empty. */
        size_t n = chunk;
        rc = j->be != NULL && j->dtype != QX_ROW_RAW
                 ? qx_rows_read_device(j->rows, j->be, j->row, n, j->dtype, data, err)
                 : qx_rows_read_pool(j->rows, j->pool, j->row, n, j->dtype, data, err);
        rc = rc == 0 ? emit(j, header, sizeof header, err) : rc;
    }
    for (size_t i = 0; rc == 0 && i < j->n && !ui_out_failed(); i += chunk) {
        size_t n = j->n - i < chunk ? j->n - i : chunk;
        if (signals_pending()) {
            rc = qx_fail(err, QX_E_INTERRUPTED, "interrupted", "stopped after %zu of %zu rows", i,
                         j->n);
            break;
        }
        if (i > 0 || j->format != F_NPY) {
            rc = j->be != NULL && j->dtype != QX_ROW_RAW
                     ? qx_rows_read_device(j->rows, j->be, j->row + i, n, j->dtype, data, err)
                     : qx_rows_read_pool(j->rows, j->pool, j->row + i, n, j->dtype, data, err);
        }
        rc = rc == 0 ? print_chunk(j, i, n, data, err) : rc;
    }
    qx_free(data);
    return rc;
}

/* ---- which rows --------------------------------------------------------------------------- */

static int check_ids(struct job *j, const char *what, const struct qx_u64_list *ids, uint64_t vocab)
{
    for (size_t i = 0; i < ids->n; i++) {
        if (ids->v[i] >= vocab) {
            return ui_usage(&j->ui, "token-out-of-range",
                         "%s %zu is %" PRIu64 ", the vocabulary has ids 0 to %" PRIu64, what, i,
                         ids->v[i], vocab - 1);
        }
    }
    return -1;
}

/* Rows of tokens: position-major, heads inside. Returns an exit code or -1. */
static int hash_tokens(struct job *j, struct qx_u64_list *rows)
{
    struct qx_error err = {0};
    struct qx_ple_hash h;
    int rc = qx_ple_hash_open(&h, j->ck, &err);
    if (rc != 0) {
        return ui_fail(&j->ui, &err);
    }
    uint64_t vocab = qx_ckpt_config(j->ck)->vocab_size;
    rc = check_ids(j, "history position", &o.history, vocab);
    rc = rc < 0 ? check_ids(j, "position", &o.tokens, vocab) : rc;
    if (rc >= 0) {
        return rc;
    }
    size_t bytes;
    j->heads = h.n_heads;
    rows->n = 0;
    rows->v = qx_mul_size(o.tokens.n, h.n_heads, &bytes) ? qx_calloc(bytes, sizeof *rows->v) : NULL;
    if (rows->v == NULL) {
        qx_fail_nomem(&err);
        return ui_fail(&j->ui, &err);
    }
    for (size_t i = 0; i < o.tokens.n; i++) {
        uint32_t prev[QX_MAX_NGRAM];
        for (uint32_t k = 0; k + 1 < h.ngram_size; k++) {
            /* The k-th id before position i: of the list, then of the history, else none. */
            prev[k] = h.eos;
            if (i > k) {
                prev[k] = (uint32_t)o.tokens.v[i - k - 1];
            } else if (k - i < o.history.n) {
                prev[k] = (uint32_t)o.history.v[o.history.n - 1 - (k - i)];
            }
        }
        qx_ple_rows(&h, (uint32_t)o.tokens.v[i], prev, rows->v + rows->n);
        rows->n += h.n_heads;
    }
    for (size_t i = 0; i < rows->n; i++) {
        uint64_t n = qx_rows_count(j->rows);
        if (rows->v[i] < j->row_base || rows->v[i] - j->row_base >= n) {
            return ui_usage(&j->ui, "row-out-of-range",
                         "row %" PRIu64
                         " of position %zu is not in this slice of the table, which holds "
                         "rows %" PRIu64 " to %" PRIu64,
                         rows->v[i], i / j->heads, j->row_base, j->row_base + n - 1);
        }
        rows->v[i] -= j->row_base;
    }
    j->token = o.tokens.v;
    return -1;
}

/* A note when rows lie behind the last one that the hash can address. */
static void note_padding(struct job *j)
{
    struct qx_ple_hash h;
    if (o.tensor != NULL || qx_ckpt_config(j->ck) == NULL ||
        qx_ple_hash_init(&h, qx_ckpt_config(j->ck), 0, NULL) != 0) {
        return;
    }
    uint64_t n = 0, first = 0;
    for (size_t i = 0; i < j->n; i++) {
        if (j->row[i] + j->row_base >= h.n_rows) {
            first = n == 0 ? j->row[i] : first;
            n++;
        }
    }
    if (n > 0) {
        ui_note(&j->ui,
                "padding-row: %" PRIu64 " of the rows (the first is %" PRIu64 ") lie%s behind the "
                "last row %" PRIu64 " that a token can look up: padding, any content",
                n, first, n == 1 ? "s" : "", h.n_rows - 1 - j->row_base);
    }
}

static int choose(struct job *j, struct qx_u64_list *hashed)
{
    if (o.has_rows) {
        uint64_t n = qx_rows_count(j->rows);
        for (size_t i = 0; i < o.rows.n; i++) {
            if (o.rows.v[i] >= n) {
                return n == 0 ? ui_usage(&j->ui, "row-out-of-range", "row %" PRIu64 ": there are no rows",
                                      o.rows.v[i])
                              : ui_usage(&j->ui, "row-out-of-range",
                                      "row %" PRIu64 ": there are rows 0 to %" PRIu64, o.rows.v[i],
                                      n - 1);
            }
        }
        j->row = o.rows.v;
        j->n = o.rows.n;
    } else {
        int rc = hash_tokens(j, hashed);
        if (rc >= 0) {
            return rc;
        }
        j->row = hashed->v;
        j->n = hashed->n;
    }
    note_padding(j);
    return -1;
}

static int tokenize(struct job *j, struct qx_error *err)
{
    struct qx_tok *tok;
    struct qx_ids ids = {0};
    int rc = qx_tok_load(&tok, j->ck, err);
    if (rc != 0) {
        return rc;
    }
    rc = qx_tok_encode(tok, o.text, strlen(o.text), &ids, err);
    o.tokens.n = 0;
    o.tokens.v = rc == 0 ? qx_calloc(ids.n + 1, sizeof *o.tokens.v) : NULL;
    if (rc == 0 && o.tokens.v == NULL) {
        rc = qx_fail_nomem(err);
    }
    for (size_t i = 0; rc == 0 && i < ids.n; i++) {
        o.tokens.v[o.tokens.n++] = ids.v[i];
    }
    qx_ids_fini(&ids);
    qx_tok_close(tok);
    return rc;
}

/* ---- the command -------------------------------------------------------------------------- */

static int check_request(struct job *j)
{
    int sources = (int)o.has_rows + (int)o.has_tokens + (int)o.has_text;
    if (sources != 1) {
        return ui_usage(&j->ui, "usage",
                     sources == 0 ? "give --rows, --tokens or --text"
                                  : "--rows, --tokens and --text exclude each other");
    }
    if (o.output != NULL && o.output[0] == '-' && o.output[1] != 0) {
        return ui_usage(&j->ui, "usage", "option '-o' wants a value (FILE), not '%s'", o.output);
    }
    if (o.tensor != NULL && !o.has_rows) {
        return ui_usage(&j->ui, "usage", "--tensor goes with --rows: tokens look up the n-gram table");
    }
    if (o.has_history && o.has_rows) {
        return ui_usage(&j->ui, "usage", "--history goes with --tokens or --text");
    }
    if ((o.has_rows && o.rows.n == 0) || (o.has_tokens && o.tokens.n == 0)) {
        return ui_usage(&j->ui, "usage", "the list is empty");
    }
    if (o.common.json && o.format != NULL && strcmp(o.format, "jsonl") != 0) {
        return ui_usage(&j->ui, "usage", "--json is --format jsonl, not '%s'", o.format);
    }
    const char *f = o.common.json ? "jsonl" : o.format != NULL ? o.format : "text";
    j->format = strcmp(f, "jsonl") == 0 ? F_JSONL
                : strcmp(f, "npy") == 0 ? F_NPY
                : strcmp(f, "hex") == 0 ? F_HEX
                                        : F_TEXT;
    /* A hex line is a decoder's answer line (qx-verify), hence bfloat16 unless asked otherwise. */
    const char *d = o.dtype != NULL ? o.dtype : j->format == F_HEX ? "bf16" : "f32";
    j->dtype = strcmp(d, "raw") == 0    ? QX_ROW_RAW
               : strcmp(d, "bf16") == 0 ? QX_ROW_BF16
                                        : QX_ROW_F32;
    if (o.device != NULL && strcmp(o.device, "cpu") != 0 && strcmp(o.device, "cuda") != 0 &&
        strncmp(o.device, "cuda:", 5) != 0) {
        return ui_usage(&j->ui, "usage", "'--device' wants cpu or cuda[:N], not '%s'", o.device);
    }
    return -1;
}

static int open_device(struct job *j, struct qx_error *err)
{
    uint64_t n = 0;
    const char *d = o.device;
    if (d == NULL || strcmp(d, "cpu") == 0) {
        return 0;
    }
    if (d[4] == ':' && (!qx_parse_u64(d + 5, strlen(d + 5), &n) || n > 1023)) {
        return qx_fail(err, QX_E_USAGE, "usage", "'--device' wants cpu or cuda[:N], not '%.40s'",
                       d);
    }
    return qx_backend_cuda_create(&j->be, (int)n, err);
}

int main(int argc, char **argv)
{
    struct job j = {.heads = 1};
    struct qx_error err = {0};
    struct qx_u64_list hashed = {0};
    char **args;
    int n_args;
    int code = opt_parse(&command, argc, argv, &args, &n_args);
    if (code >= 0) {
        return code;
    }
    ui_init(&j.ui, "qx-decode-rows", &o.common);
    code = check_request(&j);
    if (code >= 0) {
        return code;
    }
    signals_init();
    struct qx_open how = QX_OPEN_DEFAULT;
    how.n_threads = (uint32_t)o.common.threads;
    int rc = qx_ckpt_open(&j.ck, args[0], &how, &err);
    if (rc == 0) {
        rc = o.tensor != NULL ? qx_rows_open_tensor(&j.rows, j.ck, o.tensor, &err)
                              : qx_rows_open_table(&j.rows, j.ck, &err);
    }
    if (rc == 0 && o.tensor == NULL) {
        const struct qx_table *t = qx_resolved_table(qx_ckpt_resolved(j.ck));
        j.row_base = t->row_base;
        j.name = t->module;
    } else {
        j.name = o.tensor;
    }
    rc = rc == 0 && o.has_text ? tokenize(&j, &err) : rc;
    rc = rc == 0 ? open_device(&j, &err) : rc;
    if (rc == 0) {
        rc = qx_pool_create(&j.pool, (uint32_t)o.common.threads, &err);
    }
    code = rc == 0 ? choose(&j, &hashed) : ui_fail(&j.ui, &err);
    if (code < 0) {
        if (o.output != NULL && strcmp(o.output, "-") != 0) {
            rc = qx_file_out_create(&j.file, o.output, o.force, &err);
        }
        rc = rc == 0 ? print_rows(&j, &err) : rc;
        if (j.file != NULL && rc == 0) {
            rc = qx_file_out_commit(j.file, &err);
        } else if (j.file != NULL) {
            qx_file_out_abort(j.file);
        }
        int sig = signals_pending();
        if (rc != 0 && err.code == QX_E_INTERRUPTED && sig != 0) {
            ui_error(&j.ui, "%s", err.msg);
            ui_out_flush();
            signals_reraise(sig);
        }
        code = ui_finish(&j.ui, rc == 0 ? EXIT_OK : ui_fail(&j.ui, &err));
    }
    if (j.be != NULL) {
        j.be->destroy(j.be);
    }
    qx_pool_destroy(j.pool);
    qx_rows_close(j.rows);
    qx_ckpt_close(j.ck);
    qx_free(hashed.v);
    qx_u64_list_fini(&o.rows);
    qx_u64_list_fini(&o.tokens);
    qx_u64_list_fini(&o.history);
    return code;
}
