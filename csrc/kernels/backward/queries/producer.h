// The warps that move data by TMA: one walks the tiles of its CTA, hands each out and loads K and V; one for each
// consumer warpgroup loads its rows of Q and dO and stores its rows of dQ. With a warp each, no warpgroup waits for
// rows of another. All lanes keep the state, which therefore is uniform; one of them issues.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "host/geometry.h"
#include "kernels/backward/queries/config.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/tiles.h"

namespace flash_attn3 {

template <class Config>
struct QueriesKeyProducer {
  static constexpr int kBlockN = Config::kBlockN;

  BackwardParams const& params;
  QueriesStorage<Config>& storage;
  bool const elected;
  PipelineState<Config::kKeyStages> key_state{Role::kProducer};
  PipelineState<Config::kValueSlots> value_state{Role::kProducer};

  __device__ __forceinline__ void run() {
    TileFinder<false, BackwardParams> finder(params, storage.tiles.found);
    for (int tiles = 0;; ++tiles) {
      Tile const tile = finder.next();
      storage.tiles.give(tile, tiles, elected);
      if (tile.block < 0) return;
      load(tile);
    }
  }

  __device__ __forceinline__ void load(Tile const& tile) {
    int const row = tile.block * Config::kBlockM;
    int const kv_head = tile.head / params.heads_per_kv_head;
    Sequence const& sequence = tile.sequence;
    KeyRange const keys =
        key_range(row, row + Config::kBlockM, sequence.q_length, sequence.k_length, params.mask, kBlockN);
#pragma unroll 1
    for (int block = keys.end - 1; block >= keys.begin; --block) {
      TmaRows const rows = key_rows(params, tile, block * kBlockN, kBlockN);
      auto& full = storage.key_full[key_state.stage];
      storage.key_empty[key_state.stage].wait(key_state.phase);
      if (elected) {
        full.arrive_and_expect_tx(Config::kKeyBytes);
        load_rows<Config::kChunk, Config::kHeadDim, kBlockN>(params.map_k, full, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                             storage.k[key_state.stage], rows, kv_head);
      }
      key_state.advance();
#pragma unroll 1
      for (int part = 0; part < Config::kValueParts; ++part) load_values(part, rows, kv_head);
    }
  }

  __device__ __forceinline__ void load_values(int part, TmaRows const& rows, int kv_head) {
    auto& full = storage.value_full[value_state.stage];
    storage.value_empty[value_state.stage].wait(value_state.phase);
    if (elected) {
      full.arrive_and_expect_tx(Config::kPartBytes);
#pragma unroll
      for (int column = 0; column < Config::kPartColumns; column += Config::kChunk) {
        cute::SM90_TMA_LOAD_4D::copy(&params.map_v, reinterpret_cast<uint64_t*>(&full),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                     storage.v[value_state.stage] + column * kBlockN,
                                     part * Config::kPartColumns + column, rows.sequence, kv_head, rows.batch);
      }
    }
    value_state.advance();
  }
};

template <class Config>
struct QueriesRowMover {
  using Element = typename Config::Element;
  static constexpr int kChunk = Config::kChunk;

  BackwardParams const& params;
  QueriesStorage<Config>& storage;
  int const warpgroup;
  bool const elected;
  PipelineState<Config::kRowBuffers> row_state{Role::kProducer};
  PipelineState<1> output_state{Role::kConsumer};
  // Rows of a tile, of one head, as the maps of Q, dO and dQ know them.
  struct Rows {
    TmaRows at;
    int32_t head;  // -1: none
  };
  static constexpr Rows kNone = {{0, 0}, -1};
  Rows leaving[Config::kRowBuffers];  // whose dQ has not been stored, oldest first

