/* json_pull.c: owns the strict reader: a state machine over bytes with a stack of container kinds.
 * No recursion; the depth limit bounds the stack. Errors are final: after one, every call repeats it. */
#include "json_pull.h"

#include "num.h"
#include "utf8.h"

#include <math.h>
#include <string.h>

enum state {
    S_START = 0,     /* before the top-level value */
    S_VALUE,         /* a value must follow (after ':' or, in an array, ',') */
    S_FIRST_VALUE,   /* after '[': a value or ']' */
    S_FIRST_KEY,     /* after '{': a key or '}' */
    S_AFTER_VALUE,   /* ',' or the end of the container, or the end of the text */
    S_END,
    S_ERROR
};

enum { IN_OBJECT = 0, IN_ARRAY = 1 };

void qx_json_pull_init(struct qx_json_pull *j, const char *text, size_t n)
{
    *j = (struct qx_json_pull){.p = text, .end = text + n, .begin = text};
}

void qx_json_pull_fini(struct qx_json_pull *j)
{
    if (j) {
        qx_buf_fini(&j->scratch);
    }
}

static enum qx_json_type event(struct qx_json_pull *j, enum qx_json_type type)
{
    j->type = type;
    return type;
}

#define FAIL_AT(j, at, kind, ...)                                                        \
    ((void)qx_fail(&(j)->err, QX_E_FORMAT, (kind), __VA_ARGS__),                        \
     (j)->err.off = (uint64_t)((at) - (j)->begin), (j)->state = S_ERROR,                \
     (j)->off = (j)->err.off, event((j), QX_JSON_ERROR))

static enum qx_json_type fail_nomem(struct qx_json_pull *j)
{
    (void)qx_fail_nomem(&j->err);
    j->state = S_ERROR;
    return event(j, QX_JSON_ERROR);
}

static enum qx_json_type unexpected(struct qx_json_pull *j, const char *wanted)
{
    if (j->p == j->end) {
        return FAIL_AT(j, j->p, "json-syntax", "text ends where %s is expected", wanted);
    }
    unsigned char c = (unsigned char)*j->p;
    if (c >= 0x20 && c < 0x7f) {
        return FAIL_AT(j, j->p, "json-syntax", "'%c' where %s is expected", c, wanted);
    }
    return FAIL_AT(j, j->p, "json-syntax", "byte 0x%02x where %s is expected", c, wanted);
}

static void skip_space(struct qx_json_pull *j)
{
    const char *p = j->p;
    while (p < j->end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) {
        p++;
    }
    j->p = p;
}

static bool read_hex4(const char *p, const char *end, uint32_t *v)
{
    if (end - p < 4) {
        return false;
    }
    *v = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        uint32_t d;
        if (c >= '0' && c <= '9') {
            d = (uint32_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            d = (uint32_t)(c - 'a') + 10;
        } else if (c >= 'A' && c <= 'F') {
            d = (uint32_t)(c - 'A') + 10;
        } else {
            return false;
        }
        *v = *v << 4 | d;
    }
    return true;
}

/* At '\\'. Appends the character to scratch; false after setting the error. */
static bool read_escape(struct qx_json_pull *j)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *at = j->p++;
    if (j->p == j->end) {
        (void)FAIL_AT(j, at, "json-syntax", "text ends inside an escape");
        return false;
    }
    char c = *j->p++;
    const char *simple = c ? strchr(from, c) : NULL;
    if (simple) {
        qx_buf_chr(&j->scratch, to[simple - from]);
        return true;
    }
    uint32_t cp, low;
    if (c != 'u' || !read_hex4(j->p, j->end, &cp)) {
        (void)FAIL_AT(j, at, "json-syntax", "not an escape that JSON knows");
        return false;
    }
    j->p += 4;
    if (cp >= 0xd800 && cp <= 0xdfff) {
        if (cp >= 0xdc00 || j->end - j->p < 6 || j->p[0] != '\\' || j->p[1] != 'u' ||
            !read_hex4(j->p + 2, j->end, &low) || low < 0xdc00 || low > 0xdfff) {
            (void)FAIL_AT(j, at, "json-utf8", "escape \\u%04x is half of a surrogate pair",
                          (unsigned)cp);
            return false;
        }
        j->p += 6;
        cp = 0x10000 + ((cp - 0xd800) << 10) + (low - 0xdc00);
    }
    char utf8[4];
    qx_buf_add(&j->scratch, utf8, qx_utf8_encode(cp, utf8));
    return true;
}

