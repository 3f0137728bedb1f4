/* run_one.c: one prompt, one answer. */
#include "run.h"

#include "error.h"
#include "exit_code.h"
#include "signals.h"
#include "tok.h"

#include <stdio.h>
#include <string.h>

struct one {
    struct run *r;
    struct run_text text;
    struct qx_ids prompt;
    struct run_logits *logits;
    struct qx_gen *gen;
    struct qx_gen_stats stats;
    double prefill_s;
    bool loaded, prefill_stopped;
};

static int on_token(void *user, const struct qx_token *tok)
{
    struct one *o = user;
    return run_text_token(&o->text, tok);
}

static int prompt_ids(struct run *r, struct qx_ids *ids)
{
    if (r->o.tokens_given) {
        uint64_t vocab = qx_ckpt_vocab_size(r->ck);
        for (size_t i = 0; i < r->o.tokens.n; i++) {
            if (vocab > 0 && r->o.tokens.v[i] >= vocab) { /* 0: no config, which the model reports */
                return qx_fail(&r->err, QX_E_RANGE, "token-range",
                               "token id %llu, the vocabulary has %llu",
                               (unsigned long long)r->o.tokens.v[i], (unsigned long long)vocab);
            }
            if (!qx_ids_add(ids, (uint32_t)r->o.tokens.v[i])) {
                return qx_fail_nomem(&r->err);
            }
        }
        return ids->n ? 0 : qx_fail(&r->err, QX_E_USAGE, "usage", "'--tokens' lists no ids");
    }
    char *text;
    size_t n;
    int rc = run_read_prompt(r, &text, &n);
    if (rc == 0) {
        rc = run_prompt_ids(r, text, n, ids);
    }
    qx_text_free(text);
    return rc;
}

static int generate(struct one *o)
{
    struct run *r = o->r;
    uint64_t n = r->o.n_given ? r->o.n : RUN_UNLIMITED, need = 0, t0;
    struct qx_gen_hooks hooks;
    struct qx_gen_params p;
    if (n != RUN_UNLIMITED) {
        need = o->prompt.n + n;
    } else if (o->prompt.n > 16384) {
        need = o->prompt.n + 16384;
    }
    int rc = run_load(r, need, 1, r->o.draft_logits != NULL);
    if (rc) {
        return rc;
    }
    o->loaded = true;
    rc = qx_gen_create(&o->gen, r->model, &r->err);
    if (rc) {
        return rc;
    }
    if (o->logits) {
        run_logits_hooks(o->logits, &hooks);
        qx_gen_set_hooks(o->gen, &hooks);
    }
    rc = qx_model_learn_drafts(r->model, o->prompt.v, o->prompt.n, &r->err);
    if (rc) {
        return rc;
    }
    t0 = progress_now_ns();
    run_prefill_begin(r, o->prompt.n);
    rc = qx_gen_prefill(o->gen, o->prompt.v, o->prompt.n, run_prefill_progress, r, &r->err);
    run_prefill_end(r);
    o->prefill_s = (double)(progress_now_ns() - t0) * 1e-9;
    if (rc) {
        o->prefill_stopped = r->err.code == QX_E_INTERRUPTED;
        return rc;
    }
    if (n > 0) {
        run_params(r, &p);
        p.on_token = on_token;
        p.user = o;
        rc = qx_gen_generate(o->gen, &p, &o->stats, &r->err);
    }
    run_text_end(&o->text);
    if (rc == 0 && o->logits && run_logits_wants_last(o->logits, qx_gen_n_tokens(o->gen) - 1)) {
        rc = qx_gen_flush(o->gen, &r->err);
    }
    if (rc == 0 && o->logits) {
        rc = run_logits_finish(o->logits);
    }
    qx_model_info(r->model, &r->info);
    return rc;
}

static double decode_rate(const struct qx_gen_stats *s)
{
    return s->n_tokens > 1 && s->decode_ns ? (double)(s->n_tokens - 1) * 1e9 / (double)s->decode_ns : 0;
}

