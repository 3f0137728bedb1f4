/* qsa_few.cu: sparse attention for the few rows of decoding: many blocks a row, each a fixed part of it, so that
 * a row's bits do not depend on the others.
 *
 * Selection: scores by eight lanes a pooled key, which go as words (common.cuh) to the row's first block; that one
 * makes the cut and leaves the picks as words too, for attention if that comes next. Attention (bf16 caches, rounded
 * queries): 32 positions a block on tensor cores; blocks of a row and key head send each other their sums as words.
 * Where attention reads the picks as words it does not wait for the selection's end: the selection has waited for all
 * that came before it. Numbers of the step and pages, and pooled keys of earlier steps, are read before the wait (embed
 * stands between them and whatever wrote them). */
#include "mma.cuh"
#include "qsa.cuh"
#include <stddef.h>

/* ---- selection ------------------------------------------------------------------------------ */

enum {
    FS_T = 1024,
    FS_NEAR = 4 * FS_T,              /* keys for which small blocks are many enough */
    FS_MAX = 33,
    FS_BINS = 2048,
    FS_SCAN = FS_BINS / 8            /* threads that count bins */
};
static_assert(FS_T * FS_MAX * QX_ATTEND_ROWS == QX_SCORE_WORDS, "");

struct cut_smem {
    alignas(16) uint32_t hist[FS_BINS];
    uint32_t low[32], sums[32];
    uint32_t hi, bin, left, count;
};

/* The k largest of n <= 33792 scores, ties to the lower number, ascending; with `words` also as those, of this tag. By
 * a block's first eight warps where they are few, since what it costs are barriers and steps of all warps. keys: the
 * scores' bits but for signs (they are >= 0 or NaN, so bits order them), zeros up to a multiple of 1,024. Loops are
 * not unrolled far: this code comes from device memory, as the weights of a token push it out of L2, and its size is
 * what it costs. */
__device__ __forceinline__ void cut_blocks(cut_smem &s, const uint32_t *keys, uint32_t n, uint32_t k, int32_t *out,
                                           uint64_t *words, uint32_t tag)
{
    const uint32_t tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
    const uint32_t T = n <= FS_NEAR || blockDim.x < FS_T ? FS_SCAN : FS_T;
    if (tid >= T) {
        return;
    }
    const auto sync = [=]() { asm volatile("bar.sync 1, %0;" ::"r"(T) : "memory"); };
    const uint32_t J = (n + T - 1) / T, base = warp * J * 32 + lane; /* a warp has 32 J in a row */
    uint32_t lo = 0xffffffffu, hi = 0;
    const uint32_t *key = keys + base; /* the thread's j-th: key[32 j] */
#pragma unroll 2
    for (uint32_t j = 0; j < J; ++j) {
        const uint32_t v = key[j * 32];
        lo = v && v < lo ? v : lo; /* 0 is the score zero, and what is past the end, which never counts */
        hi = v > hi ? v : hi;
    }
    lo = __reduce_min_sync(0xffffffffu, lo);
    hi = __reduce_max_sync(0xffffffffu, hi);
    if (lane == 0) {
        s.low[warp] = lo;
        s.sums[warp] = hi;
    }
    sync();
    lo = __reduce_min_sync(0xffffffffu, lane < T / 32 ? s.low[lane] : 0xffffffffu);
    hi = __reduce_max_sync(0xffffffffu, lane < T / 32 ? s.sums[lane] : 0);
    /* bins of 2^shift keys from lo; bin 0 of the first pass holds the zeros, which need no count */
    uint32_t cut = 0, left = k, shift = 0, range = hi >= lo ? hi - lo : 0;
    bool done = hi == 0;
    if (done) {
        sync(); /* the sums are read */
    }
    while (!done) {
        shift = range >> 11 ? 32 - __clz(range >> 11) : 0;
        for (uint32_t i = tid; i < FS_BINS / 4; i += T) {
            ((uint4 *)s.hist)[i] = make_uint4(0, 0, 0, 0);
        }
        if (tid == 0) {
            s.bin = 0xffffffffu;
        }
        sync();
#pragma unroll 2
        for (uint32_t j = 0; j < J; ++j) {
            const uint32_t v = key[j * 32];
            if (v >= lo && v - lo <= range) {
                atomicAdd(&s.hist[(v - lo) >> shift], 1u);
            }
        }
        sync();
        /* thread t of the first ones has bins 2047 - 8 t .. 2040 - 8 t: counts from the top */
        uint32_t h[8], sum = 0, upto = 0;
        if (tid < FS_SCAN) {
            const uint4 x = *(const uint4 *)&s.hist[FS_BINS - 4 - 8 * tid],
                        y = *(const uint4 *)&s.hist[FS_BINS - 8 - 8 * tid];
            h[0] = x.w, h[1] = x.z, h[2] = x.y, h[3] = x.x;
            h[4] = y.w, h[5] = y.z, h[6] = y.y, h[7] = y.x;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                sum += h[e];
            }
            upto = warp_upto(sum, lane);
            if (lane == 31) {
                s.sums[warp] = upto;
            }
        }
        sync();
        if (tid < FS_SCAN) {
            uint32_t above = __reduce_add_sync(0xffffffffu, lane < warp ? s.sums[lane] : 0) + upto - sum;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (above < left && above + h[e] >= left) {
                    s.bin = FS_BINS - 1 - 8 * tid - e;
                    s.left = left - above;
                    s.count = h[e];
                }
                above += h[e];
            }
            if (tid == FS_SCAN - 1) {
                s.hi = above;
            }
        }
        sync();
        if (s.bin == 0xffffffffu) { /* fewer above zero than wanted: zeros fill up */
            left -= s.hi;
            cut = 0;
            done = true;
        } else {
            left = s.left;
            lo += s.bin << shift;
            cut = lo;
            if (shift == 0) {
                done = true;
            } else if (s.count == left) { /* the whole bin */
                cut = lo - 1;
                left = 0;
                done = true;
            }
            range = (1u << shift) - 1;
        }
        sync();
    }
    uint32_t gt = 0, eq = 0;
