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

/* Reads size_bytes from `off` bytes into tensor t. Checks the range. */
QX_API int qx_ckpt_read(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t off, void *dst,
                        uint64_t size_bytes, struct qx_error *err);
/* Mapped bytes of a tensor, valid until close; NULL with err if its file cannot be mapped. No
 * alignment may be assumed. */
QX_API const void *qx_ckpt_map(const struct qx_ckpt *ck, const struct qx_tensor *t, struct qx_error *err);

#ifdef __cplusplus
}
#endif
#endif