  __device__ __forceinline__ QueriesRowMover(BackwardParams const& p, QueriesStorage<Config>& s, int wg, bool one)
      : params(p), storage(s), warpgroup(wg), elected(one) {
#pragma unroll
    for (Rows& rows : leaving) rows = kNone;
  }

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = storage.tiles.take(tiles);
      if (tile.block < 0) break;
      int const first = tile.block * Config::kBlockM + warpgroup * kRowsPerWarpgroup;
      if (first < tile.sequence.q_length) {
        exchange({query_rows(params, tile, first, kRowsPerWarpgroup), tile.head});
      } else {
        // Not later: the warpgroup may wait to write its next round before it goes on to this tile, and without it K
        // and V of this tile, and so the tile after, do not come.
        wait_for_queries();
        store(leaving[0]);
        leaving[0] = kNone;
      }
    }
#pragma unroll
    for (int i = 0; i < Config::kRowBuffers; ++i) {
      wait_for_queries();
      store(leaving[0]);
      advance(kNone);
    }
  }

  // Rows of the next tile in, dQ of the one that used the buffer before out.
  __device__ __forceinline__ void exchange(Rows const next) {
    if constexpr (Config::kOutputOverQuery) {
      load_dout(next);
      wait_for_queries();
      store(leaving[0]);
      load_queries(next);
    } else {
      wait_for_queries();
      load_queries(next);
      load_dout(next);
      store(leaving[0]);
    }
    advance(next);
  }

  __device__ __forceinline__ void advance(Rows const next) {
#pragma unroll
    for (int i = 1; i < Config::kRowBuffers; ++i) leaving[i - 1] = leaving[i];
    leaving[Config::kRowBuffers - 1] = next;
    row_state.advance();
  }

  __device__ __forceinline__ void wait_for_queries() {
    storage.query_empty[row_state.stage][warpgroup].wait(row_state.phase);
  }

  __device__ __forceinline__ void load_queries(Rows const rows) {
    if (elected) {
      auto& full = storage.query_full[row_state.stage][warpgroup];
      full.arrive_and_expect_tx(Config::kQueryBytes);
      load_rows<kChunk, Config::kHeadDim, kRowsPerWarpgroup>(params.map_q, full, cute::TMA::CacheHintSm90::EVICT_FIRST,
                                                             storage.q[row_state.stage][warpgroup], rows.at, rows.head);
    }
  }

  __device__ __forceinline__ void load_dout(Rows const rows) {
    storage.dout_empty[row_state.stage][warpgroup].wait(row_state.phase);
    if (elected) {
      auto& full = storage.dout_full[row_state.stage][warpgroup];
      full.arrive_and_expect_tx(Config::kDoutBytes);
      load_rows<kChunk, Config::kHeadDimV, kRowsPerWarpgroup>(
          params.map_dout, full, cute::TMA::CacheHintSm90::EVICT_FIRST, storage.dout[row_state.stage][warpgroup],
          rows.at, rows.head);
    }
  }

  // Stores dQ of the rows, a round of columns at a time, and waits until shared memory has been read. TMA clips what
  // lies outside the sequence.
  __device__ __forceinline__ void store(Rows const rows) {
    if (rows.head < 0) return;
#pragma unroll 1
    for (int first = 0; first < Config::kHeadDim; first += Config::kOutputColumns) {
      Element* source = storage.q[row_state.stage][warpgroup];
      if constexpr (!Config::kOutputOverQuery) {
        source = storage.dq[warpgroup];
        storage.output_full[warpgroup].wait(output_state.phase);
        output_state.advance();
      }
      if (elected) {
#pragma unroll
        for (int column = 0; column < Config::kOutputColumns; column += kChunk) {
          cute::SM90_TMA_STORE_4D::copy(&params.map_dq, source + column * kRowsPerWarpgroup, first + column,
                                        rows.at.sequence, rows.head, rows.at.batch);
        }
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();
        if constexpr (!Config::kOutputOverQuery) storage.output_empty[warpgroup].arrive();
      }
      __syncwarp();  // no lane may fall phases behind
    }
  }
};

}  // namespace flash_attn3
