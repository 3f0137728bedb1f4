/* run_text.c: what becomes of each generated id: text on stdout as it comes, and the JSON document. */
#include "run.h"

#include "signals.h"
#include "tok.h"
#include "utf8.h"

#include <math.h>
#include <string.h>

void run_text_init(struct run_text *t, struct run *r, bool stream)
{
    memset(t, 0, sizeof *t);
    t->r = r;
    t->stream = stream;
    t->ids = r->tok == NULL;
    t->stops.v = r->o.stops.v;
    t->stops.n = r->o.stops.n;
    t->chars.terminal = r->ui.tty_out;
    t->dim = stream && r->ui.color_out && r->use_template && r->think_close >= 0;
    t->in_think = t->dim && !r->o.no_think;
    t->ends_line = true;
    t->with_logprobs = r->o.logprobs > 0;
    if (t->with_logprobs) {
        qx_json_out_init(&t->logprobs, false);
        qx_json_arr(&t->logprobs, NULL);
    }
}

static void write_out(struct run_text *t, const struct qx_buf *b)
{
    if (!t->stream || b->n == 0) {
        return;
    }
    if (t->in_think) {
        ui_out_str(ui_style(true, UI_DIM));
    }
    ui_out(b->p, b->n);
    if (t->in_think) {
        ui_out_str(ui_style(true, UI_PLAIN));
    }
    t->wrote = true;
    t->ends_line = b->p[b->n - 1] == '\n';
    ui_out_flush();
}

/* Bytes of one token through stop texts to text and screen. `shown_only` bytes do not belong to the
 * text: special tokens made visible. */
static void take_bytes(struct run_text *t, const char *p, size_t n, bool shown_only)
{
    struct qx_buf sure = {0}, chars = {0};
    if (shown_only) {
        qx_stop_texts_end(&t->stops, &sure);
        qx_buf_add(&t->text, sure.p, sure.n);
        qx_buf_add(&sure, p, n);
    } else {
        t->stopped_by_text = qx_stop_texts_push(&t->stops, p, n, &sure);
        qx_buf_add(&t->text, sure.p, sure.n);
    }
    qx_text_stream_push(&t->chars, sure.p, sure.n, &chars);
    write_out(t, &chars);
    t->failed = t->failed || sure.failed || chars.failed;
    qx_buf_fini(&sure);
    qx_buf_fini(&chars);
}

static void add_logprobs(struct run_text *t, const struct qx_token *tok)
{
    struct qx_json_out *o = &t->logprobs;
    qx_json_obj(o, NULL);
    qx_json_u64(o, "id", tok->id);
    qx_json_f32(o, "logprob", tok->logprob);
    qx_json_arr(o, "top");
    for (uint32_t i = 0; i < tok->n_top; i++) {
        qx_json_obj(o, NULL);
        qx_json_u64(o, "id", tok->top[i].id);
        qx_json_f32(o, "logprob", tok->top[i].logprob);
        qx_json_obj_end(o);
    }
    qx_json_arr_end(o);
    qx_json_obj_end(o);
}

bool run_text_token(struct run_text *t, const struct qx_token *tok)
{
    struct run *r = t->r;
    if (!qx_ids_add(&t->tokens, tok->id)) {
        t->failed = true;
        return true;
    }
    if (t->with_logprobs) {
        add_logprobs(t, tok);
    }
    if (t->ids) {
        struct qx_buf b = {0};
        qx_buf_fmt(&b, "%s%u", t->tokens.n > 1 ? " " : "", tok->id);
        write_out(t, &b);
        qx_buf_fini(&b);
    } else {
        size_t n;
        const char *p = qx_tok_bytes(r->tok, tok->id, &n);
        bool hidden = tok->is_stop || qx_tok_is_special(r->tok, tok->id);
        if (p && !hidden) {
            take_bytes(t, p, n, false);
        } else if (p && r->o.special) {
            take_bytes(t, p, n, true);
        }
        if ((int64_t)tok->id == r->think_close) {
            t->in_think = false;
        }
    }
    if (signals_pending()) {
        t->interrupted = true;
    }
    return t->stopped_by_text || t->interrupted || t->failed || (t->stream && ui_out_failed());
}

void run_text_end(struct run_text *t)
{
    struct qx_buf sure = {0}, chars = {0};
    if (!t->stopped_by_text) {
        qx_stop_texts_end(&t->stops, &sure);
        qx_buf_add(&t->text, sure.p, sure.n);
    }
    qx_text_stream_push(&t->chars, sure.p, sure.n, &chars);
    qx_text_stream_end(&t->chars, &chars);
    write_out(t, &chars);
    qx_buf_fini(&sure);
    qx_buf_fini(&chars);
    t->in_think = false;
    /* Ids are a line; text gets a line end only where a person would lose it before the prompt. */
    if (t->stream && (t->ids || (t->r->ui.tty_out && !t->ends_line))) {
        ui_out_str("\n");
    }
    if (t->stream) {
        ui_out_flush();
    }
    if (t->with_logprobs) {
        qx_json_arr_end(&t->logprobs);
    }
}

