/* Any words as a command line: parsing ends with a known code, a wrong line says nothing on stdout,
 * arguments are words of the line in their order, and what was accepted, spelled out again as
 * --name=value, gives the same values. */
#include "fuzz.h"

#include "../demo_opts.h"
#include "str.h"

static const struct opt_command cmd = {"demo", "qx demo PATH\n", "Shows.", "  qx demo x\n", opts, 0, 4};

static void clear(void)
{
    qx_u64_list_fini(&v.list);
    memset(&v, 0, sizeof v);
}

static void add(struct qx_buf *b, const char *name, const char *value)
{
    qx_buf_fmt(b, "--%s%s%s", name, value ? "=" : "", value ? value : "");
    qx_buf_chr(b, '\0');
}

/* Spells the parsed values out, one NUL-terminated word each. */
static void spell(struct qx_buf *b, char **args, int n_args)
{
    char text[64];
    add(b, v.flag ? "flag" : "no-flag", NULL);
    for (unsigned i = 0; i < v.count; i++) {
        add(b, "count", NULL);
    }
    if (v.str) {
        add(b, "string", v.str);
    }
    if (v.choice) {
        add(b, "colour", v.choice);
    }
    if (v.optstr) {
        add(b, "tensors", v.optstr);
    }
    snprintf(text, sizeof text, "%llu", (unsigned long long)v.u64);
    add(b, "number", text);
    snprintf(text, sizeof text, "%llu", (unsigned long long)v.size);
    add(b, "size", text);
    snprintf(text, sizeof text, "%.17g", v.f64);
    add(b, "ratio", text);
    for (size_t i = 0; i < v.strs.n; i++) {
        add(b, "many", v.strs.v[i]);
    }
    qx_buf_str(b, "--");
    qx_buf_chr(b, '\0');
    for (int i = 0; i < n_args; i++) {
        qx_buf_str(b, args[i]);
        qx_buf_chr(b, '\0');
    }
}

static int parse_words(char *p, size_t n, char **argv, char ***args, int *n_args)
{
    int argc = 1;
    argv[0] = (char *)(uintptr_t) "qx-demo";
    for (size_t i = 0; i < n && argc < 120;) {
        argv[argc++] = p + i;
        i += strlen(p + i) + 1;
    }
    return opt_parse(&cmd, argc, argv, args, n_args);
}

static bool same(const char *a, const char *b)
{
    return a == b || (a && b && !strcmp(a, b));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool quiet;
    char *argv[128], *again_argv[128], **args, **again_args;
    int n_args = 0, n_again = 0;
    if (!quiet) { /* messages and answers are not looked at here, and standard input is empty */
        CHECK(freopen("/dev/null", "r", stdin) && freopen("/dev/null", "w", stdout));
        quiet = true;
    }
    if (size > 4096 || memchr(data, '@', size)) { /* @FILE would read any file */
        return 0;
    }
    char *text = malloc(size + 1);
    CHECK(text);
    if (size) {
        memcpy(text, data, size);
    }
    text[size] = '\0';
    clear();
    int rc = parse_words(text, size, argv, &args, &n_args);
    CHECK(rc == -1 || rc == 0 || rc == 2 || rc == 3);
    if (rc == -1) {
        CHECK(n_args >= 0 && n_args <= 4);
        for (int i = 0; i < n_args; i++) {
            CHECK(args[i] >= text && args[i] <= text + size);
            CHECK(i == 0 || args[i] > args[i - 1]);
        }
        struct qx_buf b = {0};
        spell(&b, args, n_args);
        struct values first = v;
        memset(&v, 0, sizeof v);
        CHECK(first.count > 90 || parse_words(b.p, b.n, again_argv, &again_args, &n_again) == -1);
        if (first.count <= 90) {
            CHECK(n_again == n_args && v.flag == first.flag && v.count == first.count);
            CHECK(v.u64 == first.u64 && v.size == first.size && v.f64 == first.f64);
            CHECK(same(v.str, first.str) && same(v.choice, first.choice) && same(v.optstr, first.optstr));
            CHECK(v.strs.n == first.strs.n);
            for (int i = 0; i < n_args; i++) {
                CHECK(!strcmp(args[i], again_args[i]));
            }
        }
        qx_u64_list_fini(&first.list);
        qx_buf_fini(&b);
    }
    clear();
    free(text);
    CHECK(qx_alloc_live() == 0);
    return 0;
}
