/* dir_list.h: the names in a checkpoint's directory and what they tell: gaps in shard numbers, partial
 * downloads, files of other formats. */
#ifndef QX_DIR_LIST_H
#define QX_DIR_LIST_H

#include "base.h"
#include "error.h"
#include "findings.h"

struct qx_dir_list {
    char **names; /* sorted bytewise; without "." and ".." */
    bool *stray;  /* for the caller, false at first */
    size_t n;
    struct qx_arena *arena;
};
int qx_dir_list_read(struct qx_dir_list *l, const char *dir, struct qx_error *err);
void qx_dir_list_fini(struct qx_dir_list *l);

/* Finding shard-missing per set of names X-NNNNN-of-MMMMM.safetensors with absent numbers. Other names
 * count for nothing. False: no memory. */
bool qx_dir_check_numbers(const struct qx_dir_list *l, struct qx_findings *fs);
/* What a directory without safetensors holds instead, such as "a GGUF file (x.gguf)", or NULL. */
const char *qx_dir_foreign(const struct qx_dir_list *l);
/* A checkpoint one folder further down, as a hub's cache has it: DIR/NAME or DIR/snapshots/NAME. Writes its
 * path. */
bool qx_dir_nested(const char *dir, const struct qx_dir_list *l, char *out, size_t cap);
/* Looks for the unfinished download of a file: NAME.incomplete and .part beside it, the hub's folder for
 * downloads, or beside the target of a link. Writes its name and size. */
bool qx_dir_partial(const char *dir, const char *name, const char *link_target, char *out, size_t cap);

#endif
