/* run_setup.c: from options to an open checkpoint, a prompt in ids, and a loaded model. */
#include "run.h"

#include "alloc.h"
#include "ckpt.h"
#include "error.h"
#include "signals.h"
#include "tok.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

#define USUAL_CTX 32768u
#define MAX_PROMPT_BYTES (256u << 20)
/* Room behind the last token for a chain of drafts, and a round number of tokens. */
#define CTX_ROUND 64u

static int usage(struct run *r, const char *fmt, ...) QX_PRINTF(2, 3);
static int usage(struct run *r, const char *fmt, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return qx_fail(&r->err, QX_E_USAGE, "usage", "%s", text);
}

static int check_range(struct run *r, const char *name, double v, double lo, double hi)
{
    return v >= lo && v <= hi ? 0
                              : usage(r, "'--%s' wants a number from %g to %g, not %g", name, lo, hi, v);
}

/* ---- files of the command line ------------------------------------------------------------------------ */

/* Appends a file, or stdin for "-", of MAX_PROMPT_BYTES at most. */
static int read_text_file(struct run *r, const char *path, const char *what, struct qx_buf *b)
{
    bool is_stdin = !strcmp(path, "-");
    FILE *f = is_stdin ? stdin : fopen(path, "rb");
    char chunk[65536];
    size_t k;
    if (!f) {
        return qx_fail_errno(&r->err, errno == ENOENT ? QX_E_NOT_FOUND : QX_E_IO, errno, "io", "cannot read %s '%s'",
                             what, path);
    }
    while (!b->failed && b->n <= MAX_PROMPT_BYTES && !signals_pending() && (k = fread(chunk, 1, sizeof chunk, f)) > 0) {
        qx_buf_add(b, chunk, k);
    }
    bool bad = ferror(f) != 0;
    int sys = errno;
    if (!is_stdin) {
        fclose(f);
    }
    if (signals_pending()) {
        return qx_fail(&r->err, QX_E_INTERRUPTED, "interrupted", "interrupted");
    }
    if (b->n > MAX_PROMPT_BYTES) {
        return qx_fail(&r->err, QX_E_VALUE, "prompt", "%s '%s' is longer than %u MiB", what, path, MAX_PROMPT_BYTES >> 20);
    }
    return bad ? qx_fail_errno(&r->err, QX_E_IO, sys, "io", "cannot read %s '%s'", what, path) : 0;
}

static int parse_draft(struct run *r)
{
    uint64_t k = 0;
    const char *s = r->o.draft;
    if (!s) {
        return 0;
    }
    if (!strcmp(s, "auto")) {
        r->draft = QX_DRAFT_AUTO;
        return 0;
    }
    if (!qx_parse_u64(s, strlen(s), &k) || k > QX_DRAFT_MAX) {
        return usage(r, "'--draft' wants 0 to %d or 'auto', not '%s'", QX_DRAFT_MAX, s);
    }
    r->draft = (int32_t)k;
    return 0;
}

/* A count, or a file of ids. */
static int parse_draft_vocab(struct run *r)
{
    const char *s = r->o.draft_vocab;
    uint64_t n;
    if (!s) {
        return 0;
    }
    if (qx_parse_u64(s, strlen(s), &n)) {
        r->draft_vocab = n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
        return 0;
    }
    struct qx_u64_list list = {0};
    struct qx_buf text = {0};
    int rc = read_text_file(r, s + (s[0] == '@'), "list of ids", &text);
    rc = rc ? rc : qx_parse_list_text(text.p ? text.p : "", text.n, "token-range", &list, &r->err);
    for (size_t i = 0; i < list.n && rc == 0; i++) {
        if (!qx_ids_add(&r->draft_ids, list.v[i] < UINT32_MAX ? (uint32_t)list.v[i] : UINT32_MAX)) {
            rc = qx_fail_nomem(&r->err);
        }
    }
    qx_u64_list_fini(&list);
    qx_buf_fini(&text);
    if (rc == 0 && r->draft_ids.n == 0) {
        rc = usage(r, "'%s' has no ids for '--draft-vocab'", s);
    }
    return rc;
}