#pragma unroll 2
    for (uint32_t j = 0; j < J; ++j) {
        gt += __popc(__ballot_sync(0xffffffffu, key[j * 32] > cut));
        eq += __popc(__ballot_sync(0xffffffffu, key[j * 32] == cut && base + j * 32 < n));
    }
    if (lane == 0) {
        s.sums[warp] = gt << 16 | eq;
    }
    sync();
    uint32_t g = lane < warp ? s.sums[lane] : 0, e = g & 0xffffu;
    g >>= 16;
    g = __reduce_add_sync(0xffffffffu, g);
    e = __reduce_add_sync(0xffffffffu, e);
    const uint32_t below = (1u << lane) - 1;
#pragma unroll 2
    for (uint32_t j = 0; j < J; ++j) {
        const bool is_gt = key[j * 32] > cut, is_eq = key[j * 32] == cut && base + j * 32 < n;
        const uint32_t gm = __ballot_sync(0xffffffffu, is_gt), em = __ballot_sync(0xffffffffu, is_eq);
        const uint32_t e_at = e + __popc(em & below);
        if (is_gt || (is_eq && e_at < left)) {
            const uint32_t at = g + __popc(gm & below) + (e_at < left ? e_at : left);
            if (words) {
                word_post(words + at, __uint_as_float(base + j * 32), tag);
            }
            out[at] = (int32_t)(base + j * 32);
        }
        g += __popc(gm);
        e += __popc(em);
    }
}

template <class T> __device__ __forceinline__ T few_load(const T *p)
{
    static_assert(sizeof(T) == 4, "");
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return (T)v;
}

