// What every kernel that holds keys makes of a tile: which queries it walks, which rows see a key, what its producer
// loads.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "host/geometry.h"
#include "host/params.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"

namespace flash_attn3 {

template <class Config>
__device__ __forceinline__ QueryRange range_of(BackwardParams const& params, Tile const& tile) {
  int const key = tile.block * Config::kBlockN;
  return query_range(key, key + Config::kBlockN, tile.sequence.q_length, tile.sequence.k_length, params.mask,
                     Config::kBlockM);
}

// Where a tile's walk is: a query head of the group and a block. It begins at block `start` and wraps at the range's
// end.
struct Walk {
  int head, block, start;

  // At step number `step`.
  __device__ __forceinline__ Walk(QueryRange const& range, int start, int step) : start(start) {
    int const count = range.end - range.first;
    head = step / count;
    block = start + step % count;
    if (block >= range.end) block -= count;
  }

  __device__ __forceinline__ void advance(QueryRange const& range) {
    if (++block == range.end) block = range.first;
    if (block == start) ++head;
  }
};

// Rows, counted from `first_row`, that see a key: none if it lies past the sequence's end.
__device__ __forceinline__ Span rows_from(int first_row, int key, Sequence const& sequence, Mask const& mask) {
  Span const rows = visible_rows(key, sequence.q_length, sequence.k_length, mask);
  return {key < sequence.k_length ? rows.begin - first_row : INT32_MAX, rows.end - first_row};
}

// Whether a row may see a key that a later row does not: else visible_rows ends at the last row.
__device__ __forceinline__ bool forgets(Mask const& mask) { return mask.left != kUnbounded || mask.chunk > 0; }

// Softcap: scores in units of the cap are t = tanh(cap_scale q.k), and dS = P (dP - delta) (1 - t^2). The scores are
// gone when dP is there; so the last factor, in fp16, waits where dS of the step will lie. Turns two scores into t and
// returns their factors.
__device__ __forceinline__ uint32_t cap_scores(float& x, float& y, float cap_scale) {
  x = tanh_by_exp2(x * cap_scale);
  y = tanh_by_exp2(y * cap_scale);
  return Packed<cutlass::half_t>::pack(fmaf(-x, x, 1.f), fmaf(-y, y, 1.f));
}
// Takes the factors into dP.
__device__ __forceinline__ void cap_gradients(float& x, float& y, float2 delta, uint32_t factors) {
  float2 const factor = Packed<cutlass::half_t>::unpack(factors);
  x = fmaf(x - delta.x, factor.x, delta.x);
  y = fmaf(y - delta.y, factor.y, delta.y);
}

// Base of the producers: a warp that walks the tiles of its CTA and hands each to the consumers. All its lanes keep the
// state, which therefore is uniform; one of them issues.
template <class Config, class Storage>
struct TileProducer {
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  using Element = typename Config::Element;
  using Hint = cute::TMA::CacheHintSm90;

  BackwardParams const& params;
  Storage& storage;
  bool const elected;

  template <class Load>
  __device__ __forceinline__ void for_each_tile(Load load) const {
    TileFinder<true, BackwardParams> finder(params, storage.tiles.found);
    for (int tiles = 0;; ++tiles) {
      Tile const tile = finder.next();
      storage.tiles.give(tile, tiles, elected);
      if (tile.block < 0) return;
      load(tile);
    }
  }

  // K or V of the tile.
  template <int kColumns, class Full>
  __device__ __forceinline__ void load_keys(CUtensorMap const& map, Full& full, Element* smem, Tile const& tile) const {
    if (!elected) return;
    full.arrive_and_expect_tx(kBlockN * kColumns * 2);
    load_rows<Config::kChunk, kColumns, kBlockN>(map, full, Hint::EVICT_FIRST, smem,
                                                 key_rows(params, tile, tile.block * kBlockN, kBlockN), tile.head);
  }

  // Q with the LSE of its rows, or dO with their delta: a block of a query head. What lies past the sequence's end is
  // zero, its LSE +inf.
  template <int kColumns, class Full>
  __device__ __forceinline__ void load_block(CUtensorMap const& map, float const* statistics, Full& full, Element* smem,
                                             float* smem_statistics, Tile const& tile, int head, int block) const {
    if (!elected) return;
    bool const packed = params.packed.sequences != nullptr;
    int64_t const first = tile.batch * params.statistics_stride_batch + head * params.statistics_stride +
                          (packed ? statistics_begin(tile.sequence.q_begin, tile.batch) : 0);
    full.arrive_and_expect_tx(kBlockM * kColumns * 2 + kBlockM * 4);
    load_rows<Config::kChunk, kColumns, kBlockM>(map, full, Hint::EVICT_LAST, smem,
                                                 query_rows(params, tile, block * kBlockM, kBlockM), head);
    cute::SM90_BULK_COPY_G2S::copy(statistics + first + block * kBlockM, reinterpret_cast<uint64_t*>(&full),
                                   smem_statistics, kBlockM * 4);
  }
};

}  // namespace flash_attn3
