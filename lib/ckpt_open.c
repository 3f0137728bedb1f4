/* ckpt_open.c: owns the way from a path to a checkpoint: which files belong to it, their headers (read in
 * parallel), the small JSON files, and the findings about files that are absent, left over or no shards.
 * Order of results follows names, never the directory or the threads. */
#include "ckpt_priv.h"
#include "dir_list.h"
#include "json_doc.h"
#include "str.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_INDEX_BYTES ((uint64_t)1 << 30)
#define MAX_CONFIG_BYTES ((uint64_t)64 << 20)
#define KEEP_OPEN 512 /* descriptors kept; more files are opened again when read */

struct opening {
    struct qx_ckpt *ck;
    const struct qx_open *how;
    struct qx_dir_list list; /* of the directory; empty for a single file or a lone config */
    struct qx_findings **file_findings;
    struct qx_error *file_errors;
};

static bool add(struct qx_ckpt *ck, const struct qx_report *r)
{
    return qx_findings_add(ck->findings, r);
}

static char *join_path(struct qx_ckpt *ck, const char *dir, const char *name)
{
    size_t a = strlen(dir), b = strlen(name);
    char *p = qx_arena_alloc(ck->arena, a + b + 2, 1);
    if (p) {
        memcpy(p, dir, a);
        p[a] = '/';
        memcpy(p + a + 1, name, b + 1);
    }
    return p;
}

/* ---- which files ------------------------------------------------------------------------------- */

static int set_place(struct qx_ckpt *ck, bool is_dir, const char **base, struct qx_error *err)
{
    size_t n = strlen(ck->path);
    while (n > 1 && ck->path[n - 1] == '/') {
        n--;
    }
    *base = "";
    if (!is_dir) {
        const char *slash = memrchr(ck->path, '/', n);
        *base = slash ? slash + 1 : ck->path;
        ck->dir = !slash            ? "."
                  : slash == ck->path ? "/"
                                      : qx_arena_strndup(ck->arena, ck->path, (size_t)(slash - ck->path));
    } else {
        ck->dir = qx_arena_strndup(ck->arena, ck->path, n);
    }
    return ck->dir ? 0 : qx_fail_nomem(err);
}

static const char *choose_index(const struct qx_dir_list *list)
{
    const char *found = NULL;
    for (size_t i = 0; i < list->n; i++) {
        if (strcmp(list->names[i], "model.safetensors.index.json") == 0) {
            return list->names[i];
        }
        if (!found && qx_str_ends(list->names[i], ".safetensors.index.json")) {
            found = list->names[i];
        }
    }
    return found;
}

static int read_index(struct opening *o, struct qx_error *err)
{
    struct qx_ckpt *ck = o->ck;
    struct qx_error io;
    char *text;
    size_t n;
    const char *path = join_path(ck, ck->dir, ck->index_name);
    if (!path) {
        return qx_fail_nomem(err);
    }
    ck->has_index = true;
    int rc = qx_file_read_all(path, MAX_INDEX_BYTES, &text, &n, &io);
    if (rc == -(int)QX_E_NOMEM) {
        return qx_fail_nomem(err);
    }
    if (rc) {
        struct qx_report r = QX_REPORT("unreadable-file", QX_ERROR, .file = ck->index_name, .text = io.msg);
        return add(ck, &r) ? 0 : qx_fail_nomem(err);
    }
    rc = qx_index_parse(&ck->index, text, n, ck->index_name, ck->findings, err);
    qx_free(text);
    return rc;
}

static int make_files(struct opening *o, const char *single, struct qx_error *err)
{
    struct qx_ckpt *ck = o->ck;
    const struct qx_index *x = &ck->index;
    size_t n = 0, cap = single ? 1 : x->usable ? x->n_files : o->list.n;
    ck->files = qx_calloc(cap, sizeof *ck->files);
    ck->priv = qx_calloc(cap, sizeof *ck->priv);
    ck->lazy = qx_calloc(1, sizeof *ck->lazy);
    if (ck->lazy) {
        pthread_mutex_init(&ck->lazy->lock, NULL);
        ck->lazy->files = ck->priv;
    }
    if (!ck->files || !ck->priv || !ck->lazy) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; i < cap; i++) {
        const char *name = single ? single : x->usable ? x->files[i].name : o->list.names[i];
        if (!single && !x->usable && !(qx_str_ends(name, ".safetensors") && name[0] != '.')) {
            continue;
        }
        struct ckpt_file *p = &ck->priv[n];
        p->fd = -1;
        p->indexed = x->usable && !single;
        p->n_indexed = p->indexed ? x->files[i].n_tensors : 0;
        p->path = single ? qx_arena_strndup(ck->arena, ck->path, strlen(ck->path))
                         : join_path(ck, ck->dir, name);
        ck->files[n].name = qx_arena_strndup(ck->arena, name, strlen(name));
        if (p->indexed && x->files[i].unsafe) {
            ck->files[n].state = QX_FILE_REFUSED;
        }
        ck->n_files = n + 1;
        if (!p->path || !ck->files[n].name) {
            return qx_fail_nomem(err);
        }
        n++;
    }
    return 0;
}

