/* run_chat.c: a conversation on a terminal. Everything said stays in the sequence's state: a turn only
 * reads what is new. */
#include "run.h"

#include "chat_line.h"
#include "error.h"
#include "exit_code.h"
#include "signals.h"
#include "tok.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

struct chat {
    struct run *r;
    struct qx_gen *gen;
    struct run_text text;      /* of the current answer */
    uint64_t turns, read_tokens, said_tokens;
    double read_s, said_s;
    bool open_turn;            /* the last answer did not end by its stop id */
    bool open_think;           /* and not even its thinking ended */
};

static int on_token(void *user, const struct qx_token *tok)
{
    struct chat *c = user;
    c->open_turn = !tok->is_stop;
    if ((int64_t)tok->id == c->r->think_close) {
        c->open_think = false;
    }
    return run_text_token(&c->text, tok);
}

/* What must be read before the model can answer `line`. */
static int turn_text(struct chat *c, const char *line, struct qx_buf *out)
{
    struct run *r = c->r;
    char *rendered = NULL;
    size_t n = 0;
    if (!r->use_template) {
        qx_buf_str(out, line);
        return out->failed ? qx_fail_nomem(&r->err) : 0;
    }
    if (c->turns == 0) {
        int rc = run_render(r, line, &rendered, &n);
        qx_buf_add(out, rendered, n);
        qx_text_free(rendered);
        return rc ? rc : out->failed ? qx_fail_nomem(&r->err) : 0;
    }
    struct qx_chat_opts o = {.no_thinking = r->o.no_think, .effort = "medium"};
    struct qx_message m = {.role = "user", .content = line};
    if (c->open_turn) {
        qx_buf_str(out, c->open_think ? "\n</think>\n\n<|im_end|>" : "<|im_end|>");
    }
    qx_buf_chr(out, '\n');
    /* With effort medium and no system message the rendering is the user turn and the prompt alone. */
    int rc = qx_chat_render(&m, 1, &o, &rendered, &n, &r->err);
    qx_buf_add(out, rendered, n);
    qx_text_free(rendered);
    return rc ? rc : out->failed ? qx_fail_nomem(&r->err) : 0;
}

static int turn(struct chat *c, const char *line)
{
    struct run *r = c->r;
    struct qx_buf text = {0};
    struct qx_ids ids = {0};
    struct qx_gen_params p;
    struct qx_gen_stats s = {0};
    int rc = turn_text(c, line, &text);
    rc = rc ? rc : qx_tok_encode(r->tok, text.p ? text.p : "", text.n, &ids, &r->err);
    qx_buf_fini(&text);
    uint64_t have = qx_gen_n_tokens(c->gen);
    if (rc == 0 && (ids.n >= r->info.ctx_tokens || have >= r->info.ctx_tokens - ids.n)) {
        ui_error(&r->ui, "the context of %llu tokens is full (%llu used, %zu more to read): /reset begins "
                 "a new conversation", (unsigned long long)r->info.ctx_tokens, (unsigned long long)have,
                 ids.n);
        qx_ids_fini(&ids);
        return 0;
    }
    uint64_t t0 = progress_now_ns();
    if (rc == 0) {
        run_prefill_begin(r, ids.n);
        rc = qx_gen_prefill(c->gen, ids.v, ids.n, run_prefill_progress, r, &r->err);
        run_prefill_end(r);
        rc = rc ? rc : qx_model_learn_drafts(r->model, qx_gen_tokens(c->gen), qx_gen_n_tokens(c->gen), &r->err);
    }
    c->read_tokens += ids.n;
    qx_ids_fini(&ids);
    c->read_s += (double)(progress_now_ns() - t0) * 1e-9;
    if (rc && r->err.code == QX_E_INTERRUPTED) {
        signals_clear();
        /* Part of the turn may have been read: only a new conversation is well defined. */
        ui_note(&r->ui, "stopped while reading: the conversation begins anew");
        c->turns = 0;
        return qx_gen_reset(c->gen, &r->err);
    }
    if (rc) {
        return rc;
    }
    run_params(r, &p);
    p.on_token = on_token;
    p.user = c;
    c->open_turn = true;
    c->open_think = r->use_template && !r->o.no_think;
    run_text_init(&c->text, r, true);
    t0 = progress_now_ns();
    rc = qx_gen_generate(c->gen, &p, &s, &r->err);
    run_text_end(&c->text);
    c->said_s += (double)(progress_now_ns() - t0) * 1e-9;
    c->said_tokens += s.n_tokens;
    c->turns++;
    if (rc == 0 && c->text.failed) {
        rc = qx_fail_nomem(&r->err);
    }
    if (c->text.interrupted) {
        signals_clear();
        ui_note(&r->ui, "stopped");
    } else if (rc == 0 && s.reason == QX_STOP_CONTEXT) {
        ui_note(&r->ui, "the context of %llu tokens is full: /reset begins a new conversation",
                (unsigned long long)r->info.ctx_tokens);
    }
    run_text_fini(&c->text);
    return rc;
}