/* At the opening quote. Without escapes the text is a view into the source. */
static bool read_string(struct qx_json_pull *j)
{
    const char *open = j->p++, *run = j->p;
    bool escaped = false;
    j->scratch.n = 0;
    for (;;) {
        const char *p = j->p;
        while (p < j->end && (unsigned char)*p >= 0x20 && *p != '"' && *p != '\\' &&
               (unsigned char)*p < 0x80) {
            p++;
        }
        j->p = p;
        if (p == j->end) {
            (void)FAIL_AT(j, open, "json-syntax", "string without an end");
            return false;
        }
        unsigned char c = (unsigned char)*p;
        if (c == '"') {
            break;
        }
        if (c == '\\') {
            qx_buf_add(&j->scratch, run, (size_t)(p - run));
            escaped = true;
            if (!read_escape(j)) {
                return false;
            }
            run = j->p;
            continue;
        }
        if (c < 0x20) {
            (void)FAIL_AT(j, p, "json-syntax", "control byte 0x%02x inside a string", c);
            return false;
        }
        uint32_t cp;
        int len = qx_utf8_decode(p, (size_t)(j->end - p), &cp);
        if (len <= 0) {
            (void)FAIL_AT(j, p, "json-utf8", "byte 0x%02x is not UTF-8", c);
            return false;
        }
        j->p = p + len;
    }
    if (escaped) {
        qx_buf_add(&j->scratch, run, (size_t)(j->p - run));
        const char *s = qx_buf_cstr(&j->scratch);
        if (!s) {
            (void)fail_nomem(j);
            return false;
        }
        j->text = (struct qx_view){s, j->scratch.n};
    } else {
        j->text = (struct qx_view){run, (size_t)(j->p - run)};
    }
    j->p++;
    return true;
}

static const char *skip_digits(const char *p, const char *end)
{
    while (p < end && *p >= '0' && *p <= '9') {
        p++;
    }
    return p;
}

static enum qx_json_type read_number(struct qx_json_pull *j)
{
    const char *begin = j->p, *p = begin;
    bool minus = *p == '-', plain = true;
    p += minus;
    if (p == j->end || *p < '0' || *p > '9') {
        return FAIL_AT(j, begin, "json-syntax", "'-' without a number");
    }
    const char *digits = p;
    p = skip_digits(p, j->end);
    if (*digits == '0' && p - digits > 1) {
        return FAIL_AT(j, begin, "json-syntax", "number with leading zeros");
    }
    if (p < j->end && *p == '.') {
        const char *frac = ++p;
        plain = false;
        p = skip_digits(p, j->end);
        if (p == frac) {
            return FAIL_AT(j, begin, "json-syntax", "number without digits after its point");
        }
    }
    if (p < j->end && (*p == 'e' || *p == 'E')) {
        plain = false;
        p++;
        p += p < j->end && (*p == '+' || *p == '-');
        const char *exp = p;
        p = skip_digits(p, j->end);
        if (p == exp) {
            return FAIL_AT(j, begin, "json-syntax", "number without digits in its exponent");
        }
    }
    j->text = (struct qx_view){begin, (size_t)(p - begin)};
    j->p = p;
    j->negative = minus;
    j->is_nonfinite = false;
    j->is_int = false;
    j->uint_value = 0;
    j->int_value = 0;
    uint64_t u;
    int64_t i;
    if (plain && !minus && qx_parse_u64(begin, j->text.n, &u)) {
        j->is_int = true;
        j->uint_value = u;
        j->int_value = u <= INT64_MAX ? (int64_t)u : 0;
        j->f64 = (double)u;
    } else if (plain && minus && qx_parse_i64(begin, j->text.n, &i)) {
        j->is_int = true;
        j->int_value = i;
        j->f64 = i == 0 ? -0.0 : (double)i;
    } else if (!qx_parse_f64(begin, j->text.n, &j->f64)) {
        if (j->text.n > 500) {
            return FAIL_AT(j, begin, "json-syntax", "number of %zu characters", j->text.n);
        }
        j->is_nonfinite = true; /* well formed, but past the largest double */
        j->f64 = minus ? -HUGE_VAL : HUGE_VAL;
    }
    return event(j, QX_JSON_NUMBER);
}

static bool take_word(struct qx_json_pull *j, const char *word)
{
    size_t n = strlen(word);
    if ((size_t)(j->end - j->p) < n || memcmp(j->p, word, n) != 0) {
        return false;
    }
    j->text = (struct qx_view){j->p, n};
    j->p += n;
    return true;
}

static enum qx_json_type read_word(struct qx_json_pull *j)
{
    if (take_word(j, "true")) {
        return event(j, QX_JSON_TRUE);
    }
    if (take_word(j, "false")) {
        return event(j, QX_JSON_FALSE);
    }
    if (take_word(j, "null")) {
        return event(j, QX_JSON_NULL);
    }
    if (j->allow_nonfinite) {
        double v = 0;
        if (take_word(j, "NaN")) {
            v = NAN;
        } else if (take_word(j, "Infinity")) {
            v = HUGE_VAL;
        } else if (take_word(j, "-Infinity")) {
            v = -HUGE_VAL;
        } else {
            return unexpected(j, "a value");
        }
        j->is_int = false;
        j->is_nonfinite = true;
        j->negative = v < 0;
        j->uint_value = 0;
        j->int_value = 0;
        j->f64 = v;
        return event(j, QX_JSON_NUMBER);
    }
    return unexpected(j, "a value");
}