/* ---- headers ----------------------------------------------------------------------------------- */

/* The target of a link at path, when it is one that leads nowhere. */
static const char *broken_link(const char *path, int sys, char *target, size_t cap, const char **what)
{
    ssize_t n = readlink(path, target, cap - 1);
    if (n < 0) {
        return NULL;
    }
    target[n] = '\0';
    *what = sys == ELOOP ? "link loop" : "dangling link";
    return target;
}

static int read_one(struct opening *o, size_t i, struct qx_findings *fs, struct qx_error *err)
{
    struct qx_file *f = &o->ck->files[i];
    struct ckpt_file *p = &o->ck->priv[i];
    struct qx_error io;
    struct stat st;
    int fd;
    if (f->state == QX_FILE_REFUSED) {
        return 0;
    }
    if (stat(p->path, &st) != 0 && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP)) {
        f->state = QX_FILE_MISSING; /* reported once all files are known */
        return 0;
    }
    f->state = QX_FILE_BAD;
    if (qx_file_open(p->path, &fd, &f->size_bytes, &io)) {
        struct qx_report r = QX_REPORT(strcmp(io.kind, "not-a-file") == 0 ? "not-safetensors" : "unreadable-file",
                                       QX_ERROR, .file = f->name, .text = io.msg);
        return qx_findings_add(fs, &r) ? 0 : qx_fail_nomem(err);
    }
    int rc = qx_st_header_read(&p->header, fd, f->size_bytes, f->name, o->how->max_header_bytes, fs, err);
    if (!rc && fstat(fd, &st) == 0) {
        p->dev = st.st_dev;
        p->ino = st.st_ino;
        f->state = p->header.state;
        f->header_bytes = p->header.header_bytes;
        f->data_off = f->state == QX_FILE_BAD ? 0 : p->header.data_off;
        f->n_tensors = p->header.n_entries;
        f->has_metadata = p->header.has_metadata;
        f->meta = p->header.meta;
        f->n_meta = p->header.n_meta;
    }
    if (!rc && f->state != QX_FILE_BAD && o->ck->n_files <= KEEP_OPEN) {
        p->fd = fd;
    } else {
        qx_file_close(fd);
    }
    return rc;
}

static void read_one_job(void *user, uint64_t i, uint32_t worker)
{
    struct opening *o = user;
    (void)worker;
    o->file_findings[i] = qx_findings_create();
    if (o->file_findings[i]) {
        (void)read_one(o, (size_t)i, o->file_findings[i], &o->file_errors[i]);
    } else {
        (void)qx_fail_nomem(&o->file_errors[i]);
    }
}

static int read_headers(struct opening *o, struct qx_error *err)
{
    struct qx_ckpt *ck = o->ck;
    struct qx_pool *pool = NULL;
    size_t n = ck->n_files;
    o->file_findings = qx_calloc(n, sizeof(*o->file_findings));
    o->file_errors = qx_calloc(n, sizeof *o->file_errors);
    int rc = o->file_findings && o->file_errors ? 0 : qx_fail_nomem(err);
    if (!rc && n > 1 && o->how->n_threads != 1) {
        rc = qx_pool_create(&pool, o->how->n_threads, err);
    }
    if (!rc) {
        qx_pool_run(pool, n, 1, read_one_job, o);
    }
    qx_pool_destroy(pool);
    for (size_t i = 0; i < n && o->file_findings; i++) {
        if (!rc && o->file_errors[i].code) {
            rc = -(int)o->file_errors[i].code;
            if (err) {
                *err = o->file_errors[i];
            }
        }
        if (!rc && !qx_findings_append(ck->findings, o->file_findings[i])) {
            rc = qx_fail_nomem(err);
        }
        qx_findings_destroy(o->file_findings[i]);
    }
    qx_free(o->file_findings);
    qx_free(o->file_errors);
    return rc;
}

