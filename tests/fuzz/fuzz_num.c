/* Numbers, lists, sizes and globs from command lines: an accepted list, printed and parsed again, is the
 * same list; a size printed in bytes parses to itself; a glob matches itself when it has no wildcard. */
#include "fuzz.h"

#include "num.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    if (size > 4096) {
        return 0;
    }
    char *s = malloc(size + 1), text[64];
    CHECK(s);
    memcpy(s, data, size);
    s[size] = '\0';
    struct qx_u64_list a, b;
    struct qx_error err = {0};
    bool huge = false; /* ranges may name millions of numbers: not in a fuzz run */
    for (size_t i = 0, digits = 0; i < size; i++) {
        digits = s[i] >= '0' && s[i] <= '9' ? digits + 1 : 0;
        huge |= digits > 4 && memchr(s, '-', size);
    }
    if (!huge && qx_parse_list(s, "range", &a, &err) == 0) {
        struct qx_buf out = {0};
        CHECK(a.n > 0);
        for (size_t i = 0; i < a.n; i++) {
            qx_buf_fmt(&out, "%s%llu", i ? "," : "", (unsigned long long)a.v[i]);
        }
        CHECK(qx_parse_list(qx_buf_cstr(&out), "range", &b, NULL) == 0 && a.n == b.n &&
              memcmp(a.v, b.v, a.n * sizeof *a.v) == 0);
        qx_u64_list_fini(&b);
        CHECK(qx_parse_list_text(out.p, out.n, "range", &b, NULL) == 0 && a.n == b.n);
        qx_u64_list_fini(&b);
        qx_u64_list_fini(&a);
        qx_buf_fini(&out);
    } else if (!huge) {
        CHECK((err.code == QX_E_USAGE || err.code == QX_E_RANGE) && err.msg[0] && a.n == 0);
    }
    if (!huge && qx_parse_list_text(s, size, "range", &a, NULL) == 0) {
        qx_u64_list_fini(&a);
    }
    uint64_t v, w;
    if (qx_parse_size(s, &v, &err) == 0) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)v);
        CHECK(qx_parse_size(text, &w, NULL) == 0 && v == w);
        char out[32];
        CHECK(strlen(qx_size_text(v, out)) < sizeof out && strlen(qx_count_text(v, out)) < sizeof out);
    }
    double d;
    int64_t n;
    if (qx_parse_f64(s, size, &d)) {
        char again[64];
        double e;
        snprintf(again, sizeof again, "%.17g", d);
        CHECK(qx_parse_f64(again, strlen(again), &e) && e == d);
    }
    if (qx_parse_i64(s, size, &n)) {
        CHECK(n < 0 || (qx_parse_u64(s[0] == '-' ? s + 1 : s, size - (s[0] == '-'), &v) && v == (uint64_t)n));
    }
    char *half = s + strlen(s) / 2, keep = *half;
    if (!strpbrk(s, "*?")) {
        CHECK(qx_glob_match(s, s));
    }
    *half = '\0';
    (void)qx_glob_match(s, half + (keep != 0));
    CHECK(qx_str_distance(s, s) == 0);
    free(s);
    CHECK(qx_alloc_live() == live);
    return 0;
}
