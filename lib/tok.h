/* tok.h: inside of the tokenizer, shared by tok_json.c and tok_table.c (loading), tok.c (lookup,
 * encoding), tok_bpe.c (merges), tok_split.c (pre-split) and tok_norm.c (NFC). */
#ifndef QX_TOK_H
#define QX_TOK_H

#include "base.h"
#include "error.h"
#include "qx.h"
#include "str.h"

#define QX_TOK_NONE UINT32_MAX
#define QX_TOK_MAX_BYTES (512u << 20) /* of a tokenizer's file */
#define QX_TOK_EMPTY "{\"model\":{\"vocab\":{}}}" /* stands for tokenizer.json where only its config is there */

struct qx_tok_entry {
    uint64_t off;    /* into qx_tok.bytes */
    uint32_t len;
    bool present, special, added;
};

/* Open addressing, power of two, at most half full. */
struct qx_tok_slot { uint32_t hash, id; };
struct qx_merge { uint32_t left, right, rank, id; }; /* left == QX_TOK_NONE: empty */

struct qx_tok {
    struct qx_buf bytes;             /* texts of all tokens, one after the other */
    struct qx_tok_entry *entries;    /* [n_ids] */
    uint32_t n_ids;
    struct qx_tok_slot *slots;       /* text -> id of base tokens; id QX_TOK_NONE: empty */
    uint64_t slot_mask;
    struct qx_merge *merges;         /* (left, right) -> rank, id */
    uint64_t merge_mask;
    uint32_t *added;                 /* ids of added tokens, sorted by their bytes */
    uint32_t n_added;
    uint32_t byte_id[256];           /* base token of each byte, QX_TOK_NONE if there is none */
    bool byte_level;                 /* symbols are bytes; else characters */
    bool split, nfc, ignore_merges;
    int64_t eos;
};

static inline const char *qx_tok_entry_bytes(const struct qx_tok *t, uint32_t id)
{
    return t->bytes.p + t->entries[id].off;
}
/* Hashes of the two tables. */
uint64_t qx_tok_text_hash(const char *p, size_t n);
uint64_t qx_tok_pair_hash(uint32_t left, uint32_t right);
/* Base token by text, QX_TOK_NONE if absent. */
uint32_t qx_tok_lookup(const struct qx_tok *t, const char *p, size_t n);
/* NULL when the pair does not merge. */
const struct qx_merge *qx_tok_merge(const struct qx_tok *t, uint32_t left, uint32_t right);

/* Appends ids of one piece. n log n in its length. */
struct qx_bpe_work; /* scratch, grows as needed */
struct qx_bpe_work *qx_bpe_work_create(void);
void qx_bpe_work_destroy(struct qx_bpe_work *w);
int qx_tok_bpe(const struct qx_tok *t, struct qx_bpe_work *w, const char *p, size_t n,
               struct qx_ids *out, struct qx_error *err);

/* Length in bytes (> 0) of the piece at the start of p[0..n), which is valid UTF-8 and runs to the end
 * of the text. The expression of model 12. */
size_t qx_tok_split(const char *p, size_t n);

/* Appends the NFC form of valid UTF-8 to out. n log n at worst, whatever the order of its marks. */
int qx_nfc(const char *p, size_t n, struct qx_buf *out, struct qx_error *err);

bool qx_ids_add(struct qx_ids *ids, uint32_t id);

#endif
