// The producer warps: one finds the tiles of its CTA and hands them out, one loads K and V, one loads Q, so that none
// of this waits for the rest: where sequences are short, a tile takes little longer than any of it. All lanes of a warp
// keep its state, which therefore is uniform and lives in uniform registers; one of them issues.
#pragma once

#include "host/geometry.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/tiles.h"
#include "kernels/forward/config.h"

namespace flash_attn3 {

template <class Config>
struct TileGiver {
  typename Config::Params const& params;
  ForwardStorage<Config>& storage;
  bool const elected;

  __device__ __forceinline__ void run() const {
    TileFinder<false, ForwardParams> finder(params, storage.tiles.found);
    int keys = 0;  // that the tile before walks
    for (int tiles = 0;; ++tiles) {
      wait_until_due(tiles, keys);
      Tile const tile = broadcast(finder.next());
      keys = give_walks(tile, tiles) * Config::kBlockN;
      storage.tiles.give(tile, tiles, elected);
      if (tile.block < 0) return;
    }
  }

  // Tile number `count` is not looked for as early as there is a slot: one that a CTA takes ahead is one that no idle
  // CTA can take. Of a dense batch with a counter not before the last but one is done, unless the last is short, as
  // tiles of a packed batch may be: it would be done before the next has loaded.
  __device__ __forceinline__ void wait_until_due(int count, int keys_before) const {
    constexpr int kShort = 512;
    storage.nearly_loaded.wait(PipelineState<1>::at(Role::kProducer, count).phase);
    if (params.counter == nullptr || params.packed.sequences != nullptr || count < 2 || keys_before <= kShort) return;
    auto const done = PipelineState<ForwardStorage<Config>::kSlots>::at(Role::kConsumer, count - 2);
    storage.tiles.empty[done.stage].wait(done.phase);
  }

  // Writes the walks of tile number `count`, before it is given; returns how many blocks the tile has. A lane works for
  // the rows of a warpgroup, the next one for the whole tile.
  //
  // Few blocks are walked without turns. Then the warpgroups change rows from tile to tile, so that it is not the same
  // one that always has the longest walk, or has rows at all: they may be a tile apart, and so lie beside each other.
  //
  // Turns are taken in the blocks that every row of the tile sees whole, but for the one that a warpgroup walks first:
  // limits of rows never decrease, so warpgroup 0 begins lowest, and what lies below its first block lies below the
  // others'. Such blocks are in the hot loop of each active warpgroup, which takes and passes once in each, from the
  // highest down. No cycle of waits is possible: a warpgroup in block b waits for K of b and V of b + 1, which need
  // only what is released in blocks above b, and for those before it in the ring to issue in b itself.
  __device__ __forceinline__ int give_walks(Tile const& tile, int count) const {
    constexpr int kLeastTurns = 256 / Config::kBlockN;  // blocks; fewer are not worth the waits
    constexpr int kWhole = Config::kWarpgroups;
    int const lane = threadIdx.x % 32;
    Sequence const& sequence = tile.sequence;
    int const tile_row = tile.block * Config::kBlockM;
    int const row = tile_row + lane % kWhole * kRowsPerWarpgroup;
    KeyRange keys = key_range(row, row + (lane == kWhole ? Config::kBlockM : kRowsPerWarpgroup), sequence.q_length,
                              sequence.k_length, params.mask, Config::kBlockN);
    auto of_lane = [](int value, int from) { return __shfl_sync(0xffffffffu, value, from); };
    KeyRange const whole{of_lane(keys.begin, kWhole), of_lane(keys.end, kWhole), of_lane(keys.unmasked_begin, kWhole),
                         of_lane(keys.unmasked_end, kWhole)};
    int const first_end = of_lane(keys.end, 0);
    int const active = min_int(kWhole, ceil_div(sequence.q_length - tile_row, kRowsPerWarpgroup));
    int const turns_end = min_int(whole.unmasked_end, first_end - 1);
    bool const turns = active > 1 && whole.unmasked_begin + kLeastTurns <= turns_end;
    int const rotation = turns ? 0 : count % kWhole;

    float score_scale = 1.f, value_scale = 1.f;
    if constexpr (Config::kScaled) {
      if (tile.block >= 0) {
        int const kv_head = tile.head / params.heads_per_kv_head;
        score_scale = params.q_descale.of(tile.batch, kv_head) * params.k_descale.of(tile.batch, kv_head);
        value_scale = params.v_descale.of(tile.batch, kv_head);
      }
    }

    auto const slot = PipelineState<ForwardStorage<Config>::kSlots>::at(Role::kProducer, count);
    wait_and_read(storage.tiles.empty[slot.stage], slot.phase);
    if (lane < kWhole) {
      if (keys.begin == keys.end) keys.begin = keys.end = whole.begin;
      int const warpgroup = (lane + rotation) % kWhole;
      storage.walks[slot.stage][warpgroup] = {keys,
                                              whole.end - keys.end,
                                              keys.begin - whole.begin,
                                              turns ? whole.unmasked_begin : keys.unmasked_begin,
                                              turns ? turns_end : 0,
                                              lane == active - 1,
                                              tile.block < 0   ? ForwardWalk::kNoTile
                                              : lane >= active ? ForwardWalk::kNoRows
                                                               : row,
                                              score_scale,
                                              value_scale};
      write_and_arrive(storage.tiles.full[slot.stage]);
    }
    return whole.end - whole.begin;
  }
};

template <class Config>
struct KeyLoader {
  static constexpr int kChunk = Config::kChunk, kBlockN = Config::kBlockN;

