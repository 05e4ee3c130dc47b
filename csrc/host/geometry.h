// Which tile comes when, and which blocks it needs. Pure functions of integers, shared by the host, the kernels and
// the CPU tests.
#pragma once

#include <cstdint>

#include "host/params.h"

#if defined(__CUDACC__)
#define FLASH_ATTN3_HD __host__ __device__ __forceinline__
#else
#define FLASH_ATTN3_HD inline
#endif

namespace flash_attn3 {

constexpr int kRowsPerWarpgroup = 64;

// Columns of a shared-memory chunk and its TMA box: a 128-byte swizzle where it divides both head dims, else 64 bytes.
constexpr int chunk_columns(int head_dim, int head_dim_v) {
  return head_dim % 64 == 0 && head_dim_v % 64 == 0 ? 64 : 32;
}

struct Tile {
  int32_t block;  // -1: no tile
  int32_t head;
  int32_t batch;
  int32_t part;  // -1: the whole tile
  int32_t slot;  // number of the tile among those that are cut, for its partial sums; 0 if it is whole
};

// Steps [begin, end) of a tile of a kernel that holds keys.
struct StepRange {
  int32_t begin;
  int32_t end;
};

// Key blocks that 64 rows walk, from key_blocks - 1 down to 0. The first `unmasked` of them need no mask.
struct KeyRange {
  int32_t key_blocks;
  int32_t unmasked;
};

FLASH_ATTN3_HD int32_t min_int(int32_t a, int32_t b) { return a < b ? a : b; }
FLASH_ATTN3_HD int32_t max_int(int32_t a, int32_t b) { return a > b ? a : b; }
FLASH_ATTN3_HD int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Position `step` of CTA `cta` in a grid without a counter. Odd rounds run backwards, so that a CTA which got the
// longest tile of one round gets the shortest of the next.
FLASH_ATTN3_HD int64_t static_position(int32_t cta, int32_t grid, int32_t step) {
  return int64_t(step) * grid + (step & 1 ? grid - 1 - cta : cta);
}

// The tile, or part of one, at a position of the order; longest first when causal.
FLASH_ATTN3_HD Tile tile_at(TileOrder const& order, int32_t heads, bool causal, int64_t position) {
  if (position >= order.positions) return {-1, 0, 0, -1, 0};
  int32_t tile = int32_t(position), part = -1, slot = 0;
  if (tile >= order.whole) {
    part = (tile - order.whole) % order.parts;
    slot = (tile - order.whole) / order.parts;
    tile = order.whole + slot;
  }
  int32_t const tiles_per_group = order.group * order.blocks;
  int32_t const first_head = tile / tiles_per_group * order.group;
  int32_t const in_group = tile % tiles_per_group;
  int32_t const group = min_int(order.group, order.virtual_heads - first_head);
  int32_t const block = in_group / group;
  int32_t const virtual_head = first_head + in_group % group;
  return {causal ? order.blocks - 1 - block : block, virtual_head % heads, virtual_head / heads, part, slot};
}

// The share of a tile, or of its part, in the tile's `total` steps: the query blocks of its range once for every query
// head of the group. Step t belongs to head t / count of the group and is number t % count of the walk that begins at
// first_block. A part has no step where the tile has fewer than parts.
FLASH_ATTN3_HD StepRange steps_of(Tile const& tile, int32_t parts, int32_t total) {
  if (tile.part < 0) return {0, total};
  return {int32_t(int64_t(total) * tile.part / parts), int32_t(int64_t(total) * (tile.part + 1) / parts)};
}

// Keys that row `row` sees are [0, visible_keys): all, or up to the diagonal that ends at the bottom right.
FLASH_ATTN3_HD int32_t visible_keys(int32_t row, int32_t seqlen_q, int32_t seqlen_k, bool causal) {
  return causal ? max_int(0, min_int(seqlen_k, seqlen_k - (seqlen_q - 1 - row))) : seqlen_k;
}

// Rows [row_begin, row_end), of which those past seqlen_q do not count.
FLASH_ATTN3_HD KeyRange key_range(int32_t row_begin, int32_t row_end, int32_t seqlen_q, int32_t seqlen_k, bool causal,
                                  int32_t block_n) {
  if (row_begin >= seqlen_q) return {0, 0};
  int32_t const last = visible_keys(min_int(row_end, seqlen_q) - 1, seqlen_q, seqlen_k, causal);
  int32_t const first = visible_keys(row_begin, seqlen_q, seqlen_k, causal);
  return {ceil_div(last, block_n), first / block_n};
}

// Query blocks that a block of keys walks: [first, end), of which [first, unmasked) need a mask.
struct QueryRange {
  int32_t first;
  int32_t unmasked;
  int32_t end;
};

// Keys [key_begin, key_end), of which those past seqlen_k do not count; the counterpart of key_range.
FLASH_ATTN3_HD QueryRange query_range(int32_t key_begin, int32_t key_end, int32_t seqlen_q, int32_t seqlen_k,
                                      bool causal, int32_t block_m) {
  int32_t const end = ceil_div(seqlen_q, block_m);
  int32_t const first_row = causal ? max_int(0, key_begin - (seqlen_k - seqlen_q)) : 0;  // that sees key_begin
  if (first_row >= seqlen_q || key_begin >= seqlen_k) return {end, end, end};
  if (key_end > seqlen_k) return {first_row / block_m, end, end};
  int32_t const full_row = causal ? max_int(0, key_end - 1 - (seqlen_k - seqlen_q)) : 0;  // the first that sees all
  return {first_row / block_m, min_int(end, ceil_div(full_row, block_m)), end};
}

// Where in its range a block of keys begins to walk; it goes on at the range's first block after the last. Without a
// mask all CTAs of a head would add to the same block of dQ at the same time; the diagonal sets them apart anyway.
FLASH_ATTN3_HD int32_t first_block(QueryRange const& range, int32_t key_block, bool causal) {
  constexpr int32_t kPhases = 8;
  int64_t const count = range.end - range.first;
  return causal ? range.first : range.first + int32_t(key_block % kPhases * count / kPhases);
}

}  // namespace flash_attn3
