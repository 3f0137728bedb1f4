/* tokenizer.json, and any text through a byte-level tokenizer: ids of an encoding stand for bytes that join
 * to the text again (which must be in NFC for that). Input: tokenizer.json, or a text after a first byte
 * 'T'. */
#include "fuzz.h"

#include "qx.h"
#include "str.h"
#include "utf8.h"

/* A tokenizer of the 256 byte symbols alone. */
static struct qx_tok *bytes_only(void)
{
    struct qx_buf b = {0};
    struct qx_tok *t = NULL;
    struct qx_error err = {0};
    uint32_t extra = 256;
    qx_buf_str(&b, "{\"version\":\"1.0\",\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\","
                   "\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
                   "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{L}\\\\p{M}]+|\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]+[\\\\r\\\\n]*|"
                   "\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false},"
                   "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":false,\"use_regex\":false}]},"
                   "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (uint32_t c = 0; c < 256; c++) {
        bool plain = (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || c >= 174;
        char utf8[4];
        size_t n = qx_utf8_encode(plain ? c : extra++, utf8);
        qx_buf_fmt(&b, "%s\"%s%.*s\":%u", c ? "," : "", c == '"' || c == '\\' ? "\\" : "", (int)n, utf8, (unsigned)c);
    }
    qx_buf_str(&b, "},\"merges\":[]}}");
    int rc = qx_tok_parse(&t, b.p, b.n, "bytes", NULL, 0, &err);
    if (rc) {
        fprintf(stderr, "%s: %s\n", err.kind, err.msg);
    }
    qx_buf_fini(&b);
    return t;
}

static void check_text(const char *text, size_t n)
{
    static struct qx_tok *tok;
    if (!tok) {
        tok = bytes_only();
    }
    CHECK(tok);
    uint64_t live = qx_alloc_live();
    struct qx_ids ids = {0};
    struct qx_error err = {0};
    int rc = qx_tok_encode(tok, text, n, &ids, &err);
    CHECK((rc == 0) == qx_utf8_valid(text, n));
    if (rc == 0) {
        struct qx_buf out = {0};
        struct qx_ids again = {0};
        for (size_t i = 0; i < ids.n; i++) {
            size_t k;
            const char *p = qx_tok_bytes(tok, ids.v[i], &k);
            CHECK(p && k == 1);
            qx_buf_add(&out, p, k);
        }
        /* decode gives the text in NFC, which encodes to the same ids */
        CHECK(qx_tok_encode(tok, out.n ? out.p : "", out.n, &again, &err) == 0 && again.n == ids.n);
        CHECK(ids.n == 0 || memcmp(again.v, ids.v, ids.n * sizeof *ids.v) == 0);
        bool ascii = true;
        for (size_t i = 0; i < n; i++) {
            ascii &= (unsigned char)text[i] < 0x80;
        }
        CHECK(!ascii || (out.n == n && (n == 0 || memcmp(out.p, text, n) == 0)));
        qx_ids_fini(&again);
        qx_buf_fini(&out);
    }
    qx_ids_fini(&ids);
    CHECK(qx_alloc_live() == live);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = fuzz_copy(data, size);
    if (size && data[0] == 'T') {
        check_text(text + 1, size - 1);
    } else {
        uint64_t live = qx_alloc_live();
        struct qx_tok *t;
        struct qx_error err = {0};
        int rc = qx_tok_parse(&t, text, size, "f", NULL, 0, &err);
        CHECK(rc == 0 || (!t && err.kind && err.msg[0]));
        if (rc == 0) {
            struct qx_ids ids = {0};
            if (qx_tok_encode(t, "ab 1", 4, &ids, &err) == 0) {
                for (size_t i = 0; i < ids.n; i++) {
                    size_t n;
                    CHECK(ids.v[i] < qx_tok_n_ids(t) && qx_tok_bytes(t, ids.v[i], &n));
                }
            }
            qx_ids_fini(&ids);
        }
        qx_tok_close(t);
        CHECK(qx_alloc_live() == live);
    }
    free(text);
    return 0;
}
