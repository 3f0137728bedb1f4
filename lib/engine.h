/* engine.h: what the files of the engine share: the model as bound to a device, the buffers a step works
 * in, and the sequences that live in it. Nothing numeric happens in these files: they name weights, place
 * them, and call ops in order.
 *
 * Invariants: every device buffer is allocated at load; a step touches no other memory. Row arrays of a
 * step come from one control block that is uploaded whole. A sequence's tokens are known to the host. */
#ifndef QX_ENGINE_H
#define QX_ENGINE_H

#include "backend.h"
#include "base.h"
#include "budget.h"
#include "ckpt.h"
#include "config.h"
#include "error.h"
#include "ops.h"
#include "plan.h"
#include "ple_hash.h"
#include "qx.h"
#include "rows.h"

struct qx_bind; /* bind.h */

/* ---- weights ------------------------------------------------------------------------------ */

struct qx_hc_weights {
    const float *norm; /* [C * hidden] */
    struct qx_weight down, up, inject; /* inject.fmt QX_W_NONE in final mixers */
};

struct qx_gdn_weights {
    struct qx_weight qkv, z, b, a, out;
    const float *conv, *a_log, *dt_bias, *norm;
};

struct qx_qsa_weights {
    struct qx_weight q, k, v, index, o;
    const float *q_norm, *k_norm, *iq_norm, *ik_norm;
};

struct qx_moe_weights {
    struct qx_weight gate;
    struct qx_weight *experts_host;           /* [3][n_experts]: gate, up, down; during binding */
    const struct qx_weight *gates, *ups, *downs; /* [n_experts], device memory */
    uint8_t expert_fmt; /* fmt of struct qx_experts */
    struct qx_weight s_gate, s_up, s_down, s_gate_vec;
};

struct qx_ple_weights {
    struct qx_weight key, value;
    const float *norm_key, *norm_query, *norm_conv, *conv;
};

struct qx_layer {
    uint8_t type;               /* enum qx_layer_type */
    bool has_ple;
    uint32_t kind_index;        /* which of the layers of its type */
    struct qx_hc_weights hc_attn, hc_mlp;
    struct qx_gdn_weights gdn;
    struct qx_qsa_weights qsa;
    struct qx_moe_weights moe;
    struct qx_ple_weights ple;
};

struct qx_mtp {
    bool loaded;
    struct qx_weight fc_embedding, fc_hidden;
    const float *norm_embedding, *norm_hidden;
    struct qx_hc_weights mixer;
    struct qx_layer layer;
};

/* ---- working memory ----------------------------------------------------------------------- */

/* The host and device image of one control block: arrays by row and by logit row. `n_bytes` is what one
 * upload moves. */
struct qx_ctl {
    void *host, *host_dev, *dev; /* host_dev: the device's address of host */
    size_t n_bytes;
    bool in_flight;             /* an upload of `host` may still be running: wait before writing to it */
    struct qx_step step_host;   /* pointers into host */
    struct qx_step step;        /* pointers into dev; n_rows set per step */
    int32_t *src_x_host, *src_x;       /* [rows] wide state to take: row of x, or -1 (draft head) */
    int32_t *src_hold_host, *src_hold; /* [rows] or a sequence's held row, or -1 (draft head) */
    int32_t *hold_host, *hold;  /* [max_seqs] row of x to hold per sequence, or -1 */
    /* chains of drafts before a decode step, one row a line */
    struct qx_step chain_host, chain; /* [max_seqs] */
    int32_t *base_host, *base, *count_host, *count; /* [max_seqs] ops.h, draft_next */
    float *least_host, *least;  /* [max_seqs] */
    int32_t *forced_host, *forced; /* [max_seqs] ops.h, draft_accept */
    int32_t *pick_host, *pick;  /* [logit rows] rows that want logits */
    int32_t *spos_host, *spos;  /* [logit rows] position of the sampled token */
    struct qx_sample_params *params_host, *params; /* [logit rows] */
};

