/* Tokenizer: the recorded cases of another implementation, properties, hostile files, a vocabulary of
 * the released size, and long words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "alloc.h"
#include "str.h"
#include "tok.h"

static char *read_file(const char *dir, const char *name, size_t *n)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    if (!f) {
        return NULL;
    }
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *n = (size_t)ftell(f);
    rewind(f);
    char *p = malloc(*n + 1);
    assert_non_null(p);
    assert_int_equal(fread(p, 1, *n, f), *n);
    p[*n] = '\0';
    fclose(f);
    return p;
}

static struct qx_tok *sample_tok(void)
{
    const char *dir = getenv("QX_SAMPLE");
    size_t n = 0;
    char *text = dir ? read_file(dir, "tokenizer.json", &n) : NULL;
    struct qx_tok *t;
    struct qx_error err = {0};
    if (!text) {
        fprintf(stderr, "no sample tokenizer\n");
        fail();
    }
    if (qx_tok_parse(&t, text, n, "tokenizer.json", NULL, 0, &err)) {
        fail_msg("%s: %s", err.kind, err.msg);
    }
    free(text);
    return t;
}

static void decode(const struct qx_tok *t, const struct qx_ids *ids, struct qx_buf *out)
{
    for (size_t i = 0; i < ids->n; i++) {
        size_t n;
        const char *p = qx_tok_bytes(t, ids->v[i], &n);
        assert_non_null(p);
        qx_buf_add(out, p, n);
    }
}

static void recorded_cases(void **state)
{
    (void)state;
    struct qx_tok *t = sample_tok();
    size_t n = 0;
    char *text = read_file(getenv("QX_TEST_DATA"), "tokenizer_cases.json", &n);
    if (!text) { /* the build may leave it in the source tree only */
        char dir[4096];
        snprintf(dir, sizeof dir, "%s/../tests/data", getenv("QX_SAMPLE"));
        text = read_file(dir, "tokenizer_cases.json", &n);
    }
    assert_non_null(text);
    cJSON *cases = cJSON_ParseWithLength(text, n);
    assert_non_null(cases);
    int count = 0;
    for (cJSON *c = cases->child; c; c = c->next, count++) {
        const char *s = cJSON_GetObjectItem(c, "text")->valuestring;
        const char *want = cJSON_GetObjectItem(c, "decoded")->valuestring;
        cJSON *id = cJSON_GetObjectItem(c, "ids")->child;
        /* cJSON ends strings at NUL; the length comes from the decoded side's token texts. */
        size_t len = strlen(s);
        struct qx_ids ids = {0};
        struct qx_buf b = {0};
        struct qx_error err = {0};
        if (len == 0 && id) {
            continue;
        }
        if (qx_tok_encode(t, s, len, &ids, &err)) {
            fail_msg("case %d: %s", count, err.msg);
        }
        for (size_t i = 0; i < ids.n; i++, id = id->next) {
            if (!id || (uint32_t)id->valuedouble != ids.v[i]) {
                fail_msg("case %d, '%s': id %zu is %u, wanted %d", count, s, i, ids.v[i],
                         id ? id->valueint : -1);
            }
        }
        if (id) {
            fail_msg("case %d, '%s': ids are missing at the end", count, s);
        }
        decode(t, &ids, &b);
        assert_string_equal(b.n ? qx_buf_cstr(&b) : "", want);
        qx_buf_fini(&b);
        /* decode(encode(s)) = NFC(s), here by the normaliser alone */
        qx_ids_fini(&ids);
    }
    assert_int_equal(count, 251);
    cJSON_Delete(cases);
    free(text);
    qx_tok_close(t);
    assert_int_equal(qx_alloc_live(), 0);
}

static void control_characters(void **state)
{
    (void)state;
    struct qx_tok *t = sample_tok();
    struct qx_ids ids = {0};
    assert_int_equal(qx_tok_encode(t, "\0\x01\x7f", 3, &ids, NULL), 0);
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.v[0], 188);
    assert_int_equal(ids.v[1], 189);
    assert_int_equal(ids.v[2], 221);
    qx_ids_fini(&ids);
    qx_tok_close(t);
}

static uint64_t rng = 1;
static uint32_t rnd(uint32_t n)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 33) % n;
}

