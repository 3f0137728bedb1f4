/* ple_hash.c: owns the arithmetic of the n-gram table: multipliers, head sizes and offsets from the
 * configuration (model 7.1) and the rows of a token (model 7.2). Nothing is read from files here.
 */
#include "ple_hash.h"

#include <inttypes.h>
#include <string.h>

#define GAMMA UINT64_C(0x9E3779B97F4A7C15)
#define RANK_STRIDE 10007u

static uint64_t mix64(uint64_t v)
{
    v += GAMMA;
    v = (v ^ (v >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    v = (v ^ (v >> 27)) * UINT64_C(0x94D049BB133111EB);
    return v ^ (v >> 31);
}

__extension__ typedef unsigned __int128 wide; /* products of two 64-bit numbers, nothing else */

static uint64_t mul_mod(uint64_t a, uint64_t b, uint64_t m)
{
    return (uint64_t)((wide)a * b % m);
}

static uint64_t pow_mod(uint64_t a, uint64_t e, uint64_t m)
{
    uint64_t r = 1;
    for (a %= m; e; e >>= 1) {
        if (e & 1) {
            r = mul_mod(r, a, m);
        }
        a = mul_mod(a, a, m);
    }
    return r;
}

/* Miller-Rabin with the first twelve primes as bases, which decides every n < 2^64 exactly. */
static bool is_prime(uint64_t n)
{
    static const uint8_t base[12] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
    if (n < 2) {
        return false;
    }
    for (size_t i = 0; i < 12; i++) {
        if (n % base[i] == 0) {
            return n == base[i];
        }
    }
    uint64_t d = n - 1;
    unsigned s = 0;
    for (; (d & 1) == 0; d >>= 1) {
        s++;
    }
    for (size_t i = 0; i < 12; i++) {
        uint64_t x = pow_mod(base[i], d, n);
        bool witness = x != 1 && x != n - 1;
        for (unsigned k = 1; k < s && witness; k++) {
            x = mul_mod(x, x, n);
            witness = x != n - 1;
        }
        if (witness) {
            return false;
        }
    }
    return true;
}

int qx_ple_hash_init(struct qx_ple_hash *h, const struct qx_config *c, uint32_t rank,
                     struct qx_error *err)
{
    memset(h, 0, sizeof *h);
    if (c->ngram_size < 2 || c->ngram_size > QX_MAX_NGRAM || c->ple_heads == 0 ||
        c->ple_heads > QX_MAX_PLE_HEADS || c->vocab_size == 0) {
        return qx_fail(err, QX_E_CONFIG, "config-value",
                       "n-gram settings make no table: ngram_size %" PRIu32 ", %" PRIu32
                       " heads, vocab_size %" PRIu32,
                       c->ngram_size, c->ple_heads, c->vocab_size);
    }
    h->ngram_size = c->ngram_size;
    h->n_heads = c->ple_heads;
    h->heads_per_ngram = c->heads_per_ngram;
    h->eos = c->eos_token_id;
    uint64_t half = (uint64_t)INT64_MAX / c->vocab_size / 2;
    uint64_t seed = c->ngram_seed + (uint64_t)RANK_STRIDE * rank;
    for (uint32_t i = 0; i < h->ngram_size; i++) {
        h->multiplier[i] = 2 * (mix64(seed + GAMMA * (i + 1)) % half) + 1;
    }
    /* Layers take consecutive runs of primes, so earlier layers' primes are passed over first. */
    uint64_t skip = (uint64_t)rank * h->n_heads;
    uint64_t p = c->ngram_vocab_size_base;
    uint64_t sum = 0;
    for (uint64_t k = 0; k < skip + h->n_heads; p++) {
        if (p >= INT64_MAX) {
            return qx_fail(err, QX_E_CONFIG, "config-value",
                           "ngram_vocab_size_base %" PRIu64 " leaves no room for the head sizes",
                           c->ngram_vocab_size_base);
        }
        if (!is_prime(p)) {
            continue;
        }
        if (k >= skip) {
            h->size[k - skip] = p;
            h->offset[k - skip] = sum;
            if (!qx_add_u64(sum, p, &sum) || sum > INT64_MAX) {
                return qx_fail(err, QX_E_CONFIG, "config-value",
                               "the sum of the head sizes from ngram_vocab_size_base %" PRIu64
                               " is over 2^63",
                               c->ngram_vocab_size_base);
            }
        }
        k++;
    }
    uint64_t d = c->ngram_divisible_by ? c->ngram_divisible_by : 1;
    h->n_rows = sum;
    if (!qx_mul_u64(qx_ceil_div(sum, d), d, &h->n_rows_padded) || h->n_rows_padded > INT64_MAX) {
        return qx_fail(
            err, QX_E_CONFIG, "config-value",
            "make_ngram_vocab_size_divisible_by %" PRIu64 " pads the table beyond 2^63 rows", d);
    }
    return 0;
}

void qx_ple_rows(const struct qx_ple_hash *h, uint32_t token, const uint32_t *prev, uint64_t *rows)
{
    uint64_t acc = token * h->multiplier[0];
    bool cut = false; /* an end-of-text token hides everything before it */
    uint32_t head = 0;
    for (uint32_t order = 1; order < h->ngram_size; order++) {
        uint32_t id = cut ? h->eos : prev[order - 1];
        cut = cut || id == h->eos;
        acc ^= id * h->multiplier[order];
        for (uint32_t k = 0; k < h->heads_per_ngram && head < h->n_heads; k++, head++) {
            rows[head] = acc % h->size[head] + h->offset[head];
        }
    }
}
