/* repack.c: making a plan; repack_run.c carries it out. */
#include "repack_impl.h"

#include "out_dir.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- planning ----------------------------------------------------------------------------- */

static int check_opts(const struct qx_repack_opts *o, struct qx_error *err)
{
    if (o->table != QX_F_NONE && o->table != QX_F_BF16 && o->table != QX_F_FP8 &&
        o->table != QX_F_NVFP4) {
        return qx_fail(err, QX_E_USAGE, "format-unsupported",
                       "the table cannot be stored as %s: only as bf16, fp8 or nvfp4",
                       qx_format_name(o->table));
    }
    if (o->experts != QX_F_NONE && o->experts != QX_F_BF16 && o->experts != QX_F_FP8_BLOCK &&
        o->experts != QX_F_NVFP4) {
        return qx_fail(err, QX_E_USAGE, "format-unsupported",
                       "experts cannot be stored as %s: only as bf16, fp8-block or nvfp4",
                       qx_format_name(o->experts));
    }
    if (o->n_ranks > 0 && o->rank >= o->n_ranks) {
        return qx_fail(err, QX_E_USAGE, "rank",
                       "rank %" PRIu32 " of %" PRIu32 ": ranks are 0 to %" PRIu32, o->rank,
                       o->n_ranks, o->n_ranks - 1);
    }
    return 0;
}

static bool file_kept_whole(const struct qx_repack *r, const char *name, size_t n)
{
    for (size_t i = 0; i < r->n_f; i++) {
        if (r->f[i].from >= 0 && strlen(r->f[i].name) == n && memcmp(r->f[i].name, name, n) == 0) {
            return true;
        }
    }
    return false;
}

static bool ends(const char *s, const char *suffix)
{
    size_t a = strlen(s), b = strlen(suffix);
    return a >= b && strcmp(s + a - b, suffix) == 0;
}

/* Files that have nothing to do with weights: tokenizer, template, licence. */
static bool is_plain(const struct qx_repack *r, const char *name)
{
    static const char *const written[] = {"config.json", "hf_quant_config.json", QX_JOURNAL};
    static const char *const not [] = {".safetensors", ".safetensors.index.json", ".part",
                                       ".incomplete"};
    for (size_t i = 0; i < QX_ARRAY_LEN(written); i++) {
        if (strcmp(name, written[i]) == 0) {
            return false;
        }
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(not ); i++) {
        if (ends(name, not [i])) {
            return false;
        }
    }
    if (ends(name, ".complete.json")) {
        /* A mark beside a weight file says something about that file's bytes. */
        char weight[512];
        int n = snprintf(weight, sizeof weight, "%.*s.safetensors", (int)(strlen(name) - 14), name);
        return n > 0 && (size_t)n < sizeof weight && file_kept_whole(r, weight, (size_t)n);
    }
    return true;
}

static int list_plain(struct qx_repack *r, struct qx_error *err)
{
    DIR *dir = opendir(qx_ckpt_dir(r->ck));
    if (dir == NULL) {
        int rc = qx_fail_errno(err, QX_E_IO, errno, "read", "cannot list the directory");
        qx_error_at(err, qx_ckpt_dir(r->ck), NULL, QX_NO_OFF);
        return rc;
    }
    int rc = 0;
    for (struct dirent *e = readdir(dir); rc == 0 && e != NULL; e = readdir(dir)) {
        struct stat st;
        if (!is_plain(r, e->d_name) || fstatat(dirfd(dir), e->d_name, &st, 0) != 0 ||
            !S_ISREG(st.st_mode)) {
            continue;
        }
        if (!qx_grow((void **)&r->plain_files, &r->cap_plain, r->n_plain + 1,
                     sizeof *r->plain_files) ||
            !qx_grow((void **)&r->plain_sizes, &r->cap_plain_sizes, r->n_plain + 1,
                     sizeof *r->plain_sizes)) {
            rc = qx_fail_nomem(err);
            break;
        }
        const char *name = qx_arena_strndup(r->arena, e->d_name, strlen(e->d_name));
        r->plain_files[r->n_plain] = name;
        r->plain_sizes[r->n_plain++] = (uint64_t)st.st_size;
        rc = name == NULL ? qx_fail_nomem(err) : 0;
    }
    closedir(dir);
    return rc;
}

