/* scan.c: the pass over all bytes.
 *
 * The bytes are cut into chunks in file order; each chunk gets a ticket. A worker takes the next ticket,
 * reads the chunk and looks at it on its own; hashes need order, so for them workers take turns. Bytes in
 * the page cache are read in small pieces that are looked at while they are in the processor's cache;
 * others are read past the page cache (O_DIRECT), by more workers than processors, so that many reads
 * are in flight; a semaphore keeps the number that compute at n_threads.
 *
 * Invariants: tickets of at most WINDOW chunks are open (a few when the bytes are cached, so that hashes
 * still find them in the processor's cache); `base` is the first ticket not finished; an element cut by a
 * chunk's end is put together when `base` passes it. A worker never waits for its turn while it holds a
 * permit to compute, and whoever has the turn gets a permit first, so that turns always come. */
#include "scan.h"

#include "alloc.h"
#include "error.h"
#include "pool.h"
#include "qx_build.h"
#include "scan_read.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#if QX_HAVE_SHA256
#include <openssl/evp.h>
#endif

#define CHUNK (UINT64_C(4) << 20)       /* a direct read */
#define CHUNK_CACHED (UINT64_C(1) << 20)
#define PIECE (UINT64_C(256) << 10) /* of cached bytes: stays in a second-level cache; whole elements */
#define LOOK (UINT64_C(4) << 10)    /* granularity of the closer look */
#define GAP (UINT64_C(32) << 10)    /* between items: cheaper to read than to start a new read */
#define READERS 8u          /* in bulk: 32 MiB in flight */
#define READERS_PIECES 16u  /* of pieces scattered over files */
#define WINDOW 64u
#define HUGE_PAGE (UINT64_C(2) << 20)

struct chunk {
    uint64_t ticket, off, len;
    size_t file, first_item, end_item;
    bool file_begins, file_ends;
};

/* What is left over at a chunk's ends: parts of one element. */
struct edge {
    bool done;
    size_t head_item, tail_item; /* SIZE_MAX: none */
    unsigned head_n, tail_n;
    uint8_t head[8], tail[8];
    uint64_t head_elem;          /* element that the head bytes end */
};

struct pass {
    struct qx_scan *s;
    int dir;
    size_t *file_item;           /* [n_files + 1]: items of a file */
    struct qx_scan_fd *fd;
    pthread_mutex_t lock;
    pthread_cond_t permit_free, turn_permit_free, window_moved, turn_came[WINDOW];
    uint32_t permits, turn_waits, window_waits, threads;
    bool stop, cached;           /* cached: the last chunk was in the page cache */
    struct qx_error err;
    int rc;
    /* the cutter */
    size_t cut_file, cut_item;
    uint64_t cut_pos, cut_end, next_ticket;
    bool cut_in_file;
    /* completion */
    uint64_t base, turn, done_bytes, total_bytes;
    struct edge edge[WINDOW];
    uint8_t classes[QX_SCAN_COUNT][256]; /* of one-byte kinds */
    unsigned carry_n;            /* tail bytes of chunk base - 1 */
    size_t carry_item;
    uint8_t carry[8];
    /* hashes; only whoever has the turn touches them */
    bool hashing, file_hash_ok, tensor_ok;
    XXH3_state_t *file_hash, *tensor_hash;
#if QX_HAVE_SHA256
    EVP_MD_CTX *md[QX_DIGEST_COUNT]; /* all but XXH3 */
#endif
};

#if QX_HAVE_SHA256
static const EVP_MD *digest_method(int kind)
{
    return kind == QX_DIGEST_SHA256 ? EVP_sha256() : kind == QX_DIGEST_GIT ? EVP_sha1() : NULL;
}
#endif

/* ---- files -------------------------------------------------------------------------------- */

static bool open_file(struct pass *p, size_t i)
{
    if (i > 0 && p->fd[i - 1].chunks == 0) {
        qx_scan_fd_close(&p->fd[i - 1]);
    }
    return qx_scan_fd_open(&p->fd[i], p->dir, p->s->files[i].name, p->s->files[i].size_bytes, p->s->bulk);
}