/* ---- files that are absent or left over -------------------------------------------------------- */

#define MAX_PARTIALS 100 /* absent files for which a partial download is looked for */

/* What a missing file's findings say: found as in "dangling link -> target", and the whole text. */
struct absence { struct qx_buf found, text; };

static void absence_fini(struct absence *a)
{
    qx_buf_fini(&a->found);
    qx_buf_fini(&a->text);
}

static bool describe_absence(const struct qx_ckpt *ck, size_t i, bool look_for_partial, struct absence *a)
{
    const struct qx_file *f = &ck->files[i];
    const struct ckpt_file *p = &ck->priv[i];
    char target[PATH_MAX], partial[512];
    const char *what = NULL;
    struct stat st;
    int sys = stat(p->path, &st) == 0 ? 0 : errno;
    const char *to = broken_link(p->path, sys, target, sizeof target, &what);
    if (to) {
        qx_buf_fmt(&a->found, "%s -> %s", what, to);
    } else {
        qx_buf_str(&a->found, "absent");
    }
    const char *state = qx_buf_cstr(&a->found);
    if (p->indexed) {
        qx_buf_fmt(&a->text, "the index places %" PRIu64 " tensor%s in this file: %s", p->n_indexed,
                   p->n_indexed == 1 ? "" : "s", state ? state : "");
    } else {
        qx_buf_fmt(&a->text, "file of the set cannot be read: %s", state ? state : "");
    }
    if (look_for_partial && qx_dir_partial(ck->dir, f->name, to, partial, sizeof partial)) {
        qx_buf_fmt(&a->text, "; a partial download is there (%s)", partial);
    }
    return state && qx_buf_cstr(&a->text);
}

static struct qx_report missing_report(const struct qx_file *f, const struct absence *a)
{
    return QX_REPORT("shard-missing", QX_ERROR, .file = f->name, .expected = "a safetensors file",
                     .found = a->found.p, .text = a->text.p, .group = f->name);
}

static int compare_file_name(const void *name, const void *file)
{
    return strcmp(name, ((const struct qx_file *)file)->name);
}

/* One finding a missing file; its tensors are the count, some of them examples. */
static bool report_missing_files(struct opening *o)
{
    struct qx_ckpt *ck = o->ck;
    struct absence *a = qx_calloc(ck->n_files, sizeof *a);
    size_t n_missing = 0;
    bool ok = a != NULL;
    for (size_t f = 0; f < ck->n_files && ok; f++) {
        ok = ck->files[f].state != QX_FILE_MISSING || describe_absence(ck, f, n_missing++ < MAX_PARTIALS, &a[f]);
    }
    for (size_t k = 0; k < ck->n_absent && ok; k++) {
        const struct qx_file *f =
            bsearch(ck->absent[k].file, ck->files, ck->n_files, sizeof *ck->files, compare_file_name);
        if (f && f->state == QX_FILE_MISSING) {
            struct ckpt_file *p = &ck->priv[f - ck->files];
            struct qx_report r = missing_report(f, &a[f - ck->files]);
            r.tensor = ck->absent[k].name;
            p->reported = true;
            ok = add(ck, &r);
        }
    }
    for (size_t f = 0; f < ck->n_files && ok; f++) { /* those that no tensor is placed in */
        if (ck->files[f].state == QX_FILE_MISSING && !ck->priv[f].reported) {
            struct qx_report r = missing_report(&ck->files[f], &a[f]);
            ok = add(ck, &r);
        }
    }
    for (size_t f = 0; a && f < ck->n_files; f++) {
        absence_fini(&a[f]);
    }
    qx_free(a);
    return ok;
}

/* Names of *.safetensors files in the directory that the index does not give. */
static size_t count_strays(const struct opening *o)
{
    size_t n = 0;
    for (size_t i = 0; i < o->list.n; i++) {
        n += o->list.stray[i];
    }
    return n;
}

