/* step.cuh: the ops of decoding as phases of one persistent kernel (step.cu).
 *
 * Consecutive ops of few rows are collected in the queue's pending program and launched as one kernel: one
 * block a multiprocessor, 16 consumer warps that do one phase after the other with a barrier of the grid
 * between, and one producer warp that streams the weights of phase after phase into a ring of shared memory
 * without regard to those barriers, since weights depend on nothing. So the memory bus does not stand still
 * where one op ends and the next begins.
 *
 * A phase is a kind with an argument struct of constants, X_args, and two functions:
 *
 *   __device__ void X_consume(const X_args &a, step_ctx &c)    the 512 consumer threads (c.tid 0 .. 511)
 *   __device__ void X_produce(const X_args &a, step_ctx &c)    the 32 threads of the producer (c.lane)
 *
 * Consumers call step_wait(c) exactly once, before the first access to anything that an earlier op writes;
 * before it they may load constants and write c.work. step_sync() is their barrier, group_sync(c.group) that
 * of one of the two groups of eight warps. On return of X_consume the phase is over for this block: whatever
 * it wrote to global memory is seen by the next phase's blocks behind their step_wait, if they read it past
 * L1 (__ldcg). All of c.work is undefined at the start of a phase.
 *
 * The ring hands over items of any size (a multiple of 128 bytes) in one order, the same on both sides:
 *   producer:  uint8_t *d = step_fill(c, size, n_bytes);  waits for room; n_bytes will arrive (< 1 MiB)
 *              bulk_load(d + .., src, n, step_bar(c), c.policy);  by any lanes, adding up to n_bytes
 *              step_filled(c, size);
 *   consumers: const uint8_t *p = step_open(c, size);     waits until the bytes are there
 *              step_close(c, size);                       all warps of the ONE group that reads the item
 *              step_skip(c, size);                        by the group that does not
 * Each item is read by exactly one group (all its eight warps open and close it); every warp passes all items
 * by open and close or by skip. An item holds no more than was promised to step_take.
 *
 * The producer runs ahead of the consumers, in another phase. Before it loads what an earlier kernel may have
 * written (states) it calls step_producer_begin(c); before it loads what depends on earlier phases of the
 * program it calls step_producer_wait(c). Both may be called by the phases that need them, at any place.
 *
 * The producer's copies are reads by the asynchronous proxy; global memory that a phase of the same program has
 * written needs step_producer_wait, which has the fence.
 *
 * To add a phase: a kind in STEP_KINDS below, X_args and the two functions in a header of its own (step_X.cuh)
 * that step.cu includes, and in the op's entry point, where the op is one for it (decoding, act_bf16, at most
 * STEP_ROWS rows, step_can(q)), a call of step_take. An op of several phases passes several kinds, all of which
 * get the same arguments. */
#ifndef QX_CUDA_STEP_CUH
#define QX_CUDA_STEP_CUH

#include "stream.cuh"

/* KIND(name, args): name_consume, name_produce; args is a struct of name args_args. */
#define STEP_KINDS(KIND)

enum step_kind {
    STEP_NONE,
#define KIND(name, args) STEP_##name,
    STEP_KINDS(KIND)
#undef KIND
};

#define STEP_GROUPS 2u
#define STEP_CONSUMERS 512u               /* threads; the warp behind them is the producer */
#define STEP_THREADS (STEP_CONSUMERS + 32)
#define STEP_ROWS 8u                      /* rows of activations at most */
#define STEP_ITEMS 64u                    /* items in the ring at most */
#define STEP_PHASES 64u                   /* of a program */
#define STEP_ARGS 14848u                  /* bytes of arguments of a program */
#define STEP_SHARED (226u << 10)          /* of a block, dynamic */

/* ---- host ------------------------------------------------------------------------------------ */

__host__ inline bool step_can(const struct qx_queue *q)
{
    return q->step && can_stream(q) && q->smem_max >= (int)STEP_SHARED;
}

/* Appends an op to the pending program as n phases with the same arguments (copied). work: bytes of c.work it
 * needs; item: its largest item. state: NULL, or memory that this op reads early (before its step_wait, or by its
 * producer behind step_producer_begin) and writes: a program in which an op has named the same is begun anew.
 * False: does not fit, nothing happened, launch the op as a kernel of its own. */
bool step_take(struct qx_queue *q, const enum step_kind *kind, uint32_t n, const void *args, uint32_t bytes,
               uint32_t work, uint32_t item, const void *state);

/* ---- device ----------------------------------------------------------------------------------- */

struct step_ring {
    uint8_t *base;
    uint64_t *full, *empty;
    uint32_t bytes;
    uint32_t at, item;       /* place and number of the next item */
};

struct step_ctx {
    uint32_t block, n_blocks;      /* this block of n */
    uint32_t tid, warp, lane;      /* of the consumers; of the producer only lane */
    uint32_t group;                /* warp / 8 */
    uint8_t *work;                 /* 128-byte aligned shared memory of the phase */
    step_ring ring;
    uint64_t policy;               /* of the producer's loads: read once */
    /* of the framework */
    unsigned *count;               /* blocks that have ended a phase, all phases added */
    uint32_t phase;                /* of the program */
    uint32_t *cost;                /* producer: bytes of the items in the ring, by item % STEP_ITEMS */
    uint32_t used, tail;           /* producer: bytes in use, oldest item */
};

