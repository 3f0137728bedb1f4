/* ckpt_join.c: owns the decision which stored copy of a name is read: with an index the file it names,
 * without one the only copy. Headers and index are sorted lists, joined in one pass. */
#include "ckpt_priv.h"

#include "name_sort.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct join {
    struct qx_ckpt *ck;
    struct qx_name_key *all;        /* every tensor of every header, sorted by name, then by file */
    const struct qx_tensor **tensor;/* key.i -> tensor */
    uint32_t *file;                 /* key.i -> file */
    size_t n_all;
    uint32_t *index_file;           /* index's file number -> file number of the checkpoint */
    size_t cap_extras, cap_absent, cap_tensors;
    bool nomem;
};

static void report(struct join *j, const struct qx_report *r)
{
    if (!qx_findings_add(j->ck->findings, r)) {
        j->nomem = true;
    }
}

static bool gather(struct join *j)
{
    struct qx_ckpt *ck = j->ck;
    size_t n = 0;
    for (size_t f = 0; f < ck->n_files; f++) {
        n += ck->priv[f].header.n_tensors;
    }
    if (n >= UINT32_MAX) {
        return false;
    }
    j->n_all = n;
    struct qx_name_key *tmp = qx_malloc(n * sizeof *tmp);
    j->all = qx_malloc(n * sizeof *j->all);
    j->tensor = qx_malloc(n * sizeof(*j->tensor));
    j->file = qx_malloc(n * sizeof *j->file);
    if (!tmp || !j->all || !j->tensor || !j->file) {
        qx_free(tmp);
        return false;
    }
    size_t at = 0;
    for (size_t f = 0; f < ck->n_files; f++) {
        const struct qx_st_header *h = &ck->priv[f].header;
        for (size_t i = 0; i < h->n_tensors; i++, at++) {
            const struct qx_tensor *t = &h->tensors[i];
            j->all[at] = (struct qx_name_key){t->name, t->name_len, (uint32_t)at};
            j->tensor[at] = t;
            j->file[at] = (uint32_t)f;
        }
    }
    qx_name_sort(j->all, tmp, n);
    qx_free(tmp);
    return true;
}

/* End of the group of equal names that begins at i. */
static size_t group_end(const struct join *j, size_t i)
{
    size_t e = i + 1;
    while (e < j->n_all && j->all[e].n == j->all[i].n && memcmp(j->all[e].p, j->all[i].p, j->all[i].n) == 0) {
        e++;
    }
    return e;
}

static void read_this(struct join *j, size_t key, bool sure)
{
    struct qx_ckpt *ck = j->ck;
    void *v = ck->tensors;
    if (!qx_grow(&v, &j->cap_tensors, ck->n_tensors + 1, sizeof *ck->tensors)) {
        j->nomem = true;
        return;
    }
    ck->tensors = v;
    struct qx_tensor *t = &ck->tensors[ck->n_tensors++];
    *t = *j->tensor[j->all[key].i];
    t->file = j->file[j->all[key].i];
    t->readable = t->readable && sure;
}

static void not_read(struct join *j, size_t key, bool superseded)
{
    struct qx_ckpt *ck = j->ck;
    void *v = ck->extras;
    if (!qx_grow(&v, &j->cap_extras, ck->n_extras + 1, sizeof *ck->extras)) {
        j->nomem = true;
        return;
    }
    ck->extras = v;
    struct qx_extra *x = &ck->extras[ck->n_extras++];
    x->t = *j->tensor[j->all[key].i];
    x->t.file = j->file[j->all[key].i];
    x->superseded = superseded;
}

static void add_absent(struct join *j, const struct qx_absent *a)
{
    struct qx_ckpt *ck = j->ck;
    void *v = ck->absent;
    if (!qx_grow(&v, &j->cap_absent, ck->n_absent + 1, sizeof *ck->absent)) {
        j->nomem = true;
        return;
    }
    ck->absent = v;
    ck->absent[ck->n_absent++] = *a;
}

/* ---- without an index -------------------------------------------------------------------------- */