static int parse_seed(struct run *r)
{
    const char *s = r->o.seed;
    uint64_t v = 0;
    if (s && !strcmp(s, "random")) {
        if (getrandom(&v, sizeof v, 0) != (ssize_t)sizeof v) {
            return qx_fail_errno(&r->err, QX_E_IO, errno, "io", "no random seed");
        }
        v &= UINT32_MAX; /* short enough to type again */
    } else if (s && !qx_parse_u64(s, strlen(s), &v)) {
        return usage(r, "'--seed' wants a whole number or 'random', not '%s'", s);
    }
    r->sampling.seed = v;
    return 0;
}

static int check_device(struct run *r)
{
    uint64_t n;
    const char *d = r->o.device;
    if (d && strcmp(d, "cpu") != 0 && strcmp(d, "cuda") != 0 &&
        (strncmp(d, "cuda:", 5) != 0 || !qx_parse_u64(d + 5, strlen(d + 5), &n) || n > 1023)) {
        return usage(r, "'--device' wants cpu, cuda or cuda:N, not '%s'", d);
    }
    if (r->common.threads > 4096) {
        return usage(r, "'--threads' wants at most 4096");
    }
    if (r->o.gpus != 1) {
        return usage(r, "'--gpus' wants 1: a model runs on one device");
    }
    return 0;
}

int run_check_options(struct run *r)
{
    struct run_opts *o = &r->o;
    int prompts = o->prompt_given + o->prompt_file_given + o->tokens_given + o->batch_given;
    if (prompts > 1) {
        return usage(r, o->tokens_given && o->prompt_given
                            ? "'--tokens' and '-p' exclude each other"
                            : "only one of -p, --prompt-file, --tokens and --batch can be given");
    }
    if (o->tokens_given && o->raw) {
        return usage(r, "'--tokens' and '--raw' exclude each other");
    }
    if (prompts == 0 && !r->ui.tty_in) {
        return usage(r, "there is no prompt: give -p, --prompt-file, --tokens or --batch (chat needs a "
                        "terminal)");
    }
    if (prompts == 0 && r->ui.json) {
        return usage(r, "'--json' needs a prompt: -p, --prompt-file, --tokens or --batch");
    }
    if (prompts == 0 && o->show_prompt) {
        return usage(r, "'--show-prompt' needs -p or --prompt-file");
    }
    if (o->tokens_given && (o->template_name || o->system_given || o->effort_given || o->no_think ||
                            o->show_prompt || o->stops.n || o->special)) {
        return usage(r, "'--tokens' sends ids as they are: options about text do not apply");
    }
    if (o->raw && (o->template_name || o->system_given || o->effort_given || o->no_think)) {
        return usage(r, "'--raw' sends the text as it is: options of the chat template do not apply");
    }
    if (o->positions_given && !o->logits && !o->draft_logits) {
        return usage(r, "'--positions' needs --logits or --draft-logits");
    }
    if ((o->logits || o->draft_logits) && (o->batch_given || prompts == 0 || o->show_prompt)) {
        return usage(r, "'--logits' and '--draft-logits' need one prompt");
    }
    if ((o->logits && !strcmp(o->logits, "-")) || (o->draft_logits && !strcmp(o->draft_logits, "-"))) {
        return usage(r, "'--logits' and '--draft-logits' write files; one named '-' is written ./-");
    }
    if (o->logits && o->draft_logits && !strcmp(o->logits, o->draft_logits)) {
        return usage(r, "'--logits' and '--draft-logits' name the same file");
    }
    if (o->streams_given && (!o->batch_given || o->streams == 0 || o->streams > 4096)) {
        return usage(r, o->batch_given ? "'--streams' wants 1 to 4096" : "'--streams' needs --batch");
    }
    if (o->show_prompt && o->batch_given) {
        return usage(r, "'--show-prompt' needs -p or --prompt-file");
    }
    if (o->n == RUN_UNLIMITED) {
        o->n--; /* a number like any other, and far over every context */
    }
    if (o->logprobs > 64) {
        return usage(r, "'--logprobs' wants at most 64");
    }
    if (o->chunk_given && (o->chunk == 0 || o->chunk > 1u << 20)) {
        return usage(r, "'--chunk' wants 1 to 1048576");
    }
    if (o->ctx_given && o->ctx == 0) {
        return usage(r, "'--ctx' wants at least 1");
    }
    if (o->device_memory_given && o->device_memory == 0) {
        return usage(r, "'--device-memory' wants more than 0");
    }
    if (o->top_k > INT32_MAX || o->penalty_last_n > UINT32_MAX) {
        return usage(r, "'--%s' is too large", o->top_k > INT32_MAX ? "top-k" : "penalty-last-n");
    }
    for (size_t i = 0; i < o->stops.n; i++) {
        if (!o->stops.v[i][0]) {
            return usage(r, "'--stop' wants a text that is not empty");
        }
    }
    int rc = check_range(r, "temperature", o->temperature, 0, 1e6);
    rc = rc ? rc : check_range(r, "top-p", o->top_p, 0, 1);
    rc = rc ? rc : check_range(r, "min-p", o->min_p, 0, 1);
    rc = rc ? rc : check_range(r, "repeat-penalty", o->repeat_penalty, 1e-6, 1e6);
    rc = rc ? rc : check_range(r, "presence-penalty", o->presence_penalty, -1e6, 1e6);
    rc = rc ? rc : check_range(r, "frequency-penalty", o->frequency_penalty, -1e6, 1e6);
    rc = rc ? rc : check_range(r, "draft-min-prob", o->draft_min_prob, 0, 1);
    rc = rc ? rc : parse_draft(r);
    rc = rc ? rc : parse_draft_vocab(r);
    rc = rc ? rc : parse_seed(r);
    return rc ? rc : check_device(r);
}

