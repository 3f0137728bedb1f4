/* qx.h: the public interface of libqx, and the only installed header.
 *
 * What holds everywhere:
 *  - Functions that can fail return 0, or the negative of the code they also put in *err. `err` may
 *    be NULL and is untouched on success. On failure output pointers are NULL and nothing leaks.
 *  - Nothing here prints, exits, or touches signals, locale or environment.
 *  - `_open`/`_create` give an object to the caller, `_close`/`_destroy` take it back and accept NULL.
 *  - Pointers handed out "owned by X" live until X is closed.
 *  - Sizes and offsets are uint64_t bytes; everything counts from 0; shapes are outermost first.
 *
 * Section numbers in comments are those of qx-rules(7) for findings, and "formats N" and "model N"
 * name the sections of the format and model descriptions that a formula comes from.
 */
#ifndef QX_H
#define QX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define QX_API __attribute__((visibility("default")))
#else
#define QX_API
#endif

#define QX_VERSION "0.1.0"
#define QX_API_MAJOR 0
#define QX_NO_OFF UINT64_MAX

/* ---- errors ------------------------------------------------------------------------------- */

/* Pinned numbers with gaps per family. The family decides a program's exit code. */
enum qx_code {
    QX_OK = 0,
    /* the caller's request is wrong (exit 2) */
    QX_E_USAGE = 1,
    QX_E_RANGE = 2,       /* a row, token or position outside what exists */
    QX_E_INTERRUPTED = 5, /* a callback asked to stop */
    /* input that cannot be read or used (exit 3): io, format, quantisation */
    QX_E_IO = 10,
    QX_E_NOT_FOUND = 11,
    QX_E_FORMAT = 20, /* bytes of a file break its format's rules */
    QX_E_CONFIG = 21,
    QX_E_MISSING = 22, /* a tensor, shard or scale that is needed is not there */
    QX_E_UNSUPPORTED = 23,
    QX_E_VALUE = 24, /* values that cannot be used, such as non-finite logits */
    QX_E_QUANT = 40,
    /* resources (exit 4) */
    QX_E_NOMEM = 60,
    QX_E_NOSPACE = 61,
    QX_E_DEVICE = 62,
    QX_E_PLAN = 63, /* the memory plan does not fit */
    QX_E_WRITE = 64
};

/* The caller's, on its stack; no heap, nothing to free. */
struct qx_error {
    enum qx_code code;
    int sys;          /* errno or the device's code, 0 if none */
    const char *kind; /* short stable name such as "missing-scale"; static storage, never NULL once set */
    char file[256];   /* tail kept if too long; "" if none */
    char tensor[256];
    uint64_t off; /* file offset, QX_NO_OFF if none */
    char msg[512];/* what is wrong, with the value met and the value wanted; lower case, no full stop */
};

/* ---- findings ----------------------------------------------------------------------------- */

enum qx_severity { QX_NOTE = 0, QX_WARNING = 1, QX_ERROR = 2 };

/* One thing that is wrong or unusual in a checkpoint. Strings are NULL where absent and are owned by
 * the list that holds the finding. Equal findings over many tensors are one with a count. */
struct qx_finding {
    const char *kind; /* stable id; qx-rules(7) lists all */
    enum qx_severity severity;
    const char *file, *tensor, *key;
    uint64_t off; /* file offset, QX_NO_OFF if none */
    const char *expected, *found, *text;
    uint64_t count;                /* >= 1 */
    const char *const *examples;   /* names of a few members, n_examples of them */
    uint32_t n_examples;
};

/* A list of findings in a stable order (see findings.h for filling one). */
struct qx_findings;
QX_API size_t qx_findings_count(const struct qx_findings *fs);
QX_API const struct qx_finding *qx_findings_at(const struct qx_findings *fs, size_t i);
/* Number of findings with this severity; groups count once. */
QX_API size_t qx_findings_count_severity(const struct qx_findings *fs, enum qx_severity s);

/* ---- element types and storage formats ---------------------------------------------------- */

/* Element types that a safetensors header can name. */
enum qx_dtype {
    QX_DT_UNKNOWN = 0, /* text not known: range still checked, never read */
    QX_DT_BOOL, QX_DT_U8, QX_DT_I8, QX_DT_F8_E4M3, QX_DT_F8_E5M2, QX_DT_F8_E8M0,
    QX_DT_I16, QX_DT_U16, QX_DT_F16, QX_DT_BF16,
    QX_DT_I32, QX_DT_U32, QX_DT_F32,
    QX_DT_I64, QX_DT_U64, QX_DT_F64, QX_DT_C64,
    QX_DT_COUNT
};
QX_API const char *qx_dtype_name(enum qx_dtype t);       /* "BF16", ...; "unknown" for QX_DT_UNKNOWN */
QX_API uint32_t qx_dtype_size(enum qx_dtype t);          /* bytes an element; 0 for QX_DT_UNKNOWN */

/* How the values of a module (a matrix with its companions) are stored; formats 6.2. */
enum qx_format {
    QX_F_NONE = 0,  /* nothing usable stored */
    QX_F_BF16, QX_F_F16, QX_F_F32, QX_F_I64,
    QX_F_FP8,       /* E4M3 x one scale */
    QX_F_FP8_BLOCK, /* E4M3 x scale per 128x128 block */
    QX_F_MXFP8,     /* E4M3 x E8M0 per 32 columns */
    QX_F_NVFP4,     /* E2M1 x E4M3 per 16 columns x one F32; with input_scale */
    QX_F_W4A16_NVFP4, /* the same without input_scale */
    QX_F_MIXED,     /* only for components: several of the above */
    QX_F_COUNT
};
QX_API const char *qx_format_name(enum qx_format f); /* "BF16", "FP8_BLOCK", ... , "mixed" */

/* ---- checkpoint --------------------------------------------------------------------------- */

