/* ops.h: argument structs of every op with their contracts, and the op table made from ops.def.
 *
 * Common contract. All pointers are addresses on the queue's device. Activations are f32, row-major,
 * rows of one step in the order of struct qx_step. An op allocates nothing, waits for nothing and reads
 * nothing back, so whole steps can be captured as a graph; sizes passed by value are fixed at capture,
 * everything that changes from step to step is read from device memory. Outputs do not alias inputs
 * unless said. A row with pos < 0 is idle: ops neither read its state nor write any; its outputs are
 * undefined but finite-safe to compute on. The reference sums in double and rounds once to f32 per
 * stored value. Where an op has act_bf16, set means: inputs of its matrix products are first rounded to
 * bfloat16 (nearest even), as are its own intermediate inputs of later products; what does not enter a
 * matrix product stays f32. Where it has prompt, set means: the rows are a prompt's, many at a time, and
 * a backend may sum in another fixed order than for the rows of decoding; with prompt clear a row's bits
 * do not depend on how many rows the step has. NaN in inputs propagates; nothing is clamped. Rules of order (ties, summation over
 * experts) are stated where they matter. Section numbers are those of the model description. */
#ifndef QX_OPS_H
#define QX_OPS_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct qx_queue;

/* ---- stored matrices ---------------------------------------------------------------------- */

enum qx_wfmt {
    QX_W_NONE = 0, QX_W_F32, QX_W_F16, QX_W_BF16,
    QX_W_FP8,       /* E4M3 x global */
    QX_W_FP8_BLOCK, /* E4M3 x scale[(row0 + r) / 128, c / 128] */
    QX_W_MXFP8,     /* E4M3 x E8M0[r, c / 32] */
    QX_W_NVFP4      /* E2M1 (even column = low nibble) x E4M3[r, c / 16] x global */
};

/* One matrix [rows, cols] as stored. A host reference may get unaligned pointers (mapped files);
 * the CUDA loader aligns codes and scale to 16 bytes. A slice of a fused tensor has codes and scale
 * pointing at its first row's data, but for FP8_BLOCK scale points at the tensor's first scale row
 * and row0 is the slice's first row. */
struct qx_weight {
    const void *codes;   /* [rows, cols] codes, row-major */
    const void *scale;   /* per format; FP8_BLOCK: [ceil, ceil(cols/128)] of scale_bf16 ? BF16 : F32 */
    float global;        /* FP8: weight_scale; NVFP4: weight_scale_2; 1 for the others (no scale exists) */
    uint32_t rows, cols;
    uint32_t row0;
    uint8_t fmt;         /* enum qx_wfmt */
    uint8_t scale_bf16;
    uint8_t pad[2];
};

/* ---- the step ----------------------------------------------------------------------------- */

/* The rows of one step: one row decodes, K+1 rows verify drafts, many sequences batch, a chunk
 * prefills. Rows of one sequence are contiguous, positions ascending by one (a "run").
 * All arrays are device memory [n_rows]; n_rows is fixed at capture. */
struct qx_step {
    uint32_t n_rows;
    int32_t *id;        /* token id */
    int32_t *pos;       /* position in the sequence; < 0: idle row */
    int32_t *seq;       /* sequence slot: row of the page table */
    int32_t *first;     /* row where this row's run begins (itself for the first) */
    int32_t *state_in;  /* state slot the run starts from (same for all its rows); < 0: all zero, and
                           n-gram context all eos */
    int32_t *state_out; /* state slot that receives the state after this row; < 0: none. May equal
                           state_in on a run's last row. */
};

/* Slots written by the rows of one step are all different, and none is another run's state_in.
 *
 * Recurrent state of a layer lives in slots: base + slot * slot_stride (in elements). Slots are how
 * drafts roll back (each verified row writes its own slot) and prefixes are shared. */

/* Paged cache of one QSA layer. Position p of sequence s lies in page
 * page_table[s * max_pages + p / page_tokens] at index p % page_tokens. page_tokens is a multiple of
 * the indexer ratio. Elements are f32 or, with bf16 set, bfloat16 (nearest even on write). */
