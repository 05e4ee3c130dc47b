#include "binding/schedule.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "host/geometry.h"
#include "host/plan.h"

namespace flash_attn3 {
namespace {

struct Question {
  KernelRow const& row;
  Problem problem;
  int num_sms;
};

Question question(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                  bool causal, int64_t num_sms) {
  if (row < 0 || row >= kKernelCount) fail("row is ", row, "; this build has ", kKernelCount, " kernels");
  if (heads < 0 || batch < 0 || seqlen_q < 0 || seqlen_k < 0 || num_sms < 1 ||
      (heads > 0 && (kv_heads < 1 || heads % kv_heads))) {
    fail("sizes must not be negative, num_sms at least 1 and heads a multiple of kv_heads");
  }
  KernelRow const& kernel = kKernelTable[row];
  if (kernel.block_m == 0) fail("row ", row, " is ", kernel.name, ", which has no tiles");
  return {kernel,
          {batch, heads, kv_heads, seqlen_q, seqlen_k, kernel.head_dim, kernel.head_dim_v, causal, true},
          int(std::min<int64_t>(num_sms, std::numeric_limits<int>::max()))};
}

// Calls line(cta, position, tile) for every tile or part of one in the order of time.
template <class Line>
void each_tile(Question const& asked, TileOrder const& order, Line line) {
  Problem const& p = asked.problem;
  int const grid = std::min(order.positions, asked.num_sms);
  bool const counter = uses_counter(p, order, asked.num_sms), keys = holds_keys(asked.row);
  for (int32_t step = 0; int64_t(step) * grid < order.positions; ++step) {
    for (int32_t cta = 0; cta < grid; ++cta) {
      int64_t const position = counter ? int64_t(step) * grid + cta : static_position(cta, grid, step);
      // The kernels' own call: with keys, block 0 is the longest and comes first.
      Tile const tile = tile_at(order, int32_t(keys ? p.kv_heads : p.heads), p.causal && !keys, position);
      if (tile.block >= 0) line(cta, position, tile);
    }
  }
}

Tensor table(std::vector<int64_t> const& lines, int columns) {
  Tensor result = empty_cpu({int64_t(lines.size() / columns), columns}, ScalarType::Long);
  std::memcpy(result.data_ptr(), lines.data(), lines.size() * sizeof(int64_t));
  return result;
}

Tensor schedule_of_queries(Question const& asked) {
  constexpr int kColumns = 8;
  Problem const& p = asked.problem;
  std::vector<int64_t> lines;
  if (p.batch * p.heads == 0 || p.seqlen_q == 0) return table(lines, kColumns);
  TileOrder const order = plan_order(p, asked.row, asked.num_sms);
  each_tile(asked, order, [&](int cta, int64_t position, Tile const& tile) {
    for (int w = 0; w < asked.row.block_m / kRowsPerWarpgroup; ++w) {
      int32_t const begin = tile.block * asked.row.block_m + w * kRowsPerWarpgroup;
      KeyRange const keys = key_range(begin, begin + kRowsPerWarpgroup, int32_t(p.seqlen_q), int32_t(p.seqlen_k),
                                      p.causal, asked.row.block_n);
      if (begin >= p.seqlen_q) continue;
      lines.insert(lines.end(), {cta, position, w, begin, tile.head, tile.batch, keys.key_blocks, keys.unmasked});
    }
  });
  return table(lines, kColumns);
}

Tensor schedule_of_keys(Question const& asked) {
  constexpr int kColumns = 11;
  Problem const& p = asked.problem;
  std::vector<int64_t> lines;
  if (p.batch * p.heads == 0 || p.seqlen_q == 0 || p.seqlen_k == 0) return table(lines, kColumns);
  TileOrder const order = plan_order(p, asked.row, asked.num_sms);
  each_tile(asked, order, [&](int cta, int64_t position, Tile const& tile) {
    int32_t const begin = tile.block * asked.row.block_n;
    QueryRange const queries = query_range(begin, begin + asked.row.block_n, int32_t(p.seqlen_q), int32_t(p.seqlen_k),
                                           p.causal, asked.row.block_m);
    StepRange const steps = steps_of(tile, order.parts, int32_t(p.heads / p.kv_heads) * (queries.end - queries.first));
    lines.insert(lines.end(), {cta, position, tile.block, tile.head, tile.batch, queries.first, queries.unmasked,
                               queries.end, tile.part, steps.begin, steps.end});
  });
  return table(lines, kColumns);
}

}  // namespace

Tensor schedule(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                bool causal, int64_t num_sms) {
  Question const asked = question(row, batch, heads, kv_heads, seqlen_q, seqlen_k, causal, num_sms);
  if (holds_keys(asked.row)) fail("row ", row, " is ", asked.row.name, "; ask schedule_backward");
  return schedule_of_queries(asked);
}

Tensor schedule_backward(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q,
                         int64_t seqlen_k, bool causal, int64_t num_sms) {
  Question const asked = question(row, batch, heads, kv_heads, seqlen_q, seqlen_k, causal, num_sms);
  return holds_keys(asked.row) ? schedule_of_keys(asked) : schedule_of_queries(asked);
}

}  // namespace flash_attn3