/* Before what comes next. */
__device__ __forceinline__ uint4 few_load16(const void *p)
{
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

/* The first block of a row makes the cut, the others score. */
__global__ void __launch_bounds__(FS_T) qsa_select_few(const __grid_constant__ sel_args a)
{
    __shared__ __align__(16) float iq[4 * 128];
    __shared__ cut_smem cut;
    extern __shared__ uint32_t keys[];
    const uint32_t r = a.row0 + blockIdx.y, tid = threadIdx.x, l = tid & 7, T = blockDim.x;
    const bool cuts = blockIdx.x == 0;
    uint32_t tag = 0;
    if (a.picks && cuts) { /* before attention, which reads the number at once, may start */
        if (tid == 0) {
            cut.count = atomicAdd(a.number + r, 1u) + 1;
        }
        __syncthreads();
        tag = cut.count << 7 | a.place;
    }
    pdl_next();
    const int32_t pos = few_load(a.step.pos + r), seq = few_load(a.step.seq + r), first = few_load(a.step.first + r);
    const uint32_t nb = pos < 0 ? 0 : ((uint32_t)pos + 1) / a.ratio;
    uint64_t *words = a.words + (uint64_t)blockIdx.y * (FS_T * FS_MAX);
    if (cuts) {
        int32_t *out = a.block + (uint64_t)r * a.budget;
        pdl_wait();
        if (nb <= a.budget) {
            for (uint32_t i = tid; i < nb; i += T) {
                out[i] = (int32_t)i;
            }
            if (tid == 0) {
                a.n_block[r] = (int32_t)nb;
            }
            return;
        }
        const uint32_t number = __ldcg(a.launches + blockIdx.y) + 1, padded = (nb + FS_T - 1) / FS_T * FS_T;
        for (uint32_t i0 = tid; i0 < padded; i0 += 4 * T) {
            uint64_t w[4];
            bool late;
            do {
                late = false;
#pragma unroll
                for (uint32_t e = 0; e < 4; ++e) {
                    w[e] = i0 + e * T < nb ? word_read(words + i0 + e * T) : (uint64_t)number << 32;
                    late |= (uint32_t)(w[e] >> 32) != number;
                }
            } while (late);
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                if (i0 + e * T < padded) {
                    keys[i0 + e * T] = (uint32_t)w[e] & 0x7fffffffu;
                }
            }
        }
        __syncthreads();
        if (tid == 0) { /* every block has read it, whose words are here */
            a.launches[blockIdx.y] = number;
            a.n_block[r] = (int32_t)a.budget;
        }
        cut_blocks(cut, keys, nb, a.budget, out, a.picks ? a.picks + r * QX_PICK_BLOCKS : NULL, tag);
        return;
    }
    const uint32_t per_page = a.kv.page_tokens / a.ratio, step = (gridDim.x - 1) * (T / 8);
    const uint32_t b0 = (blockIdx.x - 1) * (T / 8), own = b0 + tid / 8;
    const uint16_t *pooled = (const uint16_t *)a.kv.pooled + l * 8;
    const int32_t *table = a.kv.page_table + (uint64_t)seq * a.kv.max_pages;
    if (nb <= a.budget || b0 >= nb) {
        return;
    }
    uint4 k[2] = {};
    const uint4 *p = (const uint4 *)pooled;
    if (own < nb) {
        p = (const uint4 *)(pooled + ((uint64_t)few_load(table + own / per_page) * per_page + own % per_page) * 128);
        k[0] = few_load16(p);
        k[1] = few_load16(p + 8);
    }
    pdl_wait();
    const uint32_t number = __ldcg(a.launches + blockIdx.y) + 1;
    if (tid < 128) {
        ((float4 *)iq)[tid] = __ldcg((const float4 *)(a.iq + (uint64_t)r * 512) + tid);
    }
    if (own < nb && (own + 1) * a.ratio > (uint32_t)pos - (r - (uint32_t)first)) { /* of this step */
        k[0] = __ldcg(p);
        k[1] = __ldcg(p + 8);
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t b = own; b - own + b0 < nb; b += step) {
        if (b != own && b < nb) {
            p = (const uint4 *)(pooled + ((uint64_t)__ldcg(table + b / per_page) * per_page + b % per_page) * 128);
            k[0] = __ldcg(p);
            k[1] = __ldcg(p + 8);
        }
        float s[4] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float x[8] = {bf16_lo(k[j].x), bf16_hi(k[j].x), bf16_lo(k[j].y), bf16_hi(k[j].y),
                                bf16_lo(k[j].z), bf16_hi(k[j].z), bf16_lo(k[j].w), bf16_hi(k[j].w)};
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                const float4 u = *(const float4 *)&iq[h * 128 + j * 64 + l * 8],
                             v = *(const float4 *)&iq[h * 128 + j * 64 + l * 8 + 4];
                s[h] = fmaf(u.x, x[0], fmaf(u.y, x[1], fmaf(u.z, x[2], fmaf(u.w, x[3], s[h]))));
                s[h] = fmaf(v.x, x[4], fmaf(v.y, x[5], fmaf(v.z, x[6], fmaf(v.w, x[7], s[h]))));
            }
        }
        const float sum = index_score(s);
        if (l == 0 && b < nb) {
            word_post(words + b, sum, number);
        }
    }
}

static uint32_t select_few_bytes(const struct qx_op_qsa_select *o)
{
    return (o->max_blocks + FS_T - 1) / FS_T * FS_T * 4;
}

bool select_few_fits(const struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    return o->step->n_rows <= 64 && o->i_heads == 4 && o->i_dim == 128 && o->kv.bf16 &&
           o->max_blocks <= FS_T * FS_MAX && select_few_bytes(o) + 16 * 1024 <= (uint32_t)q->smem_max &&
           (((uintptr_t)o->iq | (uintptr_t)o->kv.pooled) & 15) == 0 && has_bulk(q);
}

