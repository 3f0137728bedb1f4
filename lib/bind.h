/* bind.h: shared by bind.c (which tensors a model needs) and load.c (bringing bytes to the device). */
#ifndef QX_BIND_H
#define QX_BIND_H

#include "engine.h"

/* One piece to place: `size` bytes from `off` of a tensor, or converted values held by the host. */
struct qx_piece {
    const struct qx_tensor *t;  /* NULL: from `data` */
    uint64_t off, size;
    const void *data;
    uint64_t dst;               /* offset in the weights' arena */
};

struct qx_bind {
    struct qx_model *m;
    const struct qx_resolved *r;
    bool loading;               /* second pass: hand out addresses */
    uint64_t arena_bytes;       /* filled so far */
    char *arena;                /* device memory; NULL on host-memory backends */
    struct qx_piece *pieces;
    size_t n_pieces, cap_pieces;
    void **owned;               /* converted values and descriptor arrays, freed at the end of loading */
    size_t n_owned, cap_owned;
    uint64_t weight_bytes, table_bytes, read_bytes;
    uint64_t n_no_input_scale;  /* experts whose input_scale is missing: not used, but said */
    uint64_t n_missing;         /* problems beyond the first */
    struct qx_error first;
    void *user;
    void (*warn)(void *user, const char *kind, const char *text);
};

/* Places `size` bytes of a tensor at a multiple of 256; on host-memory backends the mapped bytes. */
int qx_bind_bytes(struct qx_bind *b, const struct qx_tensor *t, uint64_t off, uint64_t size,
                  const void **out, struct qx_error *err);
/* Places host values, which the binding then owns. On host-memory backends they stay where they are. */
int qx_bind_values(struct qx_bind *b, void *values, uint64_t size, const void **out, struct qx_error *err);

/* load.c: reads all pieces into the arena; the table to its place. */
int qx_load_pieces(struct qx_bind *b, const struct qx_model_opts *o, struct qx_error *err);
int qx_load_table(struct qx_bind *b, const struct qx_model_opts *o, struct qx_error *err);

#endif
