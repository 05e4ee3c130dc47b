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
  Sequence sequence;
};

// Steps [begin, end) of a tile of a kernel that holds keys.
struct StepRange {
  int32_t begin;
  int32_t end;
};

// [begin, end), empty if end <= begin.
struct Span {
  int32_t begin, end;
};

// Key blocks that some rows walk, from end - 1 down to begin. Those in [unmasked_begin, unmasked_end) need no mask.
// begin <= unmasked_begin <= unmasked_end <= end.
struct KeyRange {
  int32_t begin, end;
  int32_t unmasked_begin, unmasked_end;
};

// Query blocks that a block of keys walks: [first, end). Those in [unmasked_first, unmasked_end) need no mask.
struct QueryRange {
  int32_t first, end;
  int32_t unmasked_first, unmasked_end;
};

FLASH_ATTN3_HD int32_t min_int(int32_t a, int32_t b) { return a < b ? a : b; }
FLASH_ATTN3_HD int32_t max_int(int32_t a, int32_t b) { return a > b ? a : b; }
FLASH_ATTN3_HD int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Position `step` of CTA `cta` in a grid without a counter. Odd rounds run backwards, so that a CTA which got the
// longest tile of one round gets the shortest of the next.
FLASH_ATTN3_HD int64_t static_position(int32_t cta, int32_t grid, int32_t step) {
  return int64_t(step) * grid + (step & 1 ? grid - 1 - cta : cta);
}

FLASH_ATTN3_HD bool sees_all(Mask const& mask) {
  return mask.left == kUnbounded && mask.right == kUnbounded && mask.chunk == 0;
}

// The tile, or part of one, at a position of the order; its sequence is left to the caller.
FLASH_ATTN3_HD Tile tile_at(TileOrder const& order, int32_t heads, int64_t position) {
  if (position >= order.positions) return {-1, 0, 0, -1, 0, {}};
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
  return {
      order.reversed ? order.blocks - 1 - block : block, virtual_head % heads, virtual_head / heads, part, slot, {}};
}

// The share of a tile, or of its part, in the tile's `total` steps: the query blocks of its range once for every query
// head of the group. Step t belongs to head t / count of the group and is number t % count of the walk that begins at
// first_block. A part has no step where the tile has fewer than parts.
FLASH_ATTN3_HD StepRange steps_of(Tile const& tile, int32_t parts, int32_t total) {
  if (tile.part < 0) return {0, total};
  return {int32_t(int64_t(total) * tile.part / parts), int32_t(int64_t(total) * (tile.part + 1) / parts)};
}

// a - b, or 0 if that is negative; b >= 0. Not as a choice between the two: nvcc subtracts first, which may overflow.
FLASH_ATTN3_HD int32_t difference_or_zero(int32_t a, int32_t b) { return max_int(a, b) - b; }

// Keys that row `row` of a sequence sees. Neither bound decreases from row to row; nothing overflows whatever the
// bounds of the mask.
FLASH_ATTN3_HD Span visible_keys(int32_t row, int32_t seqlen_q, int32_t seqlen_k, Mask const& mask) {
  int32_t const position = row + (seqlen_k - seqlen_q);
  Span keys{difference_or_zero(position, mask.left),
            mask.right >= seqlen_q - 1 - row ? seqlen_k : max_int(0, position + mask.right + 1)};
  if (mask.chunk > 0) {
    if (position < 0) return {0, 0};
    int32_t const chunk = position / mask.chunk * mask.chunk;
    keys.begin = max_int(keys.begin, chunk);
    if (mask.chunk < keys.end - chunk) keys.end = chunk + mask.chunk;
  }
  return keys;
}

// Rows that see key `key`, which must be below seqlen_k; the counterpart of visible_keys.
FLASH_ATTN3_HD Span visible_rows(int32_t key, int32_t seqlen_q, int32_t seqlen_k, Mask const& mask) {
  int32_t const row = key - (seqlen_k - seqlen_q);  // that stands at the key; may be negative
  Span rows{difference_or_zero(row, mask.right),
            mask.left >= seqlen_k - 1 - key ? seqlen_q : max_int(0, row + mask.left + 1)};
  if (mask.chunk > 0) {
    int32_t const before = key % mask.chunk, after = mask.chunk - before;
    rows.begin = max_int(rows.begin, row - before);
    if (after < seqlen_k - key) rows.end = min_int(rows.end, max_int(0, row + after));
  }
  return rows;
}

