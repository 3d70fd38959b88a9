// K, V and PQ codes of new tokens into their pages, in one launch; or the codes of tokens that already lie there.
//
// 16 tokens a warp: keys times the D x D transform, a subspace's columns at a time, then all 256 centroids' y.c - |c|^2 / 2, on tensor cores.
// Keys are exact in tf32; everything else is split into two tf32 numbers, so that results are as exact as float32's and a code
// differs from the reference's in near-ties only. A tie goes to the lower index. The order of every sum is fixed: a key's code does not
// depend on how many tokens are written with it.
#include <algorithm>

#include "bindings.cuh"
#include "pq.cuh"

namespace santa {

constexpr int kEncodeThreads = 256, kEncodeWarps = kEncodeThreads / 32;

struct EncodeBooks {              // float32, in the order of mma.m16n8k8 fragments (vllm_santa/ssa_ops.py)
  const float4* transform;        // [kv_heads, head_dim / 8 columns, head_dim / 32, 2, 32 lanes]
  const float* bias;              // [kv_heads, head_dim] less mean times transform
  const float4* centroids;        // [kv_heads, subspaces, 16, columns / 8, 32 lanes]
  const float* norm;              // [kv_heads, subspaces, 256] less half the squared norm
};

struct EncodePages {
  Half* kv;
  int64_t page_stride;            // elements
  uint8_t* codes;
  int64_t code_stride;            // bytes
  int block_size, kv_heads;
};

struct NewTokens {                // [count, kv_heads, head_dim], tokens and heads strided
  const Half *key, *value;
  int64_t key_token, key_head, value_token, value_head;
  const int64_t* slots;           // [count] -1: skip
  int count;
};

struct CachedTokens {             // tokens of whole blocks
  const int64_t* blocks;          // null: block i is i
  int count;
};

// Where a token's key is, and where it goes: slot -1 is nowhere.
struct Source {
  const Half* key;
  int slot;
};

__device__ __forceinline__ Source source_of(const NewTokens& tokens, const EncodePages&, int head, int t) {
  if (t >= tokens.count) return {nullptr, -1};
  return {tokens.key + t * tokens.key_token + head * tokens.key_head, int(tokens.slots[t])};
}
__device__ __forceinline__ Source source_of(const CachedTokens& tokens, const EncodePages& pages, int head, int t) {
  if (t >= tokens.count) return {nullptr, -1};
  const int at = t / pages.block_size, within = t % pages.block_size;
  const int64_t block = tokens.blocks ? tokens.blocks[at] : at;
  return {pages.kv + block * pages.page_stride + (int64_t(head) * pages.block_size + within) * (2 * kHeadDim),
          int(block) * pages.block_size + within};
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t high_part(float x) { return __float_as_uint(x) & 0xffffe000u; }
__device__ __forceinline__ uint32_t low_part(float x) { return __float_as_uint(x - __uint_as_float(high_part(x))); }

// Both keys of a word as float32 bits.
__device__ __forceinline__ uint2 two_keys(uint32_t word) {
#if SANTA_BF16
  return make_uint2(word << 16, word & 0xffff0000u);
#else
  const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&word));
  return make_uint2(__float_as_uint(two.x), __float_as_uint(two.y));
#endif
}

struct Nearest {
  float score;
  int index;
  __device__ __forceinline__ void meet(float other_score, int other_index) {
    if (other_score > score || (other_score == score && other_index < index)) { score = other_score; index = other_index; }
  }
};

__device__ __forceinline__ void fetch(float4* to, const float4* from, int count) {
  for (int i = threadIdx.x; i < count; i += kEncodeThreads)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to + i))), "l"(from + i) : "memory");
}

// Columns of the transform worked on together: those of a subspace, or of several where they have fewer than 8.
constexpr int kColumnsAtOnce = kFeatures < 8 ? 8 : kFeatures;
constexpr int kColumnTiles = kColumnsAtOnce / 8, kTogether = kColumnsAtOnce / kFeatures, kGroups = kHeadDim / kColumnsAtOnce;
constexpr int kTransformPart = kColumnTiles * kPieces * 2 * 32;              // float4 of a group of columns
constexpr int kCentroidPart = kTogether * 16 * kColumnTiles * 32;
constexpr int kEncodeBytes = (kTransformPart + kCentroidPart) * 16 + kTogether * kCentroids * 4;

