/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the kernels: launching, warp sums, the matrix instruction. */
#ifndef DEVICE_CUDA_KERNEL_CUH
#define DEVICE_CUDA_KERNEL_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/cuda/kernels.h"

/* Launch so that the kernel may begin while its predecessor ends, where that is asked for. Clusters
 * of `cluster` blocks side by side in x; 0: none. */
template <typename... P, typename... A>
static inline cudaError_t launch_clusters(struct cuda_where at, void (*kernel)(P...), dim3 grid,
                                          dim3 block, size_t shared, unsigned cluster, A... a)
{
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared;
    c.stream = at.stream;
    c.attrs = attr;
    if (at.overlap) {
        attr[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attr[c.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster) {
        attr[c.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attr[c.numAttrs].val.clusterDim.x = cluster;
        attr[c.numAttrs].val.clusterDim.y = attr[c.numAttrs].val.clusterDim.z = 1;
        c.numAttrs++;
    }
    if (shared) {
        /* One split between shared memory and L1 for all: a kernel that wants another one than its
         * predecessor's can't begin beside it. */
        cudaError_t rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)shared);
        if (rc == cudaSuccess)
            rc = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared);
        if (rc)
            return rc;
    }
    return cudaLaunchKernelEx(&c, kernel, P(a)...);
}

template <typename... P, typename... A>
static inline cudaError_t launch(struct cuda_where at, void (*kernel)(P...), dim3 grid, dim3 block,
                                 size_t shared, A... a)
{
    return launch_clusters(at, kernel, grid, block, shared, 0, a...);
}

/* Everything before may run beside the preceding kernel: only weights may be touched there. Every
 * kernel calls both, so that "the one before is complete" holds for all before it. */
static __device__ __forceinline__ void wait_before()
{
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
#endif
}

static __device__ __forceinline__ float warp_sum(float x)
{
    for (int i = 16; i > 0; i >>= 1)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, i);
    return x;
}

static __device__ __forceinline__ float warp_max(float x)
{
    for (int i = 16; i > 0; i >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, i));
    return x;
}

/* Sum over a block; every thread gets it. buf: one float a warp. */
static __device__ __forceinline__ float block_sum(float x, float *buf)
{
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0)
        buf[threadIdx.x >> 5] = x;
    __syncthreads();
    x = 0;
    for (unsigned i = 0; i < blockDim.x / 32; i++)
        x += buf[i];
    return x;
}

static __device__ __forceinline__ uint32_t pack_bf16(float lo, float hi)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&v);
}

static __device__ __forceinline__ float lo_f32(uint32_t v)
{
    return __uint_as_float(v << 16);
}

static __device__ __forceinline__ float hi_f32(uint32_t v)
{
    return __uint_as_float(v & 0xFFFF0000u);
}

static __device__ __forceinline__ float to_f32(cuda_bf16 v)
{
    return __uint_as_float((uint32_t)v << 16);
}

static __device__ __forceinline__ cuda_bf16 to_bf16(float v)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

static __device__ __forceinline__ float activate(float x, int act)
{
    if (act == 1) /* DEVICE_SILU */
        return x / (1.0f + __expf(-x));
    float t = 0.7978845608028654f * (x + 0.044715f * x * x * x); /* DEVICE_GELU_TANH */
    return 0.5f * x * (1.0f + tanhf(t));
}

/* c[16x8] += a[16x16] b[16x8], bf16 operands, float32 sums. */
static __device__ __forceinline__ void mma16816(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif
