/* base.h: what every file of qx may use: fixed integer types, checked arithmetic on sizes, a few
 * attributes. No functions with a body in a .c file, no state. */
#ifndef QX_BASE_H
#define QX_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QX_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define QX_PRINTF(fmt_index, first) __attribute__((format(printf, fmt_index, first)))
#define QX_UNUSED __attribute__((unused))

/* Checked arithmetic: true when the exact result fits and was stored in *r. */
static inline bool qx_add_u64(uint64_t a, uint64_t b, uint64_t *r)
{
    return !__builtin_add_overflow(a, b, r);
}
static inline bool qx_mul_u64(uint64_t a, uint64_t b, uint64_t *r)
{
    return !__builtin_mul_overflow(a, b, r);
}
static inline bool qx_add_size(size_t a, size_t b, size_t *r)
{
    return !__builtin_add_overflow(a, b, r);
}
static inline bool qx_mul_size(size_t a, size_t b, size_t *r)
{
    return !__builtin_mul_overflow(a, b, r);
}

/* ceil(a / b) for b > 0, without overflow. */
static inline uint64_t qx_ceil_div(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

/* Least multiple of `to` (a power of two) that is >= a; false when it does not fit. */
static inline bool qx_align_u64(uint64_t a, uint64_t to, uint64_t *r)
{
    uint64_t s;
    if (!qx_add_u64(a, to - 1, &s)) {
        return false;
    }
    *r = s & ~(to - 1);
    return true;
}

#endif
