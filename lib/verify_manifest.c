/* verify_manifest.c: checksums. Compares what the pass over the bytes hashed with a list, writes a new list,
 * or both. A list with tensors also holds for a copy that is cut into other files: a listed file that is
 * absent or different is excused when its tensors were all found unchanged in other places. */
#include "verify_impl.h"

#include "alloc.h"
#include "error.h"
#include "str.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum state { UNSEEN, SAME, DIFFERS };

struct entry_state {
    uint8_t state;
    bool moved;                      /* tensors: in another file or at another offset */
    uint8_t digest[QX_DIGEST_MAX];   /* as computed, when different */
    uint64_t size_bytes;
    const char *what;                /* tensors: "type", "shape" when only that differs */
};

/* Sums over the tensors listed for a file. */
struct file_state { uint64_t listed, same, moved; };

struct verify_manifest {
    struct verify *v;
    struct qx_manifest *list;        /* NULL: only writing */
    struct entry_state *entry;
    struct file_state *file;         /* [entries], used at file entries */
    uint64_t unlisted_tensors;
    const char *unlisted_example[QX_MAX_EXAMPLES];
    struct qx_buf pending;           /* tensor lines of pending_file */
    uint32_t pending_file;
    bool write_failed, nomem, writing;
};

/* ---- files -------------------------------------------------------------------------------- */

static bool same_file(const char *path, const struct stat *st)
{
    struct stat other;
    return path && stat(path, &other) == 0 && other.st_dev == st->st_dev && other.st_ino == st->st_ino;
}

