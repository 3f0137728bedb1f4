/* step.cu: the queue's pending program and the kernel that runs it (step.cuh).
 *
 * Shared memory of a block: the ring, the work memory of the phases (the largest need), the program. The grid
 * barrier is one counter that only grows within a program: phase p begins when it has reached p times the
 * blocks. The last block to leave sets it back. */
#include "step.cuh"

#include <new>
#include <string.h>

struct step_entry {
    uint8_t kind, pad;
    uint16_t args; /* offset in bytes / 16 */
};
struct step_program {
    uint32_t n, args_bytes;
    uint32_t ring, work;       /* bytes */
    unsigned *count, *left;    /* zero between programs */
    step_entry entry[STEP_PHASES];
    uint4 args[STEP_ARGS / 16];
};
#define STEP_HEAD (offsetof(step_program, args))

struct step_pending {
    step_program p;
    uint32_t item;                       /* the largest */
    uint32_t n_states;
    const void *state[STEP_PHASES];
};

/* ---- kernel ----------------------------------------------------------------------------------- */

__device__ __forceinline__ uint4 ld_any(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__global__ void __launch_bounds__(STEP_THREADS, 1) step_kernel(const __grid_constant__ step_program in)
{
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint64_t bars[2 * STEP_ITEMS];
    __shared__ uint32_t cost[STEP_ITEMS];
    pdl_next();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    /* not by way of the constant cache, which serves one address at a time */
    step_program *p = (step_program *)(smem + in.ring + in.work);
    const uint32_t units = (uint32_t)(STEP_HEAD + in.args_bytes + 15) / 16;
    for (uint32_t i = tid; i < units; i += STEP_THREADS) {
        ((uint4 *)p)[i] = ld_any((const uint4 *)&in + i);
    }
    if (tid < STEP_ITEMS) {
        bar_init(bars + tid, 1);
        bar_init(bars + STEP_ITEMS + tid, STEP_CONSUMERS / STEP_GROUPS / 32);
    }
    bar_init_done();
    __syncthreads();
    step_ctx c = {};
    c.block = blockIdx.x;
    c.n_blocks = gridDim.x;
    c.lane = lane;
    c.ring.base = smem;
    c.ring.full = bars;
    c.ring.empty = bars + STEP_ITEMS;
    c.ring.bytes = p->ring;
    c.count = p->count;
    c.work = smem + p->ring;
    const uint32_t n = p->n;
    if (warp == STEP_CONSUMERS / 32) {
        c.policy = l2_read_once();
        c.cost = cost;
        for (c.phase = 0; c.phase < n; ++c.phase) {
            const void *args = p->args + p->entry[c.phase].args;
            (void)args;
            switch (p->entry[c.phase].kind) {
#define KIND(name, args_of) \
    case STEP_##name: name##_produce(*(const args_of *)args, c); break;
                STEP_KINDS(KIND)
#undef KIND
            default: break;
            }
            __syncwarp();
        }
        pdl_wait();
        return;
    }
    c.tid = tid;
    c.warp = warp;
    c.group = warp / STREAM_WARPS;
    for (c.phase = 0; c.phase < n; ++c.phase) {
        const void *args = p->args + p->entry[c.phase].args;
        (void)args;
        switch (p->entry[c.phase].kind) {
#define KIND(name, args_of) \
    case STEP_##name: name##_consume(*(const args_of *)args, c); break;
            STEP_KINDS(KIND)
#undef KIND
        default: step_wait(c); break;
        }
        step_sync();
        if (tid == 0 && c.phase + 1 < n) {
            __threadfence();
            step_arrive(c.count);
        }
    }
    if (tid == 0 && n > 1 && atomicInc(p->left, c.n_blocks - 1) == c.n_blocks - 1) {
        *p->count = 0; /* nobody polls any more */
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

int step_new(struct qx_queue *q)
{
    q->step = new (std::nothrow) step_pending();
    return q->step ? 0 : -(int)QX_E_NOMEM;
}
void step_free(struct qx_queue *q)
{
    delete q->step;
    q->step = nullptr;
}

/* What is left for the ring beside so much else. */
static uint32_t ring_bytes(uint32_t work, uint32_t args)
{
    const uint32_t fixed = work + (uint32_t)STEP_HEAD + args + 2 * STEP_ITEMS * 8 + STEP_ITEMS * 4 + 64;
    return fixed < STEP_SHARED ? (STEP_SHARED - fixed) / 128 * 128 : 0;
}

int step_flush(struct qx_queue *q)
{
    if (!q->step_pending) {
        return 0;
    }
    step_pending *s = q->step;
    s->p.ring = ring_bytes(s->p.work, s->p.args_bytes);
    s->p.count = q->tickets + QX_N_TICKETS;
    s->p.left = q->tickets + QX_N_TICKETS + 32;
    const uint32_t smem = s->p.ring + s->p.work + (uint32_t)STEP_HEAD + s->p.args_bytes;
    const step_program p = s->p;
    s->p.n = s->p.args_bytes = s->p.work = s->item = s->n_states = 0;
    q->step_pending = false;
    return launch(q, "step", step_kernel, dim3((unsigned)q->n_sm), dim3(STEP_THREADS), smem, p);
}

bool step_take(struct qx_queue *q, const enum step_kind *kind, uint32_t n, const void *args, uint32_t bytes,
               uint32_t work, uint32_t item, const void *state)
{
    step_pending *s = q->step;
    const uint32_t exact = bytes;
    bytes = (bytes + 15) / 16 * 16;
    work = (work + 127) / 128 * 128;
    if (n > STEP_PHASES || bytes > STEP_ARGS || ring_bytes(work, bytes) < 2 * item) {
        return false;
    }
    bool again = s->p.n + n > STEP_PHASES || s->p.args_bytes + bytes > STEP_ARGS;
    for (uint32_t i = 0; state && i < s->n_states; ++i) {
        again = again || s->state[i] == state;
    }
    const uint32_t w = work > s->p.work ? work : s->p.work, it = item > s->item ? item : s->item;
    again = again || ring_bytes(w, s->p.args_bytes + bytes) < 2 * it;
    if (again && q->step_pending && step_flush(q)) {
        return true; /* the queue has failed and says so when it is waited for */
    }
    for (uint32_t i = 0; i < n; ++i) {
        s->p.entry[s->p.n + i].kind = (uint8_t)kind[i];
        s->p.entry[s->p.n + i].args = (uint16_t)(s->p.args_bytes / 16);
    }
    memcpy((uint8_t *)s->p.args + s->p.args_bytes, args, exact);
    s->p.n += n;
    s->p.args_bytes += bytes;
    s->p.work = work > s->p.work ? work : s->p.work;
    s->item = item > s->item ? item : s->item;
    if (state) {
        s->state[s->n_states++] = state;
    }
    q->step_pending = true;
    ++q->n_launches;
    return true;
}