static void mark_strays(struct opening *o)
{
    const struct qx_ckpt *ck = o->ck;
    size_t f = 0;
    for (size_t i = 0; i < o->list.n; i++) { /* both lists are sorted */
        const char *name = o->list.names[i];
        while (f < ck->n_files && strcmp(ck->files[f].name, name) < 0) {
            f++;
        }
        o->list.stray[i] = qx_str_ends(name, ".safetensors") && name[0] != '.' &&
                           !(f < ck->n_files && strcmp(ck->files[f].name, name) == 0);
    }
}

static bool report_strays(struct opening *o)
{
    struct qx_ckpt *ck = o->ck;
    bool ok = true;
    for (size_t i = 0; i < o->list.n && ok; i++) {
        if (!o->list.stray[i]) {
            continue;
        }
        char text[200], found[48];
        struct stat st;
        const char *path = join_path(ck, ck->dir, o->list.names[i]);
        uint64_t size = path && stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
        snprintf(found, sizeof found, "%" PRIu64 " bytes", size);
        snprintf(text, sizeof text, "the index does not name this file (%" PRIu64 " bytes); it is not read",
                 size);
        ok = path && add(ck, &QX_REPORT("stray-file", QX_WARNING, .file = o->list.names[i],
                                        .expected = "only files of the index", .found = found,
                                        .text = text));
    }
    return ok;
}

static bool report_stale(struct opening *o, size_t strays)
{
    struct qx_ckpt *ck = o->ck;
    char text[200], found[64];
    snprintf(text, sizeof text, "none of the %zu files named by the index exist; %zu other safetensors "
             "file%s present: it belongs to another split", ck->n_files, strays, strays == 1 ? "" : "s");
    snprintf(found, sizeof found, "%zu other files", strays);
    return add(ck, &QX_REPORT("index-stale", QX_ERROR, .file = ck->index_name,
                              .expected = ck->files[0].name, .found = found, .text = text,
                              .count = ck->n_files));
}

static bool report_indexed_files(struct opening *o)
{
    struct qx_ckpt *ck = o->ck;
    size_t missing = 0;
    mark_strays(o);
    for (size_t f = 0; f < ck->n_files; f++) {
        missing += ck->files[f].state == QX_FILE_MISSING;
    }
    size_t strays = count_strays(o);
    if (missing && missing == ck->n_files && strays) {
        return report_stale(o, strays);
    }
    return report_missing_files(o) && report_strays(o);
}

/* Without an index: dangling links, absent numbers, a directory without any shard. */
static bool report_unindexed_files(struct opening *o)
{
    struct qx_ckpt *ck = o->ck;
    bool ok = report_missing_files(o);
    if (ok && ck->n_files == 0 && !ck->has_index) {
        char text[400];
        const char *what = qx_dir_foreign(&o->list);
        snprintf(text, sizeof text, "the directory holds no safetensors file%s%s", what ? "; there is " : "",
                 what ? what : "");
        ok = add(ck, &QX_REPORT("no-weights", QX_ERROR, .expected = "*.safetensors",
                                .found = what ? what : "none", .text = text));
    }
    return ok && qx_dir_check_numbers(&o->list, ck->findings);
}

/* ---- config ------------------------------------------------------------------------------------ */

static int read_blob(struct qx_ckpt *ck, const char *name, struct qx_blob *b, struct qx_error *err)
{
    char *text;
    int rc = qx_ckpt_read_small(ck, name, MAX_CONFIG_BYTES, &text, &b->n, &b->present, err);
    b->text = text;
    return rc;
}

static int config_failed(struct qx_ckpt *ck, const char *name, struct qx_error *err)
{
    struct qx_error *e = &ck->config_error;
    if (e->code == QX_E_NOMEM) {
        return qx_fail_nomem(err);
    }
    qx_error_at(e, name, NULL, QX_NO_OFF);
    struct qx_report r = QX_REPORT(e->kind, QX_ERROR, .file = name, .text = e->msg);
    r.off = e->off;
    return add(ck, &r) ? 0 : qx_fail_nomem(err);
}

