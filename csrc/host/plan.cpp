#include "host/plan.h"

#include <algorithm>
#include <cstring>

#include "host/geometry.h"

namespace flash_attn3 {
namespace {

// K and V of the heads that a group walks together stay below half of the 60 MB of L2.
constexpr int64_t kGroupBytes = int64_t(32) << 20;

// From this length on the wider block of keys is faster: fewer steps weigh more than the waste at the edges.
// D 256, S 4096: 64 keys 721 and 685 (causal), 80 keys 722 and 675 TFLOP/s; S 16384: 752 and 777, 769 and 795.
constexpr int64_t kWideBlockKeys = 8192;

}  // namespace

int select_forward(ForwardProblem const& problem) {
  // Columns first: every one is paid for, filled or not. Then the block of keys that suits the length.
  bool const wide = problem.seqlen_k >= kWideBlockKeys;
  auto better = [&](KernelRow const& a, KernelRow const& b) {
    int const columns_a = a.head_dim + a.head_dim_v, columns_b = b.head_dim + b.head_dim_v;
    if (columns_a != columns_b) return columns_a < columns_b;
    return wide ? a.block_n > b.block_n : a.block_n < b.block_n;
  };
  int best = -1;
  for (int id = 0; id < kKernelCount; ++id) {
    KernelRow const& row = kKernelTable[id];
    if (std::strcmp(row.op, "forward") != 0 || (std::strcmp(row.dtype, "bf16") == 0) != problem.bf16) continue;
    if (row.head_dim < problem.head_dim || row.head_dim_v < problem.head_dim_v) continue;
    if (best < 0 || better(row, kKernelTable[best])) best = id;
  }
  return best;
}

TileOrder plan_order(ForwardProblem const& problem, int block_m) {
  TileOrder order;
  order.query_blocks = ceil_div(int32_t(problem.seqlen_q), block_m);
  order.virtual_heads = int32_t(problem.batch * problem.heads);
  order.num_tiles = order.query_blocks * order.virtual_heads;
  order.group = 1;  // query blocks of one head follow each other: its K and V are read by neighbours at the same time
  if (problem.causal) {
    int64_t const head_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v);
    int64_t const kv_heads = problem.batch * problem.kv_heads;
    int64_t group = std::clamp<int64_t>(kGroupBytes / std::max<int64_t>(1, head_bytes), 1, kv_heads);
    // The last group is full or nearly so: the long tiles of a small one would start when the GPU runs empty.
    auto uneven = [&] { return kv_heads % group != 0 && 4 * (kv_heads % group) < 3 * group; };
    while (uneven()) --group;
    order.group = int32_t(group * (problem.heads / problem.kv_heads));
  }
  return order;
}

bool uses_counter(ForwardProblem const& problem, TileOrder const& order, int grid) {
  return problem.causal && order.num_tiles > grid;
}

}  // namespace flash_attn3