/* ---- opening ----------------------------------------------------------------------------------------- */

static int open_template(struct run *r)
{
    enum qx_template which = QX_TEMPLATE_NONE;
    struct run_opts *o = &r->o;
    if (o->raw) {
        return 0;
    }
    int rc = qx_chat_template(r->ck, &which, &r->template_text, &r->err);
    if (rc) {
        return rc;
    }
    r->use_template = o->template_name || which == QX_TEMPLATE_QWEN38;
    if (r->use_template) {
        return 0;
    }
    if (which == QX_TEMPLATE_UNKNOWN) {
        return qx_fail(&r->err, QX_E_UNSUPPORTED, "template-unknown",
                       "the checkpoint's chat template is not one that qx knows: --raw sends the prompt "
                       "as it is, --template qwen3.8 renders it as that model does");
    }
    if (o->system_given || o->effort_given || o->no_think) {
        return usage(r, "the checkpoint has no chat template: '--%s' needs --template qwen3.8",
                     o->system_given ? "system" : o->no_think ? "no-think" : "effort");
    }
    if (!o->batch_given) {
        ui_note(&r->ui, "the checkpoint has no chat template: the prompt is sent as it is");
    }
    return 0;
}

static int effective_sampling(struct run *r)
{
    const struct run_opts *o = &r->o;
    uint64_t seed = r->sampling.seed;
    int rc = qx_gen_defaults_read(r->ck, &r->defaults, &r->err);
    if (rc) {
        return rc;
    }
    bool sample = r->defaults.sample || o->temperature_given || o->top_k_given || o->top_p_given ||
                  o->min_p_given;
    r->sampling = r->defaults.sampling;
    r->sampling.seed = seed;
    if (o->temperature_given) {
        r->sampling.temperature = (float)o->temperature;
    }
    if (o->top_k_given) {
        r->sampling.top_k = (int32_t)o->top_k;
    }
    if (o->top_p_given) {
        r->sampling.top_p = (float)o->top_p;
    }
    if (o->min_p_given) {
        r->sampling.min_p = (float)o->min_p;
    }
    if (o->repeat_given) {
        r->sampling.repeat_penalty = (float)o->repeat_penalty;
    }
    r->sampling.presence_penalty = (float)o->presence_penalty;
    r->sampling.frequency_penalty = (float)o->frequency_penalty;
    r->sampling.penalty_last_n = (uint32_t)o->penalty_last_n;
    r->greedy = o->greedy || !sample || r->sampling.temperature == 0;
    if (r->greedy) {
        r->sampling.temperature = 0;
    }
    r->n_stop_ids = o->ignore_eos ? 0 : r->defaults.n_stop_ids;
    memcpy(r->stop_ids, r->defaults.stop_ids, r->n_stop_ids * sizeof *r->stop_ids);
    return 0;
}

