/* Any bytes through display, UTF-8 and the text streams: what is shown holds no control byte, characters
 * survive decode and encode, and cutting the bytes elsewhere never changes what a stream puts out. */
#include "fuzz.h"

#include "json_out.h"
#include "json_pull.h"
#include "str.h"
#include "text_stream.h"
#include "utf8.h"

static void check_escape(const char *s, size_t n)
{
    struct qx_buf b = {0};
    qx_buf_escaped(&b, s, n);
    CHECK(!b.failed && qx_utf8_valid(b.p ? b.p : "", b.n));
    for (size_t i = 0; i < b.n; i++) {
        CHECK((unsigned char)b.p[i] >= 0x20 && b.p[i] != 0x7f);
    }
    qx_buf_fini(&b);
}

static void check_characters(const char *s, size_t n)
{
    bool all = true;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        char back[4];
        int len = qx_utf8_decode(s + i, n - i, &cp);
        if (len > 0) {
            CHECK((size_t)len <= n - i && cp <= 0x10ffff && (cp < 0xd800 || cp > 0xdfff));
            CHECK(qx_utf8_encode(cp, back) == (size_t)len && memcmp(back, s + i, (size_t)len) == 0);
        }
        all &= len > 0;
        i += len > 0 ? (size_t)len : 1;
    }
    CHECK(all == qx_utf8_valid(s, n));
    CHECK(qx_utf8_incomplete(s, n) <= 3 && qx_utf8_width(s, n) <= 2 * n);
}

static void check_json(const char *s, size_t n)
{
    struct qx_json_out o;
    struct qx_json_pull j;
    qx_json_out_init(&o, false);
    qx_json_strn(&o, NULL, s, n);
    qx_json_pull_init(&j, o.buf.p, o.buf.n);
    CHECK(qx_json_next(&j) == QX_JSON_STRING);
    CHECK(!qx_utf8_valid(s, n) || (j.text.n == n && memcmp(j.text.p, s, n) == 0));
    CHECK(qx_json_next(&j) == QX_JSON_END);
    qx_json_pull_fini(&j);
    qx_json_out_fini(&o);
}

static void stream(const char *s, size_t n, size_t step, bool terminal, struct qx_buf *out)
{
    struct qx_text_stream t = {.terminal = terminal};
    for (size_t i = 0; i < n; i += step) {
        qx_text_stream_push(&t, s + i, n - i < step ? n - i : step, out);
    }
    qx_text_stream_end(&t, out);
}

static void check_streams(const char *s, size_t n)
{
    for (int terminal = 0; terminal < 2; terminal++) {
        struct qx_buf whole = {0}, pieces = {0};
        stream(s, n, n ? n : 1, terminal, &whole);
        for (size_t step = 1; step < 6; step += 2) {
            pieces.n = 0;
            stream(s, n, step, terminal, &pieces);
            CHECK(pieces.n == whole.n && (whole.n == 0 || memcmp(pieces.p, whole.p, whole.n) == 0));
        }
        CHECK(terminal || (whole.n == n && (n == 0 || memcmp(whole.p, s, n) == 0)));
        if (terminal) {
            CHECK(qx_utf8_valid(whole.p ? whole.p : "", whole.n));
            CHECK(whole.n == 0 || !memchr(whole.p, 0x1b, whole.n));
        }
        qx_buf_fini(&whole);
        qx_buf_fini(&pieces);
    }
}

static void check_stops(const char *s, size_t n)
{
    static const char *const stops[] = {"ab", "aab", "\n\n", "</s>"};
    struct qx_buf whole = {0}, pieces = {0};
    bool hit[2];
    for (int k = 0; k < 2; k++) {
        struct qx_stop_texts t = {.v = stops, .n = 4};
        struct qx_buf *out = k ? &pieces : &whole;
        size_t step = k ? 1 : n ? n : 1;
        hit[k] = false;
        for (size_t i = 0; i < n && !hit[k]; i += step) {
            hit[k] = qx_stop_texts_push(&t, s + i, step, out);
        }
        if (!hit[k]) {
            qx_stop_texts_end(&t, out);
        }
        qx_stop_texts_fini(&t);
    }
    CHECK(hit[0] == hit[1] && whole.n == pieces.n && (whole.n == 0 || memcmp(whole.p, pieces.p, whole.n) == 0));
    CHECK(hit[0] || whole.n == n);
    qx_buf_fini(&whole);
    qx_buf_fini(&pieces);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    if (size > 65536) {
        return 0;
    }
    char *s = fuzz_copy(data, size);
    check_escape(s, size);
    check_characters(s, size);
    check_json(s, size);
    check_streams(s, size);
    check_stops(s, size);
    free(s);
    CHECK(qx_alloc_live() == live);
    return 0;
}