static int read_config(struct opening *o, const char *name, struct qx_error *err)
{
    struct qx_ckpt *ck = o->ck;
    struct qx_error *e = &ck->config_error;
    char oid[65];
    uint64_t size;
    int rc = read_blob(ck, name, &ck->config_text, e);
    if (rc == -(int)QX_E_NOT_FOUND) {
        qx_fail(e, QX_E_NOT_FOUND, "config-missing", "%s is a dangling link", name);
        return config_failed(ck, name, err);
    }
    if (rc) {
        if (strcmp(e->kind, "not-a-file") == 0) {
            e->kind = "unreadable-file";
        }
        return config_failed(ck, name, err);
    }
    if (!ck->config_text.present) {
        qx_fail(e, QX_E_NOT_FOUND, "config-missing", "there is no %s in '%s'", name,
                qx_ckpt_path(ck));
        return config_failed(ck, name, err);
    }
    if (qx_lfs_pointer(ck->config_text.text, ck->config_text.n, oid, &size)) {
        qx_fail(e, QX_E_CONFIG, "lfs-pointer", "a Git LFS pointer instead of the file; it promises %" PRIu64
                " bytes with sha256 %s (run git lfs pull)", size, oid);
        return config_failed(ck, name, err);
    }
    struct qx_config *c = qx_calloc(1, sizeof *c);
    if (!c) {
        return qx_fail_nomem(err);
    }
    rc = qx_config_parse(c, ck->config_text.text, ck->config_text.n, name, ck->findings, e);
    if (rc) {
        qx_free(c);
        return config_failed(ck, name, err);
    }
    ck->config = c;
    return 0;
}

static int read_hf_quant(struct qx_ckpt *ck, struct qx_error *err)
{
    static const char name[] = "hf_quant_config.json";
    struct qx_error io;
    int rc = read_blob(ck, name, &ck->hf_quant_text, &io);
    if (rc == -(int)QX_E_NOMEM) {
        return qx_fail_nomem(err);
    }
    if (rc) {
        struct qx_report r = QX_REPORT("unreadable-file", QX_ERROR, .file = name, .text = io.msg);
        return add(ck, &r) ? 0 : qx_fail_nomem(err);
    }
    return 0;
}

/* Settings that resolution cannot read make the config as unusable as a wrong shape constant would. */
static int resolve_formats(struct qx_ckpt *ck, const char *config_name, struct qx_error *err)
{
    struct qx_error why = {0};
    int rc = qx_resolve(&ck->resolved, ck, ck->findings, &why);
    if (rc == 0) {
        return 0;
    }
    qx_free(ck->config);
    ck->config = NULL;
    ck->config_error = why;
    return config_failed(ck, config_name, err);
}

/* A lone JSON file that gives no configuration leaves nothing to show. */
static int lone_config_refused(const struct qx_ckpt *ck, struct qx_error *err)
{
    static const char *const keys[] = {"model_type", "architectures", "text_config", "hidden_size"};
    struct qx_json_doc doc;
    bool any = false;
    if (ck->config_text.present &&
        qx_json_doc_parse(&doc, ck->config_text.text, ck->config_text.n, ck->path, NULL, NULL) == 0) {
        for (size_t i = 0; i < QX_ARRAY_LEN(keys) && !any; i++) {
            any = qx_json_get(doc.root, keys[i]) != NULL;
        }
        qx_json_doc_fini(&doc);
        if (!any) {
            int rc = qx_fail(err, QX_E_FORMAT, "not-a-checkpoint",
                             "is JSON but no configuration of a model; give a directory, its index, a "
                             "safetensors file or a config.json");
            qx_error_at(err, ck->path, NULL, QX_NO_OFF);
            return rc;
        }
    }
    if (err) {
        *err = ck->config_error;
    }
    return -(int)ck->config_error.code;
}

/* ---- open -------------------------------------------------------------------------------------- */