/* `prompt` is the rendered prompt for --show-prompt, else NULL. */
static void json_document(const struct one *o, const char *prompt, size_t n_prompt)
{
    const struct run *r = o->r;
    const struct qx_gen_stats *s = &o->stats;
    struct qx_json_out j;
    qx_json_out_init(&j, false);
    qx_json_obj(&j, NULL);
    qx_json_str(&j, "schema", "qx.run/1");
    if (prompt) {
        qx_json_strn(&j, "prompt", prompt, n_prompt);
    }
    qx_json_arr(&j, "prompt_tokens");
    for (size_t i = 0; i < o->prompt.n; i++) {
        qx_json_u64(&j, NULL, o->prompt.v[i]);
    }
    qx_json_arr_end(&j);
    qx_json_arr(&j, "tokens");
    for (size_t i = 0; i < o->text.tokens.n; i++) {
        qx_json_u64(&j, NULL, o->text.tokens.v[i]);
    }
    qx_json_arr_end(&j);
    run_json_text(&j, &o->text);
    qx_json_str(&j, "stop_reason", (prompt || (r->o.n_given && r->o.n == 0)) && !o->text.interrupted
                                       ? "length"
                                       : run_stop_reason(&o->text, s->reason));
    qx_json_obj(&j, "timing");
    qx_json_f64(&j, "load_s", r->load_s);
    run_json_f64_or_null(&j, "ttft_s", o->prefill_s + (double)s->ttft_ns * 1e-9, s->n_tokens > 0);
    run_json_f64_or_null(&j, "prefill_tok_s", o->prefill_s > 0 ? (double)o->prompt.n / o->prefill_s : 0,
                         o->prefill_s > 0);
    run_json_f64_or_null(&j, "decode_tok_s", decode_rate(s), decode_rate(s) > 0);
    qx_json_u64(&j, "step_bytes", s->bytes_per_step);
    run_json_f64_or_null(&j, "bandwidth_share",
                         r->info.bandwidth_bytes_s && s->decode_ns
                             ? (double)s->bytes_per_step * (double)s->rounds * 1e9 /
                                   (double)s->decode_ns / (double)r->info.bandwidth_bytes_s
                             : 0,
                         r->info.bandwidth_bytes_s && s->decode_ns);
    qx_json_u64(&j, "decode_waits", s->waits);
    qx_json_u64(&j, "decode_allocations", s->allocs);
    qx_json_obj_end(&j);
    run_json_draft(&j, r, s);
    run_json_memory(&j, r);
    run_logits_json(&j, o->logits);
    if (!prompt) {
        run_json_sampling(&j, r);
    }
    qx_json_str(&j, "device", o->loaded ? r->info.device : NULL);
    if (o->text.with_logprobs) {
        qx_json_arr(&j, "logprobs");
        const struct qx_buf *b = &o->text.logprobs.buf;
        if (b->n > 2) {
            qx_buf_add(&j.buf, b->p + 1, b->n - 2); /* its elements, without the brackets */
        }
        qx_json_arr_end(&j);
    }
    qx_json_obj_end(&j);
    ui_out(j.buf.p, j.buf.n);
    ui_out_str("\n");
    qx_json_out_fini(&j);
}

static void statistics(const struct one *o)
{
    const struct run *r = o->r;
    const struct qx_gen_stats *s = &o->stats;
    const struct ui *ui = &r->ui;
    char a[32], b[32];
    double load_s = (double)r->info.load_ns * 1e-9;
    if (ui->tty_out && ui->tty_err) {
        ui_stat(ui, "%s", "");
    }
    ui_stat(ui, "load     %.2f s, %s from files%s%s%s", r->load_s, qx_size_text(r->info.loaded_bytes, a),
            load_s > 0 ? ", " : "",
            load_s > 0 ? qx_size_text((uint64_t)((double)r->info.loaded_bytes / load_s), b) : "",
            load_s > 0 ? "/s" : "");
    ui_stat(ui, "prompt   %zu tokens in %.3f s, %.1f tokens/s", o->prompt.n, o->prefill_s,
            o->prefill_s > 0 ? (double)o->prompt.n / o->prefill_s : 0);
    if (s->n_tokens > 0) {
        double rate = decode_rate(s), bytes = (double)s->bytes_per_step;
        double steps = s->decode_ns ? (double)s->rounds * 1e9 / (double)s->decode_ns : 0;
        char speed[48] = "";
        if (rate > 0) {
            snprintf(speed, sizeof speed, ", %.1f tokens/s", rate);
        }
        ui_stat(ui, "output   %llu tokens, first after %.3f s%s, ended by %s",
                (unsigned long long)s->n_tokens, o->prefill_s + (double)s->ttft_ns * 1e-9, speed,
                run_stop_reason(&o->text, s->reason));
        if (ui->verbose && s->rounds > 1) {
            ui_stat(ui, "host     waited for the device %llu times and took memory of it %llu times in decoding",
                    (unsigned long long)s->waits, (unsigned long long)s->allocs);
        }
        if (s->bytes_per_step && steps > 0) {
            char share[64] = "";
            if (r->info.bandwidth_bytes_s) {
                snprintf(share, sizeof share, ", %.0f%% of what the memory can deliver",
                         100 * bytes * steps / (double)r->info.bandwidth_bytes_s);
            }
            ui_stat(ui, "reads    %s a step, %s/s%s", qx_size_text(s->bytes_per_step, a),
                    qx_size_text((uint64_t)(bytes * steps), b), share);
        }
    }
    if (r->draft != 0) {
        uint64_t rounds = run_rounds(s);
        struct qx_buf per = {0};
        for (int i = 0; i < QX_DRAFT_MAX && s->drafted_at[i]; i++) {
            qx_buf_fmt(&per, "%s%.0f%%", i ? " " : ", by place ",
                       100.0 * (double)s->accepted_at[i] / (double)s->drafted_at[i]);
        }
        ui_stat(ui, "drafts   %llu drafted, %llu accepted in %llu rounds, acceptance length %.2f%s",
                (unsigned long long)s->drafted, (unsigned long long)s->accepted,
                (unsigned long long)rounds,
                rounds ? (double)s->n_tokens / (double)rounds : 0, per.n ? qx_buf_cstr(&per) : "");
        if (s->drafted >= 50 && s->accepted * 20 < s->drafted) {
            ui_note(ui, "few drafts are accepted: the usual cause is that the scales of the draft "
                        "head's experts are not applied or do not belong to it (qx verify looks)");
        }
        qx_buf_fini(&per);
    }
    ui_stat(ui, "memory   host %s at most; %s: %s at most, %s planned",
            qx_size_text(run_host_peak_bytes(), a), r->info.device,
            qx_size_text(r->info.device_peak_bytes, b),
            qx_size_text(r->info.planned_device_bytes, (char[32]){0}));
}

