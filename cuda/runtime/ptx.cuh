/* cuda/runtime/ptx.cuh - PTX instructions of kernels: tensor core products, fragments of tiles,
 * copies to shared memory, byte permutation, packed 16-bit arithmetic.
 *
 * PTX is only here; each primitive has its emulator version beside it. */
#ifndef TINSMITH_CUDA_RUNTIME_PTX_CUH
#define TINSMITH_CUDA_RUNTIME_PTX_CUH

#include <stdint.h>

#ifdef CUDA_EMULATED
#include "../emulator/emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#endif

/* ---- numbers ---- */

/* The real at the lower address of a register's two, and the other one. */
__device__ static __forceinline__ float low_of(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

__device__ static __forceinline__ float high_of(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* 2^x, within two ulp. */
__device__ static __forceinline__ float fast_exp2(float x)
{
#ifdef CUDA_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* x, opaque to the compiler: it can't hoist computations of x out of a loop, which would fill
 * registers. */
template <class T> __device__ static __forceinline__ T opaque(T x)
{
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    if constexpr (sizeof(T) == 4) asm volatile("" : "+r"(x));
    return x;
}

/* Selects bytes of the eight of b:a, one per nibble of `choice`: its lower three bits are the
 * index; with the fourth, all eight bits are that byte's sign bit. */
__device__ static __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t choice)
{
#ifdef CUDA_EMULATED
    uint64_t all = (uint64_t)b << 32 | a;
    uint32_t made = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t which = choice >> 4 * i & 15, byte = all >> 8 * (which & 7) & 255;
        made |= (which & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return made;
#else
    uint32_t made;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(made) : "r"(a), "r"(b), "r"(choice));
    return made;
#endif
}

/* One of the two f16 in a register, as f32. */
template <bool IS_HIGH> __device__ static __forceinline__ float f32_of_f16(uint32_t pair)
{
#ifdef CUDA_EMULATED
    uint32_t half = IS_HIGH ? pair >> 16 : pair & 0xffff;
    return __uint_as_float((half & 0x8000) << 16 | (half & 0x7fff) << 13) * 0x1p112f;
#else
    float made;
    if constexpr (IS_HIGH)
        asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(made) : "r"(pair));
    else
        asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(made) : "r"(pair));
    return made;
#endif
}

/* a·b + c of two pairs of reals, rounded once. The emulator first rounds to f32: callers have
 * numbers with so few digits that f32 holds the sum. */
__device__ static __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c)
{
#ifdef CUDA_EMULATED
    float low = fmaf(low_of(a), low_of(b), low_of(c));
    float high = fmaf(high_of(a), high_of(b), high_of(c));
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
           (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16;
#else
    uint32_t made;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(a), "r"(b), "r"(c));
    return made;
#endif
}

/* ---- products, fragments and copies ---- */

/* d (16,8) += a (16,16)·b (16,8). With lane = 4·g + i, a register's low half first:
 *   a[0] (g, 2i..)  a[1] (g+8, 2i..)  a[2] (g, 2i+8..)  a[3] (g+8, 2i+8..)
 *   b[0] (2i.., g)  b[1] (2i+8.., g)
 *   d[0] (g, 2i)  d[1] (g, 2i+1)  d[2] (g+8, 2i)  d[3] (g+8, 2i+1) */
