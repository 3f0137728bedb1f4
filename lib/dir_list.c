/* dir_list.c: owns the list of names; looks at names and sizes only, opens no file. */
#include "dir_list.h"

#include "alloc.h"
#include "num.h"
#include "out_dir.h"
#include "str.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int qx_dir_list_read(struct qx_dir_list *l, const char *dir, struct qx_error *err)
{
    *l = (struct qx_dir_list){0};
    DIR *d = opendir(dir);
    if (!d) {
        int rc = qx_fail_errno(err, QX_E_IO, errno, "unreadable-file", "cannot list the directory");
        qx_error_at(err, dir, NULL, QX_NO_OFF);
        return rc;
    }
    int rc = 0;
    size_t cap = 0;
    l->arena = qx_arena_create();
    rc = l->arena ? 0 : qx_fail_nomem(err);
    for (const struct dirent *e; !rc && (errno = 0, e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        void *v = l->names;
        char *name = qx_arena_strndup(l->arena, e->d_name, strlen(e->d_name));
        if (!name || !qx_grow(&v, &cap, l->n + 1, sizeof(*l->names))) {
            rc = qx_fail_nomem(err);
            break;
        }
        l->names = v;
        l->names[l->n++] = name;
    }
    if (!rc && errno) {
        rc = qx_fail_errno(err, QX_E_IO, errno, "unreadable-file", "cannot list the directory");
        qx_error_at(err, dir, NULL, QX_NO_OFF);
    }
    closedir(d);
    if (!rc) {
        l->stray = qx_calloc(l->n, sizeof *l->stray);
        rc = l->stray ? 0 : qx_fail_nomem(err);
    }
    if (rc) {
        qx_dir_list_fini(l);
        return rc;
    }
    if (l->n > 1) {
        qsort(l->names, l->n, sizeof(*l->names), compare_names);
    }
    return 0;
}

void qx_dir_list_fini(struct qx_dir_list *l)
{
    if (l) {
        qx_free(l->names);
        qx_free(l->stray);
        qx_arena_destroy(l->arena);
        *l = (struct qx_dir_list){0};
    }
}

/* A name X-NNNNN-of-MMMMM.safetensors. */
struct numbered { size_t prefix_n, digits; uint64_t number, of; };

static size_t digits_before(const char *s, size_t end)
{
    size_t n = 0;
    while (n < end && s[end - n - 1] >= '0' && s[end - n - 1] <= '9') {
        n++;
    }
    return n;
}

static bool parse_numbered(const char *name, struct numbered *out)
{
    static const char tail[] = ".safetensors", mid[] = "-of-";
    if (!qx_str_ends(name, tail)) {
        return false;
    }
    size_t end = strlen(name) - (sizeof tail - 1);
    size_t of_n = digits_before(name, end);
    if (of_n < 5 || end < of_n + 4 || memcmp(name + end - of_n - 4, mid, 4) != 0) {
        return false;
    }
    size_t num_end = end - of_n - 4, num_n = digits_before(name, num_end);
    if (num_n != of_n || num_end < num_n + 1 || name[num_end - num_n - 1] != '-' ||
        !qx_parse_u64(name + num_end - num_n, num_n, &out->number) ||
        !qx_parse_u64(name + end - of_n, of_n, &out->of)) {
        return false;
    }
    out->prefix_n = num_end - num_n - 1;
    out->digits = of_n;
    return true;
}

/* Files of one set lie next to each other in a sorted list only when no other set of the same prefix is
 * mixed in, so each set is gathered by its first member. */
static bool same_set(const char *a, const struct numbered *na, const char *b, const struct numbered *nb)
{
    return na->of == nb->of && na->digits == nb->digits && na->prefix_n == nb->prefix_n &&
           memcmp(a, b, na->prefix_n) == 0;
}

static void add_gap(struct qx_buf *text, uint64_t from, uint64_t to, int digits)
{
    if (text->n) {
        qx_buf_str(text, ", ");
    }
    qx_buf_fmt(text, "%0*" PRIu64, digits, from);
    if (to > from) {
        qx_buf_fmt(text, "-%0*" PRIu64, digits, to);
    }
}

static bool report_gaps(const char *name, const struct numbered *set, const struct qx_buf *gaps,
                        uint64_t absent, uint64_t first, struct qx_findings *fs)
{
    struct qx_buf file = {0}, text = {0};
    qx_buf_fmt(&file, "%.*s-%0*" PRIu64 "-of-%0*" PRIu64 ".safetensors", (int)set->prefix_n, name,
               (int)set->digits, first, (int)set->digits, set->of);
    qx_buf_fmt(&text, "%" PRIu64 " of %" PRIu64 " numbered files are absent: %.*s", absent, set->of,
               gaps->n > 200 ? 200 : (int)gaps->n, gaps->p);
    if (gaps->n > 200) {
        qx_buf_str(&text, "...");
    }
    const char *f = qx_buf_cstr(&file), *t = qx_buf_cstr(&text);
    struct qx_report r = QX_REPORT("shard-missing", QX_ERROR, .file = f, .expected = "all numbers of the set",
                                   .found = gaps->p, .text = t, .count = absent);
    bool ok = f && t && qx_findings_add(fs, &r);
    qx_buf_fini(&file);
    qx_buf_fini(&text);
    return ok;
}

/* The set whose first member is names[i]; later members are marked as seen. */
static bool check_set(const struct qx_dir_list *l, size_t i, const struct numbered *set, bool *seen,
                      struct qx_findings *fs)
{
    /* Within a set, sorted names are sorted numbers: gaps show between neighbours. Numbers start at 1,
     * or at 0 when there is a 0. */
    uint64_t next = set->number == 0 ? 0 : 1, last = set->number == 0 ? set->of - 1 : set->of;
    uint64_t absent = 0, first = 0;
    struct qx_buf gaps = {0};
    struct numbered m;
    for (size_t k = i; k < l->n; k++) {
        if (seen[k] || !parse_numbered(l->names[k], &m) || !same_set(l->names[i], set, l->names[k], &m)) {
            continue;
        }
        seen[k] = true;
        if (m.number > last || m.number < next) {
            continue;
        }
        if (m.number > next) {
            first = absent ? first : next;
            absent += m.number - next;
            add_gap(&gaps, next, m.number - 1, (int)set->digits);
        }
        next = m.number + 1;
    }
    if (next <= last && set->of > 0) {
        first = absent ? first : next;
        absent += last - next + 1;
        add_gap(&gaps, next, last, (int)set->digits);
    }
    bool ok = qx_buf_cstr(&gaps) && (absent == 0 || report_gaps(l->names[i], set, &gaps, absent, first, fs));
    qx_buf_fini(&gaps);
    return ok;
}

bool qx_dir_check_numbers(const struct qx_dir_list *l, struct qx_findings *fs)
{
    bool *seen = qx_calloc(l->n, sizeof *seen);
    bool ok = seen != NULL;
    struct numbered set;
    size_t sets = 0;
    for (size_t i = 0; i < l->n && ok; i++) {
        /* Gathering is quadratic in the number of sets; nobody has a thousand of them. */
        if (!seen[i] && l->names[i][0] != '.' && parse_numbered(l->names[i], &set) && sets++ < 1000) {
            ok = check_set(l, i, &set, seen, fs);
        }
    }
    qx_free(seen);
    return ok;
}

const char *qx_dir_foreign(const struct qx_dir_list *l)
{
    static const struct { const char *suffix, *what; } known[] = {
        {QX_ARCHIVE_LIST, "an archive, which 'qx repack ARCHIVE -o OUT' restores"},
        {".gguf", "a GGUF file, which llama.cpp reads and qx does not"},
        {".bin", "a .bin file, perhaps an old PyTorch checkpoint, which qx does not read"},
        {".pt", "a PyTorch file, which qx does not read"},
        {".pth", "a PyTorch file, which qx does not read"},
        {".npz", "a numpy archive, which qx does not read"},
        {".safetensors.incomplete", "an unfinished download"},
        {".incomplete", "an unfinished download"},
    };
    for (size_t k = 0; k < QX_ARRAY_LEN(known); k++) {
        for (size_t i = 0; i < l->n; i++) {
            if (qx_str_ends(l->names[i], known[k].suffix)) {
                return known[k].what;
            }
        }
    }
    return NULL;
}

static bool looks_like_checkpoint(const char *path)
{
    static const char *const names[] = {"config.json", "model.safetensors.index.json", "model.safetensors"};
    char file[PATH_MAX];
    struct stat st;
    bool any = false;
    for (size_t i = 0; i < QX_ARRAY_LEN(names); i++) {
        int n = snprintf(file, sizeof file, "%s/%s", path, names[i]);
        any = any || (n > 0 && (size_t)n < sizeof file && stat(file, &st) == 0 && S_ISREG(st.st_mode));
    }
    return any;
}

bool qx_dir_nested(const char *dir, const struct qx_dir_list *l, char *out, size_t cap)
{
    for (size_t i = 0; i < l->n; i++) {
        int n = snprintf(out, cap, "%s/%s", dir, l->names[i]);
        if (l->names[i][0] != '.' && n > 0 && (size_t)n < cap && looks_like_checkpoint(out)) {
            return true;
        }
    }
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/snapshots", dir);
    struct qx_dir_list below;
    bool found = false;
    if (n > 0 && (size_t)n < sizeof path && strcmp(strrchr(dir, '/') ? strrchr(dir, '/') + 1 : dir, "snapshots") != 0 &&
        qx_dir_list_read(&below, path, NULL) == 0) {
        found = qx_dir_nested(path, &below, out, cap);
        qx_dir_list_fini(&below);
    }
    return found;
}

static bool partial_at(const char *path, char *out, size_t cap)
{
    struct stat st;
    char size[32];
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode)) {
        return false;
    }
    const char *slash = strrchr(path, '/');
    snprintf(out, cap, "%.200s, %s", slash ? slash + 1 : path, qx_size_text((uint64_t)st.st_size, size));
    return true;
}