// K and V of the block's share of the tokens, several loads at a time.
template <int TOKENS>
__device__ __forceinline__ void copy_rows(const NewTokens& tokens, const EncodePages& pages, int head, int first_token) {
  constexpr int kRowChunks = kHeadDim / 8, kAtOnce = 4, kAll = TOKENS * 2 * kRowChunks;
  const int step = gridDim.y * kEncodeThreads;
  for (int start = blockIdx.y * kEncodeThreads + threadIdx.x; start < kAll; start += kAtOnce * step) {
    uint4 row[kAtOnce];
    Half* to[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = start + i * step, t = first_token + at / (2 * kRowChunks), chunk = at % (2 * kRowChunks);
      const Source source = at < kAll ? source_of(tokens, pages, head, t) : Source{nullptr, -1};
      to[i] = nullptr;
      if (source.slot < 0) continue;
      const Half* value = tokens.value + t * tokens.value_token + head * tokens.value_head;
      row[i] = *reinterpret_cast<const uint4*>(chunk < kRowChunks ? source.key + chunk * 8 : value + (chunk - kRowChunks) * 8);
      to[i] = pages.kv + int64_t(source.slot / pages.block_size) * pages.page_stride +
              (int64_t(head) * pages.block_size + source.slot % pages.block_size) * (2 * kHeadDim) + chunk * 8;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (to[i]) store16(to[i], row[i]);
  }
}

// A block takes TILES * 16 tokens of a KV head; 8 / TILES warps share the centroids of 16 tokens.
template <int TILES, class Tokens>
__global__ void __launch_bounds__(kEncodeThreads, 2) encode_kernel(Tokens tokens, EncodePages pages, EncodeBooks books, int groups_per_block) {
  constexpr int M = kSubspaces;
  constexpr int kSplit = kEncodeWarps / TILES, kPairs = 16 / kSplit;                 // pairs of 8 centroids of a warp
  extern __shared__ __align__(16) float4 shared[];
  float4 *transform = shared, *centroids = shared + kTransformPart;
  float* norm = reinterpret_cast<float*>(centroids + kCentroidPart);
  __shared__ Nearest found[kEncodeWarps][16];
  __shared__ uint8_t code_of[TILES * 16][M];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4, tile = warp / kSplit, part = warp % kSplit;
  const int head = blockIdx.z, first_token = blockIdx.x * TILES * 16;
  const int first_group = blockIdx.y * groups_per_block, last_group = min(first_group + groups_per_block, kGroups);

  uint4 keys[2][kPieces];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const Source source = source_of(tokens, pages, head, first_token + tile * 16 + r + 8 * e);
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
      keys[e][p] = source.slot >= 0 ? *reinterpret_cast<const uint4*>(source.key + p * 32 + c * 8) : uint4{0, 0, 0, 0};
  }
  for (int group = first_group; group < last_group; ++group) {
    const int first_subspace = group * kTogether;
    __syncthreads();
    fetch(transform, books.transform + (int64_t(head) * kGroups + group) * kTransformPart, kTransformPart);
    fetch(centroids, books.centroids + (int64_t(head) * kGroups + group) * kCentroidPart, kCentroidPart);
    fetch(reinterpret_cast<float4*>(norm), reinterpret_cast<const float4*>(books.norm + (int64_t(head) * M + first_subspace) * kCentroids),
          kTogether * 64);
    asm volatile("cp.async.commit_group;" ::: "memory");
    if constexpr (std::is_same_v<Tokens, NewTokens>)
      if (group == first_group) copy_rows<TILES * 16>(tokens, pages, head, first_token);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    float high[kColumnTiles][4], low[kColumnTiles][4] = {};
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      const float2 bias = *reinterpret_cast<const float2*>(books.bias + head * kHeadDim + group * kColumnsAtOnce + t * 8 + 2 * c);
      high[t][0] = high[t][2] = bias.x;
      high[t][1] = high[t][3] = bias.y;
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const uint32_t words[2][4] = {{keys[0][p].x, keys[0][p].y, keys[0][p].z, keys[0][p].w},
                                    {keys[1][p].x, keys[1][p].y, keys[1][p].z, keys[1][p].w}};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 b[kColumnTiles];
#pragma unroll
        for (int t = 0; t < kColumnTiles; ++t) b[t] = transform[((t * kPieces + p) * 2 + half) * 32 + lane];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint2 upper = two_keys(words[0][2 * half + j]), lower = two_keys(words[1][2 * half + j]);
          const uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
          for (int t = 0; t < kColumnTiles; ++t) {
            const float b0 = j ? b[t].z : b[t].x, b1 = j ? b[t].w : b[t].y;
            mma_tf32(high[t], a, high_part(b0), high_part(b1));
            mma_tf32(low[t], a, low_part(b0), low_part(b1));
          }
        }
      }
    }
    uint32_t y_high[kColumnTiles][4], y_low[kColumnTiles][4];                            // A operand: columns 2 c, 2 c + 1 as k = c, c + 4
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        constexpr int from[4] = {0, 2, 1, 3};
        const float y = high[t][from[i]] + low[t][from[i]];
        y_high[t][i] = high_part(y);
        y_low[t][i] = low_part(y);
      }

#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
      float best[4];
      int at[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) { best[i] = -INFINITY; at[i] = 0; }