/* ---- cutting ------------------------------------------------------------------------------ */

static uint64_t item_end(const struct qx_scan_item *it)
{
    return it->t->off + it->t->size_bytes;
}

/* Sets cut_pos, cut_end to the next stretch of the current file; false when the file is done. */
static bool next_stretch(struct pass *p)
{
    const struct qx_scan *s = p->s;
    size_t end = p->file_item[p->cut_file + 1];
    size_t i = p->cut_item;
    if (s->whole_files) {
        if (p->cut_in_file || s->files[p->cut_file].size_bytes == 0) {
            return false;
        }
        p->cut_pos = 0;
        p->cut_end = s->files[p->cut_file].size_bytes;
        p->cut_in_file = true;
        return true;
    }
    while (i < end && (s->items[i].bad || s->items[i].t->size_bytes == 0 ||
                       s->items[i].t->off < p->cut_end)) {
        ++i;
    }
    if (i == end) {
        return false;
    }
    p->cut_pos = s->items[i].t->off;
    p->cut_end = item_end(&s->items[i]);
    for (++i; i < end && s->items[i].t->off <= p->cut_end + GAP; ++i) {
        if (!s->items[i].bad && item_end(&s->items[i]) > p->cut_end) {
            p->cut_end = item_end(&s->items[i]);
        }
    }
    return true;
}

/* The next chunk, with the lock held; false when there is none. */
static bool cut(struct pass *p, struct chunk *c)
{
    const struct qx_scan *s = p->s;
    size_t i;
    while (p->cut_pos == p->cut_end) {
        if (p->cut_file >= s->n_files) {
            return false;
        }
        if (s->files[p->cut_file].absent || !next_stretch(p)) {
            ++p->cut_file;
            p->cut_in_file = false;
            p->cut_pos = p->cut_end = 0;
            if (p->cut_file < s->n_files) {
                p->cut_item = p->file_item[p->cut_file];
            }
        }
    }
    c->ticket = p->next_ticket++;
    c->file = p->cut_file;
    c->off = p->cut_pos;
    c->len = p->cached ? CHUNK_CACHED : CHUNK;
    c->len -= c->off % c->len; /* ends at a round address, so that no page is read twice */
    c->len = p->cut_end - p->cut_pos < c->len ? p->cut_end - p->cut_pos : c->len;
    c->file_begins = c->off == 0;
    p->cut_pos += c->len;
    c->file_ends = s->whole_files && p->cut_pos == p->cut_end;
    for (i = p->cut_item; i < p->file_item[c->file + 1] && item_end(&s->items[i]) <= c->off; ++i) {
    }
    c->first_item = i;
    for (; i < p->file_item[c->file + 1] && s->items[i].t->off < c->off + c->len; ++i) {
    }
    c->end_item = i;
    p->cut_item = c->first_item;
    return true;
}

/* ---- looking ------------------------------------------------------------------------------ */

/* What a worker learns about an item of its chunk before it tells. */
struct learned { bool nonzero; uint64_t n[QX_SCAN_CLASSES], first[QX_SCAN_CLASSES]; };

/* n elements of these classes from elem on. */
static void learn_many(struct learned *l, unsigned classes, uint64_t elem, uint64_t n)
{
    for (unsigned k = 0; k < QX_SCAN_CLASSES; ++k) {
        if (classes >> k & 1u) {
            if (l->n[k] == 0) {
                l->first[k] = elem;
            }
            l->n[k] += n;
        }
    }
}

static void learn(struct learned *l, unsigned classes, uint64_t elem)
{
    learn_many(l, classes, elem, 1);
}

static void tell(struct qx_scan_item *it, const struct learned *l)
{
    it->nonzero |= l->nonzero;
    for (unsigned k = 0; k < QX_SCAN_CLASSES; ++k) {
        if (l->n[k]) {
            if (it->n[k] == 0 || l->first[k] < it->first[k]) {
                it->first[k] = l->first[k];
            }
            it->n[k] += l->n[k];
        }
    }
}