enum qx_file_state {
    QX_FILE_OK = 0,
    QX_FILE_SHORT,   /* header sound, data cut short: tensors wholly inside are readable */
    QX_FILE_BAD,     /* exists, header unusable */
    QX_FILE_MISSING, /* named, but absent, or a dangling or looping link */
    QX_FILE_REFUSED  /* its name leaves the directory: never opened */
};

struct qx_meta { const char *key, *value; }; /* one __metadata__ pair */

/* One safetensors file of the set. Strings owned by the checkpoint. */
struct qx_file {
    const char *name;      /* relative to the directory */
    enum qx_file_state state;
    uint64_t size_bytes;   /* on disk; 0 when missing */
    uint64_t header_bytes; /* the length N of its JSON */
    uint64_t data_off;     /* 8 + N */
    uint64_t n_tensors;    /* in its header, read or not */
    bool has_metadata;     /* "__metadata__" present, maybe empty */
    const struct qx_meta *meta;
    uint32_t n_meta;
};

/* One stored tensor. `shape`, `name` owned by the checkpoint. */
struct qx_tensor {
    const char *name;
    const uint64_t *shape; /* outermost first */
    uint64_t n_elems;      /* product of shape; 1 for a scalar */
    uint64_t off;          /* absolute file offset of its first byte */
    uint64_t size_bytes;   /* n_elems x element size, as checked against data_offsets */
    uint32_t name_len;
    uint32_t file;         /* index into the checkpoint's files */
    uint8_t n_dims;
    uint8_t dtype;         /* enum qx_dtype */
    bool readable;         /* range inside the file, dtype known, sizes agree */
};

struct qx_ckpt; /* immutable after open: any number of threads may read it */

struct qx_open {
    uint64_t max_header_bytes; /* larger headers are a finding "header-too-large" */
    uint32_t n_threads;        /* readers of headers; 0 = number of processors */
    const char *layout;        /* NULL, or the layout to assume for a lone config.json */
};
#define QX_OPEN_DEFAULT ((struct qx_open){.max_header_bytes = 100000000, .n_threads = 0, .layout = 0})

/* Opens a checkpoint directory, its index file, one safetensors file, or a lone config.json.
 * Reads headers, index and configs only. What is wrong with them becomes findings, not an error:
 * an error (QX_E_NOT_FOUND, QX_E_IO, QX_E_NOMEM) means that nothing could be looked at. */
QX_API int qx_ckpt_open(struct qx_ckpt **out, const char *path, const struct qx_open *how,
                        struct qx_error *err);
QX_API void qx_ckpt_close(struct qx_ckpt *ck);

QX_API const char *qx_ckpt_path(const struct qx_ckpt *ck); /* as given */
QX_API bool qx_ckpt_is_single_file(const struct qx_ckpt *ck);
QX_API bool qx_ckpt_has_index(const struct qx_ckpt *ck);
QX_API size_t qx_ckpt_n_files(const struct qx_ckpt *ck);
QX_API const struct qx_file *qx_ckpt_file(const struct qx_ckpt *ck, size_t i); /* sorted by name */
/* The tensors that are read: with an index those it names, in the file it names; else all. Sorted by
 * name, bytewise. */
QX_API size_t qx_ckpt_n_tensors(const struct qx_ckpt *ck);
QX_API const struct qx_tensor *qx_ckpt_tensor(const struct qx_ckpt *ck, size_t i);
/* By exact name, NULL if absent. */
QX_API const struct qx_tensor *qx_ckpt_find(const struct qx_ckpt *ck, const char *name);
/* Findings of opening: container, index and JSON. Owned by the checkpoint. */
QX_API const struct qx_findings *qx_ckpt_findings(const struct qx_ckpt *ck);
/* 0 when the config was read and understood; else fills err with why every command that needs the
 * config must stop (config-missing, json-bom, unsupported-model-type, config-type, ...). */
QX_API int qx_ckpt_config_status(const struct qx_ckpt *ck, struct qx_error *err);
/* What every command that uses weights (all but inspect and verify) asks first: the config status, unless
 * this is a single file, and that the index and hf_quant_config.json, where present, could be parsed. */
QX_API int qx_ckpt_require(const struct qx_ckpt *ck, struct qx_error *err);

/* Reads size_bytes from `off` bytes into tensor t. Checks the range. */
QX_API int qx_ckpt_read(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t off, void *dst,
                        uint64_t size_bytes, struct qx_error *err);
/* Mapped bytes of a tensor, valid until close; NULL with err if its file cannot be mapped. No
 * alignment may be assumed. */
QX_API const void *qx_ckpt_map(const struct qx_ckpt *ck, const struct qx_tensor *t, struct qx_error *err);

/* ---- rows --------------------------------------------------------------------------------- */

/* Rows of any stored matrix as numbers. A row's f32 value is the exact product of code and scales rounded
 * once to f32; its bf16 value is that f32 rounded once more, both nearest even (formats 6.2). The
 * checkpoint must stay open longer than its row sources. Errors: QX_E_MISSING and QX_E_QUANT when codes or
 * scales are not usable (missing-scale, scale-dtype, ...), QX_E_NOT_FOUND for an unknown tensor. */
struct qx_rows; /* an open row source: immutable, usable from many threads */

/* The n-gram table of the checkpoint. */
QX_API int qx_rows_open_table(struct qx_rows **out, const struct qx_ckpt *ck, struct qx_error *err);
/* Any tensor by name. Weight of a quantised module: the unpacked matrix; [E,R,C] is addressed as row
 * e x R + r; 1-D tensors are one row. */
QX_API int qx_rows_open_tensor(struct qx_rows **out, const struct qx_ckpt *ck, const char *tensor,
                        struct qx_error *err);
QX_API void qx_rows_close(struct qx_rows *r);