static enum qx_json_type open_container(struct qx_json_pull *j, uint8_t kind)
{
    if (j->depth == QX_JSON_MAX_DEPTH) {
        return FAIL_AT(j, j->p, "json-too-deep", "nested more than %d levels deep", QX_JSON_MAX_DEPTH);
    }
    uint64_t bit = (uint64_t)1 << j->depth % 64, *word = &j->is_array[j->depth / 64];
    *word = kind == IN_ARRAY ? *word | bit : *word & ~bit;
    j->depth++;
    j->p++;
    j->state = kind == IN_OBJECT ? S_FIRST_KEY : S_FIRST_VALUE;
    return event(j, kind == IN_OBJECT ? QX_JSON_OBJECT : QX_JSON_ARRAY);
}

static uint8_t innermost(const struct qx_json_pull *j)
{
    uint32_t at = j->depth - 1;
    return j->is_array[at / 64] >> at % 64 & 1 ? IN_ARRAY : IN_OBJECT;
}

static enum qx_json_type close_container(struct qx_json_pull *j)
{
    uint8_t kind = innermost(j);
    j->depth--;
    j->p++;
    j->state = S_AFTER_VALUE;
    return event(j, kind == IN_OBJECT ? QX_JSON_OBJECT_END : QX_JSON_ARRAY_END);
}

static enum qx_json_type read_value(struct qx_json_pull *j)
{
    if (j->p == j->end) {
        return unexpected(j, "a value");
    }
    char c = *j->p;
    if (c == '{') {
        return open_container(j, IN_OBJECT);
    }
    if (c == '[') {
        return open_container(j, IN_ARRAY);
    }
    j->state = S_AFTER_VALUE;
    if (c == '"') {
        return read_string(j) ? event(j, QX_JSON_STRING) : QX_JSON_ERROR;
    }
    if ((c >= '0' && c <= '9') || (c == '-' && !(j->allow_nonfinite && j->end - j->p > 1 && j->p[1] == 'I'))) {
        return read_number(j);
    }
    return read_word(j);
}

static enum qx_json_type read_key(struct qx_json_pull *j)
{
    j->off = (uint64_t)(j->p - j->begin);
    if (j->p == j->end || *j->p != '"') {
        return unexpected(j, "a key");
    }
    if (!read_string(j)) {
        return QX_JSON_ERROR;
    }
    skip_space(j);
    if (j->p == j->end || *j->p != ':') {
        return unexpected(j, "':'");
    }
    j->p++;
    j->state = S_VALUE;
    return event(j, QX_JSON_KEY);
}

enum qx_json_type qx_json_next(struct qx_json_pull *j)
{
    if (j->state == S_ERROR) {
        return event(j, QX_JSON_ERROR);
    }
    if (j->state == S_START && j->end - j->p >= 3 && memcmp(j->p, "\xef\xbb\xbf", 3) == 0) {
        return FAIL_AT(j, j->p, "json-bom", "starts with a byte-order mark, which JSON forbids");
    }
    skip_space(j);
    j->off = (uint64_t)(j->p - j->begin);
    bool at_end = j->p == j->end;
    switch ((enum state)j->state) {
    case S_START:
    case S_VALUE:
        return read_value(j);
    case S_FIRST_VALUE:
        return !at_end && *j->p == ']' ? close_container(j) : read_value(j);
    case S_FIRST_KEY:
        return !at_end && *j->p == '}' ? close_container(j) : read_key(j);
    case S_AFTER_VALUE:
        break;
    case S_END:
        return event(j, QX_JSON_END);
    case S_ERROR:
        return event(j, QX_JSON_ERROR);
    }
    if (j->depth == 0) {
        if (!at_end) {
            return unexpected(j, "the end of the text");
        }
        j->state = S_END;
        return event(j, QX_JSON_END);
    }
    bool in_object = innermost(j) == IN_OBJECT;
    if (!at_end && *j->p == (in_object ? '}' : ']')) {
        return close_container(j);
    }
    if (at_end || *j->p != ',') {
        return unexpected(j, in_object ? "',' or '}'" : "',' or ']'");
    }
    j->p++;
    skip_space(j);
    j->off = (uint64_t)(j->p - j->begin);
    return in_object ? read_key(j) : read_value(j);
}

bool qx_json_skip(struct qx_json_pull *j)
{
    if (j->type == QX_JSON_KEY && qx_json_next(j) == QX_JSON_ERROR) {
        return false;
    }
    if (j->type != QX_JSON_OBJECT && j->type != QX_JSON_ARRAY) {
        return j->type != QX_JSON_ERROR;
    }
    uint32_t outside = j->depth - 1;
    while (j->depth > outside) {
        if (qx_json_next(j) == QX_JSON_ERROR) {
            return false;
        }
    }
    return true;
}

void qx_json_line_col(const char *text, size_t n, uint64_t off, uint64_t *line, uint64_t *col)
{
    size_t end = off < n ? (size_t)off : n;
    const char *p = text, *stop = text + end, *start = text;
    *line = 1;
    while (p < stop && (p = memchr(p, '\n', (size_t)(stop - p))) != NULL) {
        start = ++p;
        ++*line;
    }
    *col = (uint64_t)(stop - start) + 1;
}