/* The closer look at n elements of one byte, `classes` being those of each code. */
static void look_bytes(struct learned *l, const uint8_t classes[256], const uint8_t *b, uint64_t n,
                       uint64_t elem0)
{
    for (unsigned k = 0; k < QX_SCAN_CLASSES; ++k) {
        uint64_t count = 0, i = 0;
        for (; i < n; ++i) {
            count += classes[b[i]] >> k & 1u;
        }
        if (count && l->n[k] == 0) {
            for (i = 0; !(classes[b[i]] >> k & 1u); ++i) {
            }
            l->first[k] = elem0 + i;
        }
        l->n[k] += count;
    }
}

/* n bytes, whole elements, from element elem0 on. */
static void look(const struct pass *p, struct learned *l, enum qx_scan_kind kind, const uint8_t *b,
                 uint64_t n, uint64_t elem0)
{
    uint32_t size = qx_scan_elem_size(kind);
    for (uint64_t at = 0; at < n; at += LOOK) {
        uint64_t take = n - at < LOOK ? n - at : LOOK;
        unsigned f = qx_scan_block(kind, b + at, (size_t)take);
        l->nonzero |= f & QX_SCAN_NONZERO;
        if ((f & QX_SCAN_SUSPECT) && !(f & QX_SCAN_NONZERO)) {
            learn_many(l, qx_scan_classify(kind, b + at), elem0 + at / size, take / size);
        } else if ((f & QX_SCAN_SUSPECT) && size == 1) {
            look_bytes(l, p->classes[kind], b + at, take, elem0 + at);
        } else if (f & QX_SCAN_SUSPECT) {
            for (uint64_t i = 0; i < take; i += size) {
                unsigned c = qx_scan_classify(kind, b + at + i);
                if (c) {
                    learn(l, c, elem0 + (at + i) / size);
                }
            }
        }
    }
}

static bool any_nonzero(const uint8_t *b, unsigned n)
{
    unsigned any = 0;
    for (unsigned i = 0; i < n; ++i) {
        any |= b[i];
    }
    return any != 0;
}

/* Looks at file bytes [off, off + n) of chunk c, which lie at b. off and n are such that an element is
 * cut only at the chunk's own ends, or at a piece's end inside it (`pending` carries it over). */
struct pending { size_t item; unsigned n; uint8_t b[8]; };

static void look_piece(struct pass *p, const struct chunk *c, const uint8_t *b, uint64_t off, uint64_t n,
                       struct edge *e, struct pending *pend)
{
    struct qx_scan *s = p->s;
    for (size_t i = c->first_item; i < c->end_item; ++i) {
        struct qx_scan_item *it = &s->items[i];
        struct learned l = {0};
        uint32_t size = qx_scan_elem_size(it->kind);
        uint64_t from = it->t->off > off ? it->t->off : off;
        uint64_t to = item_end(it) < off + n ? item_end(it) : off + n;
        uint64_t rel;
        const uint8_t *q = b + (from - off);
        if (it->bad || from >= to) {
            continue;
        }
        rel = from - it->t->off;
        if (rel < 8 && rel < it->t->size_bytes) {
            uint64_t v = 0;
            unsigned k = 0;
            for (; k < 8 - rel && k < to - from; ++k) {
                v |= (uint64_t)q[k] << (8 * (rel + k));
            }
            pthread_mutex_lock(&p->lock);
            it->value |= v;
            pthread_mutex_unlock(&p->lock);
        }
        if (rel % size) {
            unsigned k = (unsigned)(size - rel % size);
            if (k > to - from) {
                k = (unsigned)(to - from);
            }
            if (from == c->off) {
                e->head_item = i;
                e->head_n = k;
                e->head_elem = rel / size;
                memcpy(e->head, q, k);
            } else if (pend->item == i) {
                memcpy(pend->b + pend->n, q, k);
                look(p, &l, it->kind, pend->b, size, rel / size);
            }
            from += k;
            rel += k;
            q += k;
        }
        look(p, &l, it->kind, q, (to - from) / size * size, rel / size);
        if ((to - from) % size) {
            unsigned k = (unsigned)((to - from) % size);
            const uint8_t *tail = b + (to - off) - k;
            if (to == c->off + c->len) {
                e->tail_item = i;
                e->tail_n = k;
                memcpy(e->tail, tail, k);
            } else {
                pend->item = i;
                pend->n = k;
                memcpy(pend->b, tail, k);
            }
        }
        pthread_mutex_lock(&p->lock);
        tell(it, &l);
        pthread_mutex_unlock(&p->lock);
    }
}

