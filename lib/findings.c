/* findings.c: owns the list of findings with its strings (one arena) and the table of groups.
 * Entries never move, so pointers into them stay valid; only the array of pointers is sorted. */
#include "findings.h"

#include "alloc.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct entry {
    struct qx_finding f;
    const char *group;
    uint64_t hash;
    uint64_t order;
    const char *examples[QX_MAX_EXAMPLES];
};

struct qx_findings {
    struct qx_arena *arena;
    struct entry **v;
    size_t n, cap;
    struct entry **groups; /* open addressing, a power of two of slots */
    size_t n_groups, group_slots;
    bool failed;
};

struct qx_findings *qx_findings_create(void)
{
    struct qx_findings *fs = qx_calloc(1, sizeof *fs);
    if (fs) {
        fs->arena = qx_arena_create();
        if (!fs->arena) {
            qx_free(fs);
            return NULL;
        }
    }
    return fs;
}

void qx_findings_destroy(struct qx_findings *fs)
{
    if (fs) {
        qx_arena_destroy(fs->arena);
        qx_free(fs->v);
        qx_free(fs->groups);
        qx_free(fs);
    }
}

static uint64_t group_hash(const char *kind, enum qx_severity severity, const char *group)
{
    uint64_t h = XXH3_64bits_withSeed(kind, strlen(kind), (XXH64_hash_t)severity);
    return XXH3_64bits_withSeed(group, strlen(group), h);
}

static struct entry **group_slot(struct qx_findings *fs, const char *kind, enum qx_severity severity,
                                 const char *group, uint64_t hash)
{
    size_t mask = fs->group_slots - 1;
    size_t i = (size_t)hash & mask;
    while (fs->groups[i]) {
        const struct entry *e = fs->groups[i];
        if (e->hash == hash && e->f.severity == severity && strcmp(e->f.kind, kind) == 0 &&
            strcmp(e->group, group) == 0) {
            break;
        }
        i = (i + 1) & mask;
    }
    return &fs->groups[i];
}

static bool grow_groups(struct qx_findings *fs)
{
    if (fs->n_groups * 2 < fs->group_slots) {
        return true;
    }
    size_t slots = fs->group_slots ? fs->group_slots * 2 : 64;
    struct entry **old = fs->groups, **fresh = qx_calloc(slots, sizeof(*fresh));
    size_t old_slots = fs->group_slots;
    if (!fresh) {
        return false;
    }
    fs->groups = fresh;
    fs->group_slots = slots;
    for (size_t i = 0; i < old_slots; i++) {
        if (old[i]) {
            *group_slot(fs, old[i]->f.kind, old[i]->f.severity, old[i]->group, old[i]->hash) = old[i];
        }
    }
    qx_free(old);
    return true;
}

static const char *copy(struct qx_findings *fs, const char *s, bool *ok)
{
    if (!s) {
        return NULL;
    }
    const char *p = qx_arena_strndup(fs->arena, s, strlen(s));
    if (!p) {
        *ok = false;
    }
    return p;
}

static bool add_example(struct qx_findings *fs, struct entry *e, const char *name)
{
    bool ok = true;
    if (name && e->f.n_examples < QX_MAX_EXAMPLES) {
        const char *p = copy(fs, name, &ok);
        if (p) {
            e->examples[e->f.n_examples++] = p;
        }
    }
    return ok;
}

static bool fail(struct qx_findings *fs)
{
    fs->failed = true;
    return false;
}