struct qx_graph_key { uint32_t kind, n_rows, n_logits, flags, n_chain, n_drafts; };
struct qx_graph { struct qx_graph_key key; void *graph; uint64_t n_nodes, last_used; uint32_t n_seen; };
#define QX_MAX_GRAPHS 64

#define QX_UNTOLD INT32_MIN

struct qx_buffers {
    float *x;                   /* [rows, C, hidden] wide state */
    float *mx;                  /* [rows, C, hidden] draft head's wide state */
    float *hold;                /* [max_seqs, C, hidden] last wide state: next for the draft head, or for the
                                   head when nothing was sampled from it yet */
    float *prefix_hold;         /* [n_prefixes, C, hidden] wide states at the ends of shared prefixes */
    float *hx;                  /* [logit rows, C, hidden] rows picked for the head */
    float *y, *m, *e, *e2;      /* [rows, hidden] */
    float *inj_a, *inj_b;       /* [rows, C] */
    float *proj;                /* [rows, widest projection] */
    float *mixed;               /* [rows, widest mixer output] */
    float *iq, *q;              /* [rows, i_heads * i_dim], [rows, n_heads * head_dim] */
    float *scratch;             /* largest scratch of any op */
    float *scores;              /* [rows, max_blocks] */
    int32_t *block, *n_block;   /* [rows, budget_blocks], [rows] */
    int32_t *expert;            /* [rows, k] */
    float *route, *route_logits;/* [rows, k], [rows, n_experts] */
    int32_t *iscratch;
    int64_t *ple_row;           /* [rows, ple heads] */
    float *ple_e, *ple_key, *ple_value; /* [rows, ple width], [rows, C * hidden], [rows, hidden] */
    float *h, *logits;          /* [logit rows, hidden], [logit rows, vocab] */
    float *sample_scratch;      /* logit rows * vocab * 2 */
    int32_t *out_id;            /* [logit rows] sampled or arg-max ids */
    float *out_value, *out_prob;/* [logit rows] */
    float *mhold;               /* [max_seqs, C, hidden] draft head's wide state behind the next draft */
    int32_t *next_id;           /* [max_seqs] the first draft of the next round */
    float *next_prob;           /* [max_seqs] */
    /* pinned host memory */
    int32_t *host_id, *told_id; /* [logit rows] ids chosen, and the device's address of them; QX_UNTOLD until then */
    int32_t *host_drafts, *told_drafts; /* [2, logit rows] ids and positions of a step's rows, drafts filled in */
    float *host_logits;         /* [logit rows, vocab]; NULL until wanted */
    float *host_ple_e;          /* table on disk: rows read before the step */
    int32_t *ring_host, *ring;  /* [QX_RING, max_seqs] ids of steps that feed themselves, mapped */
    uint64_t *count_host, *count; /* steps done of those, mapped */
    int32_t *pen_host, *pen_dev;/* penalties: ids and counts, allocated when first used */
};

struct qx_kv_layer { void *k, *v, *raw, *pooled; };

/* ---- sequences ---------------------------------------------------------------------------- */

struct qx_seq {
    bool used;
    int32_t slots[QX_DRAFT_MAX + 2]; /* state slots it owns */
    uint32_t n_slots;
    int32_t cur;                /* slot with the state after n_done tokens; -1: empty sequence */
    uint64_t n_done;            /* tokens consumed */
    uint64_t n_mtp;             /* rows in the draft head's cache: n_done, or n_done - 1 when held */
    bool broken;                /* left by an error: only a reset makes it usable */
    bool held;                  /* hold[seq] has the wide state at n_done - 1 */
    int32_t *pages;             /* [max_pages] host copy of its page table row */
    uint32_t n_pages;
    uint32_t *ids;              /* known ids, n_done or n_done + 1 of them */
    size_t n_ids, cap_ids;
};

/* ---- the model ---------------------------------------------------------------------------- */

