/* The tree of a JSON text against cJSON: the same members in the same order with the same values, for every
 * JSON file of the test checkpoints and for texts made from a seed; what cJSON refuses qx refuses too. */
#include "fixture.h"

#include "json_doc.h"

#include <dirent.h>
#include <errno.h>

static void compare(const struct qx_json *a, const cJSON *b)
{
    switch (a->type) {
    case QX_JSON_OBJECT:
    case QX_JSON_ARRAY: {
        assert_true(a->type == QX_JSON_OBJECT ? cJSON_IsObject(b) : cJSON_IsArray(b));
        assert_int_equal(a->n_children, cJSON_GetArraySize(b));
        const cJSON *d = b->child;
        for (const struct qx_json *c = a->child; c; c = c->next, d = d->next) {
            assert_non_null(d);
            if (a->type == QX_JSON_OBJECT) {
                assert_string_equal(c->key, d->string);
            }
            compare(c, d);
        }
        assert_null(d);
        break;
    }
    case QX_JSON_STRING:
        assert_true(cJSON_IsString(b));
        assert_string_equal(a->str, b->valuestring);
        break;
    case QX_JSON_NUMBER:
        assert_true(cJSON_IsNumber(b));
        assert_true(a->f64 == b->valuedouble);
        break;
    case QX_JSON_TRUE: assert_true(cJSON_IsTrue(b)); break;
    case QX_JSON_FALSE: assert_true(cJSON_IsFalse(b)); break;
    case QX_JSON_NULL: assert_true(cJSON_IsNull(b)); break;
    default: fail_msg("type %d in a tree", (int)a->type);
    }
}

/* True when qx accepts the text; then cJSON must, too, and give the same tree. */
static bool both(const char *text, size_t n)
{
    struct qx_json_doc doc = {0};
    struct qx_error err = {0};
    int rc = qx_json_doc_parse(&doc, text, n, "text", NULL, &err);
    if (rc) {
        return false;
    }
    cJSON *c = cJSON_ParseWithLength(text, n);
    if (!c) {
        fail_msg("cJSON refuses: %.*s", (int)n, text);
    }
    compare(doc.root, c);
    cJSON_Delete(c);
    qx_json_doc_fini(&doc);
    return true;
}

static unsigned files_under(const char *dir)
{
    DIR *d = opendir(dir);
    if (!d) {
        assert_int_equal(errno, ENOTDIR);
        size_t n = 0, len = strlen(dir);
        if (len < 5 || strcmp(dir + len - 5, ".json")) {
            return 0;
        }
        char *p = fx_read(dir, &n);
        assert_non_null(p);
        bool ok = both(p, n);
        free(p);
        if (!ok) {
            fail_msg("%s is refused", dir);
        }
        return 1;
    }
    unsigned count = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] != '.') {
            char path[2048];
            snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
            count += files_under(path);
        }
    }
    closedir(d);
    return count;
}

static void files(void **state)
{
    (void)state;
    const char *root = getenv("QX_TEST_DATA");
    assert_non_null(root);
    assert_true(files_under(root) > 10);
}

static uint64_t seed;
static unsigned below(unsigned n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(seed >> 33) % n;
}

/* A value, mostly well-formed; every key of an object is different. No "\u0000": cJSON ends strings there. */
static size_t make(char *p, int depth)
{
    static const char *const scalars[] = {"0", "-1", "18446744073709551615", "1e-7", "-12.5E+3", "0.1", "true",
        "false", "null", "\"\"", "\"a\\n\\\"\\\\\\/\"", "\"\\u00e9\\ud83d\\ude00\"", "\"\xc3\xa9\"", "123456789012",
        "01", "1.", "-", "tru", "\"", "\"\\x\"", "\"\\ud83d\"", "+1", "nul"};
    unsigned kind = depth ? below(3) : 2;
    char *q = p;
    if (kind == 2) {
        unsigned n_all = sizeof scalars / sizeof *scalars, n_good = 14;
        const char *s = scalars[below(60) ? below(n_good) : below(n_all)];
        return (size_t)sprintf(p, "%s", s);
    }
    unsigned n = below(5);
    *q++ = kind ? '[' : '{';
    for (unsigned i = 0; i < n; ++i) {
        q += sprintf(q, "%s%s", i ? "," : "", below(3) ? "" : " \n\t");
        if (!kind) {
            q += sprintf(q, "\"k%u\":", i);
        }
        q += make(q, depth - 1);
    }
    *q++ = below(150) ? (kind ? ']' : '}') : ',';
    return (size_t)(q - p);
}

static void made(void **state)
{
    (void)state;
    static char text[1 << 16];
    unsigned accepted = 0, refused = 0;
    for (seed = 1; accepted + refused < 20000;) {
        text[0] = '[';
        size_t n = 1 + make(text + 1, 4);
        text[n++] = ']';
        if (both(text, n)) {
            ++accepted;
        } else {
            ++refused;
        }
    }
    assert_true(accepted > 5000 && refused > 500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(files), cmocka_unit_test(made)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
