#include "host/plan.h"

#include <algorithm>
#include <cstdlib>
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

// Where two kernels without sums of dQ (backward_keys, backward_queries) are faster than one with them: sequences up to
// these lengths, none at the narrow head dims without a mask. Zeroing and converting the sums weighs more the fewer
// blocks a query walks. Figures in docs/perf_log.md.
constexpr int kNarrowHeadDim = 96;
constexpr int64_t kSeparateKeys = 768;
constexpr int64_t kSeparateKeysNarrow = 0;
constexpr int64_t kSeparateKeysCausal = 1024;

// A tile is cut into at most so many parts; each costs as much as so many steps: loads of K and V that nothing hides,
// and its dK and dV in fp32.
constexpr int64_t kMostParts = 16;
constexpr int64_t kStepsOfPart = 10;

// Whether the two kernels that compute dK, dV and dQ apart are faster than `fused`, of the same head dims.
bool faster_apart(Problem const& problem, KernelRow const& fused) {
  char const* const wanted = std::getenv("FLASH_ATTN3_BACKWARD");  // for tests and measurements
  if (wanted != nullptr && std::strcmp(wanted, "fused") == 0) return false;
  int64_t const longest = std::max(problem.seqlen_q, problem.seqlen_k);
  if (problem.causal) return longest <= kSeparateKeysCausal;
  bool const narrow = std::max(fused.head_dim, fused.head_dim_v) <= kNarrowHeadDim;
  return longest <= (narrow ? kSeparateKeysNarrow : kSeparateKeys);
}

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

// Whether a kernel knows parts of tiles.
bool cuts_tiles(KernelRow const& row) { return holds_keys(row) && row.head_dim <= 128; }

// Steps of the longest tile of a kernel that holds keys, which is the first.
int64_t most_steps(Problem const& problem, KernelRow const& row) {
  QueryRange const range =
      query_range(0, row.block_n, int32_t(problem.seqlen_q), int32_t(problem.seqlen_k), problem.causal, row.block_m);
  return problem.heads / problem.kv_heads * int64_t(range.end - range.first);
}

// Cuts the tiles of the last round, which not all SMs take part in, where the parts end sooner than whole tiles.
void cut_last_round(Problem const& problem, KernelRow const& row, int sms, TileOrder& order) {
  int64_t const last = order.whole % sms;
  if (last == 0) return;
  int64_t const steps = most_steps(problem, row);
  auto duration = [&](int64_t parts) {
    if (parts == 1) return steps;
    int64_t const rounds = (last * parts + sms - 1) / sms;
    return rounds * ((steps + parts - 1) / parts + kStepsOfPart);
  };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= kMostParts; ++parts) {
    if (duration(parts) < duration(best)) best = parts;
  }
  if (best == 1) return;
  order.whole -= int32_t(last);
  order.parts = int32_t(best);
  order.positions = order.whole + int32_t(last * best);
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
  auto apart = [&] {
    // One kernel computes five GEMMs where two compute seven; not worth it if its tiles are wider.
    int const wider = columns(fused) - std::max(columns(keys), columns(queries));
    return wider > 0 || (wider == 0 && faster_apart(problem, kKernelTable[fused]));
  };
  if (prepare >= 0 && fused >= 0 && finish >= 0 && !(separate && apart())) return {prepare, fused, finish};
  if (prepare >= 0 && separate) return {prepare, keys, queries};
  return {-1, -1, -1};
}

TileOrder plan_order(Problem const& problem, KernelRow const& row, int sms) {
  bool const keys = holds_keys(row);
  int64_t const virtual_kv_heads = problem.batch * problem.kv_heads;
  TileOrder order;
  order.blocks =
      keys ? ceil_div(int32_t(problem.seqlen_k), row.block_n) : ceil_div(int32_t(problem.seqlen_q), row.block_m);
  order.virtual_heads = int32_t(keys ? virtual_kv_heads : problem.batch * problem.heads);
  order.positions = order.whole = order.blocks * order.virtual_heads;
  order.parts = 1;
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
  if (cuts_tiles(row) && !uses_counter(problem, order, sms)) cut_last_round(problem, row, sms, order);
  return order;
}

bool uses_counter(Problem const& problem, TileOrder const& order, int sms) {
  return problem.causal && order.blocks * order.virtual_heads > sms;
}

PartialSums plan_partial_sums(TileOrder const& order, KernelRow const& row) {
  int64_t const parts = order.positions - order.whole;
  return {parts * row.block_n * (row.head_dim + row.head_dim_v), 2 * parts / order.parts};
}

int32_t statistics_stride(int64_t seqlen_q) { return int32_t((seqlen_q + 127) / 128 * 128 + 128); }

DqSums plan_dq_sums(Problem const& problem, KernelRow const& row) {
  // Two warpgroups share dQ of a block: 64 of its 128 rows each, or, of dQ^T, 64 of its 128 columns.
  bool const transposed = row.block_m != 2 * kRowsPerWarpgroup;
  int64_t const blocks = ceil_div(int32_t(problem.seqlen_q), row.block_m);
  return {row.block_m, row.head_dim, transposed, problem.batch * problem.heads * blocks * row.block_m * row.head_dim};
}

}  // namespace flash_attn3
