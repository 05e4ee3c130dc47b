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

// What a TileFinder knows of a packed batch, in shared memory: registers of producers are scarce.
struct FoundTiles {
  static constexpr int kMost = 16;
  Tile tile[kMost];
  int32_t count;
  int32_t position, taken_to;  // positions [position, taken_to) are this CTA's, their tiles not found yet
  int32_t at_once;             // how many positions to take next
};

// Finds the tiles of a CTA one after the other. All lanes of a warp hold it and call it together.
//
// In a packed batch a position of the order becomes a tile by a search and loads that wait for each other, about as
// long as a tile of a few hundred tokens takes. So where sequences are short a CTA takes several positions at once and
// each lane finds the tile of one.
template <bool kHoldsKeys, class Params>
struct TileFinder {
  static constexpr int kTokensAtOnce = 2048;  // that the tiles of the positions walk, about
  static constexpr int kShareOfTheRest = 4;   // ... but no more than this part of the CTA's share of what is left

  Params const& params;
  FoundTiles& found;
  int step = 0;  // dense: so far; packed: of the tiles found

  __device__ __forceinline__ TileFinder(Params const& p, FoundTiles& f) : params(p), found(f) {
    found.count = found.position = found.taken_to = 0;
    found.at_once = 1;
    __syncwarp();
  }

  __device__ __forceinline__ int heads() const {
    return kHoldsKeys ? params.heads / params.heads_per_kv_head : params.heads;
  }

  // With its sequence; block -1 if there is none.
  __device__ __forceinline__ Tile next() {
    if (params.packed.sequences == nullptr) {
      Tile tile = tile_at(params.order, heads(), next_position(params.counter, step++));
      tile.sequence = {0, params.seqlen_q, 0, params.seqlen_k};
      return tile;
    }
    if (step == found.count) {
      find();
      step = 0;
    }
    return found.tile[step++];
  }

  __device__ __forceinline__ void find() {
    PackedOrder const& packed = params.packed;
    int const lane = threadIdx.x % 32;
    int const heads = this->heads(), blocks = __ldcg(packed.first_block + packed.batch);
    int position = found.position, taken_to = found.taken_to;
    if (position == taken_to) {
      int const at_once = found.at_once;
      int first = 0;
      if (lane == 0) first = atomicAdd(params.counter, at_once);
      position = __shfl_sync(0xffffffffu, first, 0);
      taken_to = position + at_once;
    }
    __syncwarp();  // every lane has read the last tile, and the above
    int const block = (position + lane) / heads, first_block = position / heads;
    if (lane == 0) {  // now, not at the end: no register holds them meanwhile
      int const left = (blocks - first_block) * heads / (kShareOfTheRest * int(gridDim.x));
      found.at_once = max_int(1, min_int(FoundTiles::kMost, left));
      found.taken_to = taken_to;
    }
    if (first_block >= blocks) {
      found.tile[0].block = -1;
      found.count = 1;
      __syncwarp();
      return;
    }
    // The place of the first position by a search, those of the others among the 31 places after it.
    int const place = last_at_or_below(packed.first_block, packed.batch, first_block);
    int const begin_here = __ldcg(packed.first_block + min_int(place + lane, packed.batch));
    int offset = 0;
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) {
      int const begin = __shfl_sync(0xffffffffu, begin_here, offset + stride);
      if (begin <= block) offset += stride;
    }
    int const begin = __shfl_sync(0xffffffffu, begin_here, offset);
    int const end = __shfl_sync(0xffffffffu, begin_here, min_int(offset + 1, 31));
    bool const known = lane < min_int(FoundTiles::kMost, taken_to - position) && block < blocks && offset < 31;
    int tokens = 1;
    if (known) {
      int const batch = __ldcg(packed.longest_first + place + offset);
      Sequence const sequence = sequence_at(packed.sequences, batch);
      int const group = params.heads_per_kv_head;
      tokens = max_int(1, kHoldsKeys ? sequence.q_length * group : sequence.k_length);
      found.tile[lane] = tile_in_sequence(packed, batch, sequence, end - begin, heads, kHoldsKeys ? 1 : group, tokens,
                                          position + lane - begin * heads);
    }
    int const count = __popc(__ballot_sync(0xffffffffu, known));  // the first lanes: places never decrease
    if (lane == 0) {
      found.at_once = max_int(1, min_int(found.at_once, kTokensAtOnce / tokens));
      found.count = count;
      found.position = position + count;
    }
    __syncwarp();
  }
};

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
template <int kSlots_>
struct TileSlots {
  static constexpr int kSlots = kSlots_;
  cutlass::arch::ClusterBarrier full[kSlots];
  cutlass::arch::ClusterBarrier empty[kSlots];
  Tile tile[kSlots];
  FoundTiles found;  // of the producer

  // Of the producer, `givers` lanes arrive.
  __device__ __forceinline__ void init(int consumer_warps, int givers = 1) {
    for (int i = 0; i < kSlots; ++i) {
      full[i].init(givers);
      empty[i].init(consumer_warps);
    }
  }

  // Tile number `count`, by the producer warp.
  __device__ __forceinline__ void give(Tile const& next, int count, bool elected) {
    auto const slot = PipelineState<kSlots>::at(Role::kProducer, count);
    wait_and_read(empty[slot.stage], slot.phase);
    __syncwarp();  // every lane has passed the wait, whose phase may be over once the tile is given
    if (elected) {
      tile[slot.stage] = next;
      write_and_arrive(full[slot.stage]);
    }
  }

  // Until tile number `count` is there, by a consumer warp, which may look at it until it releases it.
  __device__ __forceinline__ void wait(int count) {
    auto const slot = PipelineState<kSlots>::at(Role::kConsumer, count);
    wait_and_read(full[slot.stage], slot.phase);
  }
  __device__ __forceinline__ Tile look(int count) {
    wait(count);
    Tile next{};
    __syncwarp();
    if (threadIdx.x % 32 == 0) next = tile[count % kSlots];
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