struct qx_kv {
    void *k, *v;         /* [page, page_tokens, n_kv_heads, head_dim]; k normed and rotated */
    void *raw;           /* [page, page_tokens, indexer_head_dim] raw index keys as projected */
    void *pooled;        /* [page, page_tokens / ratio, indexer_head_dim] normed, rotated (6.2) */
    const int32_t *page_table; /* [n_seqs, max_pages] */
    uint32_t page_tokens, max_pages;
    bool bf16;
};

/* ---- ops ---------------------------------------------------------------------------------- */

/* x[r, c, :] = table[id[r], :] for every stream c. An id outside the table gives NaN rows. */
struct qx_op_embed {
    const struct qx_step *step;
    struct qx_weight table;      /* [vocab, hidden], any format */
    uint32_t n_streams;
    float *x;                    /* [n_rows, n_streams, hidden] */
};

/* out[j, :] = in[index[j], :]; a negative index leaves the row untouched. */
struct qx_op_pick {
    const float *in;             /* [.., width] */
    const int32_t *index;        /* [n] device */
    uint32_t n, width;
    float *out;                  /* [n, width] */
};

/* Hyper-connection (4), with the write-back of the block before it fused in:
 *   if y: x[r,c,:] += (inj_in ? inj_in[r,c] : 1) * y[r,:]           (x is updated in place)
 *   n = Zgrouped(x; norm); lo = silu(down n / C); gate = sigmoid(up lo)
 *   m[r,d] = 1/C sum_c gate[c,d] n[c,d];  inj_out[r,c] = 2 sigmoid((inject n)[c] / C)
 * m NULL: only the write-back. inject.fmt QX_W_NONE: no inj_out (final mixer). */
struct qx_op_hc {
    uint32_t n_rows, n_streams, hidden, rank;
    float *x;                    /* [n_rows, C, hidden] in/out */
    const float *y;              /* [n_rows, hidden] or NULL */
    const float *inj_in;         /* [n_rows, C] or NULL */
    const float *norm;           /* [C * hidden], weight w of 1 + w */
    struct qx_weight down, up, inject; /* [rank, C*hidden], [C*hidden, rank], [C, C*hidden] */
    float eps;
    float *m;                    /* [n_rows, hidden] or NULL */
    float *inj_out;              /* [n_rows, C]; may not alias inj_in */
    bool act_bf16;               /* n (for down and inject) and lo */
    bool prompt;
    float *scratch;              /* n_rows * (C * hidden + rank) floats */
};

/* y[r, off_j + i] = sum_k w[j][i, k] x[r, k] for up to QX_LINEAR_MAX matrices that share an input;
 * off_j is the running sum of rows. acc: add to y instead of storing. late: bits of the matrices whose results the
 * next op, which is gdn on this y, needs only for its gate; so a backend may run it beside them. */
#define QX_LINEAR_MAX 6
struct qx_op_linear {
    uint32_t n_rows, n_weights;
    const float *x;              /* [n_rows, x_stride] */
    uint64_t x_stride, y_stride; /* elements */
    struct qx_weight w[QX_LINEAR_MAX];
    float *y;                    /* [n_rows, y_stride] */
    uint32_t late;
    bool acc, act_bf16, prompt;
};

/* Gated DeltaNet core (6.1 steps 2..8 without the projections). Input row layout of `in`:
 * p (conv channels = 2*k_heads*k_dim + v_heads*v_dim), z (v_heads*v_dim), b (v_heads), a (v_heads). */
struct qx_op_gdn {
    const struct qx_step *step;
    uint32_t k_heads, v_heads, k_dim, v_dim, conv_kernel;
    const float *in;             /* [n_rows, in_stride] */
    uint64_t in_stride;
    const float *conv_w;         /* [channels, conv_kernel], last tap = current token */
    const float *a_log, *dt_bias;/* [v_heads] */
    const float *norm;           /* [v_dim], plain scale */
    float eps;                   /* of the gated norm */
    float *conv_state;           /* slots of [conv_kernel - 1, channels], oldest first, pre-conv */
    uint64_t conv_slot_stride;
    float *s;                    /* slots of [v_heads, k_dim, v_dim] */
    uint64_t s_slot_stride;
    float *out;                  /* [n_rows, v_heads * v_dim] */
    float *scratch;              /* n_rows * (channels + 2 * v_heads) floats */
    uint32_t chunk;              /* reference: 0/1 recurrent, else chunked form with this length */
    bool prompt;                 /* a backend may use the chunked form; a NaN may then reach the rows of its
                                    chunk (64) before its own, too */
};