/* ---- finishing, in order ------------------------------------------------------------------ */

static void join_edges(struct pass *p, const struct edge *e)
{
    if (e->head_n) {
        struct qx_scan_item *it = &p->s->items[e->head_item];
        struct learned l = {0};
        if (p->carry_item == e->head_item &&
            p->carry_n + e->head_n == qx_scan_elem_size(it->kind)) {
            uint8_t whole[8];
            memcpy(whole, p->carry, p->carry_n);
            memcpy(whole + p->carry_n, e->head, e->head_n);
            l.nonzero = any_nonzero(whole, p->carry_n + e->head_n);
            learn(&l, qx_scan_classify(it->kind, whole), e->head_elem);
            tell(it, &l);
        }
    }
    p->carry_n = e->tail_n;
    p->carry_item = e->tail_item;
    memcpy(p->carry, e->tail, sizeof p->carry);
}

/* Wakes everybody: the pass ends. With the lock held. */
static void stop_all(struct pass *p)
{
    p->stop = true;
    pthread_cond_broadcast(&p->permit_free);
    pthread_cond_broadcast(&p->turn_permit_free);
    pthread_cond_broadcast(&p->window_moved);
    for (unsigned i = 0; i < WINDOW; ++i) {
        pthread_cond_broadcast(&p->turn_came[i]);
    }
}

static void fail(struct pass *p, int rc, const struct qx_error *err)
{
    pthread_mutex_lock(&p->lock);
    if (!p->rc) {
        p->rc = rc;
        p->err = *err;
    }
    stop_all(p);
    pthread_mutex_unlock(&p->lock);
}

static void finish(struct pass *p, const struct chunk *c, const struct edge *e)
{
    pthread_mutex_lock(&p->lock);
    p->edge[c->ticket % WINDOW] = *e;
    p->edge[c->ticket % WINDOW].done = true;
    p->done_bytes += c->len;
    p->s->read_bytes += c->len;
    while (p->edge[p->base % WINDOW].done) {
        struct edge *b = &p->edge[p->base % WINDOW];
        join_edges(p, b);
        b->done = false;
        ++p->base;
    }
    if (p->s->progress && !p->stop && p->s->progress(p->s->user, p->done_bytes, p->total_bytes)) {
        p->rc = qx_fail(&p->err, QX_E_INTERRUPTED, "interrupted", "stopped");
        stop_all(p);
    }
    if (--p->fd[c->file].chunks == 0 && p->cut_file > c->file) {
        qx_scan_fd_close(&p->fd[c->file]);
    }
    if (p->window_waits) {
        pthread_cond_broadcast(&p->window_moved);
    }
    pthread_mutex_unlock(&p->lock);
}

/* ---- hashing, by turns -------------------------------------------------------------------- */

static void tensor_digest(struct pass *p, const struct qx_scan_item *it)
{
    XXH128_canonical_t d;
    XXH128_canonicalFromHash(&d, XXH3_128bits_digest(p->tensor_hash));
    p->s->on_tensor(p->s->user, it, d.digest);
}

static bool wanted(const struct pass *p, size_t file, int kind)
{
    return p->s->digest[kind] && !p->s->files[file].no_digest[kind];
}

