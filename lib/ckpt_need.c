/* ckpt_need.c: owns the explanation why a tensor cannot be used: whether the index lists it, which file
 * should hold it, whether that file is there and what is wrong with it. The kind is that of the finding
 * that open made, so that commands fail with the word that verify reports. */
#include "ckpt_priv.h"

#include "name_sort.h"

#include <inttypes.h>
#include <string.h>

/* Kinds that make a whole file useless, then those that make one tensor useless. Static storage, as
 * struct qx_error wants it. */
static const char *const file_kinds[] = {
    "shard-missing", "lfs-pointer", "not-safetensors", "header-length", "header-too-large", "header-json",
    "header-utf8", "json-too-deep", "file-too-short", "unreadable-file", "read-error", "file-changed"};
static const char *const tensor_kinds[] = {"duplicate-tensor", "bad-offsets", "size-mismatch", "bad-shape",
                                           "unknown-dtype", "json-duplicate-key", "truncated"};

static const char *static_kind(const char *const *kinds, size_t n, const char *kind)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(kinds[i], kind) == 0) {
            return kinds[i];
        }
    }
    return NULL;
}

static bool names_tensor(const struct qx_finding *f, const char *tensor)
{
    bool hit = f->tensor && strcmp(f->tensor, tensor) == 0;
    for (uint32_t i = 0; i < f->n_examples && !hit; i++) {
        hit = strcmp(f->examples[i], tensor) == 0;
    }
    return hit;
}

/* A tensor that two files hold is reported at the second, with the first as what was found. */
static bool names_file(const struct qx_finding *f, const char *file)
{
    return f->file && (strcmp(f->file, file) == 0 ||
                       (f->found && strcmp(f->kind, "duplicate-tensor") == 0 && strcmp(f->found, file) == 0));
}

static const struct qx_finding *find_error(const struct qx_ckpt *ck, const char *const *kinds, size_t n,
                                           const char *file, const char *tensor, const char **kind)
{
    for (size_t i = 0; i < qx_findings_count(ck->findings); i++) {
        const struct qx_finding *f = qx_findings_at(ck->findings, i);
        if (f->severity != QX_ERROR || !names_file(f, file) || (tensor && !names_tensor(f, tensor))) {
            continue;
        }
        *kind = static_kind(kinds, n, f->kind);
        if (*kind) {
            return f;
        }
    }
    return NULL;
}