/* Names the plan: options and input in, everything that is laid out from them out. */
static void plan_id(struct qx_repack *r)
{
    XXH3_state_t *s = XXH3_createState();
    char line[512];
    if (s == NULL) {
        memset(r->plan_id, '0', 32);
        return;
    }
    XXH3_128bits_reset(s);
    int n = snprintf(line, sizeof line, "qx-repack 1 plain=%d row0=%" PRIu64 " rows=%" PRIu64 "\n",
                     r->o.plain_scales, r->table.row0, r->table.n_rows);
    XXH3_128bits_update(s, line, (size_t)n);
    for (size_t i = 0; i < qx_ckpt_n_files(r->ck); i++) {
        const struct qx_file *f = qx_ckpt_file(r->ck, i);
        struct stat st;
        int fd = qx_ckpt_fd(r->ck, (uint32_t)i);
        uint64_t when = fd >= 0 && fstat(fd, &st) == 0 ? (uint64_t)st.st_mtim.tv_sec * 1000000000u +
                                                             (uint64_t)st.st_mtim.tv_nsec
                                                       : 0;
        n = snprintf(line, sizeof line, "%.300s %" PRIu64 " %" PRIu64 "\n", f->name, f->size_bytes,
                     when);
        XXH3_128bits_update(s, line, (size_t)n);
    }
    for (size_t i = 0; i < r->n_f; i++) {
        XXH3_128bits_update(s, r->f[i].name, strlen(r->f[i].name) + 1);
        XXH3_128bits_update(s, &r->f[i].size, sizeof r->f[i].size);
        if (r->f[i].header != NULL) {
            XXH3_128bits_update(s, r->f[i].header, r->f[i].header_bytes);
        }
    }
    for (size_t i = 0; i < r->n_small; i++) {
        XXH3_128bits_update(s, r->small[i].text.p, r->small[i].text.n);
    }
    for (size_t i = 0; i < r->n_j; i++) {
        const struct rp_job *j = &r->j[i];
        uint64_t v[7] = {j->kind, j->file, j->off, j->n, (uint64_t)j->from, j->from_off, j->row};
        XXH3_128bits_update(s, v, sizeof v);
    }
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(s));
    for (size_t i = 0; i < 16; i++) {
        snprintf(r->plan_id + 2 * i, 3, "%02x", c.digest[i]);
    }
    XXH3_freeState(s);
}

int qx_repack_plan(struct qx_repack **out, const struct qx_ckpt *ck, const char *target,
                   const struct qx_repack_opts *opts, struct qx_error *err)
{
    *out = NULL;
    int rc = check_opts(opts, err);
    if (rc == 0 && qx_ckpt_is_single_file(ck)) {
        rc =
            qx_fail(err, QX_E_USAGE, "usage", "a single file is no checkpoint: give its directory");
    }
    rc = rc == 0 ? qx_ckpt_config_status(ck, err) : rc;
    rc = rc == 0 ? qx_out_dir_check(qx_ckpt_dir(ck), target, err) : rc;
    if (rc != 0) {
        return rc;
    }
    struct qx_repack *r = qx_calloc(1, sizeof *r);
    if (r == NULL) {
        return qx_fail_nomem(err);
    }
    r->ck = ck;
    r->o = *opts;
    if (r->o.n_threads == 0) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        r->o.n_threads = n > 0 && n < 1024 ? (uint32_t)n : 1;
    }
    r->target = qx_strdup(target);
    r->arena = qx_arena_create();
    rc = r->target == NULL || r->arena == NULL ? qx_fail_nomem(err) : 0;
    for (size_t i = 0; i < qx_ckpt_n_files(ck); i++) {
        r->info.bytes_in += qx_ckpt_file(ck, i)->size_bytes;
    }
    rc = rc == 0 ? rp_plan_experts(r, err) : rc;
    rc = rc == 0 ? rp_plan_table(r, err) : rc;
    rc = rc == 0 ? rp_plan_copies(r, err) : rc;
    rc = rc == 0 ? rp_plan_files(r, err) : rc;
    rc = rc == 0 ? rp_plan_jobs(r, err) : rc;
    rc = rc == 0 ? rp_plan_config(r, err) : rc;
    rc = rc == 0 ? list_plain(r, err) : rc;
    if (rc != 0) {
        qx_repack_destroy(r);
        return rc;
    }
    plan_id(r);
    r->info.n_files = r->n_f;
    r->info.n_tensors = r->n_t;
    r->info.n_dropped = r->n_dropped;
    for (size_t i = 0; i < r->n_t; i++) {
        *(r->t[i].from != NULL ? &r->info.n_copied : &r->info.n_converted) += 1;
    }
    r->info.free_bytes = qx_out_dir_free(target);
    *out = r;
    return 0;
}

void qx_repack_info(const struct qx_repack *r, struct qx_repack_info *out)
{
    *out = r->info;
}

void qx_repack_destroy(struct qx_repack *r)
{
    if (r == NULL) {
        return;
    }
    for (size_t i = 0; i < r->n_c; i++) {
        qx_free(r->c[i].e);
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(r->small); i++) {
        qx_buf_fini(&r->small[i].text);
    }
    qx_rows_close(r->table.rows);
    qx_free(r->t);
    qx_free(r->order);
    qx_free(r->f);
    qx_free(r->j);
    qx_free(r->c);
    qx_free(r->plain_files);
    qx_free(r->plain_sizes);
    qx_free(r->target);
    qx_arena_destroy(r->arena);
    qx_free(r);
}
