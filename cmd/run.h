/* run.h: what the files of qx-run share: the options, and what has been opened from them. */
#ifndef QX_CMD_RUN_H
#define QX_CMD_RUN_H

#include "num.h"
#include "opt.h"
#include "progress.h"
#include "qx.h"
#include "text_stream.h"
#include "ui.h"

#define RUN_UNLIMITED UINT64_MAX

struct run_opts {
    const char *prompt, *prompt_file, *batch;
    struct qx_u64_list tokens;
    bool prompt_given, prompt_file_given, tokens_given, batch_given;
    bool raw, no_think, show_prompt, special;
    const char *system, *effort, *template_name;
    bool system_given, effort_given, no_think_given;

    uint64_t n;
    bool n_given;
    bool greedy, ignore_eos;
    double temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    uint64_t top_k, penalty_last_n;
    bool temperature_given, top_p_given, min_p_given, top_k_given, repeat_given;
    const char *seed;
    struct opt_strs stops;
    uint64_t logprobs;

    const char *device, *table, *draft;
    uint64_t gpus, device_memory, ctx, chunk, streams;
    bool device_memory_given, ctx_given, chunk_given, streams_given;
    double draft_min_prob;
    const char *draft_vocab;
    bool precise;

    const char *logits, *draft_logits;
    struct qx_u64_list positions;
    bool positions_given, force;
};

struct run {
    struct ui ui;
    struct opt_common common;
    struct run_opts o;
    const char *path;
    struct qx_error err;

    struct qx_ckpt *ck;
    struct qx_tok *tok;           /* NULL with --tokens */
    bool use_template;
    char *template_text;          /* the checkpoint's, for tools */
    struct qx_gen_defaults defaults;
    struct qx_sampling sampling;
    bool greedy;                  /* effective */
    uint32_t stop_ids[QX_STOP_IDS_MAX];
    uint32_t n_stop_ids;
    int64_t think_close;          /* id of </think>, -1 if there is none */
    int32_t draft;
    uint32_t draft_vocab;         /* how many ids; 0: all */
    struct qx_ids draft_ids;      /* those of a file */
    struct qx_buf prompt_text;    /* of a prompt file, until it is used */
    uint64_t limit;               /* context of the configuration in tokens */

    struct qx_model *model;
    struct qx_model_info info;
    double load_s;
    struct progress progress;     /* of loading or prefill, whichever runs */
    bool progress_on;
};

/* All functions below return 0, or a negative code with r->err set. */

/* run_setup.c */
int run_check_options(struct run *r);
int run_open(struct run *r);              /* checkpoint, tokenizer, template, defaults */
/* Ids of a prompt: a user turn when a template is in use, else the text as it is. */
int run_prompt_ids(struct run *r, const char *text, size_t n, struct qx_ids *out);
int run_messages_ids(struct run *r, const struct qx_message *msgs, size_t n_msgs,
                     const char *const *tools, size_t n_tools, struct qx_ids *out);
/* The rendered prompt (qx_text_free). */
int run_render(struct run *r, const char *text, char **out, size_t *n);
int run_read_prompt(struct run *r, char **out, size_t *n);
/* A prompt file that is not stdin is read before anything is said about the checkpoint. */
int run_read_prompt_file(struct run *r);
/* Checks prompt + n against the context, before anything is loaded. */
int run_check_context(struct run *r, uint64_t n_prompt, uint64_t n, const char *who);
/* Loads the model with room for `need` tokens a sequence (0: as much as is usual). */
int run_load(struct run *r, uint64_t need, uint32_t max_seqs, bool mtp);
void run_params(const struct run *r, struct qx_gen_params *p);
void run_summary(const struct run *r);    /* sampling and stop ids, on stderr */
void run_close(struct run *r);
uint64_t run_host_peak_bytes(void);
void run_prefill_begin(struct run *r, uint64_t total);
void run_prefill_end(struct run *r);
int run_prefill_progress(void *user, uint64_t done, uint64_t total); /* user is a struct run */

/* run_text.c: generated ids on their way to stdout and to the JSON document. */
struct run_text {
    struct run *r;
    bool stream;                  /* write to stdout as it comes */
    bool ids;                     /* write ids, not text */
    bool dim, in_think;           /* thinking is shown dimmed */
    bool stopped_by_text, interrupted, wrote, ends_line;
    struct qx_stop_texts stops;
    struct qx_text_stream chars;
    struct qx_buf text;           /* all of it, special ids left out */
    struct qx_ids tokens;         /* all ids, the stop id included */
    struct qx_json_out logprobs;  /* elements of the array */
    bool with_logprobs, failed;
};
void run_text_init(struct run_text *t, struct run *r, bool stream);
/* Takes a token; true when generation should stop (stop text met, interrupted, stdout gone). */
bool run_text_token(struct run_text *t, const struct qx_token *tok);
void run_text_end(struct run_text *t);
void run_text_fini(struct run_text *t);
const char *run_stop_reason(const struct run_text *t, enum qx_stop_reason reason);
/* "text", and "text_base64" when it is not UTF-8. */
void run_json_text(struct qx_json_out *o, const struct run_text *t);
/* Passes of the main model that gave tokens: the one over the prompt's end gives the first, so that
 * tokens = rounds + accepted drafts. */
uint64_t run_rounds(const struct qx_gen_stats *s);
/* "draft" {...}; k as asked for. */
void run_json_draft(struct qx_json_out *o, const struct run *r, const struct qx_gen_stats *s);
void run_json_memory(struct qx_json_out *o, const struct run *r);
void run_json_sampling(struct qx_json_out *o, const struct run *r);
void run_json_f64_or_null(struct qx_json_out *o, const char *key, double v, bool there);

/* run_logits.c: rows of logits into .npy files. */
struct run_logits;
int run_logits_create(struct run_logits **out, struct run *r, uint64_t n_prompt, uint64_t n);
bool run_logits_wants_last(const struct run_logits *l, uint64_t last_pos);
void run_logits_hooks(struct run_logits *l, struct qx_gen_hooks *hooks);
/* Writes what waits and commits both files. */
int run_logits_finish(struct run_logits *l);
void run_logits_json(struct qx_json_out *o, const struct run_logits *l); /* l may be NULL */
void run_logits_destroy(struct run_logits *l);

/* Whole modes; each returns the exit code. */
int run_one(struct run *r);     /* run_one.c */
int run_batch(struct run *r);   /* run_batch.c */
int run_chat(struct run *r);    /* run_chat.c */

#endif
