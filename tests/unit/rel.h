/* rel.h: how far two vectors are apart. */
#ifndef QX_TEST_REL_H
#define QX_TEST_REL_H

#include <math.h>
#include <stddef.h>

/* |a - b| / |b|, both in the L2 norm; |a - b| where b is zero. */
static inline double rel_l2(const float *a, const float *b, size_t n)
{
    double d = 0.0, s = 0.0;
    for (size_t i = 0; i < n; ++i) {
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        s += (double)b[i] * b[i];
    }
    return sqrt(d / (s > 0 ? s : 1));
}

#endif