static bool has_file(const struct verify *v, const char *name)
{
    for (size_t i = 0; i < v->n_files; ++i) {
        if (strcmp(v->files[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static bool add_file(struct verify *v, const char *name)
{
    const char *copy = qx_arena_strndup(v->arena, name, strlen(name));
    if (!copy || !qx_grow((void **)&v->files, &v->cap_files, v->n_files + 1, sizeof *v->files)) {
        return false;
    }
    v->files[v->n_files++] = (struct qx_scan_file){.name = copy};
    return true;
}

/* A relative path that stays inside the directory. */
static bool inside(const char *name)
{
    if (name[0] == '/') {
        return false;
    }
    for (const char *p = name; *p;) {
        const char *slash = strchr(p, '/');
        size_t n = slash ? (size_t)(slash - p) : strlen(p);
        if (n == 2 && p[0] == '.' && p[1] == '.') {
            return false;
        }
        p += n + (slash != NULL);
    }
    return true;
}

static int by_name(const void *pa, const void *pb)
{
    return strcmp(((const struct qx_scan_file *)pa)->name, ((const struct qx_scan_file *)pb)->name);
}

/* Regular files of the directory beside the weight files, sorted by name. Hidden files, unfinished
 * outputs and the lists themselves are left out. */
static int other_files(struct verify *v, struct qx_error *err)
{
    const char *dir = qx_ckpt_dir(v->ck);
    size_t first = v->n_files;
    DIR *d = opendir(dir[0] ? dir : ".");
    bool ok = true;
    if (!d) {
        return qx_fail_errno(err, QX_E_IO, errno, "unreadable-file", "cannot list directory '%s'", dir);
    }
    for (struct dirent *e = readdir(d); ok && e; e = readdir(d)) {
        struct stat st;
        if (e->d_name[0] == '.' || qx_str_ends(e->d_name, ".part") || has_file(v, e->d_name) ||
            fstatat(dirfd(d), e->d_name, &st, 0) != 0 || !S_ISREG(st.st_mode) ||
            same_file(v->o->manifest_name, &st) || same_file(v->o->manifest_out_name, &st)) {
            continue;
        }
        ok = add_file(v, e->d_name);
    }
    closedir(d);
    qsort(v->files + first, v->n_files - first, sizeof *v->files, by_name);
    return ok ? 0 : qx_fail_nomem(err);
}

/* ---- opening ------------------------------------------------------------------------------ */

int verify_manifest_open(struct verify_manifest **out, struct verify *v, struct qx_error *err)
{
    struct verify_manifest *m = qx_calloc(1, sizeof *m);
    int rc = 0;
    *out = NULL;
    if (!m) {
        return qx_fail_nomem(err);
    }
    m->v = v;
    m->writing = v->o->manifest_out != NULL;
    if (v->o->manifest) {
        rc = qx_manifest_parse(&m->list, v->o->manifest, (size_t)v->o->manifest_bytes, v->o->manifest_name,
                               err);
        if (rc == 0) {
            size_t n = qx_manifest_count(m->list);
            m->entry = qx_calloc(n, sizeof *m->entry);
            m->file = qx_calloc(n, sizeof *m->file);
            rc = m->entry && m->file ? 0 : qx_fail_nomem(err);
        }
    }
    if (rc == 0 && !qx_ckpt_is_single_file(v->ck)) {
        rc = other_files(v, err);
    }
    /* Listed files in subdirectories. */
    for (size_t i = 0; rc == 0 && m->list && i < qx_manifest_count(m->list); ++i) {
        const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
        if (!e->is_tensor && inside(e->name) && strchr(e->name, '/') && !has_file(v, e->name)) {
            rc = add_file(v, e->name) ? 0 : qx_fail_nomem(err);
        }
    }
    if (rc) {
        verify_manifest_close(m);
        return rc;
    }
    *out = m;
    return 0;
}

void verify_manifest_close(struct verify_manifest *m)
{
    if (m) {
        qx_manifest_destroy(m->list);
        qx_free(m->entry);
        qx_free(m->file);
        qx_buf_fini(&m->pending);
        qx_free(m);
    }
}

static bool listed_as(const struct verify_manifest *m, int kind, const char *name)
{
    return qx_manifest_find(m->list, false, (enum qx_digest)kind, name) != SIZE_MAX;
}

static bool listed(const struct verify_manifest *m, const char *name)
{
    bool any = false;
    for (int k = 0; k < QX_DIGEST_COUNT; ++k) {
        any = any || listed_as(m, k, name);
    }
    return any;
}

void verify_manifest_scan(struct verify_manifest *m, struct qx_scan *s)
{
    s->whole_files = true;
    s->hash_tensors = m->writing || qx_manifest_has(m->list, true, QX_DIGEST_XXH3_128);
    s->digest[QX_DIGEST_XXH3_128] = m->writing || qx_manifest_has(m->list, false, QX_DIGEST_XXH3_128);
    s->digest[QX_DIGEST_SHA256] =
        m->v->o->sha256 || (m->list && qx_manifest_has(m->list, false, QX_DIGEST_SHA256));
    s->digest[QX_DIGEST_GIT] = m->list && qx_manifest_has(m->list, false, QX_DIGEST_GIT);
    for (size_t i = 0; i < m->v->n_files; ++i) {
        for (int k = 0; k < QX_DIGEST_COUNT; ++k) {
            bool made = m->writing && (k == QX_DIGEST_XXH3_128 || (k == QX_DIGEST_SHA256 && m->v->o->sha256));
            m->v->files[i].no_digest[k] = !made && !(m->list && listed_as(m, k, m->v->files[i].name));
        }
    }
    if (m->writing) {
        return;
    }
    /* Only compared: what is not listed need not be read, but for weight files with listed tensors. */
    for (size_t i = 0; i < m->v->n_files; ++i) {
        struct qx_scan_file *f = &m->v->files[i];
        bool weights = i < qx_ckpt_n_files(m->v->ck);
        if (!(weights && s->hash_tensors) && !(weights && m->v->o->level == QX_VERIFY_FULL) &&
            !listed(m, f->name)) {
            bool needed = false; /* scales that the level asks for lie in it */
            for (size_t k = 0; weights && !needed && k < m->v->n_items; ++k) {
                needed = m->v->items[k].file == i;
            }
            f->skip = f->skip || !needed;
        }
    }
}

/* ---- while the bytes pass ----------------------------------------------------------------- */

static void put_out(struct verify_manifest *m, struct qx_buf *b)
{
    m->nomem = m->nomem || b->failed;
    if (!b->failed && b->n && m->v->o->manifest_out(m->v->o->user, b->p, b->n) != 0) {
        m->write_failed = true;
    }
    b->n = 0;
}

static uint64_t data_off(const struct verify_manifest *m, const struct qx_tensor *t)
{
    return t->off - qx_ckpt_file(m->v->ck, t->file)->data_off;
}

static void shape_text(const struct qx_tensor *t, struct qx_buf *b)
{
    qx_buf_chr(b, '[');
    for (unsigned i = 0; i < t->n_dims; ++i) {
        qx_buf_fmt(b, "%s%" PRIu64, i ? "," : "", t->shape[i]);
    }
    qx_buf_chr(b, ']');
}

void verify_manifest_tensor(struct verify_manifest *m, const struct qx_scan_item *it, const uint8_t *digest)
{
    const struct qx_tensor *t = it->t;
    size_t i;
    if (m->writing) {
        if (m->pending_file != t->file) {
            m->pending.n = 0; /* a file that could not be read to its end */
            m->pending_file = t->file;
        }
        qx_manifest_put_tensor(&m->pending, digest, t->size_bytes, qx_dtype_name((enum qx_dtype)t->dtype),
                               t->shape, t->n_dims, data_off(m, t), t->name);
    }
    if (!m->list || !qx_manifest_has(m->list, true, QX_DIGEST_XXH3_128)) {
        return;
    }
    i = qx_manifest_find(m->list, true, QX_DIGEST_XXH3_128, t->name);
    if (i == SIZE_MAX) {
        if (m->unlisted_tensors < QX_MAX_EXAMPLES) {
            m->unlisted_example[m->unlisted_tensors] = t->name;
        }
        ++m->unlisted_tensors;
        return;
    }
    const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
    struct entry_state *s = &m->entry[i];
    struct qx_buf shape = {0};
    shape_text(t, &shape);
    s->size_bytes = t->size_bytes;
    s->state = memcmp(e->digest, digest, qx_digest_size(QX_DIGEST_XXH3_128)) == 0 ? SAME : DIFFERS;
    memcpy(s->digest, digest, qx_digest_size(QX_DIGEST_XXH3_128));
    if (s->state == SAME && strcmp(e->dtype, qx_dtype_name((enum qx_dtype)t->dtype)) != 0) {
        s->state = DIFFERS;
        s->what = "type";
    } else if (s->state == SAME && !qx_buf_cstr(&shape)) {
        m->nomem = true;
    } else if (s->state == SAME && strcmp(e->shape, qx_buf_cstr(&shape)) != 0) {
        s->state = DIFFERS;
        s->what = "shape";
    }
    s->moved = e->file == UINT32_MAX || e->off != data_off(m, t) ||
               strcmp(qx_manifest_at(m->list, e->file)->name, qx_ckpt_file(m->v->ck, t->file)->name) != 0;
    qx_buf_fini(&shape);
}

void verify_manifest_file(struct verify_manifest *m, size_t file,
                          const uint8_t *const digest[QX_DIGEST_COUNT])
{
    const struct qx_scan_file *f = &m->v->files[file];
    if (m->writing) {
        if (m->pending_file != file) {
            m->pending.n = 0;
        }
        for (int k = 0; k < QX_DIGEST_COUNT; ++k) {
            if (digest[k] && (k == QX_DIGEST_XXH3_128 || (k == QX_DIGEST_SHA256 && m->v->o->sha256))) {
                qx_manifest_put_file(&m->pending, (enum qx_digest)k, digest[k], f->size_bytes, f->name);
            }
        }
        put_out(m, &m->pending);
    }
    for (int k = 0; m->list && k < QX_DIGEST_COUNT; ++k) {
        size_t i = digest[k] ? qx_manifest_find(m->list, false, (enum qx_digest)k, f->name) : SIZE_MAX;
        if (i != SIZE_MAX) {
            struct entry_state *s = &m->entry[i];
            size_t n = qx_digest_size((enum qx_digest)k);
            s->state = memcmp(qx_manifest_at(m->list, i)->digest, digest[k], n) == 0 ? SAME : DIFFERS;
            memcpy(s->digest, digest[k], n);
            s->size_bytes = f->size_bytes;
        }
    }
}

/* ---- reporting ---------------------------------------------------------------------------- */

/* Every line for the same file counts towards its first file entry. */
static void sum_files(struct verify_manifest *m)
{
    for (size_t i = 0; i < qx_manifest_count(m->list); ++i) {
        const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
        if (e->is_tensor && e->file != UINT32_MAX) {
            struct file_state *f = &m->file[e->file];
            ++f->listed;
            f->same += m->entry[i].state == SAME;
            f->moved += m->entry[i].state == SAME && m->entry[i].moved;
        }
    }
}

static uint64_t tensors_now(const struct verify_manifest *m, const char *name)
{
    for (size_t i = 0; i < qx_ckpt_n_files(m->v->ck); ++i) {
        const struct qx_file *f = qx_ckpt_file(m->v->ck, i);
        if (strcmp(f->name, name) == 0) {
            return f->state == QX_FILE_OK ? f->n_tensors : UINT64_MAX;
        }
    }
    return 0;
}

/* The file's tensors are all unchanged, but lie elsewhere or among others. */
static bool laid_out_anew(const struct verify_manifest *m, size_t i)
{
    const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
    const struct file_state *f = &m->file[i];
    if (e->kind == QX_DIGEST_SHA256) { /* its tensors stand before the line of the other digest */
        size_t other = qx_manifest_find(m->list, false, QX_DIGEST_XXH3_128, e->name);
        f = other == SIZE_MAX ? f : &m->file[other];
    }
    return f->listed && f->same == f->listed &&
           (f->moved || (tensors_now(m, e->name) != f->listed && tensors_now(m, e->name) != UINT64_MAX));
}

static bool report_file(struct verify_manifest *m, size_t i, bool any_moved)
{
    const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
    const struct entry_state *s = &m->entry[i];
    struct qx_buf text = {0};
    char want[2 * QX_DIGEST_MAX + 1], got[2 * QX_DIGEST_MAX + 1] = "absent";
    bool bad = false, ok;
    if (s->state == SAME || laid_out_anew(m, i)) {
        return true;
    }
    if (any_moved && qx_str_ends(e->name, ".index.json")) {
        return true; /* names the files, so it changes with them */
    }
    if (e->kind == QX_DIGEST_SHA256) {
        size_t other = qx_manifest_find(m->list, false, QX_DIGEST_XXH3_128, e->name);
        if (other != SIZE_MAX && m->entry[other].state != SAME) {
            return true; /* said once */
        }
    }
    for (size_t k = 0; k < m->v->n_files; ++k) {
        bad = bad || (strcmp(m->v->files[k].name, e->name) == 0 && m->v->files[k].bad);
    }
    qx_digest_hex(e->digest, qx_digest_size((enum qx_digest)e->kind), want);
    if (s->state == DIFFERS) {
        qx_digest_hex(s->digest, qx_digest_size((enum qx_digest)e->kind), got);
        qx_buf_fmt(&text, "'%s' differs from the list: %s %s, listed %s", e->name,
                   qx_digest_name((enum qx_digest)e->kind), got, want);
        if (e->has_size && e->size_bytes != s->size_bytes) {
            qx_buf_fmt(&text, "; %" PRIu64 " bytes, listed %" PRIu64, s->size_bytes, e->size_bytes);
        }
    } else if (!inside(e->name)) {
        snprintf(got, sizeof got, "not opened");
        qx_buf_fmt(&text, "'%s' is listed but leaves the directory; it was not opened", e->name);
    } else {
        snprintf(got, sizeof got, bad ? "unreadable" : "absent");
        qx_buf_fmt(&text, "'%s' is listed but %s", e->name, bad ? "could not be read" : "absent");
    }
    ok = verify_add(m->v, QX_REPORT("checksum", QX_ERROR, .file = e->name, .expected = want, .found = got,
                                    .text = qx_buf_cstr(&text)));
    qx_buf_fini(&text);
    return ok;
}

static bool report_tensor(struct verify_manifest *m, size_t i, uint64_t *reported)
{
    const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
    const struct entry_state *s = &m->entry[i];
    const struct qx_tensor *t;
    struct qx_buf text = {0};
    char want[2 * QX_DIGEST_MAX + 1], got[2 * QX_DIGEST_MAX + 1] = "absent";
    bool ok;
    if (s->state == SAME) {
        return true;
    }
    t = qx_ckpt_find(m->v->ck, e->name);
    qx_digest_hex(e->digest, qx_digest_size(QX_DIGEST_XXH3_128), want);
    if (s->state == DIFFERS) {
        qx_digest_hex(s->digest, qx_digest_size(QX_DIGEST_XXH3_128), got);
        if (s->what) {
            qx_buf_fmt(&text, "tensor '%s' has another %s than listed (%s %s)", e->name, s->what, e->dtype,
                       e->shape);
        } else {
            qx_buf_fmt(&text, "tensor '%s' differs from the list: xxh3-128 %s, listed %s", e->name, got,
                       want);
        }
    } else if (t) {
        snprintf(got, sizeof got, "unreadable");
        qx_buf_fmt(&text, "tensor '%s' is listed but could not be read whole", e->name);
    } else {
        qx_buf_fmt(&text, "tensor '%s' is listed but absent", e->name);
    }
    ok = verify_add(m->v, QX_REPORT("checksum", QX_ERROR, .file = t ? verify_file(m->v, t) : NULL,
                                    .tensor = e->name, .expected = want, .found = got,
                                    .text = qx_buf_cstr(&text),
                                    .group = ++*reported > 200 ? "checksum" : NULL));
    qx_buf_fini(&text);
    return ok;
}

/* Files that lie there but are not listed. A list of weight files only says nothing about others. */
static bool report_unlisted(struct verify_manifest *m, bool any_moved)
{
    bool covers_others = false, covers_files = false, ok = true;
    for (size_t i = 0; i < qx_manifest_count(m->list); ++i) {
        const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
        covers_files = covers_files || !e->is_tensor;
        covers_others = covers_others || (!e->is_tensor && !qx_str_ends(e->name, ".safetensors"));
    }
    for (size_t i = 0; ok && covers_files && i < m->v->n_files; ++i) {
        const char *name = m->v->files[i].name;
        bool weights = i < qx_ckpt_n_files(m->v->ck);
        struct qx_buf text = {0};
        if (listed(m, name)) {
            continue;
        }
        if (weights ? any_moved || qx_ckpt_file(m->v->ck, i)->state == QX_FILE_MISSING ||
                          qx_ckpt_file(m->v->ck, i)->state == QX_FILE_REFUSED
                    : !covers_others && !qx_str_ends(name, ".safetensors")) {
            continue;
        }
        qx_buf_fmt(&text, "'%s' is not in the list", name);
        ok = verify_add(m->v, QX_REPORT("checksum-missing", QX_NOTE, .file = name, .expected = "listed",
                                        .found = "not listed", .text = qx_buf_cstr(&text)));
        qx_buf_fini(&text);
    }
    for (uint64_t i = 0; ok && i < m->unlisted_tensors; ++i) {
        bool shown = i < QX_MAX_EXAMPLES;
        ok = verify_add(m->v, QX_REPORT("checksum-missing", QX_NOTE,
                                        .tensor = shown ? m->unlisted_example[i] : NULL,
                                        .text = "tensors that are not in the list", .group = "tensors",
                                        .count = shown ? 1 : m->unlisted_tensors - i));
        if (!shown) {
            break;
        }
    }
    return ok;
}

int verify_manifest_report(struct verify_manifest *m, struct qx_error *err)
{
    uint64_t reported = 0, n_moved = 0, n_files = 0;
    bool ok = true;
    if (m->nomem) {
        return qx_fail_nomem(err);
    }
    if (m->writing && m->write_failed) {
        return qx_fail(err, QX_E_WRITE, "write", "the manifest could not be written");
    }
    if (!m->list) {
        return 0;
    }
    sum_files(m);
    for (size_t i = 0; i < qx_manifest_count(m->list); ++i) {
        const struct qx_manifest_entry *e = qx_manifest_at(m->list, i);
        if (!e->is_tensor && (e->kind == QX_DIGEST_XXH3_128 ||
                              qx_manifest_find(m->list, false, QX_DIGEST_XXH3_128, e->name) == SIZE_MAX)) {
            ++n_files;
            n_moved += laid_out_anew(m, i);
        }
    }
    for (size_t i = 0; ok && i < qx_manifest_count(m->list); ++i) {
        ok = qx_manifest_at(m->list, i)->is_tensor ? report_tensor(m, i, &reported)
                                                   : report_file(m, i, n_moved > 0);
    }
    if (ok && n_moved) {
        struct qx_buf text = {0};
        qx_buf_fmt(&text, "%" PRIu64 " of %" PRIu64 " listed files are laid out anew here; their tensors were "
                   "compared one by one", n_moved, n_files);
        ok = verify_add(m->v, QX_REPORT("manifest-layout", QX_NOTE, .text = qx_buf_cstr(&text)));
        qx_buf_fini(&text);
    }
    ok = ok && report_unlisted(m, n_moved > 0);
    return ok ? 0 : qx_fail_nomem(err);
}
