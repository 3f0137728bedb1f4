/* run_batch.c: --batch. All requests are read and checked before anything is loaded; answers come out
 * in the order of the file, each as soon as those before it are done. */
#include "run.h"

#include "alloc.h"
#include "error.h"
#include "exit_code.h"
#include "json_doc.h"
#include "signals.h"
#include "tok.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define USUAL_STREAMS 8u

struct request {
    struct batch *batch;
    struct qx_json_doc doc;    /* owns the texts of the line */
    char *id;                  /* JSON text of the id: a string or a number */
    struct qx_ids ids;
    uint64_t n;
    struct run_text text;
    struct qx_gen_stats stats;
    struct qx_error err;
    bool has_doc, done, failed;
};

struct batch {
    struct run *r;
    char *text;
    struct request *v;
    size_t n, cap, next_out;
    size_t n_failed;
    int worst;                 /* exit code of the first failed request */
};

static int bad(struct run *r, size_t line, const char *what)
{
    return qx_fail(&r->err, QX_E_FORMAT, "batch-line", "line %zu of the batch: %s", line, what);
}

static int read_file(struct batch *b)
{
    struct run *r = b->r;
    struct qx_buf buf = {0};
    bool is_stdin = !strcmp(r->o.batch, "-");
    FILE *f = is_stdin ? stdin : fopen(r->o.batch, "rb");
    char chunk[65536];
    size_t k;
    if (!f) {
        return qx_fail_errno(&r->err, errno == ENOENT ? QX_E_NOT_FOUND : QX_E_IO, errno, "io",
                             "cannot read batch '%s'", r->o.batch);
    }
    while (!buf.failed && (k = fread(chunk, 1, sizeof chunk, f)) > 0) {
        qx_buf_add(&buf, chunk, k);
    }
    bool failed = ferror(f) != 0;
    int sys = errno;
    if (!is_stdin) {
        fclose(f);
    }
    if (failed) {
        qx_buf_fini(&buf);
        return qx_fail_errno(&r->err, QX_E_IO, sys, "io", "cannot read batch '%s'", r->o.batch);
    }
    if (!qx_buf_cstr(&buf) || !buf.p) {
        qx_buf_fini(&buf);
        return qx_fail_nomem(&r->err);
    }
    b->text = buf.p;
    return 0;
}

static const char *string_of(const struct qx_json *o, const char *key)
{
    const struct qx_json *v = qx_json_get(o, key);
    return v && v->type == QX_JSON_STRING ? v->str : NULL;
}

/* The value's own text, as it stands in the line (objects for tools and arguments). */
static char *json_text_of(const char *line, const struct qx_json *v)
{
    struct qx_json_pull j;
    char *out = NULL;
    const char *p = line + v->off;
    qx_json_pull_init(&j, p, strlen(p));
    qx_json_next(&j);
    if (qx_json_skip(&j)) {
        out = qx_strndup(p, (size_t)(j.p - p));
    }
    qx_json_pull_fini(&j);
    return out;
}

/* Texts made for one rendering. */
struct made { char **v; size_t n, cap; bool failed; };

static const char *keep(struct made *m, char *s)
{
    void *p = m->v;
    if (!s || !qx_grow(&p, &m->cap, m->n + 1, sizeof *m->v)) {
        qx_free(s);
        m->failed = true;
        return "";
    }
    m->v = p;
    m->v[m->n++] = s;
    return s;
}

