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
      Tile const tile = tile_at(params.order, params.heads, params.causal, next_position(params.counter, tiles));
      storage.tiles.give(tile, tiles, elected);
      if (tile.block < 0) return;
      load(tile, PipelineState<Config::kQueryBuffers>::at(Role::kProducer, tiles));
    }
  }

  __device__ __forceinline__ void load(Tile const tile, PipelineState<Config::kQueryBuffers> const query) {
    int const row = tile.block * Config::kBlockM;
    int const kv_head = tile.head / params.heads_per_kv_head;
    int const key_blocks =
        key_range(row, row + Config::kBlockM, params.seqlen_q, params.seqlen_k, params.causal, kBlockN).key_blocks;
    // K of a block, then V of the block before: the order in which the consumers need them. Q comes after the first K.
#pragma unroll 1
    for (int block = key_blocks; block >= 0; --block) {
      if (block > 0) load_keys((block - 1) * kBlockN, kv_head, tile.batch);
      if (block < key_blocks) {
        load_values(block * kBlockN, kv_head, tile.batch);
      } else {
        load_queries(row, tile, query);
      }
    }
  }

  __device__ __forceinline__ void load_keys(int row, int kv_head, int batch) {
    auto& full = storage.key_full[key_state.stage];
    storage.key_empty[key_state.stage].wait(key_state.phase);
    if (elected) {
      full.arrive_and_expect_tx(Config::kKeyBytes);
      load_rows<kChunk, Config::kHeadDim, kBlockN>(params.map_k, full, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                   storage.k + key_state.stage * (kBlockN * Config::kHeadDim), row,
                                                   kv_head, batch);
    }
    key_state.advance();
  }

  __device__ __forceinline__ void load_values(int row, int kv_head, int batch) {
    auto& full = storage.value_full[value_state.stage];
    storage.value_empty[value_state.stage].wait(value_state.phase);
    if (elected) {
      full.arrive_and_expect_tx(Config::kValueBytes);
      load_rows<kChunk, Config::kHeadDimV, kBlockN>(params.map_v, full, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                    storage.v + value_state.stage * (kBlockN * Config::kHeadDimV), row,
                                                    kv_head, batch);
    }
    value_state.advance();
  }

  // For every warpgroup, rows past the last one (zeros) too: that keeps one state for all.
  __device__ __forceinline__ void load_queries(int row, Tile const tile,
                                               PipelineState<Config::kQueryBuffers> const query) {
#pragma unroll 1
    for (int w = 0; w < Config::kWarpgroups; ++w, row += kRowsPerWarpgroup) {
      auto& full = storage.query_full[query.stage][w];
      storage.query_empty[query.stage][w].wait(query.phase);
      if (elected) {
        full.arrive_and_expect_tx(Config::kQueryBytes);
        load_rows<kChunk, Config::kHeadDim, kRowsPerWarpgroup>(params.map_q, full,
                                                               cute::TMA::CacheHintSm90::EVICT_FIRST,
                                                               storage.q[query.stage][w], row, tile.head, tile.batch);
      }
    }
  }
};

}  // namespace flash_attn3