__device__ static __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1)
{
#ifdef CUDA_EMULATED
    struct Operand {
        float *d;
        uint32_t a[4], b[2];
    } mine = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulate::collective("mma", &mine, [](Operand **all) {
        float a[16][16], b[16][8], d[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int half = 0; half < 2; half++) {
                int g = lane / 4, i = lane % 4 * 2 + half;
                for (int r = 0; r < 4; r++) {
                    uint32_t bits = all[lane]->a[r];
                    a[g + r % 2 * 8][i + r / 2 * 8] = half ? high_of(bits) : low_of(bits);
                    d[g + r / 2 * 8][lane % 4 * 2 + r % 2] = all[lane]->d[r];
                }
                for (int r = 0; r < 2; r++)
                    b[i + r * 8][g] = half ? high_of(all[lane]->b[r]) : low_of(all[lane]->b[r]);
            }
        for (int row = 0; row < 16; row++)
            for (int col = 0; emulate::gpu.truncates && col < 8; col++)
                d[row][col] = emulate::tensor_core_sum(d[row][col], a[row], 1, &b[0][col], 8, 16);
        for (int row = 0; row < 16 && !emulate::gpu.truncates; row++)
            for (int k = 0; k < 16; k++)
                for (int col = 0; col < 8; col++) d[row][col] += a[row][k] * b[k][col];
        for (int lane = 0; lane < 32; lane++)
            for (int r = 0; r < 4; r++)
                all[lane]->d[r] = d[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
    });
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* Four 8×8 matrices of reals: lane 8·m + r passes the address of row r of matrix m (16 bytes,
 * aligned), and lane 4·g + i gets the elements (g, 2i) and (g, 2i+1) of matrix m in r[m].
 * ldmatrix_transposed gives it (2i, g) and (2i+1, g). */
#ifdef CUDA_EMULATED
template <bool TRANSPOSED> static inline void ldmatrix_emulated(uint32_t (&r)[4], const void *row)
{
    struct Operand {
        const uint16_t *row;
        uint32_t *r;
    } mine = {(const uint16_t *)row, r};
    emulate::check_shared(row, 16, "ldmatrix");
    emulate::collective(TRANSPOSED ? "ldmatrix_transposed" : "ldmatrix", &mine, [](Operand **all) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) {
                int g = lane / 4, i = lane % 4 * 2;
                uint32_t low = TRANSPOSED ? all[8 * m + i]->row[g] : all[8 * m + g]->row[i];
                uint32_t high =
                    TRANSPOSED ? all[8 * m + i + 1]->row[g] : all[8 * m + g]->row[i + 1];
                all[lane]->r[m] = low | high << 16;
            }
    });
}
#endif

__device__ static __forceinline__ void ldmatrix(uint32_t (&r)[4], const void *row)
{
#ifdef CUDA_EMULATED
    ldmatrix_emulated<false>(r, row);
#else
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#endif
}

__device__ static __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void *row)
{
#ifdef CUDA_EMULATED
    ldmatrix_emulated<true>(r, row);
#else
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#endif
}

/* Starts copying 16 bytes from global to shared memory, both aligned: the first `bytes`,
 * zero-padded. This thread sees them after waiting for their group; other threads need a barrier as
 * well. */
__device__ static __forceinline__ void cp_async(void *to, const void *from, int bytes = 16)
{
#ifdef CUDA_EMULATED
    emulate::check_shared(to, 16, "cp.async");
    if ((uintptr_t)from % 16) emulate::fault("cp.async: the source is not a multiple of 16");
    emulate::Fiber *self = emulate::gpu.now;
    self->copies.push_back({to, from, bytes, 16, self->groups});
    memset(to, emulate::POISON, 16);
#else
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
#endif
}

/* Commits this thread's copies so far as a group. */
__device__ static __forceinline__ void cp_async_commit()
{
#ifdef CUDA_EMULATED
    emulate::gpu.now->groups++;
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits for all of this thread's groups except the last N. */
template <int N> __device__ static __forceinline__ void cp_async_wait()
{
#ifdef CUDA_EMULATED
    emulate::Fiber *self = emulate::gpu.now;
    size_t kept = 0;
    for (emulate::Copy &copy : self->copies) {
        if (copy.group >= self->groups - N) {
            self->copies[kept++] = copy;
            continue;
        }
        memcpy(copy.to, copy.from, copy.bytes);
        memset((char *)copy.to + copy.bytes, 0, copy.filled - copy.bytes);
    }
    self->copies.resize(kept);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* A flag between blocks. Accesses of this thread, and of others before a barrier with it, happen
 * before the flag is raised (release). Those after flag_wait happen after it (acquire). The block
 * that raises the flag must be running already, or done. */
__device__ static __forceinline__ void flag_raise(unsigned *flag)
{
#ifdef CUDA_EMULATED
    *flag = 1;
#else
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
#endif
}

__device__ static __forceinline__ void flag_wait(const unsigned *flag)
{
#ifdef CUDA_EMULATED
    if (!*flag) emulate::fault("waits for a flag that no block has raised");
#else
    unsigned up;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(up) : "l"(flag) : "memory");
    } while (!up);
#endif
}

#endif