/* decode(encode(s)) = NFC(s) over random texts that mix scripts, marks, spaces and added tokens. */
static void round_trip(void **state)
{
    static const char *const bits[] = {
        "a", "the", " ", "\n", "\r", "\t", "'s", "'RE", "9", "\xcc\x81", "\xcc\xa7", "e", "\xc3\xa9",
        "\xe1\x84\x92", "\xe1\x85\xa1", "\xe1\x86\xab", "\xe2\x84\xab", "\xf0\x9f\x99\x82", "\xe3\x80\x80",
        "<|im_end|>", "<think>", "<|im", ".", "--", "\xc2\xa0", "\xd9\xa3", "\xe0\xa4\xbf", "A", "\xcc\xa3"};
    (void)state;
    struct qx_tok *t = sample_tok();
    for (int round = 0; round < 2000; round++) {
        struct qx_buf s = {0}, want = {0}, got = {0};
        struct qx_ids ids = {0};
        uint32_t n = rnd(24);
        for (uint32_t i = 0; i < n; i++) {
            qx_buf_str(&s, bits[rnd(QX_ARRAY_LEN(bits))]);
        }
        const char *p = qx_buf_cstr(&s);
        /* NFC acts between added tokens only. */
        size_t begin = 0;
        for (size_t i = 0; i <= s.n;) {
            size_t tok = !strncmp(p + i, "<|im_end|>", 10) ? 10 : !strncmp(p + i, "<think>", 7) ? 7 : 0;
            if (i == s.n || tok) {
                assert_int_equal(qx_nfc(p + begin, i - begin, &want, NULL), 0);
                qx_buf_add(&want, p + i, tok);
                begin = i + tok;
            }
            i += tok ? tok : 1;
        }
        assert_int_equal(qx_tok_encode(t, p, s.n, &ids, NULL), 0);
        decode(t, &ids, &got);
        assert_string_equal(qx_buf_cstr(&got), qx_buf_cstr(&want));
        qx_buf_fini(&s);
        qx_buf_fini(&want);
        qx_buf_fini(&got);
        qx_ids_fini(&ids);
    }
    qx_tok_close(t);
}

static void nfc(void **state)
{
    static const struct { const char *in, *out; } cases[] = {
        {"e\xcc\x81", "\xc3\xa9"},
        {"\xe2\x84\xab", "\xc3\x85"},
        {"\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", "\xed\x95\x9c"},
        /* marks out of order: U+0301 (230) before U+0327 (202) */
        {"c\xcc\x81\xcc\xa7", "\xe1\xb8\x89"},
        /* excluded from composition: U+0958 stays decomposed */
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"},
        {"\xcc\x81x", "\xcc\x81x"},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(cases); i++) {
        struct qx_buf b = {0};
        assert_int_equal(qx_nfc(cases[i].in, strlen(cases[i].in), &b, NULL), 0);
        assert_string_equal(qx_buf_cstr(&b), cases[i].out);
        qx_buf_fini(&b);
    }
}

static double seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts); /* the machine may be busy with other tests */
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

/* Sanitizers slow everything down several times; limits are for ordinary builds. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW 10
#else
#define SLOW 1
#endif

static void split(void **state)
{
    static const struct { const char *text; const char *pieces[8]; } cases[] = {
        {"it's", {"it", "'s"}},
        {"I'D'LL", {"I", "'D", "'LL"}},
        {"a  b", {"a", " ", " b"}},
        {"a \n b", {"a", " \n", " b"}},
        {"a\n\n", {"a", "\n\n"}},
        {"x   ", {"x", "   "}},
        {"12", {"1", "2"}},
        {" !?\r\nz", {" !?\r\n", "z"}},
        {"\tfoo", {"\tfoo"}},
        {"\nfoo", {"\n", "foo"}},
        {"  !", {" ", " !"}},
        {"\xcc\x81" "a", {"\xcc\x81" "a"}},
        {"1\xcc\x81", {"1", "\xcc\x81"}},
        {"\xc2\xa0" "a", {"\xc2\xa0" "a"}},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(cases); i++) {
        const char *p = cases[i].text;
        for (size_t k = 0; *p; k++) {
            size_t n = qx_tok_split(p, strlen(p));
            if (!cases[i].pieces[k] || n != strlen(cases[i].pieces[k]) ||
                memcmp(p, cases[i].pieces[k], n) != 0) {
                fail_msg("case %zu, piece %zu: %zu bytes of '%s'", i, k, n, p);
            }
            p += n;
        }
    }
}

/* 256 byte tokens, then every word of 2, 3 and 4 letters until there are 247,587 merges (each longer
 * word is the shorter one and a letter), fillers, 33 added tokens: 248,077 in all. */
