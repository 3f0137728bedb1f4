/* ple_open.h: the hash of a checkpoint's n-gram table as stored in it. */
#ifndef QX_PLE_OPEN_H
#define QX_PLE_OPEN_H

#include "ckpt.h"
#include "ple_hash.h"

/* From the config, with the stored buffers (layer_multipliers, ngram_heads_vocab_sizes,
 * ngram_heads_offsets) in place of the computed numbers where they are present: what is stored is what
 * rows were trained with. Every head must lie inside the table (QX_E_VALUE "ple-range"); a buffer of
 * another type or length is QX_E_FORMAT ("dtype", "shape"). Needs a table (QX_E_MISSING). */
int qx_ple_hash_open(struct qx_ple_hash *h, const struct qx_ckpt *ck, struct qx_error *err);

#endif
