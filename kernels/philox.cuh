// Philox4x32-10 (Salmon et al., SC 2011) with the counters of docs/estimators.md.
#pragma once
#include "common.cuh"

namespace santa {

enum Stream { kValueStream = 0, kSelectStream = 1, kBernoulliStream = 2 };

// An integer in [0, kOne).
__device__ inline int64_t uniform44(int64_t seed, int position, int layer, Stream stream, int head, uint32_t draw) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(uint64_t(seed) >> 32);
  uint32_t c0 = position, c1 = uint32_t(layer) | uint32_t(stream) << 16, c2 = head, c3 = draw;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  return int64_t(c0) << 12 | c1 >> 20;
}

}  // namespace santa