bool qx_findings_add(struct qx_findings *fs, const struct qx_report *r)
{
    const char *member = r->tensor ? r->tensor : r->key ? r->key : r->file;
    uint64_t count = r->count ? r->count : 1;
    uint64_t hash = 0;
    struct entry **slot = NULL;
    if (!r->text) {
        return fail(fs);
    }
    if (r->group) {
        if (!grow_groups(fs)) {
            return fail(fs);
        }
        hash = group_hash(r->kind, r->severity, r->group);
        slot = group_slot(fs, r->kind, r->severity, r->group, hash);
        if (*slot) {
            (*slot)->f.count += count;
            return add_example(fs, *slot, member) || fail(fs);
        }
    }
    void *v = fs->v;
    struct entry *e = qx_arena_alloc(fs->arena, sizeof *e, _Alignof(struct entry));
    if (!e || !qx_grow(&v, &fs->cap, fs->n + 1, sizeof(struct entry *))) {
        return fail(fs);
    }
    fs->v = v;
    bool ok = true;
    *e = (struct entry){.hash = hash, .order = fs->n};
    e->f = (struct qx_finding){
        .kind = copy(fs, r->kind, &ok),
        .severity = r->severity,
        .file = copy(fs, r->file, &ok),
        .tensor = copy(fs, r->tensor, &ok),
        .key = copy(fs, r->key, &ok),
        .off = r->off,
        .expected = copy(fs, r->expected, &ok),
        .found = copy(fs, r->found, &ok),
        .text = copy(fs, r->text, &ok),
        .count = count,
        .examples = e->examples,
    };
    e->group = copy(fs, r->group, &ok);
    if (!ok || (r->group && !add_example(fs, e, member))) {
        return fail(fs);
    }
    fs->v[fs->n++] = e;
    if (slot) {
        *slot = e;
        fs->n_groups++;
    }
    return true;
}

bool qx_findings_append(struct qx_findings *fs, const struct qx_findings *b)
{
    for (size_t i = 0; i < b->n; i++) {
        const struct entry *e = b->v[i];
        struct qx_report r = {
            .kind = e->f.kind, .severity = e->f.severity, .file = e->f.file, .tensor = e->f.tensor,
            .key = e->f.key, .off = e->f.off, .expected = e->f.expected, .found = e->f.found,
            .text = e->f.text, .group = e->group, .count = e->f.count,
        };
        if (!qx_findings_add(fs, &r)) {
            return false;
        }
        if (e->group) {
            struct entry *mine = *group_slot(fs, e->f.kind, e->f.severity, e->group, e->hash);
            for (uint32_t k = 1; k < e->f.n_examples; k++) {
                if (!add_example(fs, mine, e->examples[k])) {
                    return fail(fs);
                }
            }
        }
    }
    if (b->failed) {
        fs->failed = true;
    }
    return true;
}

static int compare_text(const char *a, const char *b)
{
    if (!a || !b) {
        return (a != NULL) - (b != NULL);
    }
    return strcmp(a, b);
}

static int compare(const void *pa, const void *pb)
{
    const struct entry *a = *(const struct entry *const *)pa, *b = *(const struct entry *const *)pb;
    if (a->f.severity != b->f.severity) {
        return a->f.severity > b->f.severity ? -1 : 1;
    }
    int c = strcmp(a->f.kind, b->f.kind);
    c = c ? c : compare_text(a->f.file, b->f.file);
    c = c ? c : compare_text(a->f.tensor, b->f.tensor);
    c = c ? c : compare_text(a->f.key, b->f.key);
    return c ? c : (a->order > b->order) - (a->order < b->order);
}

void qx_findings_sort(struct qx_findings *fs)
{
    if (fs->n > 1) {
        qsort(fs->v, fs->n, sizeof *fs->v, compare);
    }
}

bool qx_findings_failed(const struct qx_findings *fs)
{
    return fs->failed;
}

bool qx_findings_set_text(struct qx_findings *fs, size_t i, const char *text)
{
    bool ok = true;
    const char *p = copy(fs, text, &ok);
    if (!ok) {
        return fail(fs);
    }
    fs->v[i]->f.text = p;
    return true;
}

size_t qx_findings_count(const struct qx_findings *fs)
{
    return fs->n;
}

const struct qx_finding *qx_findings_at(const struct qx_findings *fs, size_t i)
{
    return i < fs->n ? &fs->v[i]->f : NULL;
}

size_t qx_findings_count_severity(const struct qx_findings *fs, enum qx_severity s)
{
    size_t n = 0;
    for (size_t i = 0; i < fs->n; i++) {
        n += fs->v[i]->f.severity == s;
    }
    return n;
}