static const struct qx_absent *find_absent(const struct qx_ckpt *ck, const char *name)
{
    size_t lo = 0, hi = ck->n_absent;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(ck->absent[mid].name, name);
        if (c == 0) {
            return &ck->absent[mid];
        }
        if (c < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return NULL;
}

static int fail_absent(const struct qx_ckpt *ck, const struct qx_absent *a, struct qx_error *err)
{
    const char *kind = NULL;
    const struct qx_finding *f = find_error(ck, file_kinds, QX_ARRAY_LEN(file_kinds), a->file, NULL, &kind);
    enum qx_code code = a->file_exists ? QX_E_FORMAT : QX_E_MISSING;
    if (f) {
        qx_fail(err, code, kind, "%s", f->text ? f->text : "the file cannot be used");
    } else if (a->file_usable) {
        qx_fail(err, QX_E_MISSING, "index-tensor-absent",
                "the index places the tensor in %s, which lacks it%s%s", a->file,
                a->found_in ? "; a copy that the index does not give is in " : "",
                a->found_in ? a->found_in : "");
    } else if (!qx_name_stays_inside(a->file, strlen(a->file))) {
        qx_fail(err, QX_E_FORMAT, "unsafe-path",
                "the index gives a file name that leaves the directory; it is not opened");
    } else {
        qx_fail(err, code, "index-stale", "the index places the tensor in %s, which does not exist, as none "
                "of its files do", a->file);
    }
    qx_error_at(err, a->file, a->name, QX_NO_OFF);
    return err ? -(int)err->code : -(int)code;
}

/* Without an index a file that could not be read may be the one that holds the tensor. */
static bool fail_unread_file(const struct qx_ckpt *ck, const char *name, struct qx_error *err)
{
    for (size_t i = 0; i < ck->n_files; i++) {
        const char *kind = NULL;
        const struct qx_finding *f = find_error(ck, file_kinds, QX_ARRAY_LEN(file_kinds), ck->files[i].name,
                                                NULL, &kind);
        if (f) {
            qx_fail(err, QX_E_FORMAT, kind, "%s", f->text ? f->text : "the file cannot be used");
            qx_error_at(err, ck->files[i].name, name, QX_NO_OFF);
            return true;
        }
    }
    return false;
}

static int fail_unknown(const struct qx_ckpt *ck, const char *name, struct qx_error *err)
{
    size_t n = strlen(name), lo = 0, hi = ck->n_extras;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct qx_tensor *t = &ck->extras[mid].t;
        if (qx_name_compare(t->name, t->name_len, name, n) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    if (lo < ck->n_extras && strcmp(ck->extras[lo].t.name, name) == 0) {
        const char *file = ck->files[ck->extras[lo].t.file].name;
        qx_fail(err, QX_E_MISSING, "missing-tensor",
                "the index does not list the tensor; a copy in %s is therefore not used", file);
        qx_error_at(err, file, name, QX_NO_OFF);
    } else if (!ck->index.usable && fail_unread_file(ck, name, err)) {
        return -(int)QX_E_FORMAT;
    } else {
        qx_fail(err, QX_E_MISSING, "missing-tensor", "the tensor is in none of the %zu files%s", ck->n_files,
                ck->index.usable ? ", nor does the index list it" : "");
        qx_error_at(err, ck->single_file ? ck->path : ck->index_name, name, QX_NO_OFF);
    }
    return -(int)QX_E_MISSING;
}

static int fail_unreadable(const struct qx_ckpt *ck, const struct qx_tensor *t, struct qx_error *err)
{
    const struct qx_file *file = &ck->files[t->file];
    const char *kind = NULL;
    const struct qx_finding *f =
        find_error(ck, tensor_kinds, QX_ARRAY_LEN(tensor_kinds), file->name, t->name, &kind);
    if (file->state == QX_FILE_SHORT && t->size_bytes && t->off + t->size_bytes > file->size_bytes) {
        qx_fail(err, QX_E_FORMAT, "truncated", "the tensor ends at byte %" PRIu64 " of a file of %" PRIu64
                " bytes", t->off + t->size_bytes, file->size_bytes);
    } else if (f) {
        qx_fail(err, QX_E_FORMAT, kind, "%s", f->text ? f->text : "the tensor cannot be read");
    } else if (t->dtype == QX_DT_UNKNOWN) {
        qx_fail(err, QX_E_UNSUPPORTED, "unknown-dtype", "the tensor's dtype is not known");
    } else {
        f = find_error(ck, tensor_kinds, QX_ARRAY_LEN(tensor_kinds), file->name, NULL, &kind);
        qx_fail(err, QX_E_FORMAT, f ? kind : "bad-offsets",
                "the tensor's header entry contradicts itself or the file");
    }
    qx_error_at(err, file->name, t->name, t->off);
    return -(int)QX_E_FORMAT;
}

int qx_ckpt_need(const struct qx_ckpt *ck, const char *name, const struct qx_tensor **out,
                 struct qx_error *err)
{
    const struct qx_tensor *t = qx_ckpt_find(ck, name);
    *out = NULL;
    if (!t) {
        const struct qx_absent *a = find_absent(ck, name);
        return a ? fail_absent(ck, a, err) : fail_unknown(ck, name, err);
    }
    if (!t->readable) {
        return fail_unreadable(ck, t, err);
    }
    *out = t;
    return 0;
}
