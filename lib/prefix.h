/* prefix.h: beginnings that prompts of a batch share. A line that reads one leaves it behind: its full pages
 * are shared, its recurrent state and last wide state copied; later lines start from there. A small set, the
 * least recently used one goes first; how many is a matter of the memory plan. */
#ifndef QX_PREFIX_H
#define QX_PREFIX_H

#include "line.h"

struct qx_prefix {
    struct qx_line *maker;      /* the line that is reading it; NULL: ready, or empty with n == 0 */
    uint32_t *ids;
    size_t n;
    uint64_t hash, used;        /* XXH3 of the ids; when it was last of use */
    int32_t *pages;
    uint32_t n_pages;
    int32_t slot;               /* -1: none taken */
};

struct qx_prefixes {
    struct qx_model *m;
    struct qx_prefix *v;        /* [budget.n_prefixes] */
    uint64_t clock;
};

int qx_prefixes_init(struct qx_prefixes *p, struct qx_model *m, struct qx_error *err);
void qx_prefixes_fini(struct qx_prefixes *p);
/* Whether a line is reading a prefix of these ids, longer than the ones at hand. */
bool qx_prefixes_coming(const struct qx_prefixes *p, const uint32_t *ids, size_t n);
/* Starts a line, whose ids are pushed and of which nothing is read, from the longest prefix of its prompt.
 * *n: ids it need not read. */
int qx_prefixes_use(struct qx_prefixes *p, struct qx_line *l, uint64_t *n, struct qx_error *err);
/* Lets a line leave the first `shared` of its ids behind, in whole pages, if that is more than it started
 * from and there is room for it. */
void qx_prefixes_make(struct qx_prefixes *p, struct qx_line *l, size_t shared);
/* The line ends: what it had not read to the end is no prefix. */
void qx_prefixes_forget(struct qx_prefixes *p, const struct qx_line *l);
/* Gives up the least recently used one; false when there is none that is ready. */
bool qx_prefixes_drop(struct qx_prefixes *p);

#endif
