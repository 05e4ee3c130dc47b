// What a consumer warpgroup leaves of a tile: dV and dK of its 64 keys, from registers to global memory.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/backward/keys/config.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"

namespace flash_attn3 {

template <class Config>
struct KeysOutput {
  using Element = typename Config::Element;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kKeys = Config::kHeadDim / 2;  // accumulators a thread: dK, dV
  static constexpr int kValues = Config::kHeadDimV / 2;

  BackwardParams const& params;
  KeysStorage<Config>& storage;
  int const warpgroup;
  int const thread;  // in the warpgroup

  __device__ __forceinline__ KeysOutput(BackwardParams const& p, KeysStorage<Config>& s, int wg)
      : params(p), storage(s), warpgroup(wg), thread(threadIdx.x % 128) {}

  // A part of a cut tile: leaves its dK and dV in fp32. The part that comes last sums all in their order, whoever it
  // is, and returns true. Each warpgroup does so for its own keys.
  __device__ __forceinline__ bool sum_parts(Tile const& tile, float (&dk)[kKeys], float (&dv)[kValues]) {
    constexpr int64_t kPartFloats = kBlockN * (Config::kHeadDim + Config::kHeadDimV);
    int const parts = params.order.parts;
    float* const slot = params.partial_sums + int64_t(tile.slot) * parts * kPartFloats + warpgroup * (kPartFloats / 2) +
                        opaque(thread) * 4;
    float* const own = slot + tile.part * kPartFloats;
    write_fragments(own, dk);
    write_fragments(own + kKeys * 128, dv);
    compiler_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    if (thread == 0) {
      __threadfence();  // releases what the barrier has shown this thread, the writes of all
      storage.parts_before[warpgroup] = atomicAdd(params.partial_counts + tile.slot * 2 + warpgroup, 1);
      __threadfence();  // and acquires those of the other parts
    }
    compiler_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    compiler_fence();
    if (storage.parts_before[warpgroup] != parts - 1) return false;
    sum_fragments(slot, parts, dk);
    sum_fragments(slot + kKeys * 128, parts, dv);
    return true;
  }

  template <int kCount>
  static __device__ __forceinline__ void write_fragments(float* target, float const (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      __stcg(reinterpret_cast<float4*>(target + i * 128),
             make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]));
    }
  }
  template <int kCount>
  static __device__ __forceinline__ void sum_fragments(float const* first, int parts, float (&values)[kCount]) {
    constexpr int64_t kPartFloats = kBlockN * (Config::kHeadDim + Config::kHeadDimV);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = 0.f;
#pragma unroll 1
    for (int part = 0; part < parts; ++part, first += kPartFloats) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        float4 const more = __ldcg(reinterpret_cast<float4 const*>(first + i * 128));
        values[i] += more.x, values[i + 1] += more.y, values[i + 2] += more.z, values[i + 3] += more.w;
      }
    }
  }

  // dV and scale * dK through the buffers of dS^T and TMA, which clips rows and columns outside the sequence. The
  // buffers must be empty.
  __device__ __forceinline__ void store(Tile const& tile, float (&dk)[kKeys], float (&dv)[kValues]) {
    wait_left();
    constexpr int kValueChunks = Config::kHeadDimV / Config::kChunk;
    int const own = opaque(thread);
    stage<0>(own, dv, 1.f);
    stage<kValueChunks>(own, dk, params.scale);
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    int const row = tile.block * kBlockN + warpgroup * kRowsPerWarpgroup;
    if (thread == 0 && row < tile.sequence.k_length) {  // of a box without rows TMA touches what lies before the tensor
      TmaRows const rows = key_rows(params, tile, row, kRowsPerWarpgroup);
#pragma unroll
      for (int i = 0; i < kValueChunks; ++i) {
        cute::SM90_TMA_STORE_4D::copy(&params.map_dv, chunk(i), i * Config::kChunk, rows.sequence, tile.head,
                                      rows.batch);
      }
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / Config::kChunk; ++i) {
        cute::SM90_TMA_STORE_4D::copy(&params.map_dk, chunk(kValueChunks + i), i * Config::kChunk, rows.sequence,
                                      tile.head, rows.batch);
      }
      cute::tma_store_arrive();
    }
  }

  // Until dV and dK of the tile before have left the buffers.
  __device__ __forceinline__ void wait_left() const {
    if (thread == 0) cute::tma_store_wait<0>();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
  }

  // Chunk number i of what leaves: dV, then dK.
  __device__ __forceinline__ Element* chunk(int i) const {
    constexpr int kPerRegion = Config::kRegionElements / Config::kOutputChunk;
    return region(i / kPerRegion) + i % kPerRegion * Config::kOutputChunk;
  }

  template <int kFirstChunk, int kCount>
  __device__ __forceinline__ void stage(int own, float const (&values)[kCount], float factor) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = Packed<Element>::pack(values[i + 2 * j] * factor, values[i + 2 * j + 1] * factor);
      }
      int const column = i * 2;
      store_matrices<Config::kChunk / 8>(own, chunk(kFirstChunk + column / Config::kChunk), column % Config::kChunk / 8,
                                         words);
    }
  }

  // The 64 rows of this warpgroup in one of the four chunks of the dS^T buffers.
  __device__ __forceinline__ Element* region(int i) const {
    return storage.ds[i / 2] + i % 2 * (kBlockN * 64) + warpgroup * Config::kRegionElements;
  }

  // STSM.x4 stores 16 rows x 16 columns a warp: lane l holds the address of row l % 16, left or right 8 columns.
  template <int kUnits>
  __device__ __forceinline__ void store_matrices(int own, Element* rows, int unit, uint32_t const (&words)[4]) const {
    int const row = (own / 2 & 48) | (own & 15);  // 16 a warp; a register less than by division
    int const swizzle = kUnits == 8 ? row % 8 : row / 2 % 4;
    cute::SM90_U32x4_STSM_N::copy(
        words[0], words[1], words[2], words[3],
        reinterpret_cast<cute::uint128_t*>(rows)[row * kUnits + ((unit + own % 32 / 16) ^ swizzle)]);
  }
};

}  // namespace flash_attn3