// Rows [row_begin, row_end), of which those past seqlen_q do not count.
FLASH_ATTN3_HD KeyRange key_range(int32_t row_begin, int32_t row_end, int32_t seqlen_q, int32_t seqlen_k,
                                  Mask const& mask, int32_t block_n) {
  if (row_begin >= seqlen_q) return {0, 0, 0, 0};
  Span const first = visible_keys(row_begin, seqlen_q, seqlen_k, mask);
  Span const last = visible_keys(min_int(row_end, seqlen_q) - 1, seqlen_q, seqlen_k, mask);
  if (last.end <= first.begin) return {0, 0, 0, 0};
  int32_t const begin = first.begin / block_n, end = ceil_div(last.end, block_n);
  int32_t const unmasked_begin = min_int(end, ceil_div(last.begin, block_n));
  return {begin, end, unmasked_begin, max_int(unmasked_begin, first.end / block_n)};
}

// Keys [key_begin, key_end), of which those past seqlen_k do not count; the counterpart of key_range.
FLASH_ATTN3_HD QueryRange query_range(int32_t key_begin, int32_t key_end, int32_t seqlen_q, int32_t seqlen_k,
                                      Mask const& mask, int32_t block_m) {
  if (key_begin >= seqlen_k) return {0, 0, 0, 0};
  Span const first = visible_rows(key_begin, seqlen_q, seqlen_k, mask);
  Span const last = visible_rows(min_int(key_end, seqlen_k) - 1, seqlen_q, seqlen_k, mask);
  if (last.end <= first.begin) return {0, 0, 0, 0};
  int32_t const begin = first.begin / block_m, end = ceil_div(last.end, block_m);
  // Keys past seqlen_k always need a mask, rows past seqlen_q never: their probabilities are 0 by their statistics.
  if (key_end > seqlen_k) return {begin, end, end, end};
  int32_t const unmasked_first = min_int(end, ceil_div(last.begin, block_m));
  int32_t const full = first.end >= seqlen_q ? end : first.end / block_m;
  return {begin, end, unmasked_first, max_int(unmasked_first, full)};
}

// Where in its range a block of keys begins to walk; it goes on at the range's first block after the last. Without a
// mask all CTAs of a head would add to the same block of dQ at the same time; a diagonal sets them apart anyway.
FLASH_ATTN3_HD int32_t first_block(QueryRange const& range, int32_t key_block, Mask const& mask) {
  constexpr int32_t kPhases = 8;
  int64_t const count = range.end - range.first;
  return sees_all(mask) ? range.first + int32_t(key_block % kPhases * count / kPhases) : range.first;
}

// Coordinates 1 and 3 of a map for the box of `box` rows that begins at row `row` of a sequence. What lies past the
// sequence's end arrives as zeros and is not stored.
struct TmaRows {
  int32_t sequence, batch;
};

// Maps of a dense batch are (head dim, sequence, head, batch). Of a packed one they are (head dim, box, head, total +
// 1) where both the second and the fourth dimension step by one row, from `box` rows before the tensor (tensor_map.h):
// the box begins as far before the end of the second dimension as the sequence has rows left. It must have one, row <
// length: of a box that lies outside altogether TMA touches the map's address, which lies before the tensor.
FLASH_ATTN3_HD TmaRows tma_rows(bool packed, int32_t batch, int32_t begin, int32_t length, int32_t row, int32_t box) {
  if (!packed) return {row, batch};
  int32_t const left = max_int(0, min_int(box, length - row));
  return {box - left, begin + row + left};
}

// Where sequence `batch` of a packed batch has its first row in the arrays of statistics, and its first block in
// dq_sums. A sequence of n rows has room for n rounded up to 128, and 128 more: any block of up to 192 rows that begins
// below n may be read whole.
FLASH_ATTN3_HD int64_t statistics_begin(int32_t q_begin, int32_t batch) {
  return int64_t(q_begin) / 128 * 128 + int64_t(batch) * 256;
}
FLASH_ATTN3_HD int64_t sums_begin(int32_t q_begin, int32_t batch, int32_t block_m) {
  return int64_t(q_begin) / block_m + batch;
}

// The tile at a position inside sequence `batch` of a packed batch, of `blocks` blocks a head. `tokens` are those that
// a head walks; query heads of one key head are never parted.
FLASH_ATTN3_HD Tile tile_in_sequence(PackedOrder const& packed, int32_t batch, Sequence const& sequence, int32_t blocks,
                                     int32_t heads, int32_t heads_per_kv_head, int32_t tokens, int32_t position) {
  int32_t const kv_heads = heads / heads_per_kv_head;
  int32_t const together = max_int(1, min_int(kv_heads, packed.group_tokens / max_int(1, tokens)));
  int32_t const positions = blocks * heads;
  TileOrder const order{blocks,         heads, packed.group_tokens == 0 ? 1 : together * heads_per_kv_head,
                        positions,      1,     positions,
                        packed.reversed};
  Tile tile = tile_at(order, heads, position);
  tile.batch = batch;
  tile.sequence = sequence;
  return tile;
}

}  // namespace flash_attn3
