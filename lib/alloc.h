/* alloc.h: the one door to the heap, so that tests can make any allocation fail, and an arena for
 * names and indexes that live as long as their owner. */
#ifndef QX_ALLOC_H
#define QX_ALLOC_H

#include "base.h"

void *qx_malloc(size_t n);
void *qx_calloc(size_t n, size_t size); /* overflow of n x size is a failure */
void *qx_realloc(void *p, size_t n);
void qx_free(void *p);
char *qx_strdup(const char *s);
char *qx_strndup(const char *s, size_t n);
/* Grows *p (element size `size`) so that it holds at least `need` elements; doubles. False on failure,
 * *p intact. */
bool qx_grow(void **p, size_t *cap, size_t need, size_t size);

/* Memory of this machine; 0 if the system does not say. */
uint64_t qx_host_memory_bytes(void);

/* Tests: the n-th allocation from now fails (0 = never), and every later one too when `sticky`. */
void qx_alloc_fail_at(uint64_t n, bool sticky);
uint64_t qx_alloc_live(void);   /* blocks allocated and not yet freed */
uint64_t qx_alloc_total(void);  /* allocations asked for so far */
uint64_t qx_alloc_failed(void); /* of these, how many were made to fail since the last qx_alloc_fail_at */

struct qx_arena; /* pieces live until the arena is destroyed; not thread safe */
struct qx_arena *qx_arena_create(void);
void qx_arena_destroy(struct qx_arena *a);
void *qx_arena_alloc(struct qx_arena *a, size_t n, size_t align);
char *qx_arena_strndup(struct qx_arena *a, const char *s, size_t n);

#endif
