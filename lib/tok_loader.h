/* tok_loader.h: between reading a tokenizer's JSON (tok_json.c) and building its tables
 * (tok_table.c): everything that was read, as it stands in the file. */
#ifndef QX_TOK_LOADER_H
#define QX_TOK_LOADER_H

#include "json_pull.h"
#include "tok.h"

#define QX_TOK_CONFIG "tokenizer_config.json"

struct qx_tok_loaded { uint64_t off; uint32_t len, id; bool special, added, in_config; };

struct qx_tok_loader {
    struct qx_tok *t;            /* bytes collects the texts; nfc, split, ignore_merges are set */
    const char *file, *text;
    const struct qx_json_pull *at; /* reader of what is being looked at, at at_base in the file; NULL: no place */
    uint64_t at_base;
    struct qx_error *err;
    struct qx_tok_loaded *list;  /* tokens in file order */
    size_t n, cap;
    uint32_t max_id;
    uint64_t n_base;             /* how many of them are no added tokens */
    struct qx_merge *pairs;
    size_t n_pairs, pairs_cap;
    const char *merges_begin, *merges_end; /* the list, read once the vocabulary is known */
    bool has_vocab, has_model, byte_level;
    int16_t byte_of[512];        /* code point of the printable alphabet -> byte, -1 */
    struct qx_buf tmp;
};

/* Sets the error with the file and the place of `at`; returns its code. */
int qx_tok_bad(struct qx_tok_loader *l, const char *kind, const char *fmt, ...) QX_PRINTF(3, 4);
/* The reader's error, its position moved by `base`. */
int qx_tok_json_error(struct qx_tok_loader *l, const struct qx_json_pull *j, uint64_t base);
int qx_tok_read_json(struct qx_tok_loader *l, size_t n);
/* added_tokens_decoder and eos_token of tokenizer_config.json. */
int qx_tok_read_config(struct qx_tok_loader *l, const char *text, size_t n, struct qx_buf *eos);

#endif
