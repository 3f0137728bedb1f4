/* pack.h: qx's own layout of the n-gram table, in which one direct read fetches a row. qx-pack(5).
 *
 * The packed table is a tensor of an ordinary safetensors file: `MODULE.packed_rows`, U8
 * [n_blocks, block_bytes], whose data begins at a multiple of block_bytes in the file. Block b holds
 * rows b x rows_per_block and following, one after another, each row its codes and then its block
 * scales; no row crosses a block, the rest of a block is zero. A global scale stays an ordinary tensor
 * (`MODULE.weight_scale` or `MODULE.weight_scale_2`). Geometry, format, the scale's bits and a hash are
 * in the file's __metadata__ under the key QX_PACK_KEY. */
#ifndef QX_PACK_H
#define QX_PACK_H

#include "base.h"
#include "error.h"
#include "qx.h"

#define QX_PACK_KEY "qx-pack"
#define QX_PACK_VERSION 1u
#define QX_PACK_LEAF "packed_rows"
#define QX_PACK_BLOCK_BYTES 4096u

struct qx_pack_info {
    enum qx_format format;    /* BF16, F16, F32, FP8 or NVFP4 */
    uint32_t width;           /* columns of the logical row */
    uint64_t n_rows;
    uint64_t row_base;        /* first row held, of the whole table (rank slices), else 0 */
    uint32_t block_bytes, rows_per_block;
    uint32_t code_bytes, scale_bytes; /* of one row; a row takes their sum */
    uint64_t n_blocks;
    bool has_global;
    uint32_t global_bits;     /* F32 bits of the global scale */
    bool has_hash;
    uint8_t xxh3[16];         /* XXH3-128 of the tensor's bytes, big-endian (canonical) */
};

/* Fills the derived members from format, width and n_rows. False when the format cannot be packed or a
 * row does not fit into a block. */
bool qx_pack_layout(struct qx_pack_info *p);
/* Offset of a row's codes inside the tensor; its scales follow them. */
static inline uint64_t qx_pack_row_off(const struct qx_pack_info *p, uint64_t row)
{
    return row / p->rows_per_block * p->block_bytes +
           row % p->rows_per_block * ((uint64_t)p->code_bytes + p->scale_bytes);
}

/* The value of QX_PACK_KEY, NUL-terminated. */
void qx_pack_print(const struct qx_pack_info *p, char out[320]);
/* Parses it. QX_E_FORMAT "pack-header" naming what is wrong, also for versions not known. */
int qx_pack_parse(struct qx_pack_info *out, const char *text, struct qx_error *err);
/* The header of the file that holds packed tensor t, checked against the tensor's shape, size and
 * place: kinds pack-header, pack-shape. */
int qx_pack_read(struct qx_pack_info *out, const struct qx_ckpt *ck, const struct qx_tensor *t,
                 struct qx_error *err);

/* Bytes of one row of a table format: codes and block scales. False when it is not a table format or
 * the width does not divide. */
bool qx_table_row_bytes(enum qx_format f, uint32_t width, uint32_t *code_bytes, uint32_t *scale_bytes);

#endif
