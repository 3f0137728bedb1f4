/* name_sort.c: owns nothing. A merge sort that skips merges of halves that are in order already. */
#include "name_sort.h"

#include <string.h>

int qx_name_compare(const char *a, size_t na, const char *b, size_t nb)
{
    int c = memcmp(a, b, na < nb ? na : nb);
    return c ? c : (na > nb) - (na < nb);
}

static int compare(const struct qx_name_key *a, const struct qx_name_key *b)
{
    return qx_name_compare(a->p, a->n, b->p, b->n);
}

static void insertion_sort(struct qx_name_key *v, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        struct qx_name_key k = v[i];
        size_t at = i;
        while (at > 0 && compare(&v[at - 1], &k) > 0) {
            v[at] = v[at - 1];
            at--;
        }
        v[at] = k;
    }
}

void qx_name_sort(struct qx_name_key *v, struct qx_name_key *tmp, size_t n)
{
    if (n <= 12) {
        insertion_sort(v, n);
        return;
    }
    size_t half = n / 2;
    qx_name_sort(v, tmp, half);
    qx_name_sort(v + half, tmp, n - half);
    if (compare(&v[half - 1], &v[half]) <= 0) {
        return;
    }
    /* What of the left half is smaller than all of the right one stays in place. */
    size_t lo = 0, hi = half;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (compare(&v[mid], &v[half]) <= 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    size_t left_n = half - lo, l = 0, r = half, out = lo;
    memcpy(tmp, v + lo, left_n * sizeof *v);
    while (l < left_n && r < n) {
        v[out++] = compare(&tmp[l], &v[r]) <= 0 ? tmp[l++] : v[r++];
    }
    memcpy(v + out, tmp + l, (left_n - l) * sizeof *v);
}