static int read_calls(struct batch *b, const char *line, size_t line_no, const struct qx_json *list,
                      struct qx_tool_call **out, size_t *n_out, struct made *made)
{
    const struct qx_json *e = NULL;
    size_t n = 0;
    if (!list || list->type == QX_JSON_NULL) {
        return 0;
    }
    if (list->type != QX_JSON_ARRAY) {
        return bad(b->r, line_no, "'tool_calls' is not a list");
    }
    struct qx_tool_call *calls = qx_calloc(list->n_children + 1, sizeof *calls);
    if (!calls) {
        return qx_fail_nomem(&b->r->err);
    }
    *out = calls;
    while ((e = qx_json_each(list, e))) {
        const struct qx_json *f = qx_json_get(e, "function"), *a;
        f = f ? f : e;
        a = qx_json_get(f, "arguments");
        calls[n].name = string_of(f, "name");
        if (a && a->type == QX_JSON_OBJECT) {
            calls[n].arguments = keep(made, json_text_of(line, a));
        } else if (a && a->type == QX_JSON_STRING) {
            calls[n].arguments = a->str;
        } else if (a) {
            return bad(b->r, line_no, "'arguments' of a tool call is not an object");
        }
        n++;
    }
    *n_out = n;
    return 0;
}

static int read_messages(struct batch *b, struct request *q, const char *line, size_t line_no,
                         const struct qx_json *list)
{
    struct run *r = b->r;
    const struct qx_json *e = NULL, *tools = qx_json_get(q->doc.root, "tools");
    struct made made = {0};
    size_t n = 0, n_tools = 0;
    int rc = 0;
    if (list->type != QX_JSON_ARRAY) {
        return bad(r, line_no, "'messages' is not a list");
    }
    if (!r->use_template) {
        return qx_fail(&r->err, QX_E_UNSUPPORTED, "template-unknown",
                       "line %zu of the batch has messages, but no chat template is in use: --template "
                       "qwen3.8 forces one", line_no);
    }
    struct qx_message *m = qx_calloc(list->n_children + 1, sizeof *m);
    const char **tool_texts = qx_calloc((tools ? tools->n_children : 0) + 1, sizeof *tool_texts);
    if (!m || !tool_texts) {
        qx_free(m);
        qx_free(tool_texts);
        return qx_fail_nomem(&r->err);
    }
    while (rc == 0 && (e = qx_json_each(list, e))) {
        struct qx_tool_call *calls = NULL;
        m[n].role = string_of(e, "role");
        m[n].content = string_of(e, "content");
        m[n].reasoning = string_of(e, "reasoning_content");
        rc = read_calls(b, line, line_no, qx_json_get(e, "tool_calls"), &calls, &m[n].n_calls, &made);
        m[n].calls = calls;
        n++;
    }
    for (e = NULL; rc == 0 && tools && tools->type == QX_JSON_ARRAY && (e = qx_json_each(tools, e));) {
        tool_texts[n_tools++] = keep(&made, json_text_of(line, e));
    }
    if (rc == 0 && made.failed) {
        rc = qx_fail_nomem(&r->err);
    }
    if (rc == 0) {
        rc = run_messages_ids(r, m, n, tool_texts, n_tools, &q->ids);
    }
    for (size_t i = 0; i < n; i++) {
        qx_free((void *)m[i].calls);
    }
    for (size_t i = 0; i < made.n; i++) {
        qx_free(made.v[i]);
    }
    qx_free(made.v);
    qx_free(tool_texts);
    qx_free(m);
    return rc;
}

static int read_tokens(struct batch *b, struct request *q, size_t line_no, const struct qx_json *list)
{
    struct run *r = b->r;
    const struct qx_json *e = NULL;
    uint64_t vocab = qx_ckpt_vocab_size(r->ck);
    if (list->type != QX_JSON_ARRAY || list->n_children == 0) {
        return bad(r, line_no, "'tokens' is not a list of ids");
    }
    while ((e = qx_json_each(list, e))) {
        if (e->type != QX_JSON_NUMBER || !e->is_int || e->negative) {
            return bad(r, line_no, "'tokens' is not a list of ids");
        }
        if (vocab > 0 && e->uint_value >= vocab) {
            return qx_fail(&r->err, QX_E_RANGE, "token-range",
                           "line %zu of the batch: token id %llu, the vocabulary has %llu", line_no,
                           (unsigned long long)e->uint_value, (unsigned long long)vocab);
        }
        if (!qx_ids_add(&q->ids, (uint32_t)e->uint_value)) {
            return qx_fail_nomem(&r->err);
        }
    }
    return 0;
}