QX_API uint64_t qx_rows_count(const struct qx_rows *r);      /* addressable rows */
QX_API uint64_t qx_rows_width(const struct qx_rows *r);      /* values a row */
QX_API enum qx_format qx_rows_format(const struct qx_rows *r);
QX_API uint64_t qx_rows_raw_bytes(const struct qx_rows *r);  /* stored code bytes a row, scales not included */
/* Table shard and local row of a row; shard -1 for other tensors. */
QX_API void qx_rows_place(const struct qx_rows *r, uint64_t row, int64_t *shard, uint64_t *local_row);

enum qx_row_dtype { QX_ROW_F32, QX_ROW_BF16, QX_ROW_RAW, QX_ROW_SCALES };
/* Decodes n rows into dst, row after row: f32 [n, width], uint16_t bf16 bits [n, width], or code bytes
 * [n, raw_bytes], or block-scale bytes [n, scale_bytes]. Reads each distinct row once; repeats and
 * order are kept. A row out of range is QX_E_RANGE ("row-out-of-range"), before anything is read. */
QX_API int qx_rows_read(const struct qx_rows *r, const uint64_t *rows, size_t n, enum qx_row_dtype dtype,
                 void *dst, struct qx_error *err);

/* ---- generation --------------------------------------------------------------------------- */

enum qx_table_place { QX_TABLE_AUTO = 0, QX_TABLE_DEVICE, QX_TABLE_HOST, QX_TABLE_DISK };