#pragma unroll (kPieces <= 4 ? 4 : 2)
      for (int pair = part * kPairs; pair < (part + 1) * kPairs; ++pair) {
        float score[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float2 start = *reinterpret_cast<const float2*>(norm + s * kCentroids + (2 * pair + k) * 8 + 2 * c);
          score[k][0] = score[k][2] = start.x;
          score[k][1] = score[k][3] = start.y;
        }
#pragma unroll
        for (int t = 0; t < kColumnTiles; ++t) {
          const float4 b = centroids[((s * 16 + pair) * kColumnTiles + t) * 32 + lane];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float b0 = k ? b.z : b.x, b1 = k ? b.w : b.y;
            mma_tf32(score[k], y_low[t], high_part(b0), high_part(b1));
            mma_tf32(score[k], y_high[t], low_part(b0), low_part(b1));
            mma_tf32(score[k], y_high[t], high_part(b0), high_part(b1));
          }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (score[k][i] > best[i]) { best[i] = score[k][i]; at[i] = 2 * pair + k; }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {                  // rows r and r + 8
        Nearest nearest{best[2 * e], at[2 * e] * 8 + 2 * c};
        nearest.meet(best[2 * e + 1], at[2 * e + 1] * 8 + 2 * c + 1);
#pragma unroll
        for (int d = 1; d < 4; d *= 2)
          nearest.meet(__shfl_xor_sync(kAll, nearest.score, d), __shfl_xor_sync(kAll, nearest.index, d));
        if (c == 0) {
          if (kSplit == 1) code_of[tile * 16 + r + 8 * e][first_subspace + s] = uint8_t(nearest.index);
          else found[warp][r + 8 * e] = nearest;
        }
      }
      if (kSplit > 1) {
        __syncthreads();
        if (threadIdx.x < TILES * 16) {
          Nearest nearest = found[threadIdx.x / 16 * kSplit][threadIdx.x % 16];
#pragma unroll
          for (int w = 1; w < kSplit; ++w) {
            const Nearest other = found[threadIdx.x / 16 * kSplit + w][threadIdx.x % 16];
            nearest.meet(other.score, other.index);
          }
          code_of[threadIdx.x][first_subspace + s] = uint8_t(nearest.index);
        }
        __syncthreads();
      }
    }
  }
  __syncthreads();

  const int first_code = first_group * kTogether, codes = (last_group - first_group) * kTogether;
  for (int i = threadIdx.x; i < TILES * 16 * codes; i += kEncodeThreads) {
    const int t = i / codes, m = first_code + i % codes;
    const int slot = source_of(tokens, pages, head, first_token + t).slot;
    if (slot >= 0)
      pages.codes[int64_t(slot / pages.block_size) * pages.code_stride + (int64_t(head) * pages.block_size + slot % pages.block_size) * M + m] =
          code_of[t][m];
  }
}

template <int TILES, class Tokens>
cudaError_t encode(const Tokens& tokens, const EncodePages& pages, const EncodeBooks& books, int processors, cudaStream_t stream) {
  const int blocks = ceil_div(tokens.count, 16 * TILES);
  const int wanted = std::clamp(2 * processors / (blocks * pages.kv_heads), 1, kGroups), each = ceil_div(kGroups, wanted);
  return launch(encode_kernel<TILES, Tokens>, dim3(blocks, ceil_div(kGroups, each), pages.kv_heads), kEncodeThreads, kEncodeBytes, stream, false,
                tokens, pages, books, each);
}

EncodePages make_encode_pages(TensorView kv, TensorView codes) {
  return {data<Half>(kv), kv.stride(0), data<uint8_t>(codes), codes.stride(0), int(kv.size(2)), int(kv.size(1))};
}
EncodeBooks make_encode_books(TensorView transform, TensorView bias, TensorView centroids, TensorView norm) {
  return {data<const float4>(transform), data<const float>(bias), data<const float4>(centroids), data<const float>(norm)};
}

void write_cache(TensorView key, TensorView value, TensorView slots, TensorView kv, TensorView codes, TensorView transform, TensorView bias,
                 TensorView centroids, TensorView norm) {
  const NewTokens tokens{data<const Half>(key), data<const Half>(value), key.stride(0),  key.stride(1),
                         value.stride(0),       value.stride(1),         data<const int64_t>(slots), int(slots.size(0))};
  if (tokens.count == 0) return;
  ffi::CUDADeviceGuard guard(kv.device().device_id);
  const auto run = tokens.count <= 16 ? encode<1, NewTokens> : tokens.count <= 64 ? encode<4, NewTokens> : encode<8, NewTokens>;
  check(run(tokens, make_encode_pages(kv, codes), make_encode_books(transform, bias, centroids, norm), multiprocessors(kv.device()),
            get_stream(kv.device())),
        "write_cache");
}

void encode_blocks(ffi::Optional<TensorView> blocks, TensorView kv, TensorView codes, TensorView transform, TensorView bias,
                   TensorView centroids, TensorView norm) {
  const int64_t count = blocks.has_value() ? blocks.value().size(0) : kv.size(0);
  const CachedTokens tokens{data<const int64_t>(blocks), int(count * kv.size(2))};
  if (tokens.count == 0) return;
  ffi::CUDADeviceGuard guard(kv.device().device_id);
  check(encode<8>(tokens, make_encode_pages(kv, codes), make_encode_books(transform, bias, centroids, norm), multiprocessors(kv.device()),
                  get_stream(kv.device())),
        "encode_blocks");
}

}  // namespace santa

TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_cache, santa::write_cache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(encode_blocks, santa::encode_blocks);
