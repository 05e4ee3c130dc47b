#include "host/plan.h"

#include <algorithm>
#include <cstring>

#include "host/geometry.h"

namespace flash_attn3 {
namespace {

// K and V of the heads that a group walks together stay below half of the 60 MB of L2.
constexpr int64_t kGroupBytes = int64_t(32) << 20;

// The same for Q, dO and the fp32 sums of dQ. Sums that stay in L2 take 3.5 TB/s of additions, others 1.4.
constexpr int64_t kGroupBytesOfQueries = int64_t(40) << 20;

// From this length on the wider block of keys is faster: fewer steps weigh more than the waste at the edges.
// D 256, S 4096: 64 keys 720 and 688 (causal), 80 keys 697 and 659 TFLOP/s; S 16384: 742 and 735, 749 and 770.
constexpr int64_t kWideBlockKeys = 8192;

// The row of an operation that a problem takes, or -1. Columns first: every one is paid for, filled or not. Then the
// block of keys that suits the length.
int select(char const* op, Problem const& problem) {
  bool const wide = problem.seqlen_k >= kWideBlockKeys;
  auto better = [&](KernelRow const& a, KernelRow const& b) {
    int const columns_a = a.head_dim + a.head_dim_v, columns_b = b.head_dim + b.head_dim_v;
    if (columns_a != columns_b) return columns_a < columns_b;
    return wide ? a.block_n > b.block_n : a.block_n < b.block_n;
  };
  int best = -1;
  for (int id = 0; id < kKernelCount; ++id) {
    KernelRow const& row = kKernelTable[id];
    if (row.head_dim < problem.head_dim || row.head_dim_v < problem.head_dim_v) continue;
    if ((std::strcmp(row.dtype, "bf16") == 0) != problem.bf16 || !is_op(row, op)) continue;
    if (best < 0 || better(row, kKernelTable[best])) best = id;
  }
  return best;
}

int columns(int id) { return kKernelTable[id].head_dim + kKernelTable[id].head_dim_v; }

// Bytes that the tiles of one key head share through L2: what a CTA walks, and what it adds to.
int64_t shared_bytes(Problem const& problem, KernelRow const& row) {
  int64_t const row_bytes = 2 * (problem.head_dim + problem.head_dim_v);
  if (!holds_keys(row)) return problem.seqlen_k * row_bytes;
  int64_t const sums_bytes = is_op(row, "backward") ? int64_t(sizeof(float)) * row.head_dim : 0;
  return problem.heads / problem.kv_heads * problem.seqlen_q * (row_bytes + sums_bytes);
}

}  // namespace

bool is_op(KernelRow const& row, char const* op) { return std::strcmp(row.op, op) == 0; }

bool holds_keys(KernelRow const& row) { return is_op(row, "backward") || is_op(row, "backward_keys"); }

int select_forward(Problem const& problem) { return select("forward", problem); }

std::array<int, 3> select_backward(Problem const& problem, bool deterministic) {
  int const prepare = select("backward_prepare", problem);
  int const keys = select("backward_keys", problem), queries = select("backward_queries", problem);
  int const finish = select("backward_finish", problem);
  int const fused = deterministic ? -1 : select("backward", problem);
  bool const separate = keys >= 0 && queries >= 0;
  // One kernel computes five GEMMs where two compute seven; not worth it if its tiles are wider.
  bool const narrow = fused >= 0 && (!separate || columns(fused) <= std::max(columns(keys), columns(queries)));
  if (prepare >= 0 && narrow && finish >= 0) return {prepare, fused, finish};
  if (prepare >= 0 && separate) return {prepare, keys, queries};
  return {-1, -1, -1};
}

TileOrder plan_order(Problem const& problem, KernelRow const& row) {
  bool const keys = holds_keys(row);
  int64_t const virtual_kv_heads = problem.batch * problem.kv_heads;
  TileOrder order;
  order.blocks =
      keys ? ceil_div(int32_t(problem.seqlen_k), row.block_n) : ceil_div(int32_t(problem.seqlen_q), row.block_m);
  order.virtual_heads = int32_t(keys ? virtual_kv_heads : problem.batch * problem.heads);
  order.num_tiles = order.blocks * order.virtual_heads;
  order.group = 1;  // blocks of one head follow each other: what they walk is read by neighbours at the same time
  if (problem.causal) {
    int64_t const limit = keys ? kGroupBytesOfQueries : kGroupBytes;
    int64_t const head_bytes = std::max<int64_t>(1, shared_bytes(problem, row));
    int64_t group = std::clamp<int64_t>(limit / head_bytes, 1, virtual_kv_heads);
    // The last group is full or nearly so: the long tiles of a small one would start when the GPU runs empty.
    auto uneven = [&] { return virtual_kv_heads % group != 0 && 4 * (virtual_kv_heads % group) < 3 * group; };
    while (uneven()) --group;
    order.group = int32_t(keys ? group : group * (problem.heads / problem.kv_heads));
  }
  return order;
}

bool uses_counter(Problem const& problem, TileOrder const& order, int grid) {
  return problem.causal && order.num_tiles > grid;
}

int32_t statistics_stride(int64_t seqlen_q) { return int32_t((seqlen_q + 127) / 128 * 128 + 128); }

DqSums plan_dq_sums(Problem const& problem, KernelRow const& row) {
  // Two warpgroups share dQ of a block: 64 of its 128 rows each, or, of dQ^T, 64 of its 128 columns.
  bool const transposed = row.block_m != 2 * kRowsPerWarpgroup;
  int64_t const blocks = ceil_div(int32_t(problem.seqlen_q), row.block_m);
  return {row.block_m, row.head_dim, transposed, problem.batch * problem.heads * blocks * row.block_m * row.head_dim};
}

}  // namespace flash_attn3