int select_few(struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    sel_args a = {*o->step, o->i_heads, o->i_dim, o->ratio,   o->budget_blocks, o->max_blocks, o->iq, o->kv,
                  o->scores, o->block,  o->n_block, q->tickets};
    const uint32_t n = o->step->n_rows, T = o->max_blocks <= FS_NEAR ? FS_SCAN : FS_T;
    const uint32_t need = (o->max_blocks * 8 + T - 1) / T;
    const uint32_t most = n == 1 ? (uint32_t)q->n_sm - 1 : n <= 4 ? 64 : n <= 16 ? 16 * (FS_T / T) : 8 * (FS_T / T);
    a.words = q->score_words;
    a.launches = q->numbers + QX_N_NUMBERS - 2 - QX_ATTEND_ROWS;
    if (n <= QX_ATTEND_ROWS && a.budget <= QX_PICK_BLOCKS && a.ratio == 4) {
        a.place = q->picked.place = (q->picked.place + 1) % QX_PICK_PLACES;
        a.picks = q->pick_words + a.place * (QX_ATTEND_ROWS * QX_PICK_BLOCKS);
        a.number = (unsigned *)(q->pick_words + QX_PICK_PLACES * QX_ATTEND_ROWS * QX_PICK_BLOCKS) +
                   a.place * QX_ATTEND_ROWS;
    }
    int r = 0;
    for (a.row0 = 0; a.row0 < n && !r; a.row0 += QX_ATTEND_ROWS) {
        const uint32_t rows = n - a.row0 < QX_ATTEND_ROWS ? n - a.row0 : QX_ATTEND_ROWS;
        r = launch(q, "qsa_select", qsa_select_few, dim3(1 + (need < most ? need : most), rows), dim3(T),
                   select_few_bytes(o), a);
    }
    q->picked.at = a.picks && !r ? q->n_launches : 0;
    q->picked.n_rows = n;
    q->picked.block = o->block;
    return r;
}

/* ---- attention ------------------------------------------------------------------------------ */

enum {
    FA_T = 128,
    FA_POS = 32,                     /* positions a block: two tiles */
    FA_BLOCKS = FA_POS / 4,
    FA_CHUNKS = 72,                  /* of positions a row and key head at most */
    FA_HEADS = 16,
    FA_Q = 288,                      /* elements from query to query: half a turn of the banks more than a row */
    FA_PAGES = 1088,
    FA_PACKET = 6,                   /* words of 16 bytes: largest exponent, sum, 16 dimensions of a head */
    FA_HEAD_WORDS = ATT_D / 16 * FA_PACKET,
    FA_READ = 10                     /* words a thread has on their way */
};

struct few_smem {
    uint16_t q[FA_HEADS][FA_Q];
    float4 part[2][2][2][32]; /* scores by half of the dimensions, tile, half of the tile */
    uint2 at[FA_BLOCKS];      /* a block's first row in the caches, its last that counts */
    int32_t pages[FA_PAGES];
    union {
        uint4 v[2][4][FA_T]; /* a thread's values: of four positions each, eight dimensions */
        uint4 words[1];      /* those posted, then those read */
    };
};

