/* scan_loops.c: loops over 16-byte vectors, written with the compiler's portable vector types. A test
 * "all exponent bits set" is an addition that carries into the sign place: (v & exponent) + lowest
 * exponent bit. State: none. */
#include "scan_loops.h"

#include <string.h>

typedef uint8_t v8 __attribute__((vector_size(16)));
typedef uint16_t v16 __attribute__((vector_size(16)));
typedef uint32_t v32 __attribute__((vector_size(16)));
typedef uint64_t v64 __attribute__((vector_size(16)));

static const uint8_t elem_size[QX_SCAN_COUNT] = {
    [QX_SCAN_NONE] = 1, [QX_SCAN_E4M3] = 1, [QX_SCAN_E5M2] = 1, [QX_SCAN_E8M0] = 1,
    [QX_SCAN_BLOCK_SCALE] = 1, [QX_SCAN_F16] = 2, [QX_SCAN_BF16] = 2, [QX_SCAN_F32] = 4,
    [QX_SCAN_F64] = 8, [QX_SCAN_SCALE_F16] = 2, [QX_SCAN_SCALE_BF16] = 2, [QX_SCAN_SCALE_F32] = 4,
    [QX_SCAN_SCALE_F64] = 8};

uint32_t qx_scan_elem_size(enum qx_scan_kind k)
{
    return elem_size[k];
}

#define HUGE_EXP 12   /* of scales: 2^12 x 448 > 10^6 */
#define TINY_EXP (-41) /* 2^-41 x 448 x 6 < 10^-8 */
#define E8M0_HUGE (127 + HUGE_EXP)

/* An IEEE-like element of `bits` bits with `mb` mantissa bits. */
static unsigned classify_float(uint64_t v, unsigned bits, unsigned mb, bool scale)
{
    uint64_t magnitude = v & ((UINT64_C(1) << (bits - 1)) - 1);
    uint64_t mant = magnitude & ((UINT64_C(1) << mb) - 1);
    uint64_t top = (UINT64_C(1) << (bits - 1 - mb)) - 1;
    unsigned c = 0;
    if (magnitude >> mb == top) {
        c = mant ? QX_SCAN_IS_NAN : QX_SCAN_IS_INF;
    }
    if (scale && !c) {
        c |= v >> (bits - 1) ? QX_SCAN_IS_SIGNED : 0u;
        int exp = (int)(magnitude >> mb) - (int)(top / 2);
        c |= magnitude == 0 ? QX_SCAN_IS_ZERO : 0u;
        c |= exp >= HUGE_EXP ? QX_SCAN_IS_HUGE : 0u;
        c |= magnitude != 0 && exp < TINY_EXP ? QX_SCAN_IS_TINY : 0u;
    }
    return c;
}

unsigned qx_scan_classify(enum qx_scan_kind k, const void *elem)
{
    const uint8_t *b = elem;
    uint64_t v = 0;
    for (unsigned i = elem_size[k]; i > 0; --i) {
        v = v << 8 | b[i - 1];
    }
    switch (k) {
    case QX_SCAN_E4M3:
        return (v & 0x7fu) == 0x7fu ? QX_SCAN_IS_NAN : 0u;
    case QX_SCAN_E5M2:
        return classify_float(v, 8, 2, false);
    case QX_SCAN_E8M0:
        return v == 0xffu ? QX_SCAN_IS_NAN : v >= E8M0_HUGE ? QX_SCAN_IS_HUGE : 0u;
    case QX_SCAN_BLOCK_SCALE:
        if ((v & 0x7fu) == 0x7fu) {
            return QX_SCAN_IS_NAN;
        }
        return (v & 0x80u ? QX_SCAN_IS_SIGNED : 0u) | ((v & 0x7fu) == 0 ? QX_SCAN_IS_ZERO : 0u);
    case QX_SCAN_F16:
    case QX_SCAN_SCALE_F16:
        return classify_float(v, 16, 10, k == QX_SCAN_SCALE_F16);
    case QX_SCAN_BF16:
    case QX_SCAN_SCALE_BF16:
        return classify_float(v, 16, 7, k == QX_SCAN_SCALE_BF16);
    case QX_SCAN_F32:
    case QX_SCAN_SCALE_F32:
        return classify_float(v, 32, 23, k == QX_SCAN_SCALE_F32);
    case QX_SCAN_F64:
    case QX_SCAN_SCALE_F64:
        return classify_float(v, 64, 52, k == QX_SCAN_SCALE_F64);
    default:
        return 0;
    }
}