static void file_digests(struct pass *p, size_t file)
{
    const uint8_t *digest[QX_DIGEST_COUNT] = {0};
    XXH128_canonical_t x;
    if (wanted(p, file, QX_DIGEST_XXH3_128)) {
        XXH128_canonicalFromHash(&x, XXH3_128bits_digest(p->file_hash));
        digest[QX_DIGEST_XXH3_128] = x.digest;
    }
#if QX_HAVE_SHA256
    uint8_t md[QX_DIGEST_COUNT][EVP_MAX_MD_SIZE];
    for (int k = 0; k < QX_DIGEST_COUNT; k++) {
        unsigned n = 0;
        if (p->md[k] && wanted(p, file, k) && EVP_DigestFinal_ex(p->md[k], md[k], &n) == 1) {
            digest[k] = md[k];
        }
    }
#endif
    p->s->on_file(p->s->user, file, digest);
}

static void hash_chunk(struct pass *p, const struct chunk *c, const uint8_t *b, bool ok)
{
    struct qx_scan *s = p->s;
    if (c->file_begins) {
        p->file_hash_ok = true;
        XXH3_128bits_reset(p->file_hash);
#if QX_HAVE_SHA256
        for (int k = 0; k < QX_DIGEST_COUNT; k++) {
            if (p->md[k] && wanted(p, c->file, k)) {
                EVP_DigestInit_ex(p->md[k], digest_method(k), NULL);
            }
        }
        if (wanted(p, c->file, QX_DIGEST_GIT)) {
            char head[32];
            int n = snprintf(head, sizeof head, "blob %" PRIu64, s->files[c->file].size_bytes);
            EVP_DigestUpdate(p->md[QX_DIGEST_GIT], head, (size_t)n + 1); /* with its zero byte */
        }
#endif
    }
    p->file_hash_ok = p->file_hash_ok && ok;
    if (p->file_hash_ok && wanted(p, c->file, QX_DIGEST_XXH3_128)) {
        XXH3_128bits_update(p->file_hash, b, (size_t)c->len);
    }
#if QX_HAVE_SHA256
    for (int k = 0; p->file_hash_ok && k < QX_DIGEST_COUNT; k++) {
        if (p->md[k] && wanted(p, c->file, k)) {
            EVP_DigestUpdate(p->md[k], b, (size_t)c->len);
        }
    }
#endif
    for (size_t i = c->first_item; s->hash_tensors && i < c->end_item; ++i) {
        struct qx_scan_item *it = &s->items[i];
        uint64_t from = it->t->off > c->off ? it->t->off : c->off;
        uint64_t to = item_end(it) < c->off + c->len ? item_end(it) : c->off + c->len;
        if (it->bad || from >= to) {
            continue;
        }
        if (from == it->t->off) {
            XXH3_128bits_reset(p->tensor_hash);
            p->tensor_ok = true;
        }
        p->tensor_ok = p->tensor_ok && ok;
        if (p->tensor_ok) {
            XXH3_128bits_update(p->tensor_hash, b + (from - c->off), (size_t)(to - from));
            if (to == item_end(it)) {
                tensor_digest(p, it);
            }
        }
    }
    if (c->file_ends) {
        for (size_t i = p->file_item[c->file]; s->hash_tensors && i < p->file_item[c->file + 1]; ++i) {
            if (s->items[i].t->size_bytes == 0 && !s->items[i].bad) {
                XXH3_128bits_reset(p->tensor_hash);
                tensor_digest(p, &s->items[i]);
            }
        }
        if (p->file_hash_ok) {
            file_digests(p, c->file);
        } else {
            s->files[c->file].bad = true;
        }
    }
}

/* ---- workers ------------------------------------------------------------------------------ */

/* With the lock held. Returns holding a permit, or with p->stop set. */
static void permit_take(struct pass *p, bool has_turn)
{
    p->turn_waits += has_turn;
    while (!p->stop && (p->permits == 0 || (!has_turn && p->turn_waits))) {
        pthread_cond_wait(has_turn ? &p->turn_permit_free : &p->permit_free, &p->lock);
    }
    p->turn_waits -= has_turn;
    if (p->permits) {
        --p->permits;
    }
    if (p->permits && !p->turn_waits) {
        pthread_cond_signal(&p->permit_free);
    }
}

