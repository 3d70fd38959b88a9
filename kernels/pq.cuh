// Product quantisation as the kernels see it: a module is compiled for one number of subspaces.
#pragma once
#include "tile.cuh"

namespace santa {

constexpr int kSubspaces = SANTA_SUBSPACES;          // bytes of a key's code
constexpr int kCentroids = 256;                      // of a subspace
constexpr int kFeatures = kHeadDim / kSubspaces;     // of a subspace
static_assert(kSubspaces == 8 || kSubspaces == 16 || kSubspaces == 32, "8, 16 or 32 subspaces");
static_assert(kHeadDim != 96, "PQ kernels: head_dim is 64, 128 or 256");

}  // namespace santa