int run_open(struct run *r)
{
    struct qx_open how = QX_OPEN_DEFAULT;
    how.n_threads = (uint32_t)r->common.threads;
    int rc = qx_ckpt_open(&r->ck, r->path, &how, &r->err);
    if (rc == 0 && !r->o.show_prompt) {
        rc = qx_ckpt_require(r->ck, &r->err);
    }
    if (rc) {
        return rc;
    }
    r->think_close = -1;
    if (!r->o.tokens_given) {
        rc = open_template(r);
        if (rc || r->o.show_prompt) {
            return rc;
        }
        rc = qx_tok_load(&r->tok, r->ck, &r->err);
        if (rc) {
            return rc;
        }
        r->think_close = r->use_template ? qx_tok_find(r->tok, "</think>", 8) : -1;
    }
    r->limit = qx_ckpt_context_limit(r->ck);
    return effective_sampling(r);
}

void run_summary(const struct run *r)
{
    struct qx_buf b = {0};
    const struct qx_sampling *s = &r->sampling;
    if (r->greedy) {
        qx_buf_str(&b, "greedy");
    } else {
        qx_buf_fmt(&b, "temperature %g, top-k %d, top-p %g", (double)s->temperature, s->top_k,
                   (double)s->top_p);
        if (s->min_p > 0) {
            qx_buf_fmt(&b, ", min-p %g", (double)s->min_p);
        }
        qx_buf_fmt(&b, ", seed %llu", (unsigned long long)s->seed);
    }
    if (s->repeat_penalty != 1) {
        qx_buf_fmt(&b, ", repeat penalty %g", (double)s->repeat_penalty);
    }
    if (s->presence_penalty != 0 || s->frequency_penalty != 0) {
        qx_buf_fmt(&b, ", presence penalty %g, frequency penalty %g", (double)s->presence_penalty,
                   (double)s->frequency_penalty);
    }
    qx_buf_str(&b, "; stop ids");
    for (uint32_t i = 0; i < r->n_stop_ids; i++) {
        qx_buf_fmt(&b, " %u", r->stop_ids[i]);
    }
    if (r->n_stop_ids) {
        qx_buf_fmt(&b, " (%s)", r->defaults.stop_source);
    } else {
        qx_buf_str(&b, r->o.ignore_eos ? " ignored" : " none");
    }
    ui_note(&r->ui, "%s", qx_buf_cstr(&b) ? b.p : "");
    qx_buf_fini(&b);
    if (r->defaults.stop_disagrees && r->n_stop_ids) {
        ui_note(&r->ui, "note: config.json and tokenizer_config.json name different stop ids, all of "
                        "them are used");
    }
}

/* ---- prompts ------------------------------------------------------------------------------------------ */

int run_read_prompt(struct run *r, char **out, size_t *n)
{
    struct qx_buf b = {0};
    *out = NULL;
    *n = 0;
    int rc = 0;
    if (r->prompt_text.p) {
        b = r->prompt_text; /* read before the checkpoint was opened */
        r->prompt_text = (struct qx_buf){0};
    } else if (r->o.prompt_given) {
        qx_buf_str(&b, r->o.prompt);
    } else {
        rc = read_text_file(r, r->o.prompt_file, "prompt file", &b);
    }
    if (rc || !qx_buf_cstr(&b)) {
        qx_buf_fini(&b);
        return rc ? rc : qx_fail_nomem(&r->err);
    }
    *out = b.p;
    *n = b.n;
    return 0;
}

int run_read_prompt_file(struct run *r)
{
    return r->o.prompt_file_given && strcmp(r->o.prompt_file, "-") != 0
               ? read_text_file(r, r->o.prompt_file, "prompt file", &r->prompt_text) : 0;
}

static struct qx_chat_opts chat_opts(const struct run *r)
{
    return (struct qx_chat_opts){.no_thinking = r->o.no_think, .effort = r->o.effort,
                                 .template_text = r->template_text};
}

