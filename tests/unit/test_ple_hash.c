/* The n-gram arithmetic against the published constants and vectors (model 7.1, 7.2; formats 5.1) and
 * those of the cases' small checkpoint T0. All are integers: equality is exact. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ple_hash.h"

static struct qx_config released(void)
{
    struct qx_config c = {0};
    c.vocab_size = 248320;
    c.n_ple_layers = 1;
    c.ngram_size = 3;
    c.heads_per_ngram = 8;
    c.ple_heads = 16;
    c.ngram_vocab_size_base = 20000000;
    c.ngram_divisible_by = 128;
    c.ngram_seed = 1234;
    c.eos_token_id = 248044;
    return c;
}

static struct qx_config small(void)
{
    struct qx_config c = released();
    c.vocab_size = 32;
    c.heads_per_ngram = 2;
    c.ple_heads = 4;
    c.ngram_vocab_size_base = 10;
    c.ngram_divisible_by = 4;
    c.eos_token_id = 2;
    return c;
}

static void rows_at(const struct qx_ple_hash *h, const uint32_t *ids, size_t pos, uint64_t *rows)
{
    uint32_t prev[QX_MAX_NGRAM];
    for (uint32_t k = 0; k + 1 < h->ngram_size; k++) {
        prev[k] = pos > k ? ids[pos - 1 - k] : h->eos;
    }
    qx_ple_rows(h, ids[pos], prev, rows);
}

static void expect(const struct qx_ple_hash *h, const uint32_t *ids, size_t pos, const uint64_t *want,
                   size_t n)
{
    uint64_t rows[QX_MAX_PLE_HEADS];
    rows_at(h, ids, pos, rows);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(rows[i], want[i]);
    }
}

static void test_released_constants(void **state)
{
    static const uint64_t mul[3] = {23703573157769, 20109073645365, 8052911324071};
    static const uint64_t size[16] = {20000003, 20000023, 20000033, 20000047, 20000059, 20000063,
                                      20000069, 20000077, 20000081, 20000093, 20000107, 20000147,
                                      20000153, 20000159, 20000161, 20000171};
    struct qx_config c = released();
    struct qx_ple_hash h;
    (void)state;
    assert_int_equal(qx_ple_hash_init(&h, &c, 0, NULL), 0);
    assert_memory_equal(h.multiplier, mul, sizeof mul);
    assert_memory_equal(h.size, size, sizeof size);
    assert_int_equal(h.offset[0], 0);
    assert_int_equal(h.offset[15], 300001275);
    assert_int_equal(h.n_rows, 320001446);
    assert_int_equal(h.n_rows_padded, 320001536);
    /* The next layer continues the row of primes and has another seed. */
    struct qx_ple_hash next;
    assert_int_equal(qx_ple_hash_init(&next, &c, 1, NULL), 0);
    assert_true(next.size[0] > h.size[15]);
    assert_true(next.multiplier[0] != h.multiplier[0]);
}

static void test_released_rows(void **state)
{
    static const uint32_t a[] = {9419, 11, 1814};
    static const uint64_t a0[16] = {6783314, 25893696, 59239020, 66167313, 81761837, 114435313,
                                    124203423, 151975917, 166590818, 187833462, 212087477, 223519364,
                                    246888052, 271470774, 293268240, 304278145};
    static const uint64_t a1[16] = {2719687, 25344284, 46798474, 76993254, 83021999, 111728594,
                                    124816772, 142320644, 167808581, 183572719, 210276485, 230623202,
                                    241922991, 273548433, 284162581, 317775660};
    static const uint32_t b[] = {9419, 248044, 11, 1814};
    static const uint64_t b2[16] = {13555483, 24877159, 54278900, 63631058, 98394898, 117447587,
                                    136774765, 157274238, 173487882, 192109366, 213364329, 236577563,
                                    258758149, 262164274, 283572184, 312653920};
    static const uint64_t b3[8] = {9385754, 32482397, 54062840, 76311413, 98272164, 118932639,
                                   139929746, 141271114};
    struct qx_config c = released();
    struct qx_ple_hash h;
    (void)state;
    assert_int_equal(qx_ple_hash_init(&h, &c, 0, NULL), 0);
    expect(&h, a, 0, a0, 16);
    expect(&h, a, 1, a1, 16);
    expect(&h, b, 2, b2, 16);
    expect(&h, b, 3, b3, 8);
    expect(&h, a, 2, b3, 8);
    uint64_t x[16];
    uint64_t y[16];
    rows_at(&h, b, 3, x);
    rows_at(&h, a, 2, y);
    for (size_t i = 8; i < 16; i++) {
        assert_int_not_equal(x[i], y[i]);
    }
}

static void test_small(void **state) /* cases C01, C03, C04, C05 */
{
    static const uint64_t mul[3] = {256496738022509279, 251627398771002343, 55314113489879221};
    static const uint64_t size[4] = {11, 13, 17, 19};
    static const uint64_t offset[4] = {0, 11, 24, 41};
    static const uint32_t a[] = {5, 7, 9};
    static const uint64_t a0[4] = {8, 17, 37, 48};
    static const uint64_t a1[4] = {10, 17, 37, 47};
    static const uint64_t a2[4] = {5, 18, 28, 54};
    static const uint32_t b[] = {5, 7, 2, 9, 4};
    static const uint64_t b3[4] = {2, 11, 37, 59};
    static const uint64_t b4[4] = {3, 12, 25, 43};
    struct qx_config c = small();
    struct qx_ple_hash h;
    (void)state;
    assert_int_equal(qx_ple_hash_init(&h, &c, 0, NULL), 0);
    assert_memory_equal(h.multiplier, mul, sizeof mul);
    assert_memory_equal(h.size, size, sizeof size);
    assert_memory_equal(h.offset, offset, sizeof offset);
    assert_int_equal(h.n_rows, 60);
    assert_int_equal(h.n_rows_padded, 60);
    expect(&h, a, 0, a0, 4);
    expect(&h, a, 1, a1, 4);
    expect(&h, a, 2, a2, 4);
    expect(&h, b, 3, b3, 4);
    expect(&h, b, 4, b4, 4);
    c.ngram_divisible_by = 8; /* case C21 */
    assert_int_equal(qx_ple_hash_init(&h, &c, 0, NULL), 0);
    assert_int_equal(h.n_rows_padded, 64);
}

static void test_overflow(void **state)
{
    struct qx_config c = released();
    struct qx_ple_hash h;
    struct qx_error err;
    (void)state;
    c.ngram_vocab_size_base = UINT64_C(1) << 62;
    assert_true(qx_ple_hash_init(&h, &c, 0, &err) < 0);
    assert_string_equal(err.kind, "config-value");
    c = released();
    c.ple_heads = 0;
    assert_true(qx_ple_hash_init(&h, &c, 0, &err) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_released_constants),
        cmocka_unit_test(test_released_rows),
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
