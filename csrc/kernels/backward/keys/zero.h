// The sums of dQ become zero beside the first steps of the kernel that adds to them, not before it: that keeps memory
// busy while tensor cores work. Three warps of the producer warpgroup have nothing to load. They take pieces of the
// sums in the order in which tiles come, key head by key head; a tile waits until all pieces of its key head are zero.
// Pieces are taken from a counter, so whichever CTAs are on the GPU, what a tile waits for goes on.
#pragma once

#include <cuda_runtime.h>

#include "host/geometry.h"
#include "host/params.h"

namespace flash_attn3 {

template <class Config>
struct SumsZeroing {
  static constexpr int kPieceFloats = 4096;

  BackwardParams const& params;

  __device__ __forceinline__ int64_t floats_of_head() const {
    return params.heads_per_kv_head * params.sums_stride * (Config::kBlockM * Config::kHeadDim);
  }
  __device__ __forceinline__ int pieces_of_head() const {
    return int((floats_of_head() + kPieceFloats - 1) / kPieceFloats);
  }

  // By each of the three warps.
  __device__ __forceinline__ void run() const {
    int const lane = threadIdx.x % 32, pieces = pieces_of_head();
    int const heads = (params.packed.sequences != nullptr ? 1 : params.batch) * params.kv_heads;
    for (;;) {
      int piece = 0;
      if (lane == 0) piece = atomicAdd(params.zeroing, 1);
      piece = __shfl_sync(0xffffffffu, piece, 0);
      int const head = piece / pieces;
      if (head >= heads) return;
      int64_t const begin = int64_t(piece % pieces) * kPieceFloats;
      int64_t const left = floats_of_head() - begin;
      int const floats = left < kPieceFloats ? int(left) : kPieceFloats;
      float* const target = params.dq_sums + head * floats_of_head() + begin;
#pragma unroll 8
      for (int i = lane * 4; i < floats; i += 128) {
        __stcg(reinterpret_cast<float4*>(target + i), float4{0.f, 0.f, 0.f, 0.f});
      }
      __syncwarp();
      if (lane == 0) {
        __threadfence();  // releases what the warp's barrier has shown this lane
        atomicAdd(params.zeroing + 1 + head, 1);
      }
    }
  }

  // By the producer warp, before it loads what the consumers need to add to a tile's sums.
  __device__ __forceinline__ void wait_for(Tile const& tile) const {
    int const batch = params.packed.sequences != nullptr ? 0 : tile.batch;
    int const* const count = params.zeroing + 1 + batch * params.kv_heads + tile.head;
    int const pieces = pieces_of_head();
    for (;;) {
      int zero;
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(zero) : "l"(count) : "memory");
      if (zero >= pieces) break;
      __nanosleep(100);
    }
    __syncwarp();
  }
};

}  // namespace flash_attn3
