/* json_edit.c: see json_edit.h. Positions come from the strict reader; the last of equal keys is
 * taken, as everywhere. */
#include "json_edit.h"

#include "json_pull.h"

#include <string.h>

struct span {
    size_t key, value, end; /* of the member */
    size_t inside, close;   /* of the object: after '{', and its '}' */
    bool found, object;
    bool first;           /* no member before it */
    size_t before, after; /* end of the member before it; start of the one after it, 0 if none */
    size_t last_end;      /* end of the object's last member, 0 if it is empty */
    size_t first_key;     /* 0 if empty */
};

/* Looks through the object at the reader's position for key[0..n). */
static bool scan(struct qx_json_pull *j, const char *key, size_t n, struct span *s)
{
    bool was_hit = false;
    memset(s, 0, sizeof *s);
    s->object = true;
    s->inside = (size_t)(j->p - j->begin);
    for (;;) {
        enum qx_json_type t = qx_json_next(j);
        if (t == QX_JSON_OBJECT_END) {
            s->close = (size_t)j->off;
            return true;
        }
        if (t != QX_JSON_KEY) {
            return false;
        }
        size_t at = (size_t)j->off;
        bool hit = j->text.n == n && memcmp(j->text.p, key, n) == 0;
        if (was_hit) {
            s->after = at;
        }
        if (s->first_key == 0) {
            s->first_key = at;
        }
        t = qx_json_next(j);
        size_t value = (size_t)j->off;
        if (t == QX_JSON_ERROR || !qx_json_skip(j)) {
            return false;
        }
        size_t end = (size_t)(j->p - j->begin);
        if (hit) {
            s->found = true;
            s->first = s->last_end == 0;
            s->before = s->last_end;
            s->key = at;
            s->value = value;
            s->end = end;
            s->after = 0;
        }
        was_hit = hit;
        s->last_end = end;
    }
}

static bool locate(const struct qx_buf *text, const char *path, struct span *s)
{
    size_t begin = 0, end = text->n;
    memset(s, 0, sizeof *s);
    for (;;) {
        size_t n = strcspn(path, "/");
        struct qx_json_pull j;
        qx_json_pull_init(&j, text->p + begin, end - begin);
        j.allow_nonfinite = true;
        bool ok = qx_json_next(&j) == QX_JSON_OBJECT && scan(&j, path, n, s);
        qx_json_pull_fini(&j);
        if (!ok) {
            memset(s, 0, sizeof *s);
            return false;
        }
        size_t *at[] = {&s->key, &s->value, &s->end, &s->inside, &s->close};
        for (size_t i = 0; i < QX_ARRAY_LEN(at); i++) {
            *at[i] += begin;
        }
        s->before += s->before > 0 ? begin : 0;
        s->after += s->after > 0 ? begin : 0;
        s->last_end += s->last_end > 0 ? begin : 0;
        s->first_key += s->first_key > 0 ? begin : 0;
        if (path[n] == 0) {
            return true;
        }
        if (!s->found) {
            memset(s, 0, sizeof *s);
            return false;
        }
        begin = s->value;
        end = s->end;
        path += n + 1;
    }
}

static bool splice(struct qx_buf *text, size_t from, size_t to, const char *p, size_t n)
{
    struct qx_buf b = {0};
    qx_buf_add(&b, text->p, from);
    qx_buf_add(&b, p, n);
    qx_buf_add(&b, text->p + to, text->n - to);
    if (b.failed) {
        qx_buf_fini(&b);
        return false;
    }
    qx_buf_fini(text);
    *text = b;
    return true;
}

bool qx_json_edit_find(const struct qx_buf *text, const char *path, struct qx_view *value)
{
    struct span s;
    if (!locate(text, path, &s) || !s.found) {
        return false;
    }
    *value = (struct qx_view){text->p + s.value, s.end - s.value};
    return true;
}

bool qx_json_edit_set(struct qx_buf *text, const char *path, const char *value)
{
    struct span s;
    if (!locate(text, path, &s) || !s.object) {
        return false;
    }
    if (s.found) {
        return splice(text, s.value, s.end, value, strlen(value));
    }
    const char *key = strrchr(path, '/');
    key = key != NULL ? key + 1 : path;
    struct qx_buf b = {0};
    size_t at = s.last_end > 0 ? s.last_end : s.inside;
    if (s.last_end > 0) {
        /* The white space before the first member is what stands between members. */
        qx_buf_chr(&b, ',');
        qx_buf_add(&b, text->p + s.inside, s.first_key - s.inside);
        if (s.first_key == s.inside) {
            qx_buf_chr(&b, ' ');
        }
    }
    qx_buf_fmt(&b, "\"%s\": %s", key, value);
    bool ok = !b.failed && splice(text, at, at, b.p, b.n);
    qx_buf_fini(&b);
    return ok;
}

bool qx_json_edit_remove(struct qx_buf *text, const char *path)
{
    struct span s;
    if (!locate(text, path, &s) || !s.found) {
        return true;
    }
    if (!s.first) {
        return splice(text, s.before, s.end, "", 0);
    }
    return s.after > 0 ? splice(text, s.key, s.after, "", 0)
                       : splice(text, s.inside, s.close, "", 0);
}
