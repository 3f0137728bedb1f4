/* wgmma.cuh: the warpgroup matrix instructions of sm_90a as functions: D[64, N] (+)= A[64, 16] B[N, 16]^T in
 * bf16 with f32 sums, A from shared memory or from registers, B from shared memory, and their fences.
 * On other architectures the functions are empty; nothing launches what uses them there. */
#ifndef QX_CUDA_WGMMA_CUH
#define QX_CUDA_WGMMA_CUH

#include "async.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WG_ASM(...) asm volatile(__VA_ARGS__)
#else
#define WG_ASM(...) ((void)0)
#endif

/* K-major tile of rows of 128 bytes in the 128-byte swizzle; the address is a multiple of 1024 but for
 * the step along K. */
__device__ __forceinline__ uint64_t wg_desc(uint32_t smem)
{
    return (uint64_t)((smem & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}
/* Rows of K with N along them, in panels of 64 columns (128 bytes) in the 128-byte swizzle, `panel` bytes apart. */
__device__ __forceinline__ uint64_t wg_desc_rows(uint32_t smem, uint32_t panel)
{
    return (uint64_t)((smem & 0x3ffffu) >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}
__device__ __forceinline__ void wg_fence()
{
    WG_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wg_commit()
{
    WG_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wg_wait()
{
    WG_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define WG_S4 "%0,%1,%2,%3"
#define WG_S8 WG_S4 ",%4,%5,%6,%7"
#define WG_S12 WG_S8 ",%8,%9,%10,%11"
#define WG_S16 WG_S8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_S24 WG_S16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_S32 WG_S16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_S48 WG_S32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_S64 WG_S48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_S72 WG_S64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WG_S80 WG_S64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_S88 WG_S80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WG_S96 WG_S80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_S112 WG_S96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WG_S128 WG_S112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_O4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WG_O8(i) WG_O4(i), WG_O4(i + 4)
#define WG_O12(i) WG_O8(i), WG_O4(i + 8)
#define WG_O16(i) WG_O8(i), WG_O8(i + 8)
#define WG_O24(i) WG_O16(i), WG_O8(i + 16)
#define WG_O32(i) WG_O16(i), WG_O16(i + 16)
#define WG_O48(i) WG_O32(i), WG_O16(i + 32)
#define WG_O64(i) WG_O32(i), WG_O32(i + 32)
#define WG_O72(i) WG_O64(i), WG_O8(i + 64)
#define WG_O80(i) WG_O64(i), WG_O16(i + 64)
#define WG_O88(i) WG_O80(i), WG_O8(i + 80)
#define WG_O96(i) WG_O64(i), WG_O32(i + 64)
#define WG_O128(i) WG_O64(i), WG_O64(i + 64)

/* A from registers. ROWS "1": rows of B lie along N instead of along K. */
#define WG_RS(NAME, ROWS, N, R, I0, I1, I2, I3, I4, I5)                                                  \
    static __device__ __forceinline__ void NAME(float *d, const uint32_t (&a)[4], uint64_t b, int add)   \
    {                                                                                                    \
        WG_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WG_S##R "}, "                 \
               "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, " ROWS ";\n}"               \
               : WG_O##R(0)                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                          \
    }
template <int N> struct wg;
#define WG_DEFINE(N, R, I0, I1, I2, I3, I4, I5)                                                          \
    template <> struct wg<N> {                                                                           \
        /* add false: d is overwritten */                                                                \
        WG_RS(rs, "0", N, R, I0, I1, I2, I3, I4, I5)                                                     \
        /* b: rows along N, eight of K after eight (wg_desc_rows) */                                     \
        WG_RS(rs_rows, "1", N, R, I0, I1, I2, I3, I4, I5)                                                \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add)             \
        {                                                                                                \
            WG_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WG_S##R "}, "             \
                   "%" #I0 ", %" #I1 ", p, 1, 1, 0, 0;\n}"                                                \
                   : WG_O##R(0)                                                                          \
                   : "l"(a), "l"(b), "r"(add));                                                          \
        }                                                                                                \
    };
WG_DEFINE(8, 4, 4, 5, 6, 7, 8, 9)
WG_DEFINE(16, 8, 8, 9, 10, 11, 12, 13)
WG_DEFINE(24, 12, 12, 13, 14, 15, 16, 17)
WG_DEFINE(32, 16, 16, 17, 18, 19, 20, 21)
WG_DEFINE(48, 24, 24, 25, 26, 27, 28, 29)
WG_DEFINE(64, 32, 32, 33, 34, 35, 36, 37)
WG_DEFINE(96, 48, 48, 49, 50, 51, 52, 53)
WG_DEFINE(128, 64, 64, 65, 66, 67, 68, 69)
WG_DEFINE(144, 72, 72, 73, 74, 75, 76, 77)
WG_DEFINE(160, 80, 80, 81, 82, 83, 84, 85)
WG_DEFINE(176, 88, 88, 89, 90, 91, 92, 93)
WG_DEFINE(192, 96, 96, 97, 98, 99, 100, 101)
WG_DEFINE(256, 128, 128, 129, 130, 131, 132, 133)

/* Keeps the compiler from moving uses of the sums across fences and waits. */
template <int R> __device__ __forceinline__ void wg_pin(float *d)
{
#pragma unroll
    for (int i = 0; i < R; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

#endif
