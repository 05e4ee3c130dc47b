// The producer: a warp that walks the tiles of its CTA, hands each to the consumers and loads Q, K and V by TMA. All
// its lanes keep the state, which therefore is uniform and lives in uniform registers; one of them issues.
#pragma once

#include "host/geometry.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/tiles.h"
#include "kernels/forward/config.h"

namespace flash_attn3 {

template <class Config>
struct Producer {
  static constexpr int kChunk = Config::kChunk, kBlockN = Config::kBlockN;

  ForwardParams const& params;
  ForwardStorage<Config>& storage;
  bool const elected;
  PipelineState<Config::kKeyStages> key_state{Role::kProducer};
  PipelineState<Config::kValueStages> value_state{Role::kProducer};

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = broadcast(next_tile<false>(params, tiles));
      KeyRange const keys = give_walks(tile, tiles);
      storage.tiles.give(tile, tiles, elected);
      if (tile.block < 0) return;
      load(tile, keys, PipelineState<Config::kQueryBuffers>::at(Role::kProducer, tiles));
    }
  }

  // Writes the walks of tile number `count`, before it is given; returns the blocks of the tile. A lane works for a
  // warpgroup, the next one for the whole tile.
  //
  // Turns are taken in the blocks that every row of the tile sees whole, but for the one that a warpgroup walks first:
  // limits of rows never decrease, so warpgroup 0 begins lowest, and what lies below its first block lies below the
  // others'. Such blocks are in the hot loop of each active warpgroup, which takes and passes once in each, from the
  // highest down. No cycle of waits is possible: a warpgroup in block b waits for K of b and V of b + 1, which need
  // only what is released in blocks above b, and for those before it in the ring to issue in b itself.
  __device__ __forceinline__ KeyRange give_walks(Tile const& tile, int count) {
    constexpr int kWhole = Config::kWarpgroups;
    int const lane = threadIdx.x % 32;
    Sequence const& sequence = tile.sequence;
    int const tile_row = tile.block * Config::kBlockM;
    int const row = tile_row + lane % kWhole * kRowsPerWarpgroup;
    KeyRange keys = key_range(row, row + (lane == kWhole ? Config::kBlockM : kRowsPerWarpgroup), sequence.q_length,
                              sequence.k_length, params.mask, kBlockN);
    auto of_lane = [](int value, int from) { return __shfl_sync(0xffffffffu, value, from); };
    KeyRange const whole{of_lane(keys.begin, kWhole), of_lane(keys.end, kWhole), of_lane(keys.unmasked_begin, kWhole),
                         of_lane(keys.unmasked_end, kWhole)};
    int const first_end = of_lane(keys.end, 0);
    int const active = min_int(kWhole, ceil_div(sequence.q_length - tile_row, kRowsPerWarpgroup));

    auto const slot = PipelineState<TileSlots::kSlots>::at(Role::kProducer, count);
    wait_and_read(storage.tiles.empty[slot.stage], slot.phase);
    if (lane < kWhole) {
      if (keys.begin == keys.end) keys.begin = keys.end = whole.begin;
      int const turns_end = min_int(whole.unmasked_end, first_end - 1);
      bool const turns = active > 1 && whole.unmasked_begin < turns_end;
      storage.walks[slot.stage][lane] = {keys,
                                         whole.end - keys.end,
                                         keys.begin - whole.begin,
                                         turns ? whole.unmasked_begin : keys.unmasked_begin,
                                         turns ? turns_end : 0,
                                         lane == active - 1};
    }
    __syncwarp();  // before the arrival of one lane
    return whole;
  }

  __device__ __forceinline__ void load(Tile const& tile, KeyRange const& keys,
                                       PipelineState<Config::kQueryBuffers> const query) {
    int const row = tile.block * Config::kBlockM;
    int const kv_head = tile.head / params.heads_per_kv_head;
    // K of a block, then V of the block before: the order in which the consumers need them. Q comes after the first K.
#pragma unroll 1
    for (int block = keys.end; block >= keys.begin; --block) {
      if (block > keys.begin) load_keys(tile, (block - 1) * kBlockN, kv_head);
      if (block < keys.end) {
        load_values(tile, block * kBlockN, kv_head);
      } else {
        load_queries(tile, row, query);
      }
    }
  }

  __device__ __forceinline__ void load_keys(Tile const& tile, int row, int kv_head) {
    auto& full = storage.key_full[key_state.stage];
    storage.key_empty[key_state.stage].wait(key_state.phase);
    if (elected) {
      full.arrive_and_expect_tx(Config::kKeyBytes);
      load_rows<kChunk, Config::kHeadDim, kBlockN>(params.map_k, full, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                   storage.k + key_state.stage * (kBlockN * Config::kHeadDim),
                                                   key_rows(params, tile, row, kBlockN), kv_head);
    }
    key_state.advance();
  }

  __device__ __forceinline__ void load_values(Tile const& tile, int row, int kv_head) {
    auto& full = storage.value_full[value_state.stage];
    storage.value_empty[value_state.stage].wait(value_state.phase);
    if (elected) {
      full.arrive_and_expect_tx(Config::kValueBytes);
      load_rows<kChunk, Config::kHeadDimV, kBlockN>(params.map_v, full, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                    storage.v + value_state.stage * (kBlockN * Config::kHeadDimV),
                                                    key_rows(params, tile, row, kBlockN), kv_head);
    }
    value_state.advance();
  }

  // For every warpgroup: that keeps one state for all. Past the last row there is nothing to load; of a box without
  // rows TMA would touch what lies before a packed tensor.
  __device__ __forceinline__ void load_queries(Tile const& tile, int row,
                                               PipelineState<Config::kQueryBuffers> const query) {
#pragma unroll 1
    for (int w = 0; w < Config::kWarpgroups; ++w, row += kRowsPerWarpgroup) {
      auto& full = storage.query_full[query.stage][w];
      storage.query_empty[query.stage][w].wait(query.phase);
      if (!elected) continue;
      if (row < tile.sequence.q_length) {
        full.arrive_and_expect_tx(Config::kQueryBytes);
        load_rows<kChunk, Config::kHeadDim, kRowsPerWarpgroup>(
            params.map_q, full, cute::TMA::CacheHintSm90::EVICT_FIRST, storage.q[query.stage][w],
            query_rows(params, tile, row, kRowsPerWarpgroup), tile.head);
      } else {
        full.arrive();
      }
    }
  }
};

}  // namespace flash_attn3
