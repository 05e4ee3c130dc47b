// The producer: for each tile K and V once, then Q, dO and their statistics for every block of queries.
#pragma once

#include "kernels/backward/keys/tile.h"
#include "kernels/backward/wide_keys/config.h"

namespace flash_attn3 {

template <class Config>
struct WideKeysProducer : TileProducer<Config, WideKeysStorage<Config>> {
  using Base = TileProducer<Config, WideKeysStorage<Config>>;
  using Base::params, Base::storage;
  using Blocks = WideKeysBlocks;

  PipelineState<1> keys{Role::kProducer};  // of the tiles that have queries
  Blocks blocks{Role::kProducer};

  __device__ __forceinline__ WideKeysProducer(BackwardParams const& p, WideKeysStorage<Config>& s, bool elected)
      : Base{p, s, elected} {}

  __device__ __forceinline__ void run() {
    this->for_each_tile([&](Tile const& tile) { load(tile); });
  }

  // Every query head of the group walks the same blocks. The order is that in which the buffers become free: Q of a new
  // tile finds its buffer before K, which the last S of the tile before still reads.
  __device__ __forceinline__ void load(Tile const& tile) {
    QueryRange const range = range_of<Config>(params, tile);
    int const count = (range.end - range.first) * params.heads_per_kv_head;
    if (count == 0) return;
    Walk at(range, range.first, 0);
#pragma unroll 1
    for (int i = 0; i < count; ++i, at.advance(range)) {
      int const head = tile.head * params.heads_per_kv_head + at.head;
      uint32_t const turn = blocks.phase ^ 1;
      load_into<Config::kHeadDim>(params.map_q, params.lse_log2, Blocks::query(blocks.stage, turn), tile, head,
                                  at.block);
      if (i == 0) {
        storage.key_empty.wait(keys.phase);
        this->template load_keys<Config::kHeadDim>(params.map_k, storage.key_full, storage.k, tile);
      }
      load_into<Config::kHeadDimV>(params.map_dout, params.delta, Blocks::output(blocks.stage, turn), tile, head,
                                   at.block);
      if (i == 0) {
        storage.value_empty.wait(keys.phase);
        this->template load_keys<Config::kHeadDimV>(params.map_v, storage.value_full, storage.v, tile);
      }
      blocks.advance();
    }
    keys.advance();
  }

  template <int kColumns>
  __device__ __forceinline__ void load_into(CUtensorMap const& map, float const* statistics, int buffer,
                                            Tile const& tile, int head, int block) {
    storage.block_empty[buffer].wait(blocks.phase);
    this->template load_block<kColumns>(map, statistics, storage.block_full[buffer], storage.blocks[buffer],
                                        storage.statistics[buffer], tile, head, block);
  }
};

}  // namespace flash_attn3