/* One loop: `any` gathers all bits, `hit` gathers what `expr` of vector x gives; a set bit of `hit`
 * under `mask` makes the block suspect. Four vectors a turn keep the additions independent. */
#define LOOP(type, lane, expr, mask)                                                              \
    do {                                                                                          \
        type any = {0}, hit = {0}, m = {0};                                                       \
        uint8_t tail[16];                                                                         \
        m += (lane)(mask);                                                                        \
        for (; n >= 64; n -= 64, p += 64) {                                                       \
            type x, x0, x1, x2, x3;                                                               \
            memcpy(&x0, p, 16);                                                                   \
            memcpy(&x1, p + 16, 16);                                                              \
            memcpy(&x2, p + 32, 16);                                                              \
            memcpy(&x3, p + 48, 16);                                                              \
            any |= (x0 | x1) | (x2 | x3);                                                         \
            x = x0;                                                                               \
            hit |= (type)(expr);                                                                  \
            x = x1;                                                                               \
            hit |= (type)(expr);                                                                  \
            x = x2;                                                                               \
            hit |= (type)(expr);                                                                  \
            x = x3;                                                                               \
            hit |= (type)(expr);                                                                  \
        }                                                                                         \
        while (n > 0) {                                                                           \
            size_t take = n < 16 ? n : 16;                                                        \
            type x;                                                                               \
            memset(tail, fill, 16);                                                               \
            memcpy(tail, p, take);                                                                \
            memcpy(&x, tail, 16);                                                                 \
            hit |= (type)(expr);                                                                  \
            memset(tail + take, 0, 16 - take);                                                    \
            memcpy(&x, tail, 16);                                                                 \
            any |= x;                                                                             \
            p += take;                                                                            \
            n -= take;                                                                            \
        }                                                                                         \
        hit &= m;                                                                                 \
        for (size_t i = 0; i < 16 / sizeof(lane); ++i) {                                          \
            f |= any[i] ? QX_SCAN_NONZERO : 0u;                                                   \
            f |= hit[i] ? QX_SCAN_SUSPECT : 0u;                                                   \
        }                                                                                         \
    } while (0)

unsigned qx_scan_block(enum qx_scan_kind k, const void *src, size_t n)
{
    const uint8_t *p = src;
    unsigned f = 0;
    int fill = 0; /* a byte that makes an unsuspicious element */
    switch (k) {
    case QX_SCAN_E4M3:
        LOOP(v8, uint8_t, (x & 0x7f) + 1, 0x80);
        break;
    case QX_SCAN_E5M2:
        LOOP(v8, uint8_t, (x & 0x7c) + 4, 0x80);
        break;
    case QX_SCAN_E8M0:
        LOOP(v8, uint8_t, x >= E8M0_HUGE, 0xff);
        break;
    case QX_SCAN_BLOCK_SCALE: /* suspect outside 01..7e: x - 1 and x + 1 both stay below 80 inside */
        fill = 1;
        LOOP(v8, uint8_t, (x - 1) | (x + 1), 0x80);
        break;
    case QX_SCAN_F16:
        LOOP(v16, uint16_t, (x & 0x7c00) + 0x0400, 0x8000);
        break;
    case QX_SCAN_BF16:
        LOOP(v16, uint16_t, (x & 0x7f80) + 0x0080, 0x8000);
        break;
    case QX_SCAN_F32:
        LOOP(v32, uint32_t, (x & 0x7f800000u) + 0x00800000u, 0x80000000u);
        break;
    case QX_SCAN_F64:
        LOOP(v64, uint64_t, (x & UINT64_C(0x7ff0000000000000)) + UINT64_C(0x0010000000000000),
             UINT64_C(0x8000000000000000));
        break;
    case QX_SCAN_NONE:
        LOOP(v8, uint8_t, x & 0, 0);
        break;
    default: /* scales in floating types are few: every block gets the closer look */
        LOOP(v8, uint8_t, x & 0, 0);
        f |= QX_SCAN_SUSPECT;
        break;
    }
    return f;
}