static void join_all(struct join *j)
{
    const struct qx_file *files = j->ck->files;
    for (size_t i = 0; i < j->n_all && !j->nomem;) {
        size_t e = group_end(j, i);
        read_this(j, i, e - i == 1);
        for (size_t k = i + 1; k < e; k++) {
            const char *a = files[j->file[j->all[i].i]].name, *b = files[j->file[j->all[k].i]].name;
            char text[600];
            snprintf(text, sizeof text, "%s and %s both hold this tensor and no index says which counts; "
                     "neither is read", a, b);
            report(j, &QX_REPORT("duplicate-tensor", QX_ERROR, .file = b, .tensor = j->all[k].p,
                                 .expected = "one file a tensor", .found = a, .text = text, .group = text));
        }
        i = e;
    }
}

/* ---- with an index ----------------------------------------------------------------------------- */

/* The files of a group, "a, b"; at most a few are named. */
static void name_files(const struct join *j, size_t i, size_t e, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = '\0';
    for (size_t k = i; k < e && n + 1 < cap; k++) {
        const char *name = j->ck->files[j->file[j->all[k].i]].name;
        int w = k - i == 4 ? snprintf(out + n, cap - n, ", and %zu more", e - k)
                           : snprintf(out + n, cap - n, "%s%s", k == i ? "" : ", ", name);
        n += w > 0 ? (size_t)w : 0;
        if (k - i == 4) {
            break;
        }
    }
}

static void report_index_absent(struct join *j, const struct qx_index_entry *x, uint32_t file, size_t i,
                                size_t e)
{
    const struct qx_file *f = &j->ck->files[file];
    char where[400], text[900], group[900];
    name_files(j, i, e, where, sizeof where);
    if (e > i) {
        snprintf(text, sizeof text, "the index places this tensor in %s, whose header (%" PRIu64
                 " tensors) lacks it; it is in %s, which the index does not give and which is not read",
                 f->name, f->n_tensors, where);
    } else {
        snprintf(text, sizeof text, "the index places this tensor in %s, whose header (%" PRIu64
                 " tensors) lacks it; no other file of the index has it", f->name, f->n_tensors);
    }
    snprintf(group, sizeof group, "%s|%s", f->name, where);
    report(j, &QX_REPORT("index-tensor-absent", QX_ERROR, .file = f->name, .tensor = x->name,
                         .expected = "in this file, says the index", .found = e > i ? where : "in no file",
                         .text = text, .group = group));
}

static void report_superseded(struct join *j, size_t key, const char *chosen)
{
    const char *file = j->ck->files[j->file[j->all[key].i]].name;
    char text[600];
    snprintf(text, sizeof text, "this file holds copies that are not read: the index gives these names to "
             "another file (the first to %s)", chosen);
    report(j, &QX_REPORT("superseded-copies", QX_WARNING, .file = file, .tensor = j->all[key].p,
                         .expected = chosen, .found = file, .text = text, .group = file));
}

static void report_unindexed(struct join *j, size_t key)
{
    const char *file = j->ck->files[j->file[j->all[key].i]].name;
    report(j, &QX_REPORT("unindexed-tensor", QX_WARNING, .file = file, .tensor = j->all[key].p,
                         .expected = "a name in the index", .found = "in the file only",
                         .text = "this file holds tensors that the index does not name; they are not read",
                         .group = file));
}

/* One name of the index against the group [i, e) of stored tensors with that name. */
static void join_entry(struct join *j, const struct qx_index_entry *x, size_t i, size_t e)
{
    uint32_t file = j->index_file[x->file];
    const struct qx_file *f = &j->ck->files[file];
    bool usable = f->state == QX_FILE_OK || f->state == QX_FILE_SHORT;
    size_t chosen = e;
    for (size_t k = i; k < e; k++) {
        if (j->file[j->all[k].i] == file) {
            chosen = k;
        }
    }
    if (chosen < e) {
        read_this(j, chosen, true);
    } else {
        struct qx_absent a = {
            .name = x->name,
            .file = j->ck->index.files[x->file].name,
            .file_exists = f->state != QX_FILE_MISSING && f->state != QX_FILE_REFUSED,
            .file_usable = usable,
            .found_in = e > i ? j->ck->files[j->file[j->all[i].i]].name : NULL,
        };
        add_absent(j, &a);
        if (usable) {
            report_index_absent(j, x, file, i, e);
        }
    }
    for (size_t k = i; k < e; k++) {
        if (k == chosen) {
            continue;
        }
        not_read(j, k, true);
        if (chosen < e) {
            report_superseded(j, k, f->name);
        }
    }
}

