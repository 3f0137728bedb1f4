/* alloc.c: owns the heap hooks and the arena. Every block of lib passes here, so a test can make the
 * n-th allocation fail and count what is still alive. Counters are atomic: workers allocate too. */
#include "alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Atomic uint64_t live_blocks, total_calls, failed_calls;
static _Atomic uint64_t fail_countdown; /* 0: off; 1: the next one fails */
static _Atomic bool fail_sticky;

static bool must_fail(void)
{
    atomic_fetch_add_explicit(&total_calls, 1, memory_order_relaxed);
    uint64_t left = atomic_load_explicit(&fail_countdown, memory_order_relaxed);
    bool fail = false;
    while (left != 0 && !fail) {
        fail = left == 1;
        if ((fail && atomic_load(&fail_sticky)) ||
            atomic_compare_exchange_weak(&fail_countdown, &left, left - 1)) {
            break;
        }
        fail = false;
    }
    if (fail) {
        atomic_fetch_add_explicit(&failed_calls, 1, memory_order_relaxed);
    }
    return fail;
}

void *qx_malloc(size_t n)
{
    if (must_fail()) {
        return NULL;
    }
    void *p = malloc(n ? n : 1);
    if (p) {
        atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    }
    return p;
}

void *qx_calloc(size_t n, size_t size)
{
    size_t total;
    if (!qx_mul_size(n, size, &total) || must_fail()) {
        return NULL;
    }
    void *p = calloc(total ? total : 1, 1);
    if (p) {
        atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    }
    return p;
}

void *qx_realloc(void *p, size_t n)
{
    if (must_fail()) {
        return NULL;
    }
    void *q = realloc(p, n ? n : 1);
    if (q && !p) {
        atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    }
    return q;
}

void qx_free(void *p)
{
    if (p) {
        atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
        free(p);
    }
}

char *qx_strndup(const char *s, size_t n)
{
    size_t room;
    char *p = qx_add_size(n, 1, &room) ? qx_malloc(room) : NULL;
    if (p) {
        memcpy(p, s, n);
        p[n] = '\0';
    }
    return p;
}

char *qx_strdup(const char *s)
{
    return qx_strndup(s, strlen(s));
}

bool qx_grow(void **p, size_t *cap, size_t need, size_t size)
{
    if (need <= *cap) {
        return true;
    }
    size_t want = *cap < 8 ? 8 : *cap;
    while (want < need) {
        if (!qx_mul_size(want, 2, &want)) {
            return false;
        }
    }
    size_t bytes;
    if (!qx_mul_size(want, size, &bytes)) {
        return false;
    }
    void *q = qx_realloc(*p, bytes);
    if (!q) {
        return false;
    }
    *p = q;
    *cap = want;
    return true;
}

void qx_alloc_fail_at(uint64_t n, bool sticky)
{
    atomic_store(&failed_calls, 0);
    atomic_store(&fail_sticky, sticky);
    atomic_store(&fail_countdown, n);
}

uint64_t qx_alloc_live(void)
{
    return atomic_load(&live_blocks);
}

uint64_t qx_alloc_total(void)
{
    return atomic_load(&total_calls);
}

uint64_t qx_alloc_failed(void)
{
    return atomic_load(&failed_calls);
}

struct chunk {
    struct chunk *next;
    size_t used, cap;
    _Alignas(16) char bytes[];
};

uint64_t qx_host_memory_bytes(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
}

struct qx_arena {
    struct chunk *head;
    size_t next_cap;
};

#define FIRST_CHUNK ((size_t)4096)
#define LARGEST_CHUNK ((size_t)4 << 20)

struct qx_arena *qx_arena_create(void)
{
    struct qx_arena *a = qx_calloc(1, sizeof *a);
    if (a) {
        a->next_cap = FIRST_CHUNK;
    }
    return a;
}

void qx_arena_destroy(struct qx_arena *a)
{
    if (!a) {
        return;
    }
    for (struct chunk *c = a->head; c;) {
        struct chunk *next = c->next;
        qx_free(c);
        c = next;
    }
    qx_free(a);
}

static struct chunk *make_chunk(size_t cap)
{
    size_t bytes;
    struct chunk *c = qx_add_size(cap, sizeof *c, &bytes) ? qx_malloc(bytes) : NULL;
    if (c) {
        c->used = 0;
        c->cap = cap;
    }
    return c;
}

void *qx_arena_alloc(struct qx_arena *a, size_t n, size_t align)
{
    struct chunk *c = a->head;
    if (c) {
        size_t at = (c->used + align - 1) & ~(align - 1);
        if (at <= c->cap && n <= c->cap - at) {
            c->used = at + n;
            return c->bytes + at;
        }
    }
    if (n > a->next_cap / 4) {
        /* A large piece gets its own chunk behind the head, which stays in use for small ones. */
        c = make_chunk(n);
        if (!c) {
            return NULL;
        }
        c->used = n;
        if (a->head) {
            c->next = a->head->next;
            a->head->next = c;
        } else {
            c->next = NULL;
            a->head = c;
        }
        return c->bytes;
    }
    c = make_chunk(a->next_cap);
    if (!c) {
        return NULL;
    }
    if (a->next_cap < LARGEST_CHUNK) {
        a->next_cap *= 2;
    }
    c->next = a->head;
    a->head = c;
    c->used = n;
    return c->bytes;
}

char *qx_arena_strndup(struct qx_arena *a, const char *s, size_t n)
{
    size_t room;
    char *p = qx_add_size(n, 1, &room) ? qx_arena_alloc(a, room, 1) : NULL;
    if (p) {
        memcpy(p, s, n);
        p[n] = '\0';
    }
    return p;
}