/* Three values and the number of the launch. */
__device__ __forceinline__ void word3_post(uint4 *p, const uint4 &v)
{
    asm volatile("{\n.reg .b128 t;\n.reg .b64 lo, hi;\nmov.b64 lo, {%1, %2};\nmov.b64 hi, {%3, %4};\n"
                 "mov.b128 t, {lo, hi};\nst.relaxed.gpu.global.b128 [%0], t;\n}" ::"l"(p),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint4 word3_read(const uint4 *p)
{
    uint4 v;
    asm volatile("{\n.reg .b128 t;\n.reg .b64 lo, hi;\nld.relaxed.gpu.global.b128 t, [%4];\n"
                 "mov.b128 {lo, hi}, t;\nmov.b64 {%0, %1}, lo;\nmov.b64 {%2, %3}, hi;\n}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint32_t quarter_of(const uint4 &v, int j)
{
    return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
}
/* As 16 bits each: the j-th of x below the j-th of y. */
__device__ __forceinline__ uint32_t pair_of(const uint4 &x, const uint4 &y, int j)
{
    return __byte_perm(quarter_of(x, j / 2), quarter_of(y, j / 2), j & 1 ? 0x7632 : 0x5410);
}
/* By one thread of every block, once the block has read the launch's number and waited. */
__device__ __forceinline__ void few_done(const att_args &a)
{
    if (atomicAdd(a.number + 1, 1u) == gridDim.x * gridDim.y * gridDim.z - 1) {
        a.number[1] = 0;
        a.number[0] = __ldcg(a.number) + 1;
    }
}

/* A block has 32 positions in a row's list for one key head, or with many rows twice that: a multiprocessor brings 25 bytes a nanosecond, so they
 * are spread over all. Its sums go out as words, and each block puts together the packets of its share of the
 * dimensions from all blocks of the row and key head. */
template <int GROUP>
__global__ void __launch_bounds__(FA_T, 5) qsa_attend_few(const __grid_constant__ att_args a)
{
    extern __shared__ __align__(128) uint8_t mem[];
    few_smem &s = *(few_smem *)mem;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, g = lane / 4, q2 = lane & 3;
    const uint32_t kvh = blockIdx.y, r = a.row0 + blockIdx.z;
    const uint32_t G = GROUP ? GROUP : a.n_heads / a.n_kv;
    pdl_next();
    const int32_t pos = __ldcg(a.step.pos + r), seq = __ldcg(a.step.seq + r);
    const int32_t *table = a.kv.page_table + (uint64_t)seq * a.kv.max_pages;
    const uint32_t all = ((uint32_t)pos + 1) / 4, nb = all < a.budget ? all : a.budget;
    const uint32_t n = pos < 0 ? 0 : nb * 4 + ((uint32_t)pos + 1) % 4,
                   chunks = (n + FA_POS - 1) / FA_POS;
    /* the selection's words: it has waited for all that came before */
    const bool polls = a.picks && all > a.budget;
    if (blockIdx.x >= chunks) {
        pdl_wait();
        if (pos < 0 && blockIdx.x == 0) { /* idle: finite all the same */
            for (uint32_t i = tid; i < G * ATT_D; i += FA_T) {
                a.o[((uint64_t)r * a.n_heads + kvh * G) * ATT_D + i] = 0.0f;
            }
        }
        if (tid == 0) {
            few_done(a);
        }
        return;
    }
    const uint32_t pages = (uint32_t)pos / a.kv.page_tokens + 1;
    for (uint32_t i = tid; i < pages && pages <= FA_PAGES; i += FA_T) {
        s.pages[i] = __ldcg(table + i);
    }
    for (uint32_t i = tid; i < (FA_HEADS - G) * FA_Q / 2; i += FA_T) {
        ((uint32_t *)s.q[G])[i] = 0;
    }
    const uint64_t row = (uint64_t)a.n_kv * ATT_D;   /* elements of the caches */
    const uint32_t tile = warp & 1, half = warp / 2; /* of the scores */
    const uint16_t *keys = (const uint16_t *)a.kv.k + kvh * ATT_D + half * (ATT_D / 2) + q2 * 8;
    const uint16_t *values = (const uint16_t *)a.kv.v + kvh * ATT_D + warp * 64 + g * 8;
    const float4 *queries = (const float4 *)(a.q + ((uint64_t)r * a.n_heads + kvh * G) * ATT_D);
    uint4 *words = (uint4 *)a.words + blockIdx.z * (QX_ATTEND_WORDS / QX_ATTEND_ROWS / 2) +
                   kvh * (a.chunks * (G * FA_HEAD_WORDS));
    const uint32_t stride = G * FA_HEAD_WORDS; /* from chunk to chunk */
    constexpr uint32_t HEADS = GROUP ? GROUP : FA_HEADS, NQ = (HEADS * ATT_D / 4 + FA_T - 1) / FA_T;
    /* words a thread posts at most */
    constexpr uint32_t POST = (HEADS * FA_HEAD_WORDS + FA_T - 1) / FA_T;
    uint32_t tag = 0;
    if (polls) {
        tag = few_load(a.pick_number + r) << 7 | a.place;
    }
    __syncthreads();
    uint32_t number = tag;
    if (!polls) {
        pdl_wait();
        number = (__ldcg(a.number) + 1) << 7 | QX_PICK_PLACES;
    }
#pragma unroll 1
    for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const uint32_t first = chunk * FA_POS;
        if (tid < FA_BLOCKS) {
            const uint32_t i = first + tid * 4; /* past the end the row's own position */
            uint32_t picked = 0;
            if (polls) {
                const uint32_t at = i / 4 < nb ? i / 4 : nb - 1;
                uint64_t w;
                do {
                    w = word_read(a.picks + r * QX_PICK_BLOCKS + at);
                } while ((uint32_t)(w >> 32) != tag);
                picked = (uint32_t)w;
            } else if (i / 4 < nb) {
                picked = (uint32_t)__ldcg(a.block + (uint64_t)r * a.budget + i / 4);
            }
            const uint32_t p = i >= n ? (uint32_t)pos : i / 4 < nb ? picked * 4 : all * 4;
            const uint32_t page = p / a.kv.page_tokens;
            const uint32_t at =
                (uint32_t)(pages <= FA_PAGES ? s.pages[page] : __ldcg(table + page)) *
                    a.kv.page_tokens +
                p % a.kv.page_tokens;
            s.at[tid] = make_uint2(at, i >= n ? 0 : n - i < 4 ? n - i - 1 : 3);
        }
        __syncthreads();
        uint4 k[2][4];
        {
            const uint2 at = s.at[tile * 4 + g / 2];
#pragma unroll
            for (uint32_t t = 0; t < 2; ++t) {
                const uint32_t of = 2 * t + (g & 1);
                const uint16_t *p = keys + (uint64_t)(at.x + (of < at.y ? of : at.y)) * row;
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    k[t][i] = __ldcg((const uint4 *)(p + i * 32));
                }
            }
        }
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            const uint2 at = s.at[t * 4 + q2];
#pragma unroll
            for (uint32_t of = 0; of < 4; ++of) {
                copy16(&s.v[t][of][tid], values + (uint64_t)(at.x + (of < at.y ? of : at.y)) * row);
            }
        }
        copy_commit();
        {
            float4 q[NQ];
#pragma unroll
            for (uint32_t e = 0; e < NQ; ++e) {
                const uint32_t i = e * FA_T + tid;
                q[e] = (e + 1) * FA_T <= GROUP * (ATT_D / 4) || i < G * (ATT_D / 4)
                           ? __ldcg(queries + i)
                           : float4();
            }
#pragma unroll
            for (uint32_t e = 0; e < NQ; ++e) {
                const uint32_t i = e * FA_T + tid, h = i / (ATT_D / 4), d = i % (ATT_D / 4) * 4;
                if ((e + 1) * FA_T <= GROUP * (ATT_D / 4) || h < G) {
                    *(uint2 *)&s.q[h][d] =
                        make_uint2(pack_bf16(q[e].x, q[e].y), pack_bf16(q[e].z, q[e].w));
                }
            }
        }
        __syncthreads();
        /* half t of a tile has of each of its four blocks of positions the rows 2 t and 2 t + 1 */
        {
            float S[2][2][4] = {};
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t d = half * (ATT_D / 2) + i * 32 + q2 * 8;
                const uint4 x = *(const uint4 *)&s.q[g][d], y = *(const uint4 *)&s.q[g + 8][d];
                const uint32_t a0[4] = {x.x, y.x, x.y, y.y}, a1[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
                for (uint32_t t = 0; t < 2; ++t) {
                    mma16(S[0][t], a0, k[t][i].x, k[t][i].y);
                    mma16(S[1][t], a1, k[t][i].z, k[t][i].w);
                }
            }
#pragma unroll
            for (uint32_t t = 0; t < 2; ++t) {
                s.part[half][tile][t][lane] =
                    make_float4(S[0][t][0] + S[1][t][0], S[0][t][1] + S[1][t][1],
                                S[0][t][2] + S[1][t][2], S[0][t][3] + S[1][t][3]);
            }
        }
        __syncthreads();
        /* every warp has all probabilities, in the places that the products take them from */
        float x[2][2][4], top[2] = {-INFINITY, -INFINITY}, l[2] = {};
#pragma unroll
        for (uint32_t p = 0; p < 2; ++p) {
#pragma unroll
            for (uint32_t t = 0; t < 2; ++t) {
                const float4 u = s.part[0][p][t][lane], w = s.part[1][p][t][lane];
                const float sum[4] = {u.x + w.x, u.y + w.y, u.z + w.z, u.w + w.w};
#pragma unroll
                for (uint32_t e = 0; e < 4; ++e) {
                    const bool in = first + p * 16 + q2 * 4 + t * 2 + (e & 1) < n;
                    x[p][t][e] = in ? sum[e] * 0.09016844005556021f : -INFINITY; /* log2 e / 16 */
                    top[e >> 1] = fmaxf(top[e >> 1], x[p][t][e]);
                }
            }
        }
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 1));
            top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 2));
        }
        uint32_t P[2][4];
