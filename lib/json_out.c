/* json_out.c: owns the text being written. A document is valid at every point where all containers are
 * closed; out of memory is remembered by the buffer. */
#include "json_out.h"

#include "num.h"
#include "utf8.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void qx_json_out_init(struct qx_json_out *o, bool indent)
{
    *o = (struct qx_json_out){.indent = indent};
}

void qx_json_out_fini(struct qx_json_out *o)
{
    if (o) {
        qx_buf_fini(&o->buf);
    }
}

static void new_line(struct qx_json_out *o)
{
    if (o->indent) {
        qx_buf_chr(&o->buf, '\n');
        for (uint32_t i = 0; i < o->depth; i++) {
            qx_buf_add(&o->buf, "  ", 2);
        }
    }
}

static void quoted(struct qx_json_out *o, const char *s, size_t n)
{
    struct qx_buf *b = &o->buf;
    qx_buf_chr(b, '"');
    for (size_t i = 0; i < n;) {
        size_t run = i;
        while (run < n && (unsigned char)s[run] >= 0x20 && (unsigned char)s[run] < 0x7f && s[run] != '"' &&
               s[run] != '\\') {
            run++;
        }
        qx_buf_add(b, s + i, run - i);
        i = run;
        if (i == n) {
            break;
        }
        unsigned char c = (unsigned char)s[i];
        uint32_t cp;
        int len = qx_utf8_decode(s + i, n - i, &cp);
        if (c == '"' || c == '\\') {
            qx_buf_chr(b, '\\');
            qx_buf_chr(b, (char)c);
        } else if (c == '\n') {
            qx_buf_str(b, "\\n");
        } else if (c == '\t') {
            qx_buf_str(b, "\\t");
        } else if (c == '\r') {
            qx_buf_str(b, "\\r");
        } else if (c < 0x20 || c == 0x7f || (len > 0 && cp >= 0x80 && cp < 0xa0)) {
            /* DEL and C1 too, so that a terminal never sees a control byte */
            qx_buf_fmt(b, "\\u%04x", (unsigned)cp);
        } else if (len <= 0) {
            qx_buf_str(b, "\xef\xbf\xbd");
            len = 1;
        } else {
            qx_buf_add(b, s + i, (size_t)len);
        }
        i += (size_t)len;
    }
    qx_buf_chr(b, '"');
}

static bool *comma_flag(struct qx_json_out *o)
{
    return &o->need_comma[o->depth < QX_ARRAY_LEN(o->need_comma) ? o->depth
                                                                : QX_ARRAY_LEN(o->need_comma) - 1];
}

static void begin(struct qx_json_out *o, const char *key)
{
    bool *comma = comma_flag(o);
    if (*comma) {
        qx_buf_chr(&o->buf, ',');
        if (!o->indent) {
            qx_buf_chr(&o->buf, ' ');
        }
    }
    *comma = true;
    if (o->depth) {
        new_line(o);
    }
    if (key) {
        quoted(o, key, strlen(key));
        qx_buf_str(&o->buf, ": ");
    }
}

static void open_with(struct qx_json_out *o, const char *key, char c)
{
    begin(o, key);
    qx_buf_chr(&o->buf, c);
    o->depth++;
    *comma_flag(o) = false;
}

static void close_with(struct qx_json_out *o, char c)
{
    bool had_members = *comma_flag(o);
    o->depth--;
    if (had_members) {
        new_line(o);
    }
    qx_buf_chr(&o->buf, c);
}

void qx_json_obj(struct qx_json_out *o, const char *key)
{
    open_with(o, key, '{');
}

void qx_json_obj_end(struct qx_json_out *o)
{
    close_with(o, '}');
}

void qx_json_arr(struct qx_json_out *o, const char *key)
{
    open_with(o, key, '[');
}

void qx_json_arr_end(struct qx_json_out *o)
{
    close_with(o, ']');
}

void qx_json_strn(struct qx_json_out *o, const char *key, const char *s, size_t n)
{
    begin(o, key);
    quoted(o, s, n);
}

void qx_json_str(struct qx_json_out *o, const char *key, const char *s)
{
    if (s) {
        qx_json_strn(o, key, s, strlen(s));
    } else {
        qx_json_null(o, key);
    }
}

void qx_json_u64(struct qx_json_out *o, const char *key, uint64_t v)
{
    begin(o, key);
    qx_buf_fmt(&o->buf, "%llu", (unsigned long long)v);
}

void qx_json_i64(struct qx_json_out *o, const char *key, int64_t v)
{
    begin(o, key);
    qx_buf_fmt(&o->buf, "%lld", (long long)v);
}

static void number(struct qx_json_out *o, const char *key, double v, bool single)
{
    if (isnan(v)) {
        qx_json_str(o, key, "NaN");
        return;
    }
    if (isinf(v)) {
        qx_json_str(o, key, v < 0 ? "-Infinity" : "Infinity");
        return;
    }
    begin(o, key);
    char text[40];
    for (int digits = single ? 6 : 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        char *comma = strchr(text, ','); /* printf follows the locale, JSON does not */
        if (comma) {
            *comma = '.';
        }
        double back;
        if (qx_parse_f64(text, strlen(text), &back) &&
            (single ? (float)back == (float)v : back == v)) {
            break;
        }
    }
    qx_buf_str(&o->buf, text);
}

void qx_json_f64(struct qx_json_out *o, const char *key, double v)
{
    number(o, key, v, false);
}

void qx_json_f32(struct qx_json_out *o, const char *key, float v)
{
    number(o, key, (double)v, true);
}

void qx_json_bool(struct qx_json_out *o, const char *key, bool v)
{
    begin(o, key);
    qx_buf_str(&o->buf, v ? "true" : "false");
}

void qx_json_null(struct qx_json_out *o, const char *key)
{
    begin(o, key);
    qx_buf_str(&o->buf, "null");
}
