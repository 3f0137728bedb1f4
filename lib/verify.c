/* verify.c: the driver of qx_verify_run: cheap checks first, then one pass over the bytes that the level and
 * the manifest ask for, then rows decoded twice. Owns the list of findings and the items of the pass. */
#include "verify_impl.h"

#include "alloc.h"
#include "error.h"
#include "hub.h"
#include "rules.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

struct qx_verify {
    struct qx_findings *fs;
    struct qx_verify_stats stats;
};

bool verify_add(struct verify *v, struct qx_report r)
{
    return qx_findings_add(v->fs, &r);
}

const char *verify_file(const struct verify *v, const struct qx_tensor *t)
{
    return t ? qx_ckpt_file(v->ck, t->file)->name : NULL;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- the pass ----------------------------------------------------------------------------- */

struct pass_user { struct verify *v; struct verify_manifest *m; };

static void on_tensor(void *user, const struct qx_scan_item *it, const uint8_t *digest)
{
    struct pass_user *u = user;
    if (u->m) {
        verify_manifest_tensor(u->m, it, digest);
    }
}

static void on_file(void *user, size_t file, const uint8_t *const digest[QX_DIGEST_COUNT])
{
    struct pass_user *u = user;
    if (u->m) {
        verify_manifest_file(u->m, file, digest);
    }
}

static void on_bad(void *user, size_t file, uint64_t off, uint64_t len, int sys)
{
    struct pass_user *u = user;
    char text[256], reason[96];
    struct qx_report r;
    snprintf(text, sizeof text, "%llu bytes could not be read: %s", (unsigned long long)len,
             strerror_r(sys, reason, sizeof reason));
    r = QX_REPORT("read-error", QX_ERROR, .file = u->v->files[file].name, .text = text,
                  .group = u->v->files[file].name);
    r.off = off;
    verify_add(u->v, r);
}

static bool on_progress(void *user, uint64_t done, uint64_t total)
{
    const struct qx_verify_opts *o = ((struct pass_user *)user)->v->o;
    return o->progress && o->progress(o->user, "reading", done, total) != 0;
}

/* All tensors, so that each gets a digest; those of the level have better kinds already. */
static int every_tensor(struct verify *v, struct qx_error *err)
{
    struct verify_opts_copy { struct qx_verify_opts o; } copy = {*v->o};
    const struct qx_verify_opts *o = v->o;
    int rc;
    copy.o.level = QX_VERIFY_FULL;
    v->o = &copy.o;
    rc = qx_values_gather(v, err);
    v->o = o;
    return rc;
}

static int read_values(struct verify *v, struct qx_error *err)
{
    struct pass_user u = {v, NULL};
    struct qx_scan s = {.ck = v->ck, .n_threads = v->o->n_threads, .user = &u, .on_tensor = on_tensor,
                        .on_file = on_file, .on_bad = on_bad, .progress = on_progress};
    bool manifest = v->o->manifest || v->o->manifest_out;
    uint64_t t0;
    int rc = 0;
    v->arena = qx_arena_create();
    if (!v->arena) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; rc == 0 && i < qx_ckpt_n_files(v->ck); ++i) {
        const struct qx_file *f = qx_ckpt_file(v->ck, i);
        if (!qx_grow((void **)&v->files, &v->cap_files, v->n_files + 1, sizeof *v->files)) {
            return qx_fail_nomem(err);
        }
        v->files[v->n_files++] = (struct qx_scan_file){
            .name = f->name, .skip = f->state == QX_FILE_MISSING || f->state == QX_FILE_REFUSED};
    }
    if (manifest) {
        rc = every_tensor(v, err);
        rc = rc ? rc : verify_manifest_open(&u.m, v, err);
        if (rc == 0) {
            verify_manifest_scan(u.m, &s);
        }
    } else {
        rc = qx_values_gather(v, err);
    }
    if (rc == 0 && v->o->manifest_out) {
        struct qx_buf head = {0};
        qx_manifest_put_head(&head);
        if (head.failed) {
            rc = qx_fail_nomem(err);
        } else if (v->o->manifest_out(v->o->user, head.p, head.n) != 0) {
            rc = qx_fail(err, QX_E_WRITE, "write", "the manifest could not be written");
        }
        qx_buf_fini(&head);
    }
    if (rc == 0) {
        s.bulk = manifest || v->o->level == QX_VERIFY_FULL;
        s.files = v->files;
        s.n_files = v->n_files;
        s.items = v->items;
        s.n_items = v->n_items;
        t0 = now_ns();
        rc = qx_scan_run(&s, err);
        v->stats.read_ns = now_ns() - t0;
        v->stats.read_bytes = s.read_bytes;
        v->stats.bytes += s.read_bytes;
    }
    if (rc == 0 && v->o->level >= QX_VERIFY_SCALES) {
        rc = qx_values_report(v, err);
    }
    if (rc == 0 && u.m) {
        rc = verify_manifest_report(u.m, err);
    }
    verify_manifest_close(u.m);
    return rc;
}