#pragma unroll
        for (uint32_t p = 0; p < 2; ++p) {
#pragma unroll
            for (uint32_t t = 0; t < 2; ++t) {
#pragma unroll
                for (uint32_t e = 0; e < 4; ++e) {
                    x[p][t][e] =
                        exp2f(x[p][t][e] - (top[e >> 1] == -INFINITY ? 0.0f : top[e >> 1]));
                    l[e >> 1] += x[p][t][e];
                }
                P[p][2 * t] = pack_bf16(x[p][t][0], x[p][t][1]);
                P[p][2 * t + 1] = pack_bf16(x[p][t][2], x[p][t][3]);
            }
        }
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            l[e] += __shfl_xor_sync(0xffffffffu, l[e], 1);
            l[e] += __shfl_xor_sync(0xffffffffu, l[e], 2);
        }
        float O[8][4] = {};
        copy_wait<0>();
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            const uint4 v0 = s.v[t][0][tid], v1 = s.v[t][1][tid], v2 = s.v[t][2][tid],
                        v3 = s.v[t][3][tid];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                mma16(O[j], P[t], pair_of(v0, v1, j), pair_of(v2, v3, j));
            }
        }
        __syncthreads();
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) { /* dimensions 64 warp + 16 q2 .. + 15 of two heads */
            const uint32_t h = g + 8 * e;
            if (h < G) {
                float w[18] = {top[e], l[e]};
#pragma unroll
                for (uint32_t j = 0; j < 8; ++j) {
                    w[2 + j] = O[j][2 * e];
                    w[10 + j] = O[j][2 * e + 1];
                }
                uint4 *to = s.words + h * FA_HEAD_WORDS + (warp * 4 + q2) * FA_PACKET;
#pragma unroll
                for (uint32_t i = 0; i < FA_PACKET; ++i) {
                    to[i] = make_uint4(__float_as_uint(w[3 * i]), __float_as_uint(w[3 * i + 1]),
                                       __float_as_uint(w[3 * i + 2]), number);
                }
            }
        }
        __syncthreads();
        {
            uint4 *to = words + chunk * stride + tid, w[POST];
#pragma unroll
            for (uint32_t e = 0; e < POST; ++e) {
                w[e] = s.words[e * FA_T + tid];
            }
#pragma unroll
            for (uint32_t e = 0; e < POST; ++e) {
                if ((e + 1) * FA_T <= GROUP * FA_HEAD_WORDS || e * FA_T + tid < stride) {
                    word3_post(to + e * FA_T, w[e]);
                }
            }
        }
    }
    /* shares of the packets, one a chunk: their words of all chunks */
