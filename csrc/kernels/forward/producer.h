// The producer: one thread that walks the tiles of its CTA, hands each to the consumers and loads Q, K and V by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "host/geometry.h"
#include "kernels/common/pipeline.h"
#include "kernels/forward/config.h"

namespace flash_attn3 {

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

// Position of the CTA's next tile: a share of the order by position, or the next number of the counter.
__device__ __forceinline__ int64_t next_position(ForwardParams const& params, int step) {
  if (params.counter == nullptr) return static_position(blockIdx.x, gridDim.x, step);
  return atomicAdd(params.counter, 1);
}

template <class Config>
struct Producer {
  static constexpr int kChunk = Config::kChunk, kBlockN = Config::kBlockN;

  ForwardParams const& params;
  ForwardStorage<Config>& storage;
  PipelineState<Config::kStages> key_state{Role::kProducer}, value_state{Role::kProducer};
  uint32_t query_phases = ~0u;  // bit w: parity of query_empty[w]

  __device__ __forceinline__ void run() {
    PipelineState<kTileSlots> slot(Role::kProducer);
    for (int step = 0;; ++step) {
      Tile const tile = tile_at(params.order, params.heads, params.causal, next_position(params, step));
      storage.tile_empty[slot.stage].wait(slot.phase);
      storage.tile[slot.stage] = tile;
      storage.tile_full[slot.stage].arrive();
      slot.advance();
      if (tile.query_block < 0) return;
      load(tile);
    }
  }

  __device__ __forceinline__ void load(Tile const tile) {
    int const row = tile.query_block * Config::kBlockM;
    int const kv_head = tile.head / params.heads_per_kv_head;
    int const key_blocks =
        key_range(row, row + Config::kBlockM, params.seqlen_q, params.seqlen_k, params.causal, kBlockN).key_blocks;
    // K of a block, then V of the block before: the order in which the consumers need them. Q comes after the first K.
#pragma unroll 1
    for (int block = key_blocks; block >= 0; --block) {
      if (block > 0) load_keys((block - 1) * kBlockN, kv_head, tile.batch);
      if (block < key_blocks) {
        load_values(block * kBlockN, kv_head, tile.batch);
      } else if (key_blocks > 0) {
        load_queries(row, tile);
      }
    }
  }

  __device__ __forceinline__ void load_keys(int row, int kv_head, int batch) {
    auto& full = storage.key_full[key_state.stage];
    storage.key_empty[key_state.stage].wait(key_state.phase);
    full.arrive_and_expect_tx(Config::kKeyBytes);
    load_rows<kChunk, Config::kHeadDim, kBlockN>(params.map_k, full, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                 storage.k + key_state.stage * (kBlockN * Config::kHeadDim), row, kv_head,
                                                 batch);
    key_state.advance();
  }

  __device__ __forceinline__ void load_values(int row, int kv_head, int batch) {
    auto& full = storage.value_full[value_state.stage];
    storage.value_empty[value_state.stage].wait(value_state.phase);
    full.arrive_and_expect_tx(Config::kValueBytes);
    load_rows<kChunk, Config::kHeadDimV, kBlockN>(params.map_v, full, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                  storage.v + value_state.stage * (kBlockN * Config::kHeadDimV), row,
                                                  kv_head, batch);
    value_state.advance();
  }

  __device__ __forceinline__ void load_queries(int row, Tile const tile) {
#pragma unroll 1
    for (int w = 0; w < Config::kWarpgroups; ++w, row += kRowsPerWarpgroup) {
      // Past the last row, or no key in sight: the warpgroup does not wait for Q.
      if (key_range(row, row + kRowsPerWarpgroup, params.seqlen_q, params.seqlen_k, params.causal, kBlockN).key_blocks == 0)
        continue;
      auto& full = storage.query_full[w];
      storage.query_empty[w].wait(query_phases >> w & 1);
      query_phases ^= 1u << w;
      full.arrive_and_expect_tx(Config::kQueryBytes);
      load_rows<kChunk, Config::kHeadDim, kRowsPerWarpgroup>(
          params.map_q, full, cute::TMA::CacheHintSm90::EVICT_FIRST, storage.q[w], row, tile.head, tile.batch);
    }
  }
};

}  // namespace flash_attn3
