// How the producer warp of a persistent kernel finds its tiles and hands them to the consumers, and how it loads rows.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "host/geometry.h"
#include "kernels/common/pipeline.h"

namespace flash_attn3 {

// Position of the CTA's tile number `step`: a share of the order by position, or the next number of the counter. All
// lanes of a warp call it together.
__device__ __forceinline__ int64_t next_position(int32_t* counter, int step) {
  if (counter == nullptr) return static_position(blockIdx.x, gridDim.x, step);
  int taken = 0;
  if (threadIdx.x % 32 == 0) taken = atomicAdd(counter, 1);
  return __shfl_sync(0xffffffffu, taken, 0);
}

// Tiles on their way from the producer to the consumers, in shared memory.
// - full[i]: producer -> all consumers read the tile in slot i
// - empty[i]: each consumer warp, when it needs to look no more -> producer overwrites slot i
struct TileSlots {
  static constexpr int kSlots = 2;
  cutlass::arch::ClusterBarrier full[kSlots];
  cutlass::arch::ClusterBarrier empty[kSlots];
  Tile tile[kSlots];

  __device__ __forceinline__ void init(int consumer_warps) {
    for (int i = 0; i < kSlots; ++i) {
      full[i].init(1);
      empty[i].init(consumer_warps);
    }
  }

  // Tile number `count`, by the producer warp.
  __device__ __forceinline__ void give(Tile const next, int count, bool elected) {
    auto const slot = PipelineState<kSlots>::at(Role::kProducer, count);
    wait_and_read(empty[slot.stage], slot.phase);
    if (elected) {
      tile[slot.stage] = next;
      write_and_arrive(full[slot.stage]);
    }
  }

  // Tile number `count`, by a consumer warp, which may look again until it releases it. Known to be uniform: loops,
  // stages and WGMMA descriptors that come from it live in uniform registers.
  __device__ __forceinline__ Tile look(int count) {
    auto const slot = PipelineState<kSlots>::at(Role::kConsumer, count);
    wait_and_read(full[slot.stage], slot.phase);
    Tile next{};
    __syncwarp();
    if (threadIdx.x % 32 == 0) next = tile[slot.stage];
    next.block = __shfl_sync(0xffffffffu, next.block, 0);
    next.head = __shfl_sync(0xffffffffu, next.head, 0);
    next.batch = __shfl_sync(0xffffffffu, next.batch, 0);
    next.part = __shfl_sync(0xffffffffu, next.part, 0);
    next.slot = __shfl_sync(0xffffffffu, next.slot, 0);
    return next;
  }
  __device__ __forceinline__ void release(int count) {
    __syncwarp();  // every lane has passed the wait, whose phase may be over once the slot is given back
    if (threadIdx.x % 32 == 0) write_and_arrive(empty[count % kSlots]);
  }
  __device__ __forceinline__ Tile take(int count) {
    Tile const next = look(count);
    release(count);
    return next;
  }
};

// Loads kRows rows of one head, a box of kChunk columns at a time; what lies outside the tensor arrives as zeros.
template <int kChunk, int kColumns, int kRows, class Element, class Barrier>
__device__ __forceinline__ void load_rows(CUtensorMap const& map, Barrier& full, cute::TMA::CacheHintSm90 hint,
                                          Element* smem, int row, int head, int batch) {
  auto* const barrier = reinterpret_cast<uint64_t*>(&full);
#pragma unroll
  for (int column = 0; column < kColumns; column += kChunk) {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<uint64_t>(hint), smem + column * kRows, column, row, head,
                                 batch);
  }
}

// Arrives once for the calling warp, when all its lanes are here.
template <class Barrier>
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) write_and_arrive(barrier);
}

}  // namespace flash_attn3