/* Rotary table: freq[i] for pair i (f32), scale multiplies cos and sin (yarn; 1 otherwise). */
struct qx_rope {
    const float *freq;           /* [rotary_dim / 2] device */
    uint32_t rotary_dim;
    float scale;
};

/* QSA projections -> norms, rope, caches (6.2). Input row layout of `in`: per query head query then
 * gate (n_heads * 2 * head_dim), k, v (n_kv_heads * head_dim each), index (i_heads + 1) * i_dim.
 * Writes k, v, raw of each row into the cache, then every block that a row of this step completes
 * into pooled (raw keys of earlier rows of the block come from the cache). */
struct qx_op_qsa_prepare {
    const struct qx_step *step;
    uint32_t n_heads, n_kv_heads, head_dim, i_heads, i_dim, ratio;
    const float *in;
    uint64_t in_stride;
    const float *q_norm, *k_norm, *iq_norm, *ik_norm; /* 1 + w */
    float eps;
    struct qx_rope rope;
    struct qx_kv kv;
    float *q;                    /* [n_rows, n_heads, head_dim] */
    float *iq;                   /* [n_rows, i_heads, i_dim] */
};

/* Block selection (6.2): the min(budget_blocks, nb) best of the nb = (pos + 1) / ratio complete blocks
 * by score = sum_h max(0, iq_h . K_b), ties to the lower block. Written ascending. */
struct qx_op_qsa_select {
    const struct qx_step *step;
    uint32_t i_heads, i_dim, ratio, budget_blocks;
    const float *iq;
    struct qx_kv kv;
    uint32_t max_blocks;         /* capacity for scores: >= (largest position + 1) / ratio */
    float *scores;               /* scratch [n_rows, max_blocks] */
    int32_t *block;              /* [n_rows, budget_blocks] */
    int32_t *n_block;            /* [n_rows] */
    bool prompt;
};

/* Attention over the selected blocks and the tail, in causal order, output gate applied (6.2):
 * o_h * sigmoid(gate_h). */
struct qx_op_qsa_attend {
    const struct qx_step *step;
    uint32_t n_heads, n_kv_heads, head_dim, ratio, budget_blocks;
    const float *q;              /* [n_rows, n_heads, head_dim] */
    const float *in;             /* the projection rows of qsa_prepare, for the gates */
    uint64_t in_stride;
    struct qx_kv kv;
    const int32_t *block, *n_block;
    float *o;                    /* [n_rows, n_heads * head_dim] */
    float *scratch;              /* n_rows * n_heads * (head_dim + 2) * QX_ATTEND_SPLITS floats */
    bool act_bf16;               /* a backend may round q and the probabilities; the reference does not */
    bool prompt;                 /* rows may share what they read; a NaN value may then reach the seven rows
                                    before its own, too */
};
#define QX_ATTEND_SPLITS 16

/* Router (8): f32 logits, the k largest, ties to the lower expert, order descending;
 * weight = softmax over the picked (norm) or over all (not norm). */
struct qx_op_moe_route {
    uint32_t n_rows, hidden, n_experts, k;
    bool norm;
    const float *m;              /* [n_rows, hidden] */
    struct qx_weight gate;       /* [n_experts, hidden] */
    float *logits;               /* scratch [n_rows, n_experts] */
    int32_t *expert;             /* [n_rows, k] */
    float *weight;               /* [n_rows, k] */
    bool prompt;                 /* the logits are f32 all the same: a rounded input would pick others */
};

/* Experts of a layer: descriptors in device memory. */
struct qx_experts {
    const struct qx_weight *gate, *up, *down; /* [n_experts] each, device memory */
    uint32_t n_experts, hidden, inter;
    uint8_t fmt; /* enum qx_wfmt of all of them, 16-byte aligned; QX_W_NONE: not one for all */
};

/* y = sum_k weight_k down_k(silu(gate_k m) * (up_k m)) in slot order, plus the shared expert
 * sigmoid(shared_gate m) * down_s(silu(gate_s m) * (up_s m)) added last (8). */