static bool map_index_files(struct join *j)
{
    const struct qx_ckpt *ck = j->ck;
    const struct qx_index *x = &ck->index;
    j->index_file = qx_malloc(x->n_files * sizeof *j->index_file);
    if (!j->index_file) {
        return false;
    }
    /* Both lists are sorted, and every file of the index is a file of the checkpoint. */
    size_t f = 0;
    for (size_t i = 0; i < x->n_files; i++) {
        while (f + 1 < ck->n_files && strcmp(ck->files[f].name, x->files[i].name) < 0) {
            f++;
        }
        j->index_file[i] = (uint32_t)f;
    }
    return true;
}

static void join_index(struct join *j)
{
    const struct qx_index *x = &j->ck->index;
    size_t i = 0;
    for (size_t at = 0; (at < x->n_entries || i < j->n_all) && !j->nomem;) {
        const struct qx_index_entry *e = at < x->n_entries ? &x->entries[at] : NULL;
        int c = !e            ? 1
                : i >= j->n_all ? -1
                                : qx_name_compare(e->name, e->name_len, j->all[i].p, j->all[i].n);
        if (c < 0) {
            join_entry(j, e, i, i);
            at++;
            continue;
        }
        size_t end = group_end(j, i);
        if (c == 0) {
            join_entry(j, e, i, end);
            at++;
        } else {
            for (size_t k = i; k < end; k++) {
                not_read(j, k, false);
                report_unindexed(j, k);
            }
        }
        i = end;
    }
}

static void check_total(struct join *j)
{
    const struct qx_ckpt *ck = j->ck;
    uint64_t tensors = 0, files = 0;
    if (!ck->index.has_total || ck->n_absent) {
        return;
    }
    for (size_t f = 0; f < ck->n_files; f++) {
        if (ck->files[f].state != QX_FILE_OK || !qx_add_u64(files, ck->files[f].size_bytes, &files)) {
            return;
        }
    }
    for (size_t i = 0; i < ck->n_tensors; i++) {
        if (!qx_add_u64(tensors, ck->tensors[i].size_bytes, &tensors)) {
            return;
        }
    }
    uint64_t declared = ck->index.total_size;
    if (declared == tensors) {
        return;
    }
    char expected[96], found[32], text[300];
    snprintf(expected, sizeof expected, "%" PRIu64, tensors);
    snprintf(found, sizeof found, "%" PRIu64, declared);
    snprintf(text, sizeof text, "metadata.total_size is %" PRIu64 ", the tensors have %" PRIu64
             " bytes and the files %" PRIu64 "%s", declared, tensors, files,
             declared == files ? ": it counts the files, headers included" : "");
    report(j, &QX_REPORT("total-size", QX_WARNING, .file = ck->index_name, .key = "metadata.total_size",
                         .expected = expected, .found = found, .text = text));
}

int ckpt_join(struct qx_ckpt *ck, struct qx_error *err)
{
    struct join j = {.ck = ck};
    bool ok = gather(&j);
    if (ok && ck->index.usable) {
        ok = map_index_files(&j);
        if (ok) {
            void *v = NULL;
            ok = qx_grow(&v, &j.cap_tensors, ck->index.n_entries, sizeof *ck->tensors);
            ck->tensors = v;
        }
        if (ok) {
            join_index(&j);
            check_total(&j);
        }
    } else if (ok) {
        join_all(&j);
    }
    qx_free(j.index_file);
    qx_free(j.file);
    qx_free(j.tensor);
    qx_free(j.all);
    for (size_t f = 0; f < ck->n_files; f++) { /* names stay: the header's arena owns them */
        qx_free(ck->priv[f].header.tensors);
        ck->priv[f].header.tensors = NULL;
        ck->priv[f].header.n_tensors = 0;
    }
    return ok && !j.nomem ? 0 : qx_fail_nomem(err);
}