static char *big_json(size_t *n)
{
    struct qx_buf b = {0}, m = {0};
    uint32_t id = 0, merges = 0;
    qx_buf_str(&b, "{\"added_tokens\":[");
    for (int i = 0; i < 33; i++) {
        qx_buf_fmt(&b, "%s{\"id\":%d,\"content\":\"<|added_%d|>\",\"special\":%s}", i ? "," : "", 248044 + i,
                   i, i % 2 ? "true" : "false");
    }
    qx_buf_str(&b, "],\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"ByteLevel\","
                   "\"add_prefix_space\":false,\"use_regex\":false},\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (int i = 0, next = 256; i < 256; i++) {
        bool printable = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        int c = printable ? i : next++;
        qx_buf_fmt(&b, "%s\"\\u%04x\":%u", i ? "," : "", (unsigned)c, id++);
    }
    qx_buf_str(&m, "[");
    for (int len = 2; len <= 4; len++) {
        int count = len == 2 ? 676 : len == 3 ? 17576 : 456976;
        for (int w = 0; w < count && merges < 247587; w++) {
            char s[5] = "";
            for (int k = len - 1, v = w; k >= 0; k--, v /= 26) {
                s[k] = (char)('a' + v % 26);
            }
            qx_buf_fmt(&b, ",\"%s\":%u", s, id++);
            qx_buf_fmt(&m, "%s[\"%.*s\",\"%c\"]", merges ? "," : "", len - 1, s, s[len - 1]);
            merges++;
        }
    }
    while (id < 248044) {
        qx_buf_fmt(&b, ",\"filler%u\":%u", id, id);
        id++;
    }
    qx_buf_str(&b, "},\"merges\":");
    qx_buf_add(&b, m.p, m.n);
    qx_buf_str(&b, "]}}");
    qx_buf_fini(&m);
    assert_false(b.failed);
    *n = b.n;
    return b.p;
}

static void released_size(void **state)
{
    (void)state;
    size_t n;
    char *json = big_json(&n);
    double best = 1e9;
    struct qx_tok *t = NULL;
    for (int i = 0; i < 3; i++) {
        double t0 = seconds();
        struct qx_error err = {0};
        qx_tok_close(t);
        if (qx_tok_parse(&t, json, n, "tokenizer.json", NULL, 0, &err)) {
            fail_msg("%s", err.msg);
        }
        double s = seconds() - t0;
        best = s < best ? s : best;
    }
    printf("# %zu bytes, 248077 tokens: %.3f s\n", n, best);
    assert_int_equal(qx_tok_n_ids(t), 248077);
    assert_true(best < 0.3 * SLOW);
    struct qx_ids ids = {0};
    assert_int_equal(qx_tok_encode(t, "abc<|added_3|>", 14, &ids, NULL), 0);
    assert_int_equal(ids.n, 2);
    assert_int_equal(ids.v[0], 256 + 676 + 28);
    assert_int_equal(ids.v[1], 248047);
    ids.n = 0;
    /* One word of 1 MB, and a run of 1 MB of marks in the worst order. */
    size_t big = 1 << 20;
    char *s = malloc(big);
    assert_non_null(s);
    for (size_t i = 0; i < big; i++) {
        s[i] = (char)('a' + rnd(26));
    }
    double t0 = seconds();
    assert_int_equal(qx_tok_encode(t, s, big, &ids, NULL), 0);
    printf("# one word of 1 MiB: %.3f s\n", seconds() - t0);
    assert_true(seconds() - t0 < 3.0 * SLOW);
    struct qx_buf back = {0};
    decode(t, &ids, &back);
    assert_int_equal(back.n, big);
    assert_memory_equal(back.p, s, big);
    qx_buf_fini(&back);
    for (size_t i = 0; i < big; i += 2) {
        memcpy(s + i, i % 4 ? "\xcc\xa3" : "\xcc\x81", 2);
    }
    t0 = seconds();
    struct qx_buf b = {0};
    assert_int_equal(qx_nfc(s, big, &b, NULL), 0);
    printf("# 1 MiB of marks: %.3f s\n", seconds() - t0);
    assert_true(seconds() - t0 < 3.0 * SLOW);
    qx_buf_fini(&b);
    free(s);
    qx_ids_fini(&ids);
    qx_tok_close(t);
    qx_free(json);
}