/* ---- all ---------------------------------------------------------------------------------- */

static int run(struct verify *v, struct qx_error *err)
{
    int rc = 0;
    if (!qx_findings_append(v->fs, qx_ckpt_findings(v->ck))) {
        return qx_fail_nomem(err);
    }
    v->stats.files = qx_ckpt_n_files(v->ck);
    v->stats.tensors = qx_ckpt_n_tensors(v->ck);
    for (size_t i = 0; i < qx_ckpt_n_files(v->ck); ++i) {
        const struct qx_file *f = qx_ckpt_file(v->ck, i);
        v->stats.bytes += f->state == QX_FILE_OK || f->state == QX_FILE_SHORT ? 8 + f->header_bytes : 0;
    }
    if (v->res) {
        rc = qx_rules_headers(v->ck, v->fs, err);
        rc = rc ? rc : qx_rules_scale_headers(v->ck, v->fs, err);
        rc = rc ? rc : qx_rules_text(v->ck, v->fs, err);
    }
    if (rc == 0 && (v->o->level >= QX_VERIFY_SCALES || v->o->manifest || v->o->manifest_out)) {
        rc = read_values(v, err);
    }
    if (rc == 0 && v->res && v->o->level >= QX_VERIFY_SCALES && v->o->sample_rows) {
        rc = qx_verify_decode(v, err);
    }
    if (rc == 0 && qx_findings_failed(v->fs)) {
        rc = qx_fail_nomem(err);
    }
    return rc;
}

static int verify_run(struct qx_verify **out, const struct qx_ckpt *ck, const struct qx_verify_opts *opts,
                      struct qx_error *err)
{
    struct verify v = {.ck = ck, .o = opts};
    struct qx_verify *r;
    int rc;
    if (!qx_ckpt_is_single_file(ck)) {
        rc = qx_ckpt_config_status(ck, err);
        if (rc) {
            return rc;
        }
        v.res = qx_ckpt_resolved(ck);
    }
    r = qx_calloc(1, sizeof *r);
    v.fs = r ? qx_findings_create() : NULL;
    if (!v.fs) {
        qx_free(r);
        return qx_fail_nomem(err);
    }
    rc = run(&v, err);
    qx_free(v.items);
    qx_free(v.files);
    qx_arena_destroy(v.arena);
    if (rc) {
        qx_findings_destroy(v.fs);
        qx_free(r);
        return rc;
    }
    qx_findings_sort(v.fs);
    r->fs = v.fs;
    r->stats = v.stats;
    *out = r;
    return 0;
}

int qx_verify_run(struct qx_verify **out, const struct qx_ckpt *ck, const struct qx_verify_opts *opts,
                  struct qx_error *err)
{
    struct qx_verify_opts o = opts ? *opts : QX_VERIFY_DEFAULT;
    struct qx_buf list = {0};
    int rc = 0;
    *out = NULL;
    if (qx_ckpt_is_lone_config(ck)) { /* nothing wrong in nothing would pass for a sound checkpoint */
        qx_fail(err, QX_E_NOT_FOUND, "not-a-checkpoint", "a configuration alone has nothing to verify; give its directory");
        return qx_error_at(err, qx_ckpt_path(ck), NULL, QX_NO_OFF);
    }
    if (o.hub && o.manifest) {
        return qx_fail(err, QX_E_USAGE, "usage", "one list: the hub's checksums or a manifest");
    }
    if (o.hub) {
        rc = qx_hub_list(ck, &list, err);
        o.manifest = list.p;
        o.manifest_bytes = list.n;
        o.manifest_name = NULL;
    }
    rc = rc ? rc : verify_run(out, ck, &o, err);
    qx_buf_fini(&list);
    return rc;
}

const struct qx_findings *qx_verify_findings(const struct qx_verify *v)
{
    return v->fs;
}

void qx_verify_stats(const struct qx_verify *v, struct qx_verify_stats *out)
{
    *out = v->stats;
}

void qx_verify_free(struct qx_verify *v)
{
    if (v) {
        qx_findings_destroy(v->fs);
        qx_free(v);
    }
}