/* How to load. Start from QX_MODEL_OPTS_DEFAULT. Strings need to live only during the call. */
struct qx_model_opts {
    const char *device;       /* "cpu", "cuda", "cuda:N"; NULL: cuda if there is one, else cpu */
    uint32_t n_threads;       /* workers of the cpu device and readers; 0: all processors */
    bool precise;             /* cuda: f32 activations and caches; the cpu always does so */
    enum qx_table_place table;
    uint64_t device_memory_bytes; /* limit to plan within; 0: what the device has */
    uint64_t ctx_tokens;      /* per sequence; 0: min(limit of the configuration, 32768) */
    uint32_t chunk_rows;      /* rows of a prefill step; 0: 512. Changes no bit on the cpu; on a GPU
                               * sums of prompts depend on it in their last bits */
    uint32_t max_seqs;        /* sequences that exist at one time; 0: 1 */
    uint32_t draft_max;       /* largest drafts a round that will be asked for, 0..8 */
    uint32_t draft_vocab;     /* drafts are chosen among so many ids, which reads less of the head; 0: all.
                               * Never changes the text. The lowest (byte-level BPE numbers frequent pieces
                               * low), until qx_model_learn_drafts */
    const uint32_t *draft_ids;/* NULL, or the ids to choose drafts among, most frequent first; draft_vocab then
                               * takes the first of them (0: all) and nothing is learned */
    size_t n_draft_ids;
    bool mtp;                 /* load the MTP head though draft_max is 0 (for draft logits) */
    void *user;               /* first argument of the callbacks; they must not call back in */
    /* During loading, at most a few times a second. Non-zero stops: QX_E_INTERRUPTED. May be NULL. */
    int (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    /* Something unusual that does not stop the run (missing input_scale, table read from disk, ...).
     * May be NULL. */
    void (*warn)(void *user, const char *kind, const char *text);
};
#define QX_MODEL_OPTS_DEFAULT ((struct qx_model_opts){.table = QX_TABLE_AUTO})

/* One line of the memory plan: bytes of a part and where they lie ("device", "host", "disk"). */
struct qx_plan_part { const char *name, *place; uint64_t size_bytes; };

struct qx_model_info {
    char device[160];              /* "cpu, 2 threads" or the device's name */
    char variants[256];            /* kernel variants chosen; "" on the cpu */
    uint64_t ctx_tokens, vocab_size, hidden_size, n_layers, n_streams;
    uint32_t chunk_rows, max_seqs, draft_max;
    bool has_mtp;                  /* the head is there and loaded */
    enum qx_table_place table;     /* never AUTO */
    uint64_t weight_bytes;         /* bytes of weights placed, table included unless on disk */
    uint64_t loaded_bytes, load_ns;/* read from files and how long it took */
    uint64_t planned_device_bytes, planned_host_bytes;
    uint64_t device_bytes, device_peak_bytes; /* allocated now, and at most so far */
    /* What the device's driver counts as taken since it was opened, its own rounding and the kernels' code
     * included, the context of the process not; other processes count too. 0: unknown. */
    uint64_t device_used_bytes;
    uint64_t bandwidth_bytes_s;    /* the device memory's peak, 0 if unknown */
    /* What reading and large bf16 products are known to reach on this device, 0 if unknown. */
    uint64_t reach_bytes_s, reach_flops_s;
    const struct qx_plan_part *parts; /* owned by the model */
    uint32_t n_parts;
};

/* A model on a device: weights, caches and states for max_seqs sequences of ctx_tokens tokens, all
 * allocated at load. A model and everything made from it belong to one thread at a time. The checkpoint
 * must stay open longer than the model.
 *
 * Checked before anything is read, all from headers, in this order: configuration (rope-unsupported,
 * context-exceeded: QX_E_USAGE), every tensor and scale the model needs (missing-tensor, missing-scale,
 * scale-shape, ...: QX_E_MISSING, QX_E_QUANT), the hash buffers, then the memory plan (memory-plan:
 * QX_E_PLAN with weights, table, caches, scratch, total, available and what would fit). */
struct qx_model;
QX_API int qx_model_load(struct qx_model **out, const struct qx_ckpt *ck,
                         const struct qx_model_opts *opts, struct qx_error *err);
QX_API void qx_model_free(struct qx_model *m);
QX_API void qx_model_info(const struct qx_model *m, struct qx_model_info *out);
/* Drafts from now on are chosen among the draft_vocab most frequent ids of a text, filled up with the lowest.
 * Nothing to do for a model that chooses among all, or among given ones. */
QX_API int qx_model_learn_drafts(struct qx_model *m, const uint32_t *ids, size_t n, struct qx_error *err);
/* Context limit of a checkpoint's configuration in tokens (model 14), 0 without one. For "prompt + n is
 * over the context" before loading. */
QX_API uint64_t qx_ckpt_context_limit(const struct qx_ckpt *ck);
/* Vocabulary rows of the head, 0 without a configuration. */
QX_API uint64_t qx_ckpt_vocab_size(const struct qx_ckpt *ck);

/* How a token is chosen (model 9): penalties, temperature, top-k, top-p, min-p, draw. The draw uses a
 * counter-based generator keyed by seed and position, so a seed gives the same text on every device,
 * in any batch, with or without drafts. */
struct qx_sampling {
    float temperature;         /* 0: arg-max of the raw logits, lowest id on ties */
    float top_p;               /* 1: off */
    float min_p;               /* 0: off; relative to the most probable token */
    int32_t top_k;             /* 0: off */
    uint64_t seed;
    float repeat_penalty;      /* 1: off; logit / r if positive, x r if negative, once a token */
    float presence_penalty;    /* 0: off; subtracted once a token */
    float frequency_penalty;   /* 0: off; subtracted for every occurrence */
    uint32_t penalty_last_n;   /* how many last ids count; 0: the whole sequence */
};
#define QX_SAMPLING_GREEDY \
    ((struct qx_sampling){.temperature = 0, .top_p = 1, .repeat_penalty = 1})

struct qx_logprob { uint32_t id; float logprob; };
/* A generated token as handed to the caller. */
struct qx_token {
    uint32_t id;
    uint64_t pos;               /* its position in the sequence */
    bool is_stop;               /* one of the stop ids: generation ends with it */
    float logprob;              /* of the raw distribution (before temperature); NaN if not asked for */
    const struct qx_logprob *top; /* n_top most probable, descending; valid during the call */
    uint32_t n_top;
};

#define QX_DRAFT_MAX 8
#define QX_DRAFT_AUTO (-1)

struct qx_gen_params {
    uint64_t n_max;             /* tokens to generate at most; UINT64_MAX: until stop or context */
    struct qx_sampling sampling;
    const uint32_t *stop_ids;   /* any of them ends generation; it is the last token handed out */
    uint32_t n_stop_ids;        /* 0: nothing stops (--ignore-eos) */
    int32_t draft;              /* drafts a round, 0: off, up to draft_max; QX_DRAFT_AUTO: measured */
    float draft_min_prob;       /* a chain ends early when the draft's probability is below; 0: never. Decided
                                 * on the device, without a wait: what follows is not verified */
    /* Proposes up to k ids to follow position pos instead of the draft head; returns how many. The text
     * does not depend on them. Needs draft >= 1. May be NULL. */
    uint32_t (*propose)(void *user, uint64_t pos, uint32_t k, uint32_t *ids);
    uint32_t n_logprobs;        /* fill qx_token.top, at most 64; then logits come to the host */
    /* Called for every token in order. Non-zero stops after this token (QX_STOP_CALLER). May be NULL. */
    int (*on_token)(void *user, const struct qx_token *t);
    void *user;
};
#define QX_GEN_PARAMS_DEFAULT \
    ((struct qx_gen_params){.n_max = UINT64_MAX, .sampling = QX_SAMPLING_GREEDY})

enum qx_stop_reason { QX_STOP_ID = 0, QX_STOP_LENGTH, QX_STOP_CONTEXT, QX_STOP_CALLER };

struct qx_gen_stats {
    enum qx_stop_reason reason;
    uint64_t n_tokens;          /* handed out */
    uint64_t ttft_ns;           /* from the call to the first token */
    uint64_t decode_ns;         /* from the first token to the last */
    uint64_t rounds;            /* steps of the main model after the first token */
    uint64_t drafted, accepted; /* draft tokens proposed and kept */
    uint64_t drafted_at[QX_DRAFT_MAX], accepted_at[QX_DRAFT_MAX]; /* by place in the chain */
    uint64_t bytes_per_step;    /* that a step of one row without drafts must read and write */
    /* From the first token to the last: times the host waited for the device, and took memory of it. Plain
     * decoding waits once a stretch of 512 steps; other sequences of a batch count too. */
    uint64_t waits, allocs;
};

/* What tests and --logits look at. Rows come in ascending position order and once a position; the
 * pointers are host memory and valid during the call. Any member may be NULL. */
struct qx_gen_hooks {
    void *user;
    bool (*want_logits)(void *user, uint64_t pos); /* logits after consuming position pos */
    void (*logits)(void *user, uint64_t pos, const float *row); /* [vocab_size], raw */
    /* MTP logits of row pos: wide state at pos and the id at pos + 1. Needs the head loaded. */
    bool (*want_draft_logits)(void *user, uint64_t pos);
    void (*draft_logits)(void *user, uint64_t pos, const float *row); /* [vocab_size] */
    bool (*want_streams)(void *user, uint64_t pos);
    /* Wide state after a layer, before the next: [n_streams * hidden_size]. */
    void (*streams)(void *user, uint32_t layer, uint64_t pos, const float *x);
    /* Rows of the n-gram table of a position: [n_heads]. */
    bool (*want_ple_rows)(void *user, uint64_t pos);
    void (*ple_rows)(void *user, uint64_t pos, const int64_t *rows, uint32_t n_heads);
    /* Blocks of keys that a sparse attention layer chose at a position: [n], ascending. */
    bool (*want_blocks)(void *user, uint64_t pos);
    void (*blocks)(void *user, uint32_t layer, uint64_t pos, const int32_t *block, uint32_t n);
};

/* One sequence. Positions count from 0 over everything ever fed or generated. */
struct qx_gen;
/* QX_E_PLAN when max_seqs sequences exist already. */
QX_API int qx_gen_create(struct qx_gen **out, struct qx_model *m, struct qx_error *err);
QX_API void qx_gen_destroy(struct qx_gen *g);
/* Copies *hooks; NULL removes them. They cost speed. */
QX_API void qx_gen_set_hooks(struct qx_gen *g, const struct qx_gen_hooks *hooks);
/* Ids known to the sequence: consumed ones and, after generating, a last one not yet consumed. */
QX_API uint64_t qx_gen_n_tokens(const struct qx_gen *g);
QX_API const uint32_t *qx_gen_tokens(const struct qx_gen *g); /* owned by g, until its next call */
/* Consumes n more ids (and first the pending one, if any), in chunks. An id >= vocab_size is QX_E_RANGE
 * ("token-range"); more than the context holds is QX_E_USAGE ("context-exceeded"); nothing is consumed
 * then. `progress` (may be NULL) is told after every chunk; non-zero stops with QX_E_INTERRUPTED, what
 * was consumed stays. */
QX_API int qx_gen_prefill(struct qx_gen *g, const uint32_t *ids, size_t n,
                          int (*progress)(void *user, uint64_t done, uint64_t total), void *user,
                          struct qx_error *err);
/* Consumes the last generated id, so that its logits reach the hooks. Nothing when there is none. */
QX_API int qx_gen_flush(struct qx_gen *g, struct qx_error *err);
/* Generates from the state after at least one consumed id. *stats is filled also on failure. Logits that
 * are not finite: QX_E_VALUE, kind "non-finite-logits", with the position and the first layer; tokens
 * handed out before stay valid. */
QX_API int qx_gen_generate(struct qx_gen *g, const struct qx_gen_params *p, struct qx_gen_stats *stats,
                           struct qx_error *err);
/* Back to an empty sequence. */
QX_API int qx_gen_reset(struct qx_gen *g, struct qx_error *err);

/* The whole state of a sequence (model 15) in host memory, restorable into any sequence of the same
 * model. */
struct qx_snapshot;
QX_API int qx_gen_save(struct qx_gen *g, struct qx_snapshot **out, struct qx_error *err);
QX_API int qx_gen_restore(struct qx_gen *g, const struct qx_snapshot *s, struct qx_error *err);
QX_API void qx_snapshot_destroy(struct qx_snapshot *s);
/* XXH3-128 over the state that decides the future text (recurrent states, conv histories, n-gram ids,
 * K/V, index keys; the draft head's caches not): equal states give equal digests. */
QX_API int qx_gen_digest(struct qx_gen *g, uint8_t out[16], struct qx_error *err);

/* Many sequences at once: continuous batching over the same step. A sequence's greedy text does not
 * depend on what runs beside it. */
struct qx_request {
    const uint32_t *ids;        /* prompt; copied */
    size_t n_ids;
    struct qx_gen_params params;/* on_token and user are per request; stop_ids are copied */
    /* Told once when the request ends; reason in stats. err is NULL unless it failed. May be NULL. */
    void (*on_done)(void *user, const struct qx_gen_stats *stats, const struct qx_error *err);
};
struct qx_batch;
/* Uses sequences of the model that no qx_gen holds. */
QX_API int qx_batch_create(struct qx_batch **out, struct qx_model *m, struct qx_error *err);
QX_API void qx_batch_destroy(struct qx_batch *b);
/* Queues a request; they are admitted in order as sequences become free. */
QX_API int qx_batch_add(struct qx_batch *b, const struct qx_request *r, struct qx_error *err);
/* Works until every request is done. A request that cannot run ends through its on_done; an error here
 * means the device failed. */
QX_API int qx_batch_run(struct qx_batch *b, struct qx_error *err);
struct qx_batch_stats {
    uint64_t n_done, n_tokens, prefill_tokens, shared_tokens; /* shared: prefix tokens not computed again */
    uint64_t elapsed_ns, steps;
};
QX_API void qx_batch_stats(const struct qx_batch *b, struct qx_batch_stats *out);

/* ---- text: tokenizer and chat ------------------------------------------------------------- */

/* A growing list of token ids. Zeroed is empty; the caller ends it. */
struct qx_ids { uint32_t *v; size_t n, cap; };
QX_API void qx_ids_fini(struct qx_ids *ids);

/* Byte-level BPE of model 12. Immutable: any number of threads may use one. */
struct qx_tok;
/* Reads tokenizer.json of the checkpoint's directory, and tokenizer_config.json if there is one (more
 * added tokens, end-of-turn token). QX_E_NOT_FOUND, kind "tokenizer-missing", when there is none;
 * "json-..." kinds, "tokenizer-unsupported" (names the setting) and "tokenizer-value". */
QX_API int qx_tok_load(struct qx_tok **out, const struct qx_ckpt *ck, struct qx_error *err);
/* From the text of a tokenizer.json; `file` names it in messages. `config` (n_config bytes, may be NULL)
 * is the text of tokenizer_config.json. The texts may be freed afterwards. */
QX_API int qx_tok_parse(struct qx_tok **out, const char *text, size_t n, const char *file,
                        const char *config, size_t n_config, struct qx_error *err);
QX_API void qx_tok_close(struct qx_tok *t);
/* Largest id + 1. */
QX_API uint32_t qx_tok_n_ids(const struct qx_tok *t);
/* Appends the ids of a text: added tokens by literal match, NFC, split, merges. Nothing is put in front
 * or behind. The text must be UTF-8 ("text-utf8") and every byte must have a token ("text-no-token"). */
QX_API int qx_tok_encode(const struct qx_tok *t, const char *text, size_t n, struct qx_ids *out,
                         struct qx_error *err);
/* The bytes that an id stands for (not NUL-terminated, may end inside a character), owned by t; NULL
 * for an id that the tokenizer does not have. */
QX_API const char *qx_tok_bytes(const struct qx_tok *t, uint32_t id, size_t *n);
/* Control tokens, left out of text unless asked for. */
QX_API bool qx_tok_is_special(const struct qx_tok *t, uint32_t id);
/* Id of the token whose text is exactly s (added tokens first), -1 if none. */
QX_API int64_t qx_tok_find(const struct qx_tok *t, const char *s, size_t n);
/* End-of-turn id named by tokenizer_config.json (eos_token), -1 if none. */
QX_API int64_t qx_tok_eos(const struct qx_tok *t);
/* The same for a checkpoint, also when it has tokenizer_config.json only. */
QX_API int qx_tok_load_eos(const struct qx_ckpt *ck, int64_t *id, struct qx_error *err);

/* Chat template of a checkpoint: chat_template.jinja, or chat_template in tokenizer_config.json. */
enum qx_template {
    QX_TEMPLATE_NONE = 0, /* the checkpoint has none */
    QX_TEMPLATE_UNKNOWN,
    QX_TEMPLATE_QWEN38    /* the one of model 13, known by its SHA-256 */
};
struct qx_tool_call {
    const char *name;
    const char *arguments;   /* a JSON object as text */
};
/* Strings are UTF-8 and NUL-terminated; absent ones NULL. */
struct qx_message {
    const char *role;        /* "system", "user", "assistant", "tool" */
    const char *content;
    const char *reasoning;   /* assistant only */
    const struct qx_tool_call *calls;
    size_t n_calls;
};
struct qx_chat_opts {
    bool no_thinking;
    const char *effort;      /* "xhigh" (also NULL), "medium", "low" */
    bool forget_thinking;    /* leave reasoning of earlier turns out (preserve_thinking false) */
    bool no_generation_prompt;
    const char *const *tools;/* JSON objects as text */
    size_t n_tools;
    const char *template_text; /* needed only for tools: its fixed texts are taken from there */
};
/* Which template the checkpoint carries. *text gets its text (free with qx_text_free), NULL if none;
 * `text` may be NULL. */
QX_API int qx_chat_template(const struct qx_ckpt *ck, enum qx_template *which, char **text,
                            struct qx_error *err);
/* Renders messages as the template of model 13 does. *out is NUL-terminated, *n its length. What the
 * template refuses is QX_E_USAGE, kind "chat". */
QX_API int qx_chat_render(const struct qx_message *msgs, size_t n_msgs, const struct qx_chat_opts *opts,
                          char **out, size_t *n, struct qx_error *err);
QX_API void qx_text_free(char *text);

/* ---- verify ------------------------------------------------------------------------------- */

enum qx_verify_level {
    QX_VERIFY_HEADERS, /* names, shapes, dtypes, offsets, coverage, metadata against storage */
    QX_VERIFY_SCALES,  /* also every scale, the hash buffers, and a sample of rows decoded twice */
    QX_VERIFY_FULL     /* also every byte: NaN codes, all-zero tensors */
};

/* How to verify. Start from QX_VERIFY_DEFAULT. Strings and texts need to live only during the call. */
struct qx_verify_opts {
    enum qx_verify_level level;
    uint64_t sample_rows;      /* rows a tensor that are decoded twice; those at the ends and on both
                                  sides of shard boundaries come in any case. 0: no decoding */
    uint64_t seed;             /* of the sample */
    const char *decode_glob;   /* decode twice only tensors whose names match; NULL: all.
                                  None that could be: QX_E_NOT_FOUND */
    const char *device;        /* of the ordinary decoder: NULL or "cpu", "cuda", "cuda:N" */
    const char *decoder;       /* shell command of an external decoder; NULL: the one in the library */
    uint32_t decoder_timeout_ms; /* without an answer the external decoder is given up; 0: 60 s */
    const char *manifest;      /* text of a checksum list to compare with, or NULL; qx-manifest(5) */
    uint64_t manifest_bytes;
    const char *manifest_name; /* for messages; a file of this name in the directory is not listed */
    bool hub;                  /* instead: compare with the checksums that a download from the Hugging Face
                                  hub left (SHA-256 of large files, git's ids of small ones). None there:
                                  QX_E_NOT_FOUND "hub-checksums" */
    /* Receives a new checksum list in pieces; non-zero stops (QX_E_WRITE). NULL: none is made. */
    int (*manifest_out)(void *user, const char *text, uint64_t n);
    const char *manifest_out_name; /* its path if any: not listed itself */
    bool sha256;               /* the new list has SHA-256 of files, too */
    uint32_t n_threads;        /* that compute; 0: all processors */
    void *user;                /* first argument of callbacks; they must not call back in */
    /* "headers", "reading", "decoding" with an amount of `total` (bytes, or tensors for decoding). From
     * any thread, one call at a time. Non-zero stops: QX_E_INTERRUPTED. May be NULL. */
    int (*progress)(void *user, const char *phase, uint64_t done, uint64_t total);
};
#define QX_VERIFY_DEFAULT ((struct qx_verify_opts){.level = QX_VERIFY_SCALES, .sample_rows = 64})

struct qx_verify_stats {
    uint64_t files, tensors;   /* looked at */
    uint64_t bytes;            /* of files read: headers, and values as far as the level asks */
    uint64_t rows;             /* decoded twice */
    uint64_t read_bytes, read_ns; /* of the pass over values and how long it took */
};

/* All findings about an open checkpoint, those of opening included, in stable order. What is wrong with
 * the checkpoint is never an error of the call. Errors: QX_E_CONFIG and others of qx_ckpt_config_status
 * for a directory whose config cannot be used; QX_E_FORMAT "manifest-syntax"; QX_E_DEVICE;
 * QX_E_UNSUPPORTED for SHA-256 in a build without it; memory; QX_E_INTERRUPTED. For a single file only the
 * rules of the container (and at level full NaN codes) apply. */
struct qx_verify;
QX_API int qx_verify_run(struct qx_verify **out, const struct qx_ckpt *ck,
                         const struct qx_verify_opts *opts, struct qx_error *err);
QX_API const struct qx_findings *qx_verify_findings(const struct qx_verify *v); /* owned by v */
QX_API void qx_verify_stats(const struct qx_verify *v, struct qx_verify_stats *out);
QX_API void qx_verify_free(struct qx_verify *v);
/* What a checkpoint says about generating: generation_config.json, else stop ids from the configuration
 * and the tokenizer. */
#define QX_STOP_IDS_MAX 32
struct qx_gen_defaults {
    bool has_file;             /* generation_config.json is there */
    bool sample;               /* it asks for sampling (do_sample) */
    struct qx_sampling sampling; /* values of the file where given, else off; temperature 1 if not given */
    uint32_t stop_ids[QX_STOP_IDS_MAX];
    uint32_t n_stop_ids;
    const char *stop_source;   /* "generation_config.json", "config.json", ... static storage */
    bool stop_disagrees;       /* config.json and tokenizer_config.json name different ids */
};
/* Errors: json-... and "config-type" in generation_config.json. Without that file, a tokenizer that
 * cannot be read is not an error here. */
QX_API int qx_gen_defaults_read(const struct qx_ckpt *ck, struct qx_gen_defaults *out,
                                struct qx_error *err);

/* ---- inspect ------------------------------------------------------------------------------ */

struct qx_dtype_total { const char *dtype; uint64_t n_tensors, n_elems, size_bytes; };

/* A part of the model. format and source are NULL when nothing says (no usable config). */
struct qx_component_total {
    const char *name;            /* "embed", ..., "other" (qx inspect's names) */
    uint64_t n_tensors, size_bytes;
    uint64_t n_params;           /* logical weights: a packed 4-bit byte is two */
    const char *format, *source;
};

/* Weights of one component in one format, with what they take. */
struct qx_format_total {
    const char *component, *format;
    uint64_t n_modules, n_params;
    uint64_t code_bytes;         /* weights and block scales, without scalars */
};

/* How one module, or the experts of a layer that all agree, is read. */
struct qx_module_info {
    const char *module, *format, *source;
    const char *entry;           /* map key or pattern that decided, NULL */
    uint32_t group_size;         /* 0: none */
    uint64_t n_members;          /* modules behind this line */
};

struct qx_ple_info {
    bool present;                /* the configuration has a table */
    uint32_t layer_index, row_width, embed_dim, n_heads, ngram_size;
    uint64_t n_rows;             /* stored rows, padding included (from the config when none is stored) */
    uint64_t n_rows_used;        /* sum of the head sizes */
    uint64_t rows_per_shard; /* the last shard may have fewer */
    uint32_t n_shards;
    const char *form;            /* NULL when nothing readable is stored */
    const char *scale_dtype;     /* of the one scale, NULL */
    const char *scale_tensor;
    bool has_scale;
    double scale;
    uint64_t size_bytes;         /* scales included */
    const uint64_t *head_sizes, *head_offsets, *multipliers; /* [n_heads], [n_heads], [ngram_size] */
};

/* Everything `qx inspect` shows. Strings and arrays are owned by the object or by the checkpoint. */
struct qx_inspection {
    const char *type, *type_found, *architecture; /* NULL when unknown */
    const char *layout;          /* bf16, fp8, nvfp4-ple, mixed, nvfp4, or NULL */
    bool has_config;             /* it could be used */
    uint64_t n_layers, n_linear_layers, n_full_layers, hidden_size, n_experts, vocab_size;
    uint64_t n_tensors, payload_bytes, file_bytes, n_params;
    const struct qx_dtype_total *dtypes;
    size_t n_dtypes;
    const struct qx_component_total *components; /* those that have tensors */
    size_t n_components;
    const struct qx_format_total *formats;
    size_t n_formats;
    const char *quant_method, *quant_algo, *quant_file, *kv_cache_algo; /* NULL when absent */
    const struct qx_module_info *modules;
    size_t n_modules;
    struct qx_ple_info ple;
    bool has_mtp;
    const char *mtp_format;
    const char *const *remarks;  /* what other loaders would make of this, one sentence each */
    size_t n_remarks;
    const struct qx_findings *findings; /* of opening and of the rules over headers */
    bool planned;                /* nothing is stored: components are what a layout would have */
};
/* Reads nothing but the table's scale. `layout` NULL, or for a directory or config.json without weights
 * the layout to plan for (one of the five names; QX_E_USAGE otherwise). */
QX_API int qx_inspect(struct qx_inspection **out, const struct qx_ckpt *ck, const char *layout,
                      struct qx_error *err);
QX_API void qx_inspection_free(struct qx_inspection *i);

/* Everything consulted to decide how one tensor or module is read, as lines of text; free with
 * qx_text_free. QX_E_NOT_FOUND when neither a tensor nor a module nor a map entry has that name. */
QX_API int qx_inspect_why(const struct qx_ckpt *ck, const char *name, char **text, struct qx_error *err);

/* The memory plan for a device, before anything is loaded. */
struct qx_fit_request {
    uint64_t device_bytes;       /* memory of the device; 0: not limited */
    uint64_t ctx_tokens;         /* 0: the default of run */
    uint32_t n_streams;          /* sequences at once; 0: 1 */
    uint32_t draft;              /* MTP drafts a round; 0: no MTP head */
    enum qx_table_place table;
};
struct qx_fit {
    uint64_t device_bytes, needed_bytes, host_bytes, ctx_tokens;
    enum qx_table_place table;
    bool fits;
    struct qx_plan_part parts[32]; /* weights by component, table, caches, states, scratch */
    uint32_t n_parts;
    char advice[256];            /* what to change, "" when it fits */
};
QX_API int qx_fit(struct qx_fit *out, const struct qx_ckpt *ck, const struct qx_inspection *i,
                  const struct qx_fit_request *r, struct qx_error *err);

/* Values of a stored matrix, decoded, or of a scale as numbers. */
#define QX_STATS_BINS 64
struct qx_value_stats {
    uint64_t n, n_zero, n_nan, n_inf;
    double min, max, mean, rms, amax;  /* over finite values; 0 when there are none */
    double bin_lo, bin_hi;             /* the histogram's range: bins of equal width */
    uint64_t bin[QX_STATS_BINS];
};
/* Reads one tensor whole, in bounded memory. Scales and buffers are taken as the numbers they are. */
QX_API int qx_tensor_stats(const struct qx_ckpt *ck, const char *tensor, struct qx_value_stats *out,
                           struct qx_error *err);

/* What differs between two checkpoints: findings of severity note with kinds diff-added, diff-removed,
 * diff-dtype, diff-shape, diff-config, diff-values. with_values compares every byte. The list is the
 * caller's (qx_findings_free). */
QX_API int qx_ckpt_diff(struct qx_findings **out, const struct qx_ckpt *a, const struct qx_ckpt *b,
                        bool with_values, struct qx_error *err);
QX_API void qx_findings_free(struct qx_findings *fs);

/* ---- repacking ---------------------------------------------------------------------------- */

/* What to store differently. Formats: table BF16, FP8 or NVFP4; experts BF16, FP8_BLOCK or NVFP4. */
struct qx_repack_opts {
    enum qx_format table, experts; /* QX_F_NONE: as stored */
    uint64_t table_shards;         /* 0: as stored; ceil(rows / it) rows a shard, the last ones what is left */
    uint32_t rank, n_ranks;        /* only the table rows of one rank; n_ranks 0: all */
    bool row_layout;               /* the table in qx's own row layout (qx-pack(5)) */
    bool canonical_names, drop_vision, drop_mtp;
    bool plain_scales;             /* round to nearest with amax scales: no search */
    uint64_t max_shard_bytes;      /* 0: files as they are */
    bool force;                    /* replace an existing output */
    bool resume;                   /* go on with an unfinished output of the same plan */
    bool verify;                   /* read everything again and compare */
    uint32_t n_threads;            /* 0: all processors; the output does not depend on it */
    /* Told how many bytes are written; non-zero stops with QX_E_INTERRUPTED and leaves what can be
     * resumed. May be NULL. */
    int (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
};
#define QX_REPACK_DEFAULT ((struct qx_repack_opts){.resume = true})

/* Error that a conversion introduced, beside that of plain amax scaling. */
struct qx_quant_report {
    const char *name;              /* "ple_table", "experts" */
    const char *from, *to;         /* format names */
    uint64_t n_values, n_rows;
    double rel_rms, plain_rel_rms; /* sqrt(sum of squared errors / sum of squares) */
    double max_err, plain_max_err;
    double row_limit;              /* rows whose relative RMS error is above it: */
    uint64_t rows_above, plain_rows_above;
    double bits_per_weight;        /* codes and scales */
};
struct qx_repack_info {
    uint64_t bytes_in, bytes_out;  /* of weight files */
    uint64_t n_files, n_tensors, n_copied, n_converted, n_dropped;
    uint64_t peak_bytes;           /* memory at most */
    uint64_t free_bytes;           /* at the target, before */
    uint64_t resumed_bytes;        /* written by an earlier run */
    const struct qx_quant_report *reports; /* after the run; owned by the plan */
    size_t n_reports;
};

/* A plan: everything is checked and laid out, nothing is written. `target` must not be the input or lie in
 * it. Errors: wrong requests are QX_E_USAGE (format-unsupported, table-shards, rank, exists, ...), input that
 * lacks what is needed QX_E_MISSING and others, too little space QX_E_NOSPACE from the run. The checkpoint
 * must stay open longer than the plan. */
struct qx_repack;
QX_API int qx_repack_plan(struct qx_repack **out, const struct qx_ckpt *ck, const char *target,
                          const struct qx_repack_opts *opts, struct qx_error *err);
QX_API void qx_repack_info(const struct qx_repack *r, struct qx_repack_info *out);
/* Builds TARGET.part, syncs and renames it. Whatever happens the input is untouched and the target is
 * whole or as it was before. */
QX_API int qx_repack_run(struct qx_repack *r, struct qx_error *err);
QX_API void qx_repack_destroy(struct qx_repack *r);

/* One zstd file for each file of the directory, with a list of hashes (qx-archive.json.zst); and back,
 * bit for bit. Both build the target as a unit and resume as above. */
struct qx_archive_component { const char *name; uint64_t bytes, packed_bytes; };
struct qx_archive_result {
    uint64_t n_files, bytes_in, bytes_out; /* dry run: bytes_out at most */
    uint64_t peak_bytes, free_bytes;
    uint64_t resumed_bytes; /* of the files' content: taken over from an earlier run */
    struct qx_archive_component components[16];
    size_t n_components;
};
struct qx_archive_opts {
    bool force, resume, dry_run;
    uint32_t n_threads;
    int (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
};
QX_API bool qx_is_archive(const char *path);
QX_API int qx_archive_create(const char *path, const char *target, const struct qx_archive_opts *opts,
                             struct qx_archive_result *result, struct qx_error *err);
QX_API int qx_archive_restore(const char *path, const char *target, const struct qx_archive_opts *opts,
                              struct qx_archive_result *result, struct qx_error *err);

#ifdef __cplusplus
}
#endif
#endif