int run_render(struct run *r, const char *text, char **out, size_t *n)
{
    struct qx_chat_opts o = chat_opts(r);
    struct qx_message m[2];
    size_t k = 0;
    if (!r->use_template) {
        *out = qx_strdup(text);
        *n = *out ? strlen(*out) : 0;
        return *out ? 0 : qx_fail_nomem(&r->err);
    }
    memset(m, 0, sizeof m);
    if (r->o.system_given) {
        m[k++] = (struct qx_message){.role = "system", .content = r->o.system};
    }
    m[k++] = (struct qx_message){.role = "user", .content = text};
    return qx_chat_render(m, k, &o, out, n, &r->err);
}

static int check_prompt(struct run *r, const char *text, size_t n)
{
    if (memchr(text, '\0', n) && r->use_template) {
        return qx_fail(&r->err, QX_E_VALUE, "prompt", "the prompt holds a NUL byte");
    }
    return 0;
}

int run_prompt_ids(struct run *r, const char *text, size_t n, struct qx_ids *out)
{
    char *rendered = NULL;
    int rc = check_prompt(r, text, n);
    if (rc == 0 && r->use_template) {
        rc = run_render(r, text, &rendered, &n);
        text = rendered;
    }
    if (rc == 0) {
        rc = qx_tok_encode(r->tok, text, n, out, &r->err);
    }
    bool only_ids = r->o.n_given && r->o.n == 0 && !r->o.logits && !r->o.draft_logits;
    if (rc == 0 && out->n == 0 && !only_ids) {
        rc = usage(r, "the prompt is empty");
    }
    qx_text_free(rendered);
    return rc;
}

int run_messages_ids(struct run *r, const struct qx_message *msgs, size_t n_msgs,
                     const char *const *tools, size_t n_tools, struct qx_ids *out)
{
    struct qx_chat_opts o = chat_opts(r);
    char *text = NULL;
    size_t n = 0;
    o.tools = tools;
    o.n_tools = n_tools;
    int rc = qx_chat_render(msgs, n_msgs, &o, &text, &n, &r->err);
    if (rc == 0) {
        rc = qx_tok_encode(r->tok, text, n, out, &r->err);
    }
    qx_text_free(text);
    return rc;
}

/* ---- the model ----------------------------------------------------------------------------------------- */

/* Whether the engine knows this position scaling: if not, its own refusal comes first. */
static bool rope_known(const struct run *r)
{
    const struct qx_config *c = qx_ckpt_config(r->ck);
    return c && (!strcmp(c->rope_type, "default") || !strcmp(c->rope_type, "yarn"));
}

int run_check_context(struct run *r, uint64_t n_prompt, uint64_t n, const char *who)
{
    uint64_t have = r->o.ctx_given ? r->o.ctx : r->limit, need;
    if (!rope_known(r)) {
        return 0;
    }
    if (r->o.ctx_given && r->o.ctx > r->limit) {
        return qx_fail(&r->err, QX_E_USAGE, "context-exceeded",
                       "a context of %llu tokens is asked for, the model has %llu",
                       (unsigned long long)r->o.ctx, (unsigned long long)r->limit);
    }
    if (n == RUN_UNLIMITED ? n_prompt > have : !qx_add_u64(n_prompt, n, &need) || need > have) {
        char asked[64] = "";
        if (n != RUN_UNLIMITED) {
            snprintf(asked, sizeof asked, " and %llu requested", (unsigned long long)n);
        }
        return qx_fail(&r->err, QX_E_USAGE, "context-exceeded",
                       "%s%s%llu prompt tokens%s exceed the context of %llu tokens", who ? who : "",
                       who ? ": " : "", (unsigned long long)n_prompt, asked, (unsigned long long)have);
    }
    return 0;
}

static int load_progress(void *user, uint64_t done, uint64_t total)
{
    struct run *r = user;
    if (!r->progress_on) {
        progress_start(&r->progress, &r->ui, "loading", total, PROGRESS_BYTES);
        r->progress_on = true;
    }
    progress_update(&r->progress, done);
    return signals_pending();
}

static void load_warn(void *user, const char *kind, const char *text)
{
    struct run *r = user;
    ui_warn(&r->ui, "%s: %s", kind, text);
}

