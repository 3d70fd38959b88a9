// ssa, ssa_fixed, topk, uniform_tail: the buffers their stages share, and the stages in the order they run.
#pragma once
#include "gather.cuh"
#include "pq.cuh"
#include "selection.cuh"

namespace santa {

enum ProxyMethod { kSsa = 7, kSsaFixed = 8, kTopk = 9, kUniformTail = 10 };

constexpr int kQuads = ceil_div(kGroup, 4);          // four query heads share an entry of a look-up table, as fp16
// Entries of a table for one centroid: half a warp reads 16 of them in 16 different banks, so 8 subspaces come twice.
constexpr int kSlots = kSubspaces < 16 ? 16 : kSubspaces;

struct CodePages {                // [blocks, kv_heads, block_size, subspaces], dense within a block
  const uint8_t* codes;
  int64_t page_stride;            // bytes from one block to the next
  int block_size;
};

// One layer's codebooks, as the look-up tables are made from them.
struct Codebooks {
  const float* query_transform;   // [kv_heads, subspaces, head_dim, kFeatures] columns of a subspace together
  const float* query_offset;      // [kv_heads, head_dim]
  const float* centroids;         // [kv_heads, subspaces, kFeatures, 256]
};

// Tokens that are always taken: [0, begin) and [end, n). Those between may be selected.
struct Window {
  int sink, local;
  __device__ __forceinline__ int begin(int n) const { return min(sink, n); }
  __device__ __forceinline__ int end(int n) const { return max(n - local, begin(n)); }
};

struct ProxyBuffers {             // P = rows * kv_heads pairs of a row and a KV head
  uint2* tables;                  // [P, kQuads, 256, kSlots] log2-domain, less each subspace's maximum
  int* broken;                    // [P, group] 1 where the query is not finite
  uint2* scores;                  // [P, kQuads, max_units * kUnit] proxies of four heads, fp16
  float2* norm;                   // [P, norm_slots, group] (m, s): a block's keys weigh s * 2^m
  int16_t* codes;                 // [P, max_units * kUnit]
  unsigned* histogram;            // [P, kBins]
  int64_t* chunk_sum;             // [P, max_chunks] of the placement
  int64_t* chunk_taken;           // [P, max_chunks] of place_fixed
  int* fine;                      // [P, max_chunks + 1, 32] codes of the threshold's bin, in a chunk and in all
  int64_t* low_weight;            // [P] of the bins below the threshold's
  int max_chunks, norm_slots;
};

struct SelectBuffers {            // what the selection reads and leaves
  const unsigned* histogram;      // [P, kBins] of the included log-codes
  const int16_t* codes;           // [P, max_units * kUnit]
  const int64_t* exp2;            // [256] round(2^43 * 2^(f / 256))
  int* rate;                      // [P] lambda in log-codes (written for whoever wants to know)
  int64_t* chunk_sum;             // [P, max_chunks] zero before the placement runs
  int4* sample;                   // [P, max_samples] (token, its row in the cache, inclusion probability as float, 0)
  int* count;                     // [P]
  int max_chunks, max_samples;
};

cudaError_t proxy_tables(const Batch&, const Codebooks&, const void* q, float scale, const ProxyBuffers&, cudaStream_t);
cudaError_t proxy_scores(const Batch&, const CodePages&, const Window&, const ProxyBuffers&, cudaStream_t, bool overlap);
cudaError_t proxy_mix(const Batch&, const Window&, float uniform_share, const ProxyBuffers&, int blocks, cudaStream_t, bool overlap);
cudaError_t place_adaptive(const Batch&, const SelectBuffers&, int block_size, cudaStream_t, bool overlap);
cudaError_t place_fixed(const Batch&, const SelectBuffers&, double heavy_fraction, int block_size, const ProxyBuffers&, cudaStream_t,
                        bool overlap);

struct SoftMerge {                // partial outputs of the blocks that share a row and a KV head, each with its own maximum
  Merge merge;                    // SIZE: group * head_dim
  float2* mass;                   // [P, splits, group] (m, s)
};
cudaError_t gather_rows(const Batch&, const Pages&, const Window&, const Scores&, const void* q, const SelectBuffers&, const int* broken,
                        const SoftMerge&, void* out, float* lse, int* read, cudaStream_t, bool overlap);

}  // namespace santa
