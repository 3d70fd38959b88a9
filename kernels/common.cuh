// What every stage shares: the build's shape, one decode batch as the kernels see it, and small device helpers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace santa {

// A module is compiled for one shape: head_dim, query heads per KV head, and dtype (SANTA_BF16 0 or 1).
#ifdef SANTA_HEAD_DIM
constexpr int kHeadDim = SANTA_HEAD_DIM;
constexpr int kGroup = SANTA_GROUP;
#if SANTA_BF16
using Half = __nv_bfloat16;
#else
using Half = __half;
#endif
static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128 || kHeadDim == 256, "head_dim is 64, 96, 128 or 256");
static_assert(kGroup >= 1 && kGroup <= 16, "1 to 16 query heads share a KV head");
#endif

constexpr int kUnit = 64;  // tokens a warp scores at a time, and that share one exponent (GROUP of docs/estimators.md)
constexpr int64_t kOne = int64_t(1) << 44;           // one expected row
constexpr int kExcluded = -32768;                    // log-code of a token no selection may take
constexpr int kBinShift = 5;                         // a histogram bin holds 2^5 log-codes: 1/8 octave
constexpr int kBins = 65536 >> kBinShift;
constexpr int kChunk = 8192;                         // tokens one block of the place kernel covers
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kNotFinite = INT32_MAX;                // exponent of a unit that holds NaN or +inf
constexpr int kNoExponent = -(1 << 20);              // exponent of a unit whose scores are all -inf

// One decode batch: row r attends to its first seq_lens[r] tokens, if its method is one of those in `methods`.
struct Batch {
  const int* seq_lens;        // [rows]
  const int8_t* method;       // [rows]
  const int* budget;          // [rows]
  const int64_t* seed;        // [rows]
  const int* block_table;     // [rows, table_stride]
  int64_t table_stride;
  int rows, kv_heads;
  uint32_t methods;           // bit m: rows of method m are ours
  int layer, head_offset;     // global layer, and first global KV head of this rank
  int max_units;              // stash capacity per row and head, in units

  // Context length of a row that is ours, else 0.
  __device__ int length(int row) const {
    int length, method_of;                  // asked for together: left alone, the compiler waits for the one before it asks for the other
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(length) : "l"(seq_lens + row));
    asm volatile("ld.global.nc.s8 %0, [%1];" : "=r"(method_of) : "l"(method + row));
    return methods >> method_of & 1 ? length : 0;
  }
};

// Pages hold, per KV head, block_size token rows of K then V: [blocks, kv_heads, block_size, 2, head_dim].
struct Pages {
  const void* kv;
  int64_t page_stride;        // elements from one block to the next
  int block_size;
};

__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

struct Scores {
  float log2_scale;           // scale * log2(e)
  float cap, inverse_cap;     // soft cap * log2(e), and 2 / soft cap; cap 0: none

  static Scores make(float scale, float soft_cap) {
    return {scale * kLog2e, soft_cap * kLog2e, soft_cap > 0.f ? 2.f / soft_cap : 0.f};
  }
  // Log2-domain score of a raw dot product: cap * tanh(l / cap), as 1 - 2 / (e^2z + 1).
  __device__ __forceinline__ float operator()(float dot) const {
    const float x = dot * log2_scale;
    return cap > 0.f ? cap - 2.f * cap * __frcp_rn(exp2_fast(x * inverse_cap) + 1.f) : x;
  }
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Maximum that lets NaN through.
__device__ __forceinline__ float max_nan(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }

// L2 drops what is read with this policy first, and so keeps the stash; what is written with the other one last.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  return policy;
}

// Gives up the 128-byte lines of [begin, end), as far as they lie in it whole: nobody reads them before they are written again, so L2 need not
// write them to memory. By a block of THREADS threads, none of which may read them any more.
template <int THREADS>
__device__ __forceinline__ void give_up(const void* begin, const void* end) {
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / 128 * 128;
#pragma unroll 1
  for (uintptr_t line = (reinterpret_cast<uintptr_t>(begin) + 127) / 128 * 128 + threadIdx.x * 128; line < last; line += THREADS * 128)
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}
// Whether a stash of so many bytes per unit, row and KV head is worth giving up. A smaller one is still in L2 when the next layer writes over it.
__device__ __forceinline__ bool leaves_l2(const Batch& batch, size_t unit_bytes) {
  return size_t(batch.rows) * batch.kv_heads * batch.max_units * unit_bytes > 9 << 20;
}

// A row of K or V, read by several lanes at once: 64 bytes at a time reach only 85 % of the speed without the 128-byte hint.
__device__ __forceinline__ uint4 load_row(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same through L1, for rows of which a block reads few.
__device__ __forceinline__ uint4 load_row_near(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// One 16-byte store; left alone, the compiler splits some of them.
__device__ __forceinline__ void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Between the warps of a block, through shared memory. A fence would wait for the loads on their way as well.
__device__ __forceinline__ int load_acquire(const int* shared) {
  int value;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(uint32_t(__cvta_generic_to_shared(shared))) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(int* shared, int value) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))), "r"(value) : "memory");
}
__device__ __forceinline__ int add_acquire_release(int* shared, int value) {
  int before;
  asm volatile("atom.acq_rel.cta.shared.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(uint32_t(__cvta_generic_to_shared(shared))), "r"(value)
               : "memory");
  return before;
}

// Programmatic dependent launch: the next kernel may start its prologue; wait for the one before.
__device__ __forceinline__ void launch_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Beyond 48 KB of dynamic and static shared memory together it must be asked for.
template <class... Params>
inline cudaError_t allow_shared_memory(void (*kernel)(Params...), size_t smem) {
  return smem > 16 * 1024 ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem)) : cudaSuccess;
}

template <class... Params, class... Args>
inline cudaError_t launch(void (*kernel)(Params...), dim3 grid, int block, size_t smem, cudaStream_t stream, bool overlap, Args... args) {
  if (const cudaError_t status = allow_shared_memory(kernel, smem)) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// A multiprocessor has to run empty before it can divide its memory anew between shared memory and L1. Kernels whose blocks are to run side
// by side with those of the stage before all ask for the largest share.
template <class... Params>
inline cudaError_t ask_for_shared_memory(void (*kernel)(Params...)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}
template <class... Params, class... Args>
inline cudaError_t launch_side_by_side(void (*kernel)(Params...), dim3 grid, int block, size_t smem, cudaStream_t stream, bool overlap,
                                       Args... args) {
  if (const cudaError_t status = ask_for_shared_memory(kernel)) return status;
  return launch(kernel, grid, block, smem, stream, overlap, args...);
}

}  // namespace santa