struct qx_op_moe {
    uint32_t n_rows, k;
    const float *m;              /* [n_rows, hidden] */
    const int32_t *expert;       /* [n_rows, k] */
    const float *weight;
    struct qx_experts experts;
    struct qx_weight s_gate, s_up, s_down, s_gate_vec; /* shared expert; s_gate_vec [1, hidden] */
    uint32_t s_inter;
    float *y;                    /* [n_rows, hidden] */
    float *scratch;              /* n_rows * (k * (inter + hidden) + s_inter + hidden + 1) floats */
    int32_t *iscratch;           /* n_rows * k + 3 * n_experts + 8 ints, for grouping rows by expert */
    bool act_bf16;               /* m (not for s_gate_vec) and the inputs of down */
    bool prompt;
};

/* Row ids of the n-gram table (7.2). The two (ngram_size - 1) previous ids come from earlier rows of
 * the run, then from the state slot; state_out gets the ids after the row, newest first. */
struct qx_op_ple_ids {
    const struct qx_step *step;
    uint32_t ngram_size, n_heads, heads_per_ngram, eos;
    const uint64_t *multiplier;  /* [ngram_size] device */
    const uint64_t *size, *offset; /* [n_heads] device */
    int32_t *prev;               /* slots of [ngram_size - 1], newest first */
    uint64_t prev_slot_stride;
    int64_t *row;                /* [n_rows, n_heads]; -1 for idle rows */
};

/* The table as placed: shards of rows_per_shard rows, device-readable (device or mapped host). */
struct qx_table_desc {
    const void *const *codes;    /* [n_shards] device array of pointers */
    const void *const *scale;    /* [n_shards] NVFP4 block scales, else NULL */
    uint64_t rows_per_shard, n_rows;
    uint64_t code_stride, scale_stride; /* bytes from row to row */
    uint32_t width;
    float global;
    uint8_t fmt;                 /* QX_W_BF16, F16, F32, FP8, NVFP4 */
};

/* out[j, :] = decoded row[j] (f32 product as in decode_rows); row[j] < 0 or >= n_rows gives zeros. */
struct qx_op_ple_gather {
    struct qx_table_desc table;
    const int64_t *row;          /* [n] */
    uint32_t n;                  /* n_rows * n_heads */
    float *out;                  /* [n, width] */
};

/* PLE block on the wide state (7.3) after key_proj and value_proj. */
struct qx_op_ple {
    const struct qx_step *step;
    uint32_t n_streams, hidden, conv_kernel, dilation;
    float *x;                    /* [n_rows, C, hidden] in/out */
    const float *key;            /* [n_rows, C * hidden] key_proj output */
    const float *value;          /* [n_rows, hidden] */
    const float *norm_key, *norm_query, *norm_conv; /* [C * hidden], 1 + w */
    const float *conv_w;         /* [C * hidden, conv_kernel] */
    float eps;
    float *conv_state;           /* slots of [(conv_kernel - 1) * dilation, C * hidden], oldest first */
    uint64_t conv_slot_stride;
    float *scratch;              /* n_rows * 2 * C * hidden floats */
};

/* Selected rows of one stored matrix or table, decoded: f32 (product rounded once) or bf16 bits of it
 * (formats 6.2). row[j] out of range is the caller's mistake and gives zeros. */
struct qx_op_decode_rows {
    struct qx_table_desc table;  /* n_shards may be 1; MXFP8 and FP8_BLOCK via `weight` instead */
    struct qx_weight weight;     /* used when weight.fmt != QX_W_NONE */
    const int64_t *row;
    uint32_t n;
    bool bf16;
    void *out;                   /* float or uint16_t [n, width] */
};

/* id[r] = lowest index of the largest logit; NaN counts as larger than any number, so that it is seen. */
struct qx_op_argmax {
    uint32_t n_rows, vocab;
    const float *logits;         /* [n_rows, vocab] */
    int32_t *id;                 /* [n_rows] */
    float *value;                /* [n_rows] */
    float *prob;                 /* NULL, or [n_rows]: softmax probability of id, 1e-5 relative */
    float *scratch;              /* n_rows * 256 * 4 floats */
};

/* A copy of a BF16 matrix in six bits a value, in an order of its own (cuda/head.cu): codes has QX_HEAD_COPY_BYTES.
 * off[r]: what a row's product with x differs from its copy's by at most, over |x|: |row - copy| (1 + 2^-10)
 * + 2^-13 |row| + 2^-30, the second part for sums in f32. */
#define QX_HEAD_COPY_BYTES(rows, cols) (((uint64_t)(rows) + 7) / 8 * (((uint64_t)(cols) + 127) / 128) * 784)
struct qx_op_head_copy {
    struct qx_weight from;       /* whole groups of 8 columns */
    uint8_t *codes;
    float *off;                  /* [rows] */
};

/* arg-max of a head's logits, inputs rounded to bf16, by a copy: all logits of the copy, then those of the head's rows
 * whose logit may be the largest by `off`, which have the bits that linear gives them. prob: softmax probability, of the
 * copy's logits but for the numerator. Only for devices whose linears of few rows stream (capability 90 to 119). */
struct qx_op_head_best {
    uint32_t n_rows;
    struct qx_weight head;
    const uint8_t *codes;        /* of head_copy, complete before what is enqueued with this */
    const float *off;
    const float *x;              /* [n_rows, cols] */
    float *near;                 /* [n_rows, rows]: scratch */
    int32_t *id;                 /* [n_rows]; ties, NaN: as argmax */
    float *value, *prob;         /* both or NULL: [n_rows] */
    bool finite;                 /* as sampling: id -1 where the largest is NaN or +infinity */
    int32_t *told;               /* as in qx_op_sample */
    float *scratch;              /* n_rows * min(rows / 8 + 16, 1280) floats */
};

/* Sampling (9): logits / temperature, top-k, top-p (smallest set reaching it, crossing token in),
 * min-p relative to the largest, renormalise, draw with a counter-based generator keyed by
 * (seed[r], pos[r]): the same text whatever the batch. temperature 0: arg-max. Reference order:
 * candidates sorted by logit descending, ties to the lower id; sums of probabilities run in that order.
 * id -1 when any logit is NaN or +infinity: such a step has no token (embed turns it into NaN, so that
 * it stays seen). top_p >= 1, min_p <= 0, top_k <= 0 or >= vocab are off.
 * The draw: u = (qx_rand_u64(seed, pos) >> 40) * 2^-24 (rand.h), the token is the first candidate whose
 * cumulative probability exceeds u x total, the last candidate if none does. Weights are
 * exp((logit - largest) / temperature). */
struct qx_sample_params {
    float temperature, top_p, min_p;
    int32_t top_k;               /* 0: all */
    uint64_t seed;
};
struct qx_op_sample {
    uint32_t n_rows, vocab;
    const float *logits;         /* [n_rows, vocab] */
    const struct qx_sample_params *params; /* [n_rows] device */
    const int32_t *pos;          /* [n_rows] position of the sampled token */
    int32_t *id;                 /* [n_rows] */
    int32_t *told;               /* NULL, or the same in the host's memory, which looks at it while the device works
                                    on: an id is seen after all that earlier ops wrote for the host */
    float *scratch;              /* n_rows * vocab * 2 floats */
};

/* Repetition penalties, in place: logit = logit > 0 ? logit / repeat : logit * repeat, then
 * logit -= presence + frequency * count. Lists are per row, distinct ids, ended by a negative id or
 * max_ids. */
struct qx_penalty { float repeat, presence, frequency; };
struct qx_op_penalize {
    uint32_t n_rows, vocab, max_ids;
    const struct qx_penalty *params; /* [n_rows] device */
    const int32_t *id, *count;   /* [n_rows, max_ids] device */
    float *logits;               /* [n_rows, vocab] in/out */
};

/* After a decode step of one row a sequence: appends id_new[r] to the output ring, makes it the next
 * input (id, pos + 1). Idle rows stay idle. ring[(count % ring_len) * n_rows + r], then ++count. */
struct qx_op_advance {
    const struct qx_step *step;
    const int32_t *id_new;       /* [n_rows] */
    int32_t *spos;               /* NULL, or [n_rows]: positions for sampling, also + 1 */
    int32_t *ring;               /* device or mapped host memory */
    uint32_t ring_len;
    uint64_t *count;             /* one counter, beside the ring */
};