__device__ __forceinline__ void step_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(STEP_CONSUMERS) : "memory");
}
__device__ __forceinline__ void group_sync(uint32_t group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(STEP_CONSUMERS / STEP_GROUPS) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint64_t step_time()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
/* A wait that lasts longer than any phase means a mistake in a program: better an error than a device that
 * never comes back. */
#define STEP_PATIENCE 2000000000ull
__device__ __forceinline__ bool step_try(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n"
                 " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done;
}
static __device__ __noinline__ void step_bar_long(uint32_t bar, uint32_t parity)
{
    const uint64_t t0 = step_time();
    while (!step_try(bar, parity)) {
        if (step_time() - t0 > STEP_PATIENCE) {
            __trap();
        }
    }
}
__device__ __forceinline__ void step_bar_wait(uint64_t *b, uint32_t parity)
{
    const uint32_t bar = smem_addr(b);
    if (!step_try(bar, parity)) {
        step_bar_long(bar, parity);
    }
}
__device__ __forceinline__ uint32_t step_count(const unsigned *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
/* Waits until n arrivals have been counted. */
__device__ __forceinline__ void step_poll(const unsigned *count, uint32_t n)
{
    uint64_t t0 = 0;
    for (uint32_t i = 0; step_count(count) < n; ++i) {
        if ((i & 1023) == 1023) {
            const uint64_t t = step_time();
            t0 = t0 ? t0 : t;
            if (t - t0 > STEP_PATIENCE) {
                __trap();
            }
        }
    }
}
__device__ __forceinline__ void step_arrive(unsigned *count)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ void step_proxy_fence()
{
    asm volatile("fence.proxy.async;" ::: "memory");
}
#else
__device__ __forceinline__ void step_bar_wait(uint64_t *, uint32_t) {}
__device__ __forceinline__ void step_poll(const unsigned *, uint32_t) {}
__device__ __forceinline__ void step_arrive(unsigned *) {}
__device__ __forceinline__ void step_proxy_fence() {}
#endif

/* Consumers: earlier ops are complete. */
__device__ __forceinline__ void step_wait(step_ctx &c)
{
    if (c.phase == 0) {
        pdl_wait();
    } else if (c.tid == 0) {
        step_poll(c.count, c.phase * c.n_blocks);
    }
    step_sync();
}
/* Producer: earlier kernels are complete. */
__device__ __forceinline__ void step_producer_begin(step_ctx &)
{
    pdl_wait();
}
/* Producer: earlier phases are complete. */
__device__ __forceinline__ void step_producer_wait(step_ctx &c)
{
    pdl_wait();
    if (c.phase) {
        if (c.lane == 0) {
            step_poll(c.count, c.phase * c.n_blocks);
        }
        __syncwarp();
        step_proxy_fence();
    }
}

/* ---- the ring --------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t step_item_bytes(uint32_t n)
{
    return (n + 127) & ~127u;
}
__device__ __forceinline__ void ring_place(step_ring &r, uint32_t size)
{
    if (r.at + size > r.bytes) {
        r.at = 0;
    }
}
__device__ __forceinline__ void ring_advance(step_ring &r, uint32_t size)
{
    r.at += size;
    ++r.item;
}

__device__ __forceinline__ const uint8_t *step_open(step_ctx &c, uint32_t size)
{
    ring_place(c.ring, size);
    step_bar_wait(c.ring.full + c.ring.item % STEP_ITEMS, c.ring.item / STEP_ITEMS & 1);
    return c.ring.base + c.ring.at;
}
__device__ __forceinline__ void step_close(step_ctx &c, uint32_t size)
{
    __syncwarp();
    if (c.lane == 0) {
        bar_arrive(c.ring.empty + c.ring.item % STEP_ITEMS);
    }
    ring_advance(c.ring, size);
}
__device__ __forceinline__ void step_skip(step_ctx &c, uint32_t size)
{
    ring_place(c.ring, size);
    ring_advance(c.ring, size);
}

__device__ __forceinline__ uint64_t *step_bar(const step_ctx &c)
{
    return c.ring.full + c.ring.item % STEP_ITEMS;
}
__device__ __forceinline__ uint8_t *step_fill(step_ctx &c, uint32_t size, uint32_t n_bytes)
{
    const uint32_t was = c.ring.at;
    ring_place(c.ring, size);
    const uint32_t cost = size + (c.ring.at == 0 ? c.ring.bytes - was : 0) % c.ring.bytes; /* with what is skipped */
    while (c.used + cost > c.ring.bytes || c.ring.item - c.tail == STEP_ITEMS) {
        step_bar_wait(c.ring.empty + c.tail % STEP_ITEMS, c.tail / STEP_ITEMS & 1);
        c.used -= c.cost[c.tail % STEP_ITEMS];
        ++c.tail;
    }
    c.used += cost;
    __syncwarp();
    if (c.lane == 0) {
        c.cost[c.ring.item % STEP_ITEMS] = cost;
        bar_expect(step_bar(c), n_bytes);
    }
    __syncwarp();
    return c.ring.base + c.ring.at;
}
__device__ __forceinline__ void step_filled(step_ctx &c, uint32_t size)
{
    ring_advance(c.ring, size);
}

#endif