void run_text_fini(struct run_text *t)
{
    qx_stop_texts_fini(&t->stops);
    qx_buf_fini(&t->text);
    qx_ids_fini(&t->tokens);
    if (t->with_logprobs) {
        qx_json_out_fini(&t->logprobs);
    }
}

const char *run_stop_reason(const struct run_text *t, enum qx_stop_reason reason)
{
    if (t->interrupted) {
        return "interrupted";
    }
    if (t->stopped_by_text) {
        return "stop";
    }
    switch (reason) {
    case QX_STOP_ID:
        return "stop";
    case QX_STOP_LENGTH:
        return "length";
    case QX_STOP_CONTEXT:
        return "context";
    case QX_STOP_CALLER:
        break;
    }
    return "interrupted";
}

uint64_t run_rounds(const struct qx_gen_stats *s)
{
    return s->rounds + (s->n_tokens > 0);
}

void run_json_f64_or_null(struct qx_json_out *o, const char *key, double v, bool there)
{
    if (there) {
        qx_json_f64(o, key, v);
    } else {
        qx_json_null(o, key);
    }
}

void run_json_text(struct qx_json_out *o, const struct run_text *t)
{
    if (t->ids) {
        qx_json_null(o, "text");
        return;
    }
    qx_json_strn(o, "text", t->text.p ? t->text.p : "", t->text.n);
    if (!qx_utf8_valid(t->text.p, t->text.n)) {
        struct qx_buf b = {0};
        qx_buf_base64(&b, t->text.p, t->text.n);
        qx_json_str(o, "text_base64", qx_buf_cstr(&b));
        qx_buf_fini(&b);
    }
}

void run_json_draft(struct qx_json_out *o, const struct run *r, const struct qx_gen_stats *s)
{
    uint64_t rounds = run_rounds(s);
    qx_json_obj(o, "draft");
    qx_json_i64(o, "k", r->draft == QX_DRAFT_AUTO ? QX_DRAFT_MAX : r->draft);
    qx_json_bool(o, "auto", r->draft == QX_DRAFT_AUTO);
    qx_json_u64(o, "rounds", rounds);
    qx_json_u64(o, "drafted", s->drafted);
    qx_json_u64(o, "accepted", s->accepted);
    run_json_f64_or_null(o, "acceptance_length",
                         rounds ? (double)s->n_tokens / (double)rounds : 0, rounds > 0);
    qx_json_arr(o, "acceptance");
    for (int i = 0; i < QX_DRAFT_MAX && s->drafted_at[i]; i++) {
        qx_json_f64(o, NULL, (double)s->accepted_at[i] / (double)s->drafted_at[i]);
    }
    qx_json_arr_end(o);
    qx_json_obj_end(o);
}

void run_json_memory(struct qx_json_out *o, const struct run *r)
{
    qx_json_obj(o, "memory");
    qx_json_u64(o, "host_peak_bytes", run_host_peak_bytes());
    if (r->model) {
        struct qx_model_info now;
        qx_model_info(r->model, &now);
        qx_json_u64(o, "device_peak_bytes", now.device_peak_bytes);
        qx_json_u64(o, "device_used_bytes", now.device_used_bytes);
        qx_json_u64(o, "planned_bytes", now.planned_device_bytes);
    } else {
        qx_json_null(o, "device_peak_bytes");
        qx_json_null(o, "planned_bytes");
    }
    qx_json_obj_end(o);
}

void run_json_sampling(struct qx_json_out *o, const struct run *r)
{
    const struct qx_sampling *s = &r->sampling;
    qx_json_obj(o, "sampling");
    qx_json_bool(o, "greedy", r->greedy);
    qx_json_f32(o, "temperature", s->temperature);
    qx_json_i64(o, "top_k", s->top_k);
    qx_json_f32(o, "top_p", s->top_p);
    qx_json_f32(o, "min_p", s->min_p);
    qx_json_u64(o, "seed", s->seed);
    qx_json_f32(o, "repeat_penalty", s->repeat_penalty);
    qx_json_f32(o, "presence_penalty", s->presence_penalty);
    qx_json_f32(o, "frequency_penalty", s->frequency_penalty);
    qx_json_obj_end(o);
    qx_json_arr(o, "stop_ids");
    for (uint32_t i = 0; i < r->n_stop_ids; i++) {
        qx_json_u64(o, NULL, r->stop_ids[i]);
    }
    qx_json_arr_end(o);
}