/* -n 0 without logits: the ids of the prompt. */
static void print_ids(const struct one *o)
{
    struct qx_buf b = {0};
    for (size_t i = 0; i < o->prompt.n; i++) {
        qx_buf_fmt(&b, "%s%u", i ? " " : "", o->prompt.v[i]);
    }
    qx_buf_chr(&b, '\n');
    ui_out(b.p ? b.p : "", b.n);
    qx_buf_fini(&b);
}

/* --show-prompt: the text that would be tokenized, byte for byte. */
static int show_prompt(struct one *o)
{
    struct run *r = o->r;
    char *text = NULL, *rendered = NULL;
    size_t n = 0;
    int rc = run_read_prompt(r, &text, &n);
    rc = rc ? rc : run_render(r, text, &rendered, &n);
    if (rc == 0 && r->ui.json) {
        run_text_init(&o->text, r, false);
        json_document(o, rendered, n);
    } else if (rc == 0) {
        ui_out(rendered, n);
    }
    qx_text_free(text);
    qx_text_free(rendered);
    return rc;
}

int run_one(struct run *r)
{
    struct one o = {.r = r};
    uint64_t n = r->o.n_given ? r->o.n : RUN_UNLIMITED;
    bool run_model = n > 0 || r->o.logits || r->o.draft_logits;
    int rc = run_read_prompt_file(r);
    rc = rc ? rc : run_open(r);
    if (rc == 0 && r->o.show_prompt) {
        rc = show_prompt(&o);
        run_text_fini(&o.text);
        return rc ? ui_fail(&r->ui, &r->err) : EXIT_OK;
    }
    if (rc == 0) {
        run_text_init(&o.text, r, !r->ui.json && n > 0);
        rc = prompt_ids(r, &o.prompt);
    }
    if (rc == 0 && run_model) {
        rc = run_check_context(r, o.prompt.n, n, NULL);
    }
    if (rc == 0) {
        rc = run_logits_create(&o.logits, r, o.prompt.n, n);
    }
    if (rc == 0 && n > 0) {
        run_summary(r);
    }
    if (rc == 0 && run_model) {
        rc = generate(&o);
    }
    if (rc == 0 && o.text.failed) {
        rc = qx_fail_nomem(&r->err);
    }
    bool stopped = rc && o.prefill_stopped;
    if (stopped) {
        o.text.interrupted = true;
        rc = 0;
    }
    if (rc == 0) {
        if (r->ui.json) {
            json_document(&o, NULL, 0);
        } else if (n == 0) {
            print_ids(&o);
        }
        if (o.loaded) {
            statistics(&o);
        }
    }
    int code = rc ? ui_fail(&r->ui, &r->err) : EXIT_OK;
    run_logits_destroy(o.logits);
    qx_gen_destroy(o.gen);
    if (o.text.r) {
        run_text_fini(&o.text);
    }
    qx_ids_fini(&o.prompt);
    return code;
}
