// The producer: a warp that walks the tiles of its CTA, hands each to the consumers and loads K, V, Q and dO by TMA and
// the rows' statistics by bulk copies. All its lanes keep the state, which therefore is uniform; one of them issues.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "host/geometry.h"
#include "kernels/backward/wide_keys/config.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/tiles.h"

namespace flash_attn3 {

template <class Config>
struct WideKeysProducer {
  using Hint = cute::TMA::CacheHintSm90;
  using Blocks = WideKeysBlocks;
  static constexpr int kChunk = Config::kChunk, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;

  BackwardParams const& params;
  WideKeysStorage<Config>& storage;
  bool const elected;
  PipelineState<1> keys{Role::kProducer};  // of the tiles that have queries
  Blocks blocks{Role::kProducer};

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = tile_at(params.order, params.kv_heads, false, next_position(params.counter, tiles));
      storage.tiles.give(tile, tiles, elected);
      if (tile.block < 0) return;
      load(tile);
    }
  }

  // Every query head of the group walks the same blocks. The order is that in which the buffers become free: Q of a new
  // tile finds its buffer before K, which the last S of the tile before still reads.
  __device__ __forceinline__ void load(Tile const tile) {
    int const row = tile.block * kBlockN;
    QueryRange const range = query_range(row, row + kBlockN, params.seqlen_q, params.seqlen_k, params.causal, kBlockM);
    if (range.first == range.end) return;
    int const first_head = tile.head * params.heads_per_kv_head;
    int const end_head = first_head + params.heads_per_kv_head;
    bool held = false;
#pragma unroll 1
    for (int head = first_head; head < end_head; ++head) {
#pragma unroll 1
      for (int block = range.first; block < range.end; ++block) {
        uint32_t const turn = blocks.phase ^ 1;
        load_block<Config::kHeadDim, Config::kQueryBytes>(params.map_q, params.lse_log2,
                                                          Blocks::query(blocks.stage, turn), block, head, tile.batch);
        if (!held) {
          load_keys<Config::kHeadDim>(params.map_k, storage.key_full, storage.key_empty, storage.k, row, tile);
        }
        load_block<Config::kHeadDimV, Config::kOutputBytes>(
            params.map_dout, params.delta, Blocks::output(blocks.stage, turn), block, head, tile.batch);
        if (!held) {
          load_keys<Config::kHeadDimV>(params.map_v, storage.value_full, storage.value_empty, storage.v, row, tile);
        }
        held = true;
        blocks.advance();
      }
    }
    keys.advance();
  }

  template <int kColumns, int kBytes>
  __device__ __forceinline__ void load_block(CUtensorMap const& map, float const* statistics, int buffer, int block,
                                             int head, int batch) {
    auto& full = storage.block_full[buffer];
    storage.block_empty[buffer].wait(blocks.phase);
    if (elected) {
      full.arrive_and_expect_tx(kBytes);
      load_rows<kChunk, kColumns, kBlockM>(map, full, Hint::EVICT_LAST, storage.blocks[buffer], block * kBlockM, head,
                                           batch);
      int64_t const first = (int64_t(batch) * params.heads + head) * params.statistics_stride + block * kBlockM;
      cute::SM90_BULK_COPY_G2S::copy(statistics + first, reinterpret_cast<uint64_t*>(&full), storage.statistics[buffer],
                                     kBlockM * 4);
    }
  }

  template <int kColumns, class Full, class Empty, class Element>
  __device__ __forceinline__ void load_keys(CUtensorMap const& map, Full& full, Empty& empty, Element* smem, int row,
                                            Tile const tile) {
    empty.wait(keys.phase);
    if (elected) {
      full.arrive_and_expect_tx(kBlockN * kColumns * 2);
      load_rows<kChunk, kColumns, kBlockN>(map, full, Hint::EVICT_FIRST, smem, row, tile.head, tile.batch);
    }
  }
};

}  // namespace flash_attn3