/* What the draft head's matrices read (10.1): e[r] = Z(embedding of id[r]; norm_e) and y[r] = Z(wide state of
 * row r; norm_wide), one statistic over all of its streams. The wide state is wide[i][row[i][r]] of the first i
 * that has one: row[i] NULL means r itself, a negative number none; of neither there are zeros. */
struct qx_op_draft_in {
    const struct qx_step *step;
    struct qx_weight table;      /* [vocab, hidden] */
    uint32_t width;
    const float *wide[2];        /* [.., width]; NULL: none */
    const int32_t *row[2];       /* [step rows] or NULL */
    const float *norm_e, *norm_wide; /* [hidden], [width], 1 + w */
    float eps;
    float *e, *y;                /* [step rows, hidden], [step rows, width] */
};

/* What the draft head's step leaves for the next round, by sequence s = seq[row[j]] of its row[j]:
 * hold[s] = wide[row[j]], next_id[s] = map ? map[id[j]] : id[j], next_prob[s] = prob[j]. The sequences
 * are all different. */
struct qx_op_draft_keep {
    const struct qx_step *step;
    uint32_t n, width;
    const int32_t *row;          /* [n] */
    const float *wide;           /* [step rows, width] */
    const int32_t *id;           /* [n] chosen by the draft head */
    const float *prob;           /* [n] */
    const int32_t *map;          /* NULL, or ids of the rows of a smaller head */
    float *hold;                 /* [sequences, width] */
    int32_t *next_id;            /* [sequences] */
    float *next_prob;            /* [sequences] */
};

/* Draft number nth (from 1) of each of n lines goes where it is used. Line i is row i of `chain`, the draft
 * head's step that would give the draft after it, and rows base[i] .. base[i] + count[i] of `step`, the
 * main model's: the pending id and its drafts. With a = by_seq ? chain.seq[i] : i:
 *   chain.pos[i] < 0: the chain has ended, nothing changes.
 *   nth <= count[i] and not prob[a] < min_prob[i]: step.id[base + nth] = chain.id[i] = map ? map[id[a]]
 *     : id[a]; after the last draft chain.pos[i] = -1, else ++chain.pos[i] if nth > 1.
 *   Else the chain ends: chain.pos[i] = -1, rows base + nth .. base + count become idle (pos -1, first the
 *     row itself, state_out -1; their ids stay valid ones). */
struct qx_op_draft_next {
    const struct qx_step *chain; /* [n] rows; updated */
    const struct qx_step *step;  /* updated */
    uint32_t n, nth;
    const int32_t *base, *count; /* [n] */
    const float *min_prob;       /* [n] */
    const int32_t *id;           /* by line, or by sequence */
    const float *prob;
    const int32_t *map;          /* NULL, or ids of the rows of a smaller head */
    bool by_seq;
    int32_t *told_id, *told_pos; /* NULL, or by row of `step`, for the host: ids filled in, -1 of rows made idle */
};

/* Of a verification of one line, rows 0 .. n - 1 of `step` (the pending id and its drafts, idle from some row on), what
 * the draft head gets. id[i] was chosen from row i; draft i + 1 stands if all before it do, row i + 1 is not idle and
 * its id is id[i], or i < *forced. With a drafts that stand, rows n - 1 - a .. n - 1 of feed are the positions of rows
 * 0 .. a, each with the id behind it (of the last, id[a]) and src its row in step; those before are idle with id 0 and
 * src -1. feed's seq is that of row 0, state_in and state_out are -1; only its last row is a row that chooses, so what
 * follows can be told where it lies: pick[0] = 0. */
struct qx_op_draft_accept {
    const struct qx_step *step;
    const struct qx_step *feed;  /* written */
    uint32_t n;                  /* <= 32 */
    const int32_t *id;           /* [n] */
    const int32_t *forced;       /* one */
    int32_t *src, *pick;         /* [n], one */
};

enum qx_op_id {
#define OP(name, bound) QX_OP_##name,
#include "ops.def"
#undef OP
    QX_OP_COUNT
};

struct qx_ops {
#define OP(name, bound) int (*name)(struct qx_queue * q, const struct qx_op_##name *a);
#include "ops.def"
#undef OP
};

extern const char *const qx_op_names[QX_OP_COUNT];

#ifdef __cplusplus
}
#endif
#endif