static int read_id(struct batch *b, struct request *q, const char *line, size_t line_no)
{
    const struct qx_json *id = qx_json_get(q->doc.root, "id");
    if (!id || id->type == QX_JSON_NULL) {
        char text[32];
        snprintf(text, sizeof text, "%zu", line_no);
        q->id = qx_strdup(text);
    } else if (id->type == QX_JSON_STRING || id->type == QX_JSON_NUMBER) {
        q->id = json_text_of(line, id);
    } else {
        return bad(b->r, line_no, "'id' is not a text or a number");
    }
    return q->id ? 0 : qx_fail_nomem(&b->r->err);
}

static int read_request(struct batch *b, struct request *q, const char *line, size_t n, size_t line_no)
{
    struct run *r = b->r;
    char who[64];
    int rc = qx_json_doc_parse(&q->doc, line, n, r->o.batch, NULL, &r->err);
    if (rc) {
        char text[sizeof r->err.msg];
        memcpy(text, r->err.msg, sizeof text);
        qx_fail(&r->err, QX_E_FORMAT, r->err.kind, "line %zu of the batch: %s", line_no, text);
        return rc;
    }
    q->has_doc = true;
    if (q->doc.root->type != QX_JSON_OBJECT) {
        return bad(r, line_no, "not a JSON object");
    }
    const struct qx_json *prompt = qx_json_get(q->doc.root, "prompt"),
                         *tokens = qx_json_get(q->doc.root, "tokens"),
                         *messages = qx_json_get(q->doc.root, "messages"),
                         *max = qx_json_get(q->doc.root, "max_tokens");
    if (!!prompt + !!tokens + !!messages != 1) {
        return bad(r, line_no, "exactly one of 'prompt', 'tokens' and 'messages' is wanted");
    }
    rc = read_id(b, q, line, line_no);
    if (rc == 0 && tokens) {
        rc = read_tokens(b, q, line_no, tokens);
    } else if (rc == 0 && messages) {
        rc = read_messages(b, q, line, line_no, messages);
    } else if (rc == 0) {
        rc = prompt->type != QX_JSON_STRING ? bad(r, line_no, "'prompt' is not a text")
                                            : run_prompt_ids(r, prompt->str, prompt->str_n, &q->ids);
    }
    if (rc) {
        return rc;
    }
    q->n = r->o.n_given ? r->o.n : RUN_UNLIMITED;
    if (max && max->type != QX_JSON_NULL) {
        if (max->type != QX_JSON_NUMBER || !max->is_int || max->negative) {
            return bad(r, line_no, "'max_tokens' is not a count");
        }
        q->n = max->uint_value;
    }
    snprintf(who, sizeof who, "line %zu of the batch", line_no);
    return run_check_context(r, q->ids.n, q->n, who);
}

/* Tokenizer only when some line needs one: lines of ids alone run without. */
static bool needs_text(const char *text)
{
    return strstr(text, "\"prompt\"") || strstr(text, "\"messages\"");
}

static int read_requests(struct batch *b)
{
    size_t line_no = 0;
    for (const char *p = b->text; p && *p;) {
        size_t n = strcspn(p, "\n"), blank = strspn(p, " \t\r");
        line_no++;
        if (blank < n) {
            void *grown = b->v;
            if (!qx_grow(&grown, &b->cap, b->n + 1, sizeof *b->v)) {
                return qx_fail_nomem(&b->r->err);
            }
            b->v = grown;
            memset(&b->v[b->n], 0, sizeof *b->v);
            /* The line must end by itself for json_text_of. */
            int rc = read_request(b, &b->v[b->n++], p, n, line_no);
            if (rc) {
                return rc;
            }
        }
        p += n + (p[n] == '\n');
    }
    return b->n ? 0 : qx_fail(&b->r->err, QX_E_FORMAT, "batch-empty", "the batch has no requests");
}