struct qx_alloc_list { void **p; bool *host; size_t n, cap; };

struct qx_model {
    const struct qx_ckpt *ck;
    const struct qx_config *cfg;
    struct qx_backend *be;
    struct qx_queue *q;
    struct qx_budget budget;
    struct qx_model_info info;
    struct qx_plan_part parts[16];
    bool kv_bf16, act_bf16;     /* ops.h */
    bool prompt;                /* the ops being issued read a prompt (ops.h) */
    bool alone;                 /* ops of one kind are issued without the others: none may rely on the next (late) */

    struct qx_weight embed, head;
    struct qx_layer *layers;    /* [n_layers] */
    struct qx_hc_weights mixer;
    struct qx_mtp mtp;
    uint32_t n_gdn, n_qsa;      /* layers of each type, the draft head not counted */

    bool has_ple;
    uint32_t ple_layer;
    struct qx_ple_hash hash;
    uint64_t *mult_dev, *size_dev, *offset_dev;
    enum qx_table_place place;
    struct qx_table_desc table;
    struct qx_rows *table_rows; /* on disk */
    struct qx_rope rope;

    struct qx_bind *bind;       /* kept where descriptors point into its values */
    struct qx_alloc_list allocs; /* everything taken from the backend */

    /* states by slot, caches by page */
    float **gdn_s, **gdn_conv;  /* [n_gdn] */
    float *ple_conv;
    int32_t *ple_prev;
    uint64_t gdn_s_stride, gdn_conv_stride, ple_conv_stride, ple_prev_stride; /* elements a slot */
    struct qx_kv_layer *kv;     /* [n_qsa + 1], the last for the draft head */
    int32_t *page_table_dev, *page_table_host; /* [max_seqs, max_pages] */
    bool page_table_dirty;
    int32_t *free_pages;
    uint32_t n_free_pages;
    uint16_t *page_refs;        /* [n_pages] */
    int32_t *free_slots;
    uint32_t n_free_slots;
    struct qx_seq *seqs;        /* [max_seqs] */

    struct qx_buffers b;
    /* Of decode steps and of prompt steps, of the main model and of the draft head. */
    struct qx_ctl ctl, pctl, mctl, mpctl;
    struct qx_graph graphs[QX_MAX_GRAPHS];
    uint32_t n_graphs;
    uint64_t n_steps, n_runs;   /* steps of the main model; of everything (graphs' last use) */
    /* rows of the head that choose drafts: the head itself, or some of its rows (draft_head.c) */
    struct qx_weight draft_head;
    int32_t *draft_map;         /* [draft_head.rows] device: their ids; NULL: the same numbers */
    int64_t *draft_rows;        /* the same, where rows are decoded */
    void *draft_codes, *draft_scale; /* the copies */
    bool draft_fixed;           /* the caller said which: nothing is learned */
    bool head_copied;           /* head_copy.c */
    uint8_t *head_codes;
    float *head_off;            /* [head.rows] */
    bool free_greedy;           /* steps that feed themselves choose by the copy */
    uint64_t free_at_open;      /* bytes the device had before anything was taken; 0 unknown */
    uint32_t gdn_chunk;         /* 0: recurrent everywhere, so that chunks change no bit */
};

/* model.c: parts of loading that a model without a checkpoint (synth.c) needs too. The configuration must be
 * set: the layers and the hash; the device of the options and its queue; rotary table and hash constants. */
int qx_model_describe(struct qx_model *m, struct qx_error *err);
/* Budget, table place and what the device is, from a plan that fits. */
void qx_model_take_plan(struct qx_model *m, const struct qx_plan *plan, const struct qx_device_info *info);
int qx_model_open_device(struct qx_model *m, const struct qx_model_opts *o, struct qx_error *err);
int qx_model_open_queue(struct qx_model *m, struct qx_error *err);
int qx_model_constants(struct qx_model *m, struct qx_error *err);