static void permit_give_locked(struct pass *p)
{
    ++p->permits;
    pthread_cond_signal(p->turn_waits ? &p->turn_permit_free : &p->permit_free);
}

static void permit_give(struct pass *p)
{
    pthread_mutex_lock(&p->lock);
    permit_give_locked(p);
    pthread_mutex_unlock(&p->lock);
}

static bool window_full(const struct pass *p)
{
    uint64_t w = p->cached ? 2 * (uint64_t)p->threads : WINDOW;
    return p->next_ticket >= p->base + (w < WINDOW ? w : WINDOW);
}

/* Reads and looks, piece by piece while the bytes are in the processor's cache. Without hashes nobody
 * needs the piece before. */
static bool read_cached(struct pass *p, struct qx_scan_fd *f, const struct chunk *c, uint8_t *b,
                        struct edge *e)
{
    struct pending pend = {.item = SIZE_MAX};
    for (uint64_t done = 0; done < c->len; done += PIECE) {
        uint64_t n = c->len - done < PIECE ? c->len - done : PIECE;
        uint8_t *at = p->hashing ? b + done : b;
        if (!qx_scan_fd_read(f, at, n, c->off + done)) {
            return false;
        }
        look_piece(p, c, at, c->off + done, n, e, &pend);
    }
    return true;
}

static void work(struct pass *p, uint8_t *buffer)
{
    for (;;) {
        struct chunk c;
        struct edge e = {.head_item = SIZE_MAX, .tail_item = SIZE_MAX};
        struct qx_scan_fd *f;
        uint8_t *at = buffer;
        bool more, permit, cached, ok = true;
        int sys = 0;

        pthread_mutex_lock(&p->lock);
        /* While bytes come from the page cache a ticket needs a permit, so that few chunks are open; while
         * they come from the disk it needs none, so that reads start however busy the processors are. */
        permit = p->cached;
        if (permit) {
            permit_take(p, false);
        }
        while (!p->stop && window_full(p)) {
            if (permit) {
                permit_give_locked(p);
            }
            ++p->window_waits;
            pthread_cond_wait(&p->window_moved, &p->lock);
            --p->window_waits;
            permit = p->cached;
            if (permit) {
                permit_take(p, false);
            }
        }
        more = !p->stop && cut(p, &c);
        if (!more) {
            if (permit) {
                permit_give_locked(p);
            }
            pthread_mutex_unlock(&p->lock);
            return;
        }
        ++p->fd[c.file].chunks;
        ok = open_file(p, c.file);
        sys = errno;
        f = &p->fd[c.file];
        pthread_mutex_unlock(&p->lock);

        cached = ok && qx_scan_fd_cached(f, c.off, c.len);
        pthread_mutex_lock(&p->lock);
        p->cached = cached;
        if (permit && !cached) {
            permit_give_locked(p);
        } else if (!permit && cached) {
            permit_take(p, false);
        }
        pthread_mutex_unlock(&p->lock);
        if (cached) {
            ok = read_cached(p, f, &c, buffer, &e);
            sys = errno;
            permit_give(p);
        } else if (ok) {
            struct pending pend = {.item = SIZE_MAX};
            ok = qx_scan_fd_read_direct(f, buffer, c.len, c.off, &at);
            sys = errno;
            pthread_mutex_lock(&p->lock);
            permit_take(p, false);
            pthread_mutex_unlock(&p->lock);
            if (ok) {
                look_piece(p, &c, at, c.off, c.len, &e, &pend);
            }
            permit_give(p);
        }
        if (!ok) {
            pthread_mutex_lock(&p->lock);
            for (size_t i = c.first_item; i < c.end_item; ++i) {
                p->s->items[i].bad = true;
            }
            p->s->on_bad(p->s->user, c.file, c.off, c.len, sys);
            pthread_mutex_unlock(&p->lock);
        }
        if (p->hashing) {
            pthread_mutex_lock(&p->lock);
            while (p->turn != c.ticket && !p->stop) {
                pthread_cond_wait(&p->turn_came[c.ticket % WINDOW], &p->lock);
            }
            if (p->stop) {
                pthread_mutex_unlock(&p->lock);
                return;
            }
            permit_take(p, true);
            pthread_mutex_unlock(&p->lock);
            hash_chunk(p, &c, at, ok);
            pthread_mutex_lock(&p->lock);
            ++p->turn;
            pthread_cond_signal(&p->turn_came[p->turn % WINDOW]);
            permit_give_locked(p);
            pthread_mutex_unlock(&p->lock);
        }
        finish(p, &c, &e);
    }
}