static int open_parts(struct opening *o, bool is_dir, struct qx_error *err)
{
    struct qx_ckpt *ck = o->ck;
    const char *base;
    int rc = set_place(ck, is_dir, &base, err);
    if (rc) {
        return rc;
    }
    bool index_path = !is_dir && qx_str_ends(base, ".index.json");
    ck->lone_config = !is_dir && !index_path && qx_str_ends(base, ".json");
    ck->single_file = !is_dir && !index_path && !ck->lone_config;
    if (is_dir || index_path) {
        rc = qx_dir_list_read(&o->list, ck->dir, err);
        ck->index_name = rc ? NULL : index_path ? base : choose_index(&o->list);
        if (ck->index_name) {
            ck->index_name = qx_arena_strndup(ck->arena, ck->index_name, strlen(ck->index_name));
            rc = ck->index_name ? read_index(o, err) : qx_fail_nomem(err);
        }
    }
    rc = rc ? rc : make_files(o, ck->single_file ? base : NULL, err);
    rc = rc ? rc : read_headers(o, err);
    rc = rc ? rc : ckpt_join(ck, err);
    if (!rc && (is_dir || index_path)) {
        bool ok = ck->index.usable ? report_indexed_files(o) : report_unindexed_files(o);
        rc = ok ? 0 : qx_fail_nomem(err);
    }
    if (!rc && !ck->single_file) {
        rc = read_config(o, ck->lone_config ? base : "config.json", err);
        rc = rc || ck->lone_config ? rc : read_hf_quant(ck, err);
    }
    if (!rc && ck->config) {
        rc = resolve_formats(ck, ck->lone_config ? base : "config.json", err);
    }
    if (!rc && ck->lone_config && !ck->config) {
        rc = lone_config_refused(ck, err);
    }
    if (!rc && is_dir && ck->n_files == 0 && !ck->has_index && !ck->config_text.present) {
        const char *what = qx_dir_foreign(&o->list);
        char nested[PATH_MAX];
        if (!what && qx_dir_nested(ck->dir[0] ? ck->dir : ".", &o->list, nested, sizeof nested)) {
            rc = qx_fail(err, QX_E_NOT_FOUND, "not-a-checkpoint",
                         "no safetensors file, index or config.json here; did you mean '%.400s'?", nested);
        } else {
            rc = qx_fail(err, QX_E_NOT_FOUND, "not-a-checkpoint",
                         "no safetensors file, index or config.json here%s%s", what ? "; there is " : "",
                         what ? what : "");
        }
        qx_error_at(err, ck->path, NULL, QX_NO_OFF);
    }
    return rc;
}

/* An address, or OWNER/NAME where there is no folder OWNER. */
static bool is_hub_name(const char *path)
{
    const char *slash = strchr(path, '/');
    char owner[256];
    struct stat st;
    if (strncmp(path, "https://", 8) == 0 || strncmp(path, "hf://", 5) == 0) {
        return true;
    }
    if (!slash || slash == path || path[0] == '.' || path[0] == '~' || slash[1] == '\0' || strchr(slash + 1, '/') ||
        (size_t)(slash - path) >= sizeof owner) {
        return false;
    }
    memcpy(owner, path, (size_t)(slash - path));
    owner[slash - path] = '\0';
    return stat(owner, &st) != 0;
}

int qx_ckpt_open(struct qx_ckpt **out, const char *path, const struct qx_open *how, struct qx_error *err)
{
    static const struct qx_open defaults = {.max_header_bytes = 100000000};
    struct opening o = {.how = how ? how : &defaults};
    struct stat st;
    *out = NULL;
    if (stat(path, &st) != 0) {
        int sys = errno;
        bool absent = sys == ENOENT || sys == ENOTDIR || sys == ELOOP;
        int rc = qx_fail_errno(err, absent ? QX_E_NOT_FOUND : QX_E_IO, sys, absent ? "not-found" : "unreadable-file",
                               "cannot open the checkpoint%s",
                               absent && is_hub_name(path) ? " (qx reads directories; a name on a hub is to be downloaded "
                                                             "first)" : "");
        qx_error_at(err, path, NULL, QX_NO_OFF);
        return rc;
    }
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) {
        int rc = qx_fail(err, QX_E_IO, "not-a-file", "is a device or pipe, expected a directory or a file");
        qx_error_at(err, path, NULL, QX_NO_OFF);
        return rc;
    }
    struct qx_ckpt *ck = qx_calloc(1, sizeof *ck);
    if (!ck) {
        return qx_fail_nomem(err);
    }
    o.ck = ck;
    ck->arena = qx_arena_create();
    ck->findings = qx_findings_create();
    ck->path = ck->arena ? qx_arena_strndup(ck->arena, path, strlen(path)) : NULL;
    int rc = ck->path && ck->findings ? open_parts(&o, S_ISDIR(st.st_mode), err) : qx_fail_nomem(err);
    qx_dir_list_fini(&o.list);
    if (!rc && qx_findings_failed(ck->findings)) {
        rc = qx_fail_nomem(err);
    }
    if (rc) {
        qx_ckpt_close(ck);
        return rc;
    }
    qx_findings_sort(ck->findings);
    *out = ck;
    return 0;
}