/* model.c: memory of the device, remembered for qx_model_free. */
int qx_model_mem(struct qx_model *m, void *out_ptr, uint64_t n_bytes, struct qx_error *err);
int qx_model_host_mem(struct qx_model *m, void *out_ptr, uint64_t n_bytes, struct qx_error *err);
/* The same of host memory the device can address as *dev_ptr. */
int qx_model_host_mem_mapped(struct qx_model *m, void *out_ptr, void *dev_ptr, uint64_t n_bytes,
                             struct qx_error *err);
/* Counts device bytes that are held without a call of the above. */
void qx_model_note_bytes(struct qx_model *m, uint64_t n);
/* Turns a failed op into an error with its name. */
int qx_model_op_failed(struct qx_model *m, const char *op, int rc, struct qx_error *err);
/* Returns what a failed call returned. */
#define QX_TRY(call)                                                                  \
    do {                                                                              \
        int rc_ = (call);                                                             \
        if (rc_) {                                                                    \
            return rc_;                                                               \
        }                                                                             \
    } while (0)
#define QX_RUN(m, op, args, err)                                                      \
    do {                                                                              \
        int rc_ = (m)->be->ops->op((m)->q, (args));                                   \
        if (rc_) {                                                                    \
            return qx_model_op_failed((m), #op, rc_, (err));                          \
        }                                                                             \
    } while (0)

/* bind.c: names to descriptors, then bytes to the device. The first call looks only at headers and fails
 * with everything that is missing; it fills the sizes. The second places and loads. */
struct qx_bind_sizes { uint64_t weight_bytes, table_bytes, read_bytes; };
int qx_bind_create(struct qx_bind **out, struct qx_model *m, const struct qx_model_opts *o,
                   struct qx_error *err);
void qx_bind_sizes(const struct qx_bind *b, struct qx_bind_sizes *out);
int qx_bind_load(struct qx_bind *b, const struct qx_model_opts *o, struct qx_error *err);
void qx_bind_destroy(struct qx_bind *b);

/* draft_head.c: rows of a smaller draft head (0: none), its device bytes, and making it once the head is
 * loaded. Without a smaller one the draft head is the head. */
uint32_t qx_draft_head_rows(const struct qx_model_opts *o, uint32_t vocab);
uint64_t qx_draft_head_bytes(const struct qx_weight *head, uint32_t n);
int qx_draft_head_init(struct qx_model *m, const struct qx_model_opts *o, struct qx_error *err);

/* head_copy.c: bytes of a copy of the head, 0: of no use here; making it where the plan has it. Whether the largest
 * logits of n rows are found by it: then their ids go to b.out_id, from the rows in b.h; of drafts with values and
 * probabilities, else -1 where they are not finite. */
uint64_t qx_head_copy_bytes(const struct qx_model *m, const struct qx_device_info *info);
int qx_head_copy_init(struct qx_model *m, struct qx_error *err);
bool qx_head_by_copy(const struct qx_model *m, uint32_t n);
int qx_graph_best(struct qx_model *m, uint32_t n, bool draft, int32_t *told, struct qx_error *err);

/* state.c: buffers, caches and sequences. */
int qx_state_alloc(struct qx_model *m, struct qx_error *err);
void qx_state_free(struct qx_model *m);
int qx_seq_open(struct qx_model *m, int32_t *seq, struct qx_error *err);
void qx_seq_close(struct qx_model *m, int32_t seq);
void qx_seq_reset(struct qx_model *m, int32_t seq);
/* Pages for positions < n_tokens; QX_E_PLAN when the pool is empty. */
int qx_seq_reserve(struct qx_model *m, int32_t seq, uint64_t n_tokens, struct qx_error *err);
/* Copies between slots and pages, of all layers. */
int qx_seq_copy_slot(struct qx_model *m, int32_t from, int32_t to, struct qx_error *err);
int qx_seq_copy_page(struct qx_model *m, int32_t from, int32_t to, struct qx_error *err);
int qx_seq_push(struct qx_model *m, int32_t seq, uint32_t id, struct qx_error *err);

/* ---- graph files: order of ops only ------------------------------------------------------- */

/* A pending write-back: y times inj into the wide state, done by the next hyper-connection. */
struct qx_pending { const float *y, *inj; };

/* graph_mix.c */
int qx_graph_embed(struct qx_model *m, const struct qx_step *s, uint32_t n_streams, float *x,
                   struct qx_error *err);
/* Reads the wide state through a hyper-connection: pending write-back in, m and inj out. */
int qx_graph_hc(struct qx_model *m, const struct qx_hc_weights *w, uint32_t n_rows, float *x,
                struct qx_pending *pending, float *mixed, float *inj, struct qx_error *err);
/* The pending write-back alone. */
int qx_graph_flush(struct qx_model *m, uint32_t n_rows, float *x, struct qx_pending *pending,
                   struct qx_error *err);
/* Final mixer, into b.h, and head for n_logits picked rows (pick NULL: the first
 * n_logits rows, x itself); head NULL: the mixer alone. */
int qx_graph_head(struct qx_model *m, const struct qx_hc_weights *mixer, uint32_t n_rows, float *x,
                  struct qx_pending *pending, const int32_t *pick, uint32_t n_logits,
                  const struct qx_weight *head, struct qx_error *err);
/* One decoder layer on wide state x. `kv_index` chooses the caches of a QSA layer. tail: NULL, or the last rows of s
 * as a step of their own; of the rows before it a QSA layer then only keeps keys and values, and what it leaves pending
 * is the tail's. */
int qx_graph_layer(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, const struct qx_step *tail,
                   float *x, struct qx_pending *pending, uint32_t kv_index, struct qx_error *err);
/* All layers of a step. `after` (may be NULL) sees the wide state after each. */
int qx_graph_layers(struct qx_model *m, const struct qx_step *s, struct qx_pending *pending,
                    int (*after)(void *user, uint32_t layer, struct qx_error *err), void *user,
                    struct qx_error *err);
/* Draft head rows: the ids' embeddings and wide states mixed into `out`; where from: ops.h, draft_in. */
struct qx_wide_rows { const float *from[2]; const int32_t *row[2]; };
int qx_graph_mtp(struct qx_model *m, const struct qx_step *s, const struct qx_step *tail,
                 const struct qx_wide_rows *wide, float *out, struct qx_pending *pending, struct qx_error *err);
/* graph_gdn.c, graph_attn.c, graph_moe.c: mixer input in, y out. graph_ple.c: on the wide state. */
int qx_graph_gdn(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, const float *in,
                 float *y, struct qx_error *err);
int qx_graph_attn(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, const struct qx_step *tail,
                  uint32_t kv_index, const float *in, float *y, struct qx_error *err);
int qx_graph_moe(struct qx_model *m, const struct qx_layer *l, uint32_t n_rows, const float *in, float *y,
                 struct qx_error *err);
int qx_graph_ple(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, float *x,
                 struct qx_error *err);

/* ---- steps: exec.c ------------------------------------------------------------------------ */

struct qx_row {
    int32_t seq, pos, id;
    int32_t state_in, state_out;
    int32_t src_x, src_hold;    /* draft head rows: where the wide state comes from, -1 none */
};

/* A chain of drafts before a decode step: `count` of them for sequence seq, into the rows behind `row` (the
 * pending id's). Their ids are the device's to fill in; those the chain does not reach become idle. */
struct qx_chain { int32_t seq; uint32_t row, count; float min_prob; uint32_t forced; /* ops.h, draft_accept */ };

/* What to do with a step besides running it. */
struct qx_want {
    bool prompt;                /* rows of prompts (ops.h); no row of a decode step is */
    const struct qx_chain *chain; /* decode steps: drafts to make first; needs next_id of the sequences */
    uint32_t n_chain;           /* <= max_seqs */
    bool feed;                  /* of a step of one chain's rows: what it keeps goes to the draft head at once, which
                                   chooses the next chain's first draft; *fed if so */
    bool *fed;
    const uint32_t *logit_row;  /* rows of the step that want logits, ascending */
    uint32_t n_logits;          /* <= budget.n_logit_rows */
    const struct qx_sampling *sampling; /* [n_logits]; NULL: arg-max */
    const struct qx_seq *const *history; /* [n_logits] for penalties; may be NULL */
    bool logits_to_host;        /* into b.host_logits */
    const struct qx_gen_hooks *hooks; /* streams and table rows; forces an eager step */
    int32_t *scan_layer;        /* not NULL: finds the first layer with a value that is not finite: its
                                   index, n_layers for the final mixer, n_layers + 1 for none */
};

/* Runs rows through the main model. Afterwards b.x has their wide states, and for every logit row
 * b.host_id the token chosen (-1: logits not finite). Rows that chains filled have their ids in `rows`, idle
 * ones position -1. Waits: once, but with chains twice where the host needs the drafts' ids before the step
 * (table on disk, penalties). */
int qx_exec_step(struct qx_model *m, struct qx_row *rows, uint32_t n, const struct qx_want *w,
                 struct qx_error *err);
/* Steps that feed themselves: every row's chosen id becomes its next input on the device, and the host
 * only collects behind. start takes rows as for qx_exec_step, all with logits and state_in = state_out;
 * launch enqueues one more step and does not wait; ids gives the ids [n] of step i (from 0) once it is
 * done, else NULL. No more than QX_RING steps may be launched ahead of reading. */
#define QX_RING 16
int qx_exec_free_start(struct qx_model *m, const struct qx_row *rows, uint32_t n, const struct qx_want *w,
                       struct qx_error *err);
int qx_exec_free_launch(struct qx_model *m, uint32_t n, struct qx_error *err);
const int32_t *qx_exec_free_ids(struct qx_model *m, uint32_t n, uint64_t i);
/* Runs rows through the draft head; wide states from b.x or hold (src_*). The logit rows, of different
 * sequences, give the drafts that chains of their sequences begin with: id, probability and wide state stay
 * on the device. Does not wait. */
int qx_exec_mtp(struct qx_model *m, const struct qx_row *rows, uint32_t n, const struct qx_want *w,
                struct qx_error *err);
/* What `ops` enqueues as a graph, with its number of nodes (may be NULL); *graph is NULL on failure. */
int qx_exec_record(struct qx_model *m, int (*ops)(struct qx_model *m, const void *user, struct qx_error *err),
                   const void *user, void **graph, uint64_t *n_nodes, struct qx_error *err);
/* For measuring: the ops of a round of one sequence as the last one ran, of k drafts, all or a part of them; the
 * control blocks are uploaded again or are what is left there. */
enum qx_round_part { QX_ROUND_ALL = 0, QX_ROUND_CHECK, QX_ROUND_DRAFTS };
int qx_exec_round_ops(struct qx_model *m, uint32_t k, enum qx_round_part part, bool upload, struct qx_error *err);
/* Waits for everything enqueued. */
int qx_exec_wait(struct qx_model *m, struct qx_error *err);
/* Mixer and head of rows that the last step left: of b.x, of the draft head's rows, or (row i's sequence)
 * of what is held. w->logit_row indexes `rows`, which give positions for sampling. Waits. */
enum qx_head_source { QX_HEAD_X = 0, QX_HEAD_HOLD, QX_HEAD_MTP };
int qx_exec_head(struct qx_model *m, enum qx_head_source from, const struct qx_row *rows,
                 const struct qx_want *w, struct qx_error *err);
/* Keeps wide states of the last step for the draft head: hold[seq] = x[row_of_seq[seq]], -1 leaves it. */
int qx_exec_hold(struct qx_model *m, const int32_t *row_of_seq, struct qx_error *err);

#endif