static void work_item(void *user, uint64_t i, uint32_t worker)
{
    struct pass *p = user;
    void *buffer = NULL;
    (void)i;
    (void)worker;
    if (posix_memalign(&buffer, (size_t)HUGE_PAGE, (size_t)(CHUNK + HUGE_PAGE)) != 0) {
        struct qx_error e;
        int rc = qx_fail_nomem(&e);
        fail(p, rc, &e);
        return;
    }
    /* A direct read into small pages is handed to the disk page by page, which costs a third of its
     * rate. Without huge pages it is only slower. */
    (void)madvise(buffer, (size_t)(CHUNK + HUGE_PAGE), MADV_HUGEPAGE);
    work(p, buffer);
    free(buffer);
}

/* ---- the pass ----------------------------------------------------------------------------- */

static int by_place(const void *pa, const void *pb)
{
    const struct qx_scan_item *a = pa, *b = pb;
    if (a->file != b->file) {
        return a->file < b->file ? -1 : 1;
    }
    if (a->t->off != b->t->off) {
        return a->t->off < b->t->off ? -1 : 1;
    }
    return a->t->size_bytes < b->t->size_bytes ? -1 : a->t->size_bytes > b->t->size_bytes;
}

static void prepare(struct pass *p)
{
    struct qx_scan *s = p->s;
    size_t k = 0;
    for (unsigned kind = 0; kind < QX_SCAN_COUNT; ++kind) {
        for (unsigned b = 0; b < 256 && qx_scan_elem_size(kind) == 1; ++b) {
            p->classes[kind][b] = (uint8_t)qx_scan_classify(kind, &(uint8_t){(uint8_t)b});
        }
    }
    if (s->n_items > 1) {
        qsort(s->items, s->n_items, sizeof *s->items, by_place);
    }
    for (size_t f = 0; f < s->n_files; ++f) {
        struct stat st;
        uint64_t end = 0;
        p->fd[f].buffered = p->fd[f].direct = -1;
        s->files[f].absent = s->files[f].skip || fstatat(p->dir, s->files[f].name, &st, 0) != 0 || !S_ISREG(st.st_mode);
        s->files[f].size_bytes = s->files[f].absent ? 0 : (uint64_t)st.st_size;
        p->file_item[f] = k;
        for (; k < s->n_items && s->items[k].file == f; ++k) {
            struct qx_scan_item *it = &s->items[k];
            /* Overlapping tensors are a finding of the header; only the first is looked at. */
            if (s->files[f].absent || it->t->off < end || item_end(it) > s->files[f].size_bytes) {
                it->bad = true;
            } else if (it->t->size_bytes) {
                end = item_end(it);
            }
            p->total_bytes += s->whole_files || it->bad ? 0 : it->t->size_bytes;
        }
        p->total_bytes += s->whole_files ? s->files[f].size_bytes : 0;
    }
    p->file_item[s->n_files] = k;
    p->cut_item = 0;
}