static void show_stats(struct chat *c)
{
    struct run *r = c->r;
    char a[32];
    qx_model_info(r->model, &r->info);
    ui_stat(&r->ui, "%llu turns; %llu tokens of %llu in the context", (unsigned long long)c->turns,
            (unsigned long long)qx_gen_n_tokens(c->gen), (unsigned long long)r->info.ctx_tokens);
    ui_stat(&r->ui, "read %llu tokens, %.1f tokens/s; said %llu tokens, %.1f tokens/s",
            (unsigned long long)c->read_tokens, c->read_s > 0 ? (double)c->read_tokens / c->read_s : 0,
            (unsigned long long)c->said_tokens, c->said_s > 0 ? (double)c->said_tokens / c->said_s : 0);
    ui_stat(&r->ui, "%s: %s of device memory at most", r->info.device,
            qx_size_text(r->info.device_peak_bytes, a));
}

/* 1: leave, 0: go on, negative: failed. */
static int slash_command(struct chat *c, const char *line)
{
    struct run *r = c->r;
    if (!strcmp(line, "/exit") || !strcmp(line, "/quit")) {
        return 1;
    }
    if (!strcmp(line, "/reset")) {
        int rc = qx_gen_reset(c->gen, &r->err);
        c->turns = 0;
        ui_note(&r->ui, "a new conversation");
        return rc;
    }
    if (!strcmp(line, "/stats")) {
        show_stats(c);
    } else if (!strcmp(line, "/help")) {
        ui_stat(&r->ui, "/reset begins a new conversation, /stats shows figures, /exit leaves; Ctrl-C "
                        "stops an answer, Ctrl-D leaves; a line that ends in \\ goes on");
    } else {
        ui_error(&r->ui, "unknown command '%s' (/help lists them)", line);
    }
    return 0;
}

/* A message: lines that end in a backslash go on. */
static enum chat_line read_message(struct chat_input *in, struct qx_buf *out)
{
    struct qx_buf line = {0};
    enum chat_line got = chat_input_line(in, "> ", &line);
    out->n = 0;
    while (got == CHAT_LINE_OK && line.n && line.p[line.n - 1] == '\\') {
        qx_buf_add(out, line.p, line.n - 1);
        qx_buf_chr(out, '\n');
        got = chat_input_line(in, ". ", &line);
    }
    qx_buf_add(out, line.p, line.n);
    qx_buf_fini(&line);
    return got;
}

static int converse(struct chat *c)
{
    struct run *r = c->r;
    struct qx_buf line = {0};
    struct chat_input *in = chat_input_open(!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO));
    int rc = in ? 0 : qx_fail_nomem(&r->err);
    while (rc == 0) {
        enum chat_line got = read_message(in, &line);
        if (got == CHAT_LINE_INTERRUPTED) {
            if (signals_pending() == SIGINT) {
                signals_clear(); /* at a prompt Ctrl-C leaves; other signals end the process */
            }
            break;
        }
        if (got == CHAT_LINE_END) {
            if (r->ui.tty_out) {
                ui_out_str("\n");
            }
            break;
        }
        const char *s = qx_buf_cstr(&line);
        if (!s) {
            rc = qx_fail_nomem(&r->err);
        } else if (s[strspn(s, " \t\n")] == '\0') {
            continue;
        } else {
            rc = s[0] == '/' ? slash_command(c, s) : turn(c, s);
        }
        if (rc < 0 && r->err.code == QX_E_VALUE && !strcmp(r->err.kind, "text-utf8")) {
            ui_error(&r->ui, "%s", r->err.msg); /* a slip of the keyboard does not end a conversation */
            rc = 0;
        }
    }
    chat_input_close(in);
    qx_buf_fini(&line);
    return rc < 0 ? rc : 0;
}

int run_chat(struct run *r)
{
    struct chat c = {.r = r};
    int rc = run_open(r);
    if (rc == 0) {
        run_summary(r);
        rc = run_load(r, 0, 1, false);
    }
    rc = rc ? rc : qx_gen_create(&c.gen, r->model, &r->err);
    if (rc == 0) {
        ui_note(&r->ui, "%s, context of %llu tokens; /help lists commands", r->info.device,
                (unsigned long long)r->info.ctx_tokens);
        rc = converse(&c);
    }
    if (rc == 0 && c.turns) {
        show_stats(&c);
    }
    qx_gen_destroy(c.gen);
    return rc ? ui_fail(&r->ui, &r->err) : EXIT_OK;
}
