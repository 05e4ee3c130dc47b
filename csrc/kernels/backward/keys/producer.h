// The producer: a warp that walks the tiles of its CTA, hands each to the consumers and loads K and V once, then Q, dO
// and their statistics for every step. All lanes keep the state, one issues.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "kernels/backward/keys/config.h"

namespace flash_attn3 {

template <class Config>
struct KeysProducer {
  static constexpr int kChunk = Config::kChunk, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  using Hint = cute::TMA::CacheHintSm90;

  BackwardParams const& params;
  KeysStorage<Config>& storage;
  bool const elected;
  PipelineState<Config::kQueryStages> query_state{Role::kProducer};
  PipelineState<Config::kGradientStages> gradient_state{Role::kProducer};
  uint32_t tile_phase = static_cast<uint32_t>(Role::kProducer);  // of K and V: flips with every tile that has steps

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = tile_at(params.order, params.kv_heads, false, next_position(params.counter, tiles));
      storage.tiles.give(tile, tiles, elected);
      if (tile.block < 0) return;
      load(tile);
    }
  }

  // V and K come after what their first readers need beside them: V is given back before the end of the tile before, K
  // at its very end.
  __device__ __forceinline__ void load(Tile const tile) {
    int const key = tile.block * kBlockN;
    QueryRange const range = query_range(key, key + kBlockN, params.seqlen_q, params.seqlen_k, params.causal, kBlockM);
    StepRange const steps = steps_of(tile, params.order.parts, params.heads_per_kv_head * (range.end - range.first));
    if (steps.begin >= steps.end) return;
    Walk at(range, tile.block, steps.begin, params.causal);
#pragma unroll 1
    for (int i = steps.begin; i < steps.end; ++i, at.advance(range)) {
      int const head = tile.head * params.heads_per_kv_head + at.head;
      load_queries(at.block, head, tile.batch);
      if (i == steps.begin) load_values(key, tile);
      load_gradients(at.block, head, tile.batch);
      if (i == steps.begin) load_keys(key, tile);
    }
    tile_phase ^= 1;
  }

  __device__ __forceinline__ void load_keys(int key, Tile const tile) {
    storage.key_empty.wait(tile_phase);
    if (elected) {
      storage.key_full.arrive_and_expect_tx(Config::kKeyBytes);
      load_rows<kChunk, Config::kHeadDim, kBlockN>(params.map_k, storage.key_full, Hint::EVICT_FIRST, storage.k, key,
                                                   tile.head, tile.batch);
    }
  }

  __device__ __forceinline__ void load_values(int key, Tile const tile) {
    storage.value_empty.wait(tile_phase);
    if (elected) {
      storage.value_full.arrive_and_expect_tx(Config::kValueBytes);
      load_rows<kChunk, Config::kHeadDimV, kBlockN>(params.map_v, storage.value_full, Hint::EVICT_FIRST, storage.v, key,
                                                    tile.head, tile.batch);
    }
  }

  __device__ __forceinline__ void load_queries(int block, int head, int batch) {
    int const s = query_state.stage;
    storage.query_empty[s].wait(query_state.phase);
    if (elected) {
      auto& full = storage.query_full[s];
      full.arrive_and_expect_tx(Config::kQueryBytes);
      load_rows<kChunk, Config::kHeadDim, kBlockM>(params.map_q, full, Hint::EVICT_LAST, storage.q[s], block * kBlockM,
                                                   head, batch);
      load_statistic(params.lse_log2, full, storage.lse_log2[s], block, head, batch);
    }
    query_state.advance();
  }

  __device__ __forceinline__ void load_gradients(int block, int head, int batch) {
    int const s = gradient_state.stage;
    storage.gradient_empty[s].wait(gradient_state.phase);
    if (elected) {
      auto& full = storage.gradient_full[s];
      full.arrive_and_expect_tx(Config::kGradientBytes);
      load_rows<kChunk, Config::kHeadDimV, kBlockM>(params.map_dout, full, Hint::EVICT_LAST, storage.dout[s],
                                                    block * kBlockM, head, batch);
      load_statistic(params.delta, full, storage.delta[s], block, head, batch);
    }
    gradient_state.advance();
  }

  template <class Barrier>
  __device__ __forceinline__ void load_statistic(float const* rows, Barrier& full, float* smem, int block, int head,
                                                 int batch) {
    int64_t const row = (int64_t(batch) * params.heads + head) * params.statistics_stride + block * kBlockM;
    cute::SM90_BULK_COPY_G2S::copy(rows + row, reinterpret_cast<uint64_t*>(&full), smem, Config::kStatisticBytes);
  }
};

}  // namespace flash_attn3