#pragma unroll 1
    for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const uint32_t share = (G * (ATT_D / 16) + chunks - 1) / chunks, p0 = chunk * share,
                       most = G * (ATT_D / 16);
        if (p0 >= most) {
            break;
        }
        const uint32_t packets = most - p0 < share ? most - p0 : share, per = packets * FA_PACKET,
                       want = per * chunks;
        /* this thread's words of those: the first, and how far to the next ones */
        const uint32_t c0 = tid / per, w0 = tid - c0 * per, at0 = p0 * FA_PACKET + c0 * stride + w0;
        const uint32_t step_c = FA_T / per, step_w = FA_T - step_c * per,
                       step_at = step_c * stride + step_w;
        /* a warp puts a packet together: lane and lane + 16 the same dimension of every second
         * chunk */
        const float *gates = a.in + (uint64_t)r * a.stride + kvh * G * 2 * ATT_D + ATT_D;
        uint32_t of = (p0 + warp) * 16 + (lane & 15);
        float gate = 0.0f;
        if (warp < packets) {
            gate = __ldcg(gates + of / ATT_D * (2 * ATT_D) + of % ATT_D);
        }
        uint32_t at = at0, w = w0;
#pragma unroll 1
        for (uint32_t i0 = tid; i0 < want + tid; i0 += FA_READ * FA_T) {
            uint4 got[FA_READ];
            uint32_t from[FA_READ];
#pragma unroll
            for (uint32_t e = 0; e < FA_READ; ++e) {
                from[e] = i0 + e * FA_T < want ? at : p0 * FA_PACKET;
                at += step_at;
                w += step_w;
                if (w >= per) {
                    w -= per;
                    at += stride - per;
                }
            }
#pragma unroll
            for (uint32_t e = 0; e < FA_READ; ++e) {
                got[e] = word3_read(words + from[e]);
            }
            bool late;
            do {
                late = false;
#pragma unroll
                for (uint32_t e = 0; e < FA_READ; ++e) {
                    if (got[e].w != number) {
                        late = true;
                        got[e] = word3_read(words + from[e]);
                    }
                }
            } while (late);
            if (i0 < FA_T) {
                __syncthreads(); /* all have posted */
            }
#pragma unroll
            for (uint32_t e = 0; e < FA_READ; ++e) {
                if (i0 + e * FA_T < want) {
                    s.words[i0 + e * FA_T] = got[e];
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (uint32_t p = warp; p < packets; p += FA_T / 32) {
            float *m = (float *)(s.words + p * FA_PACKET), high = -INFINITY, sum = 0.0f, y = 0.0f;
#pragma unroll
            for (uint32_t j = 0; j < (FA_CHUNKS + 31) / 32; ++j) {
                if (lane + j * 32 < chunks) {
                    high = fmaxf(high, m[(lane + j * 32) * per * 4]);
                }
            }
            high = warp_max(high);
#pragma unroll
            for (uint32_t j = 0; j < (FA_CHUNKS + 31) / 32; ++j) {
                if (lane + j * 32 < chunks) {
                    float *c = m + (lane + j * 32) * per * 4;
                    const float f = *c == -INFINITY ? 0.0f : exp2f(*c - high);
                    sum = fmaf(f, c[1], sum);
                    *c = f;
                }
            }
            sum = warp_sum(sum);
            __syncwarp();
            const uint32_t vi = (lane & 15) + 2;
            const float *d = m + vi / 3 * 4 + vi % 3;
#pragma unroll 8
            for (uint32_t j = lane / 16; j < chunks; j += 2) {
                y = fmaf(m[j * per * 4], d[j * per * 4], y);
            }
            y += __shfl_xor_sync(0xffffffffu, y, 16);
            if (p != warp) {
                of = (p0 + p) * 16 + (lane & 15);
                gate = __ldcg(gates + of / ATT_D * (2 * ATT_D) + of % ATT_D);
            }
            y = __fdividef(y, sum) * sigmoid_f(gate);
            if (lane < 16) {
                a.o[((uint64_t)r * a.n_heads + kvh * G) * ATT_D + of] = y;
            }
        }
        __syncthreads();
    }
    if (polls) {
        pdl_wait(); /* so that what comes next knows all before it complete */
    }
    if (tid == 0) {
        few_done(a);
    }
}

static uint32_t attend_few_chunks(uint32_t budget)
{
    return (budget * 4 + 3 + FA_POS - 1) / FA_POS;
}
static uint32_t attend_few_bytes(uint32_t group)
{
    /* a block puts together at most FA_CHUNKS - 1 packets more than all heads have, of all chunks */
    const uint32_t words = (group * (ATT_D / 16) + FA_CHUNKS - 1) * FA_PACKET * (uint32_t)sizeof(uint4);
    const uint32_t posted = (group == 12 ? 12 : FA_HEADS) * FA_HEAD_WORDS * (uint32_t)sizeof(uint4);
    const uint32_t most = words > posted ? words : posted;
    return (uint32_t)offsetof(few_smem, v) + most;
}
static uint64_t attend_few_row(const struct qx_op_qsa_attend *o) /* words of a row */
{
    return (uint64_t)attend_few_chunks(o->budget_blocks) * o->n_heads * FA_HEAD_WORDS * 2;
}

bool attend_few_fits(const struct qx_queue *q, const struct qx_op_qsa_attend *o)
{
    const uintptr_t at = (uintptr_t)o->q | (uintptr_t)o->kv.k | (uintptr_t)o->kv.v;
    const uint32_t group = o->n_heads / o->n_kv_heads;
    return o->act_bf16 && o->kv.bf16 && o->ratio == 4 && group <= FA_HEADS && (at & 15) == 0 && o->step->n_rows <= 64 &&
           attend_few_chunks(o->budget_blocks) <= FA_CHUNKS && attend_few_row(o) <= QX_ATTEND_WORDS / QX_ATTEND_ROWS &&
           has_bulk(q) && attend_few_bytes(group) <= (uint32_t)q->smem_max;
}

int attend_few(struct qx_queue *q, const struct qx_op_qsa_attend *o, const att_args &args)
{
    att_args a = args;
    a.chunks = attend_few_chunks(a.budget);
    a.words = q->attend_words;
    a.number = q->numbers + QX_N_NUMBERS - 2;
    if (q->picked.at && q->picked.at == q->n_launches && q->picked.block == o->block &&
        q->picked.n_rows == a.step.n_rows) {
        a.place = q->picked.place;
        a.picks = q->pick_words + a.place * (QX_ATTEND_ROWS * QX_PICK_BLOCKS);
        a.pick_number = (const unsigned *)(q->pick_words + QX_PICK_PLACES * QX_ATTEND_ROWS * QX_PICK_BLOCKS) +
                        a.place * QX_ATTEND_ROWS;
    }
    const uint32_t n = a.step.n_rows, most = QX_ATTEND_ROWS;
    const uint32_t smem = attend_few_bytes(a.n_heads / a.n_kv);
    int r = 0;
    for (a.row0 = 0; a.row0 < n && !r; a.row0 += most) {
        const uint32_t rows = n - a.row0 < most ? n - a.row0 : most;
        /* two chunks a block where else not all would have a place at once */
        const bool fit = a.chunks * a.n_kv * rows <= 5 * (uint32_t)q->n_sm;
        r = launch(q, "qsa_attend", a.n_heads == 12 * a.n_kv ? qsa_attend_few<12> : qsa_attend_few<0>,
                   dim3(fit ? a.chunks : (a.chunks + 1) / 2, a.n_kv, rows), dim3(FA_T), smem, a);
    }
    return r;
}