  ForwardParams const& params;
  ForwardStorage<Config>& storage;
  bool const elected;
  PipelineState<Config::kKeyStages> key_state{Role::kProducer};
  PipelineState<Config::kValueStages> value_state{Role::kProducer};

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = storage.tiles.look(tiles);
      if (tile.block < 0) return;
      ForwardWalk const& walk = storage.walks[tiles % storage.kSlots][0];
      int begin = 0, end = 0;  // of the whole tile
      if (threadIdx.x % 32 == 0) begin = walk.keys.begin - walk.below, end = walk.keys.end + walk.above;
      begin = __shfl_sync(0xffffffffu, begin, 0);
      end = __shfl_sync(0xffffffffu, end, 0);
      storage.tiles.release(tiles);
      load(tile, begin, end);
    }
  }

  // K of a block, then V of the block before: the order in which the consumers need them.
  __device__ __forceinline__ void load(Tile const& tile, int begin, int end) {
    constexpr int kAhead = 4;  // blocks before the last, when the next tile is looked for
    int const kv_head = tile.head / params.heads_per_kv_head;
#pragma unroll 1
    for (int block = end; block >= begin; --block) {
      if (block > begin) load_keys(tile, (block - 1) * kBlockN, kv_head);
      if (block < end) load_values(tile, block, kv_head);
      if (block == min_int(end, begin + kAhead)) arrive_warp(storage.nearly_loaded);
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

  __device__ __forceinline__ void load_values(Tile const& tile, int block, int kv_head) {
    auto& full = storage.value_full[value_state.stage];
    storage.value_empty[value_state.stage].wait(value_state.phase);
    if (elected) {
      full.arrive_and_expect_tx(Config::kValueBytes);
      auto const hint = cute::TMA::CacheHintSm90::EVICT_LAST;
      auto* const stage = storage.v + value_state.stage * (Config::kValueBytes / sizeof(*storage.v));
      if constexpr (Config::kScaled) {  // a block as kernels/fp8/transpose.h leaves it
        int const head = tile.batch * (params.heads / params.heads_per_kv_head) + kv_head;
        cute::SM90_TMA_LOAD_4D::copy(&params.map_v, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint),
                                     stage, 0, 0, block, head);
      } else {
        load_rows<kChunk, Config::kHeadDimV, kBlockN>(params.map_v, full, hint, stage,
                                                      key_rows(params, tile, block * kBlockN, kBlockN), kv_head);
      }
    }
    value_state.advance();
  }
};

template <class Config>
struct QueryLoader {
  ForwardParams const& params;
  ForwardStorage<Config>& storage;
  bool const elected;
  int uses[Config::kWarpgroups] = {};  // of each warpgroup's buffers

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = storage.tiles.look(tiles);
      if (tile.block < 0) return;
      load(tile, tiles);
      storage.tiles.release(tiles);
    }
  }

  // Past the last row there is nothing to load; of a box without rows TMA would touch what lies before a packed tensor.
  __device__ __forceinline__ void load(Tile const& tile, int tiles) {
#pragma unroll
    for (int w = 0; w < Config::kWarpgroups; ++w) {
      int const row = storage.walks[tiles % storage.kSlots][w].first_row;
      if (row < 0) continue;
      auto const query = PipelineState<Config::kQueryBuffers>::at(Role::kProducer, uses[w]++);
      storage.query_empty[query.stage][w].wait(query.phase);
      if (elected) {
        auto& full = storage.query_full[query.stage][w];
        full.arrive_and_expect_tx(Config::kQueryBytes);
        load_rows<Config::kChunk, Config::kHeadDim, kRowsPerWarpgroup>(
            params.map_q, full, cute::TMA::CacheHintSm90::EVICT_FIRST, storage.q[query.stage][w],
            query_rows(params, tile, row, kRowsPerWarpgroup), tile.head);
      }
    }
  }
};

}  // namespace flash_attn3