/* Files without bytes: no chunk leads to them. */
static void hash_empty(struct pass *p)
{
    struct qx_scan *s = p->s;
    for (size_t f = 0; s->whole_files && f < s->n_files; ++f) {
        if (!s->files[f].absent && s->files[f].size_bytes == 0) {
            struct chunk c = {.file = f, .file_begins = true, .file_ends = true};
            hash_chunk(p, &c, (const uint8_t *)"", true);
        }
    }
}

int qx_scan_run(struct qx_scan *s, struct qx_error *err)
{
    struct pass p = {.s = s, .dir = -1, .carry_item = SIZE_MAX};
    struct qx_pool *pool = NULL;
    uint32_t threads = s->n_threads;
    const char *dir = qx_ckpt_dir(s->ck);
    int rc = 0;
    if (!threads) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        threads = n > 0 ? (uint32_t)n : 1;
    }
    p.permits = p.threads = threads;
    p.cached = true;
    p.hashing = s->hash_tensors || s->digest[QX_DIGEST_XXH3_128] || s->digest[QX_DIGEST_SHA256] ||
                s->digest[QX_DIGEST_GIT];
    pthread_mutex_init(&p.lock, NULL);
    pthread_cond_init(&p.permit_free, NULL);
    pthread_cond_init(&p.turn_permit_free, NULL);
    pthread_cond_init(&p.window_moved, NULL);
    for (unsigned i = 0; i < WINDOW; ++i) {
        pthread_cond_init(&p.turn_came[i], NULL);
    }
    p.file_item = qx_calloc(s->n_files + 1, sizeof *p.file_item);
    p.fd = qx_calloc(s->n_files + 1, sizeof *p.fd);
    p.file_hash = XXH3_createState();
    p.tensor_hash = XXH3_createState();
    if (!p.file_item || !p.fd || !p.file_hash || !p.tensor_hash) {
        rc = qx_fail_nomem(err);
        goto out;
    }
#if QX_HAVE_SHA256
    for (int k = 0; k < QX_DIGEST_COUNT; k++) {
        if (s->digest[k] && digest_method(k) && !(p.md[k] = EVP_MD_CTX_new())) {
            rc = qx_fail_nomem(err);
            goto out;
        }
    }
#else
    if (s->digest[QX_DIGEST_SHA256] || s->digest[QX_DIGEST_GIT]) {
        rc = qx_fail(err, QX_E_UNSUPPORTED, "sha256", "this build has no SHA-256 (OpenSSL was not found)");
        goto out;
    }
#endif
    p.dir = open(dir[0] ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (p.dir < 0) {
        rc = qx_fail_errno(err, QX_E_IO, errno, "read", "cannot open directory '%s'", dir);
        goto out;
    }
    prepare(&p);
    if (p.hashing) {
        hash_empty(&p);
    }
    if (threads < (s->bulk ? READERS : READERS_PIECES)) {
        threads = s->bulk ? READERS : READERS_PIECES;
    }
    rc = qx_pool_create(&pool, threads, err);
    if (rc) {
        goto out;
    }
    qx_pool_run(pool, threads, 1, work_item, &p);
    if (p.rc) {
        rc = p.rc;
        if (err) {
            *err = p.err;
        }
    }
out:
    qx_pool_destroy(pool);
#if QX_HAVE_SHA256
    for (int k = 0; k < QX_DIGEST_COUNT; k++) {
        EVP_MD_CTX_free(p.md[k]);
    }
#endif
    for (size_t f = 0; p.fd && f < s->n_files; ++f) {
        qx_scan_fd_close(&p.fd[f]);
    }
    if (p.dir >= 0) {
        close(p.dir);
    }
    XXH3_freeState(p.tensor_hash);
    XXH3_freeState(p.file_hash);
    qx_free(p.fd);
    qx_free(p.file_item);
    for (unsigned i = 0; i < WINDOW; ++i) {
        pthread_cond_destroy(&p.turn_came[i]);
    }
    pthread_cond_destroy(&p.window_moved);
    pthread_cond_destroy(&p.turn_permit_free);
    pthread_cond_destroy(&p.permit_free);
    pthread_mutex_destroy(&p.lock);
    return rc;
}
