// The producer: for each tile K and V once, then Q, dO and their statistics for every step.
#pragma once

#include "kernels/backward/keys/config.h"
#include "kernels/backward/keys/tile.h"
#include "kernels/backward/keys/zero.h"

namespace flash_attn3 {

template <class Config>
struct KeysProducer : TileProducer<Config, KeysStorage<Config>> {
  using Base = TileProducer<Config, KeysStorage<Config>>;
  using Base::params, Base::storage;

  PipelineState<Config::kQueryStages> query_state{Role::kProducer};
  PipelineState<Config::kGradientStages> gradient_state{Role::kProducer};
  uint32_t tile_phase = static_cast<uint32_t>(Role::kProducer);  // of K and V: flips with every tile that has steps

  __device__ __forceinline__ KeysProducer(BackwardParams const& p, KeysStorage<Config>& s, bool elected)
      : Base{p, s, elected} {}

  __device__ __forceinline__ void run() {
    this->for_each_tile([&](Tile const& tile) { load(tile); });
  }

  // V and K come after what their first readers need beside them: V is given back before the end of the tile before, K
  // at its very end.
  __device__ __forceinline__ void load(Tile const& tile) {
    QueryRange const range = range_of<Config>(params, tile);
    StepRange const steps = steps_of(tile, params.order.parts, params.heads_per_kv_head * (range.end - range.first));
    if (steps.begin >= steps.end) return;
    Walk at(range, first_block(range, tile.block, params.mask), steps.begin);
#pragma unroll 1
    for (int i = steps.begin; i < steps.end; ++i, at.advance(range)) {
      int const head = tile.head * params.heads_per_kv_head + at.head;
      load_queries(tile, head, at.block);
      if (i == steps.begin) {
        if constexpr (Config::kFused) SumsZeroing<Config>{params}.wait_for(tile);
        storage.value_empty.wait(tile_phase);
        this->template load_keys<Config::kHeadDimV>(params.map_v, storage.value_full, storage.v, tile);
      }
      load_gradients(tile, head, at.block);
      if (i == steps.begin) {
        storage.key_empty.wait(tile_phase);
        this->template load_keys<Config::kHeadDim>(params.map_k, storage.key_full, storage.k, tile);
      }
    }
    tile_phase ^= 1;
  }

  __device__ __forceinline__ void load_queries(Tile const& tile, int head, int block) {
    int const s = query_state.stage;
    storage.query_empty[s].wait(query_state.phase);
    this->template load_block<Config::kHeadDim>(params.map_q, params.lse_log2, storage.query_full[s], storage.q[s],
                                                storage.lse_log2[s], tile, head, block);
    query_state.advance();
  }

  __device__ __forceinline__ void load_gradients(Tile const& tile, int head, int block) {
    int const s = gradient_state.stage;
    storage.gradient_empty[s].wait(gradient_state.phase);
    this->template load_block<Config::kHeadDimV>(params.map_dout, params.delta, storage.gradient_full[s],
                                                 storage.dout[s], storage.delta[s], tile, head, block);
    gradient_state.advance();
  }
};

}  // namespace flash_attn3
