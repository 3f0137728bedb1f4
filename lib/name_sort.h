/* name_sort.h: sorting many names bytewise. Names come in sorted pieces nearly always (a header, an
 * index), so the sort takes linear time on sorted input and n log k on k sorted pieces. */
#ifndef QX_NAME_SORT_H
#define QX_NAME_SORT_H

#include "base.h"

struct qx_name_key { const char *p; uint32_t n; uint32_t i; }; /* i: the caller's index */

/* Shorter first when one is a prefix of the other. */
int qx_name_compare(const char *a, size_t na, const char *b, size_t nb);
/* Stable. tmp has room for n keys. */
void qx_name_sort(struct qx_name_key *v, struct qx_name_key *tmp, size_t n);

#endif