int run_load(struct run *r, uint64_t need, uint32_t max_seqs, bool mtp)
{
    struct qx_model_opts m = QX_MODEL_OPTS_DEFAULT;
    const struct run_opts *o = &r->o;
    uint64_t t0 = progress_now_ns(), ctx = o->ctx;
    if (!o->ctx_given) {
        ctx = need ? need : USUAL_CTX;
        ctx = ctx < UINT64_MAX / 2 ? (ctx + QX_DRAFT_MAX + CTX_ROUND) / CTX_ROUND * CTX_ROUND : ctx;
        ctx = ctx > r->limit ? r->limit : ctx;
    }
    m.device = o->device;
    m.n_threads = (uint32_t)r->common.threads;
    m.precise = o->precise;
    m.table = !o->table                     ? QX_TABLE_AUTO
              : !strcmp(o->table, "device") ? QX_TABLE_DEVICE
              : !strcmp(o->table, "host")   ? QX_TABLE_HOST
                                            : QX_TABLE_DISK;
    m.device_memory_bytes = o->device_memory;
    m.ctx_tokens = ctx;
    m.chunk_rows = (uint32_t)o->chunk;
    m.max_seqs = max_seqs;
    m.draft_max = r->draft == QX_DRAFT_AUTO ? QX_DRAFT_MAX : (uint32_t)r->draft;
    m.draft_vocab = r->draft_vocab;
    m.draft_ids = r->draft_ids.v;
    m.n_draft_ids = r->draft_ids.n;
    m.mtp = mtp;
    m.user = r;
    m.progress = load_progress;
    m.warn = load_warn;
    int rc = qx_model_load(&r->model, r->ck, &m, &r->err);
    if (r->progress_on) {
        progress_finish(&r->progress);
        r->progress_on = false;
    }
    if (rc) {
        return rc;
    }
    r->load_s = (double)(progress_now_ns() - t0) * 1e-9;
    qx_model_info(r->model, &r->info);
    if (r->ui.verbose) {
        ui_note(&r->ui, "device: %s%s%s", r->info.device, r->info.variants[0] ? "; kernels: " : "",
                r->info.variants);
        for (uint32_t i = 0; i < r->info.n_parts; i++) {
            char size[32];
            ui_note(&r->ui, "plan: %s, %s, %s", r->info.parts[i].name, r->info.parts[i].place,
                    qx_size_text(r->info.parts[i].size_bytes, size));
        }
    }
    return 0;
}

void run_params(const struct run *r, struct qx_gen_params *p)
{
    *p = QX_GEN_PARAMS_DEFAULT;
    p->n_max = r->o.n_given ? r->o.n : RUN_UNLIMITED;
    p->sampling = r->sampling;
    p->stop_ids = r->stop_ids;
    p->n_stop_ids = r->n_stop_ids;
    p->draft = r->draft;
    p->draft_min_prob = (float)r->o.draft_min_prob;
    p->n_logprobs = (uint32_t)r->o.logprobs;
}

void run_prefill_begin(struct run *r, uint64_t total)
{
    progress_start(&r->progress, &r->ui, "reading the prompt, tokens", total, PROGRESS_COUNT);
    r->progress_on = true;
}

int run_prefill_progress(void *user, uint64_t done, uint64_t total)
{
    struct run *r = user;
    (void)total;
    progress_update(&r->progress, done);
    return signals_pending();
}

void run_prefill_end(struct run *r)
{
    progress_finish(&r->progress);
    r->progress_on = false;
}

uint64_t run_host_peak_bytes(void)
{
    struct rusage u;
    return getrusage(RUSAGE_SELF, &u) == 0 ? (uint64_t)u.ru_maxrss * 1024 : 0;
}

void run_close(struct run *r)
{
    qx_model_free(r->model);
    qx_tok_close(r->tok);
    qx_text_free(r->template_text);
    qx_ckpt_close(r->ck);
    qx_u64_list_fini(&r->o.tokens);
    qx_u64_list_fini(&r->o.positions);
    qx_ids_fini(&r->draft_ids);
    qx_buf_fini(&r->prompt_text);
    r->model = NULL;
    r->tok = NULL;
    r->template_text = NULL;
    r->ck = NULL;
}