static void put_record(struct batch *b, const struct request *q)
{
    struct qx_json_out j;
    const struct qx_gen_stats *s = &q->stats;
    if (!b->r->ui.json) {
        struct qx_buf t = {0};
        qx_buf_fmt(&t, "== %s\n", q->id);
        if (q->failed) {
            qx_buf_str(&t, "(failed)");
        } else if (q->text.ids) {
            for (size_t i = 0; i < q->text.tokens.n; i++) {
                qx_buf_fmt(&t, "%s%u", i ? " " : "", q->text.tokens.v[i]);
            }
        } else {
            struct qx_text_stream c = {.terminal = b->r->ui.tty_out};
            qx_text_stream_push(&c, q->text.text.p, q->text.text.n, &t);
            qx_text_stream_end(&c, &t);
        }
        if (t.n && t.p[t.n - 1] != '\n') {
            qx_buf_chr(&t, '\n');
        }
        ui_out(t.p ? t.p : "", t.n);
        qx_buf_fini(&t);
        return;
    }
    qx_json_out_init(&j, false);
    qx_json_obj(&j, NULL);
    qx_json_str(&j, "schema", q->failed ? "qx.error/1" : "qx.run/1");
    /* The id as it was written: its type and exact text are the caller's. */
    qx_buf_fmt(&j.buf, ", \"id\": %s", q->id);
    if (q->failed) {
        qx_json_str(&j, "kind", q->err.kind);
        qx_json_str(&j, "text", q->err.msg);
        qx_json_null(&j, "file");
        qx_json_null(&j, "tensor");
        qx_json_null(&j, "offset");
    }
    qx_json_arr(&j, "prompt_tokens");
    for (size_t i = 0; i < q->ids.n; i++) {
        qx_json_u64(&j, NULL, q->ids.v[i]);
    }
    qx_json_arr_end(&j);
    qx_json_arr(&j, "tokens");
    for (size_t i = 0; i < q->text.tokens.n; i++) {
        qx_json_u64(&j, NULL, q->text.tokens.v[i]);
    }
    qx_json_arr_end(&j);
    if (!q->failed) {
        run_json_text(&j, &q->text);
        qx_json_str(&j, "stop_reason", run_stop_reason(&q->text, s->reason));
        double decode_s = (double)s->decode_ns * 1e-9;
        qx_json_obj(&j, "timing");
        qx_json_f64(&j, "load_s", b->r->load_s);
        run_json_f64_or_null(&j, "ttft_s", (double)s->ttft_ns * 1e-9, s->n_tokens > 0);
        qx_json_null(&j, "prefill_tok_s");
        run_json_f64_or_null(&j, "decode_tok_s",
                             decode_s > 0 ? (double)(s->n_tokens - 1) / decode_s : 0,
                             s->n_tokens > 1 && decode_s > 0);
        qx_json_obj_end(&j);
        run_json_draft(&j, b->r, s);
        run_json_memory(&j, b->r);
        qx_json_null(&j, "logit_positions");
    }
    qx_json_obj_end(&j);
    ui_out(j.buf.p, j.buf.n);
    ui_out_str("\n");
    qx_json_out_fini(&j);
}

static int on_token(void *user, const struct qx_token *tok)
{
    struct request *q = user;
    return run_text_token(&q->text, tok);
}

static void on_done(void *user, const struct qx_gen_stats *stats, const struct qx_error *err)
{
    struct request *q = user;
    struct batch *b = q->batch;
    q->stats = *stats;
    q->done = true;
    run_text_end(&q->text);
    if (err) {
        q->failed = true;
        q->err = *err;
        b->n_failed++;
        b->worst = b->worst ? b->worst : qx_error_exit_code(err);
        ui_error(&b->r->ui, "request %s: %s: %s", q->id, err->kind, err->msg);
    }
    for (; b->next_out < b->n && b->v[b->next_out].done; b->next_out++) {
        put_record(b, &b->v[b->next_out]);
    }
    ui_out_flush();
    progress_add(&b->r->progress, 1);
}

