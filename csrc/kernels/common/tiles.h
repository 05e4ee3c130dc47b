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

// The last number i below `count` with first[i] <= value; first[0] is 0 and numbers never decrease. All lanes of a warp
// call it together: each step asks 32 places at once. Past the L1, whose lines may be older than the kernel that wrote.
__device__ __forceinline__ int last_at_or_below(int32_t const* first, int count, int32_t value) {
  int begin = 0, left = count;
  while (left > 1) {
    int const stride = (left + 31) / 32;
    int const probe = int(threadIdx.x % 32) * stride;
    bool const below = probe < left && __ldcg(first + begin + probe) <= value;
    int const last = __popc(__ballot_sync(0xffffffffu, below)) - 1;
    begin += last * stride;
    left = min_int(stride, left - last * stride);
  }
  return begin;
}

__device__ __forceinline__ Sequence sequence_at(Sequence const* sequences, int batch) {
  int4 const s = __ldcg(reinterpret_cast<int4 const*>(sequences) + batch);
  return {s.x, s.y, s.z, s.w};
}

// The CTA's tile number `step`, with its sequence; block -1 if there is none. All lanes of a warp call it together.
template <bool kHoldsKeys, class Params>
__device__ __forceinline__ Tile next_tile(Params const& params, int step) {
  int64_t const position = next_position(params.counter, step);
  int const group = params.heads_per_kv_head;
  int const heads = kHoldsKeys ? params.heads / group : params.heads;
  PackedOrder const& packed = params.packed;
  if (packed.sequences == nullptr) {
    Tile tile = tile_at(params.order, heads, position);
    tile.sequence = {0, params.seqlen_q, 0, params.seqlen_k};
    return tile;
  }
  if (position >= int64_t(__ldcg(packed.first_block + packed.batch)) * heads) return {-1, 0, 0, -1, 0, {}};
  int const place = last_at_or_below(packed.first_block, packed.batch, int(position / heads));
  int const first = __ldcg(packed.first_block + place), next = __ldcg(packed.first_block + place + 1);
  int const batch = __ldcg(packed.longest_first + place);
  Sequence const sequence = sequence_at(packed.sequences, batch);
  int const tokens = kHoldsKeys ? sequence.q_length * group : sequence.k_length;
  return tile_in_sequence(packed, batch, sequence, next - first, heads, kHoldsKeys ? 1 : group, tokens,
                          int(position - int64_t(first) * heads));
}

// The tile of lane 0, known to be uniform: loops, stages and WGMMA descriptors that come from it live in uniform
// registers.
__device__ __forceinline__ Tile broadcast(Tile tile) {
  auto of_lane_0 = [](int32_t& value) { value = __shfl_sync(0xffffffffu, value, 0); };
  of_lane_0(tile.block);
  of_lane_0(tile.head);
  of_lane_0(tile.batch);
  of_lane_0(tile.part);
  of_lane_0(tile.slot);
  of_lane_0(tile.sequence.q_begin);
  of_lane_0(tile.sequence.q_length);
  of_lane_0(tile.sequence.k_begin);
  of_lane_0(tile.sequence.k_length);
  return tile;
}

template <class Params>
__device__ __forceinline__ TmaRows query_rows(Params const& params, Tile const& tile, int row, int box) {
  Sequence const& s = tile.sequence;
  return tma_rows(params.packed.sequences != nullptr, tile.batch, s.q_begin, s.q_length, row, box);
}

template <class Params>
__device__ __forceinline__ TmaRows key_rows(Params const& params, Tile const& tile, int row, int box) {
  Sequence const& s = tile.sequence;
  return tma_rows(params.packed.sequences != nullptr, tile.batch, s.k_begin, s.k_length, row, box);
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
  __device__ __forceinline__ void give(Tile const& next, int count, bool elected) {
    auto const slot = PipelineState<kSlots>::at(Role::kProducer, count);
    wait_and_read(empty[slot.stage], slot.phase);
    if (elected) {
      tile[slot.stage] = next;
      write_and_arrive(full[slot.stage]);
    }
  }

  // Tile number `count`, by a consumer warp, which may look again until it releases it.
  __device__ __forceinline__ Tile look(int count) {
    auto const slot = PipelineState<kSlots>::at(Role::kConsumer, count);
    wait_and_read(full[slot.stage], slot.phase);
    Tile next{};
    __syncwarp();
    if (threadIdx.x % 32 == 0) next = tile[slot.stage];
    return broadcast(next);
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

// Loads kRows rows of one head, a box of kChunk columns at a time; what lies outside the sequence arrives as zeros.
template <int kChunk, int kColumns, int kRows, class Element, class Barrier>
__device__ __forceinline__ void load_rows(CUtensorMap const& map, Barrier& full, cute::TMA::CacheHintSm90 hint,
                                          Element* smem, TmaRows const& rows, int head) {
  auto* const barrier = reinterpret_cast<uint64_t*>(&full);
#pragma unroll
  for (int column = 0; column < kColumns; column += kChunk) {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<uint64_t>(hint), smem + column * kRows, column,
                                 rows.sequence, head, rows.batch);
  }
}

// Arrives once for the calling warp, when all its lanes are here.
template <class Barrier>
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) write_and_arrive(barrier);
}

}  // namespace flash_attn3