/* Paths too long for the buffer are not looked at: this only adds a hint. */
static bool partial_in_hub_folder(const char *dir, const char *name, char *out, size_t cap)
{
    char path[PATH_MAX];
    bool found = false;
    int n = snprintf(path, sizeof path, "%s/.cache/huggingface/download", dir);
    DIR *d = n > 0 && (size_t)n < sizeof path ? opendir(path) : NULL;
    for (const struct dirent *e; d && !found && (e = readdir(d)) != NULL;) {
        if (qx_str_starts(e->d_name, name) && qx_str_ends(e->d_name, ".incomplete")) {
            int k = snprintf(path + n, sizeof path - (size_t)n, "/%s", e->d_name);
            found = k > 0 && (size_t)n + (size_t)k < sizeof path && partial_at(path, out, cap);
        }
    }
    if (d) {
        closedir(d);
    }
    return found;
}

bool qx_dir_partial(const char *dir, const char *name, const char *link_target, char *out, size_t cap)
{
    static const char *const suffix[] = {".incomplete", ".part", ".aria2", ".crdownload"};
    char path[PATH_MAX];
    for (size_t i = 0; i < 2 * QX_ARRAY_LEN(suffix); i++) {
        const char *base = i < QX_ARRAY_LEN(suffix) ? name : link_target;
        if (!base) {
            break;
        }
        bool absolute = base[0] == '/';
        int n = snprintf(path, sizeof path, "%s%s%s%s", absolute ? "" : dir, absolute ? "" : "/", base,
                         suffix[i % QX_ARRAY_LEN(suffix)]);
        if (n > 0 && (size_t)n < sizeof path && partial_at(path, out, cap)) {
            return true;
        }
    }
    return partial_in_hub_folder(dir, name, out, cap);
}