static void hostile(void **state)
{
    static const struct { const char *json, *kind; } cases[] = {
        {"", "json-syntax"},
        {"[]", "tokenizer-value"},
        {"{}", "tokenizer-value"},
        {"\xef\xbb\xbf{}", "json-bom"},
        {"{\"model\":{}}", "tokenizer-value"},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "tokenizer-unsupported"},
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":0}}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":4000000000}}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":2000000000}}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":-1}}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":1.5}}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"ab\"]}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":7}}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":0}},\"added_tokens\":[{\"id\":1}]}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":0}},\"added_tokens\":[{\"content\":\"x\"}]}", "tokenizer-value"},
        {"{\"model\":{\"vocab\":{\"a\":0}},\"added_tokens\":[{\"id\":1,\"content\":\"x\",\"lstrip\":true}]}",
         "tokenizer-unsupported"},
        {"{\"model\":{\"vocab\":{\"a\":0}},\"normalizer\":{\"type\":\"NFKC\"}}", "tokenizer-unsupported"},
        {"{\"model\":{\"vocab\":{\"a\":0}},\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":"
         "\"\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false}}", "tokenizer-unsupported"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"byte_fallback\":true}}", "tokenizer-unsupported"},
        {"{\"model\":{\"vocab\":{\"a\":0}}", "json-syntax"},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(cases); i++) {
        struct qx_tok *t;
        struct qx_error err = {0};
        int rc = qx_tok_parse(&t, cases[i].json, strlen(cases[i].json), "tokenizer.json", NULL, 0, &err);
        if (rc == 0 || t || strcmp(err.kind, cases[i].kind) != 0) {
            fail_msg("case %zu: '%s' gives %s: %s", i, cases[i].json, rc ? err.kind : "success", err.msg);
        }
        assert_string_equal(err.file, "tokenizer.json");
    }
    assert_int_equal(qx_alloc_live(), 0);
}

/* Every allocation fails in turn: an error each time, nothing left behind. */
static void out_of_memory(void **state)
{
    static const char json[] =
        "{\"added_tokens\":[{\"id\":5,\"content\":\"<e>\",\"special\":true}],\"normalizer\":{\"type\":\"NFC\"},"
        "\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"\\u00e9\":3},\"merges\":[\"a b\"]}}";
    static const char config[] = "{\"added_tokens_decoder\":{\"6\":{\"content\":\"<f>\"}},"
                                 "\"eos_token\":{\"content\":\"<e>\"}}";
    (void)state;
    bool done = false;
    for (uint64_t i = 1; !done && i < 500; i++) {
        struct qx_tok *t = NULL;
        struct qx_error err = {0};
        struct qx_ids ids = {0};
        qx_alloc_fail_at(i, true);
        int rc = qx_tok_parse(&t, json, sizeof json - 1, "t", config, sizeof config - 1, &err);
        if (rc == 0) {
            rc = qx_tok_encode(t, "ab<e>e\xcc\x81<f>", 11, &ids, &err);
        }
        qx_alloc_fail_at(0, false);
        if (rc) {
            assert_int_equal(err.code, QX_E_NOMEM);
        } else {
            done = true;
            assert_int_equal(qx_tok_eos(t), 5);
            assert_int_equal(qx_tok_find(t, "<f>", 3), 6);
            assert_int_equal(qx_tok_find(t, "b", 1), 1);
            assert_int_equal(qx_tok_find(t, "zz", 2), -1);
            assert_true(qx_tok_is_special(t, 5));
            assert_false(qx_tok_is_special(t, 6));
        }
        qx_ids_fini(&ids);
        qx_tok_close(t);
        assert_int_equal(qx_alloc_live(), 0);
    }
    assert_true(done);
}

static void no_token(void **state)
{
    static const char json[] = "{\"model\":{\"vocab\":{\"a\":0,\"\\u00e9\":3}}}";
    (void)state;
    struct qx_tok *t;
    struct qx_error err = {0};
    struct qx_ids ids = {0};
    assert_int_equal(qx_tok_parse(&t, json, sizeof json - 1, "t", NULL, 0, &err), 0);
    assert_int_equal(qx_tok_encode(t, "a\xc3\xa9", 3, &ids, &err), 0);
    assert_int_equal(ids.n, 2);
    assert_int_equal(qx_tok_encode(t, "ab", 2, &ids, &err), -(int)QX_E_VALUE);
    assert_string_equal(err.kind, "text-no-token");
    assert_int_equal(qx_tok_encode(t, "a\xff", 2, &ids, &err), -(int)QX_E_VALUE);
    assert_string_equal(err.kind, "text-utf8");
    qx_ids_fini(&ids);
    qx_tok_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recorded_cases), cmocka_unit_test(control_characters),
        cmocka_unit_test(round_trip),     cmocka_unit_test(nfc),
        cmocka_unit_test(split),          cmocka_unit_test(released_size),
        cmocka_unit_test(hostile),        cmocka_unit_test(out_of_memory),
        cmocka_unit_test(no_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