/* Drafts for a batch are chosen among what its prompts have most of. */
static int learn(struct batch *b)
{
    struct qx_ids all = {0};
    bool ok = true;
    for (size_t i = 0; i < b->n && b->r->draft_vocab; i++) {
        for (size_t j = 0; j < b->v[i].ids.n && ok; j++) {
            ok = qx_ids_add(&all, b->v[i].ids.v[j]);
        }
    }
    int rc = ok ? qx_model_learn_drafts(b->r->model, all.v, all.n, &b->r->err) : qx_fail_nomem(&b->r->err);
    qx_ids_fini(&all);
    return rc;
}

static int run_all(struct batch *b)
{
    struct run *r = b->r;
    uint64_t need = 0, streams = r->o.streams_given ? r->o.streams : USUAL_STREAMS;
    struct qx_batch *batch = NULL;
    struct qx_batch_stats st = {0};
    for (size_t i = 0; i < b->n; i++) {
        uint64_t n = b->v[i].n == RUN_UNLIMITED ? 4096 : b->v[i].n, k = b->v[i].ids.n + n;
        need = k > need ? k : need;
    }
    streams = streams < b->n ? streams : b->n;
    run_summary(r);
    int rc = run_load(r, need, (uint32_t)streams, false);
    rc = rc ? rc : learn(b);
    rc = rc ? rc : qx_batch_create(&batch, r->model, &r->err);
    progress_start(&r->progress, &r->ui, "requests", b->n, PROGRESS_COUNT);
    for (size_t i = 0; rc == 0 && i < b->n; i++) {
        struct request *q = &b->v[i];
        struct qx_request req = {.ids = q->ids.v, .n_ids = q->ids.n, .on_done = on_done};
        q->batch = b;
        run_text_init(&q->text, r, false);
        q->text.dim = q->text.in_think = false;
        run_params(r, &req.params);
        req.params.n_max = q->n;
        req.params.on_token = on_token;
        req.params.user = q;
        rc = qx_batch_add(batch, &req, &r->err);
    }
    rc = rc ? rc : qx_batch_run(batch, &r->err);
    progress_finish(&r->progress);
    if (batch) {
        qx_batch_stats(batch, &st);
        qx_model_info(r->model, &r->info);
    }
    if (rc == 0) {
        double s = (double)st.elapsed_ns * 1e-9;
        char peak[32];
        ui_stat(&r->ui, "%llu requests, %llu tokens in %.2f s, %.1f tokens/s; %llu prompt tokens read, "
                "%llu shared; %s device memory at most",
                (unsigned long long)st.n_done, (unsigned long long)st.n_tokens, s,
                s > 0 ? (double)st.n_tokens / s : 0, (unsigned long long)st.prefill_tokens,
                (unsigned long long)st.shared_tokens, qx_size_text(r->info.device_peak_bytes, peak));
    }
    qx_batch_destroy(batch);
    return rc;
}

int run_batch(struct run *r)
{
    struct batch b = {.r = r};
    int rc = read_file(&b);
    /* run_open leaves the tokenizer out when ids are given. */
    if (rc == 0 && b.text) {
        r->o.tokens_given = !needs_text(b.text);
        rc = run_open(r);
    }
    rc = rc ? rc : read_requests(&b);
    rc = rc ? rc : run_all(&b);
    int code = rc ? ui_fail(&r->ui, &r->err) : b.worst;
    for (size_t i = 0; i < b.n; i++) {
        struct request *q = &b.v[i];
        if (q->text.r) {
            run_text_fini(&q->text);
        }
        if (q->has_doc) {
            qx_json_doc_fini(&q->doc);
        }
        qx_ids_fini(&q->ids);
        qx_free(q->id);
    }
    qx_free(b.v);
    qx_free(b.text);
    return code;
}
