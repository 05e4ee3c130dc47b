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

// Whatever its bytes, a group has about two rounds of tiles on the 132 SMs of an H100 SXM or H200, or all there are:
// the long tiles of the last group would start when the others are done, and few SMs would run them.
constexpr int64_t kGroupTiles = 2 * 132;

// From this length on the wider block of keys is faster: fewer steps weigh more than the waste at the edges.
// D 256, S 4096: 64 keys 720 and 688 (causal), 80 keys 697 and 659 TFLOP/s; S 16384: 742 and 735, 749 and 770.
constexpr int64_t kWideBlockKeys = 8192;

// Where two kernels without sums of dQ (backward_keys, backward_queries) are faster than one with them: where a query
// walks up to so many keys, none at the narrow head dims without a mask. Zeroing and converting the sums weighs more
// the fewer blocks a query walks. Figures in docs/perf_log.md: without a mask and causal.
constexpr int kNarrowHeadDim = 96;
constexpr int64_t kSeparateKeys = 768;
constexpr int64_t kSeparateKeysNarrow = 0;
constexpr int64_t kSeparateKeysMasked = 512;

// A tile is cut into at most so many parts; each costs as much as so many steps: loads of K and V that nothing hides,
// and its dK and dV in fp32.
constexpr int64_t kMostParts = 16;
constexpr int64_t kStepsOfPart = 10;

// Keys that a query walks, on average, if queries and keys are as many as the longer of both; of a packed batch, in a
// sequence of mean length.
int64_t keys_walked(Problem const& problem) {
  Mask const& mask = problem.mask;
  int64_t keys = std::max(problem.seqlen_q, problem.seqlen_k);
  if (problem.packed) keys /= std::max<int64_t>(1, problem.batch);
  if (mask.chunk > 0) keys = std::min<int64_t>(keys, mask.chunk);
  int64_t const half = (keys + 1) / 2;
  return std::min(keys, std::min<int64_t>(mask.left, half) + std::min<int64_t>(mask.right, half));
}

// Whether the two kernels that compute dK, dV and dQ apart are faster than `fused`, of the same head dims.
bool faster_apart(Problem const& problem, KernelRow const& fused) {
  char const* const wanted = std::getenv("FLASH_ATTN3_BACKWARD");  // for tests and measurements
  if (wanted != nullptr && std::strcmp(wanted, "fused") == 0) return false;
  bool const narrow = std::max(fused.head_dim, fused.head_dim_v) <= kNarrowHeadDim;
  int64_t most = narrow ? kSeparateKeysNarrow : kSeparateKeys;
  if (!sees_all(problem.mask)) most = kSeparateKeysMasked;
  return keys_walked(problem) <= most;
}

// The row of an operation that a problem takes, or -1. Columns first: every one is paid for, filled or not. Then the
// block of keys that suits the length; a packed batch always takes the narrow one.
int select(char const* op, Problem const& problem) {
  bool const wide = !problem.packed && problem.seqlen_k >= kWideBlockKeys;
  char const* const dtype = problem.fp8 ? "e4m3" : problem.bf16 ? "bf16" : "fp16";
  auto better = [&](KernelRow const& a, KernelRow const& b) {
    int const columns_a = a.head_dim + a.head_dim_v, columns_b = b.head_dim + b.head_dim_v;
    if (columns_a != columns_b) return columns_a < columns_b;
    return wide ? a.block_n > b.block_n : a.block_n < b.block_n;
  };
  int best = -1;
  for (int id = 0; id < kKernelCount; ++id) {
    KernelRow const& row = kKernelTable[id];
    if (row.head_dim < problem.head_dim || row.head_dim_v < problem.head_dim_v) continue;
    if (std::strcmp(row.dtype, dtype) != 0 || !is_op(row, op)) continue;
    if (best < 0 || better(row, kKernelTable[best])) best = id;
  }
  return best;
}

int columns(int id) { return kKernelTable[id].head_dim + kKernelTable[id].head_dim_v; }

int64_t heads_per_kv_head(Problem const& problem) { return problem.heads / problem.kv_heads; }

// Bytes of a token that the tiles of one key head share through L2: what a CTA walks, and what it adds to.
int64_t shared_bytes(Problem const& problem, KernelRow const& row) {
  int64_t const sums_bytes = is_op(row, "backward") ? int64_t(sizeof(float)) * row.head_dim : 0;
  return (problem.fp8 ? 1 : 2) * (problem.head_dim + problem.head_dim_v) + sums_bytes;
}

// What the tokens of a group may take.
int64_t group_limit(KernelRow const& row) { return holds_keys(row) ? kGroupBytesOfQueries : kGroupBytes; }

// Whether later blocks of a head are longer: causal queries. Causal keys begin with the longest, and all but the edge
// blocks of a window are alike.
bool grows(Problem const& problem, KernelRow const& row) {
  Mask const& mask = problem.mask;
  return !holds_keys(row) && mask.right != kUnbounded && mask.left == kUnbounded && mask.chunk == 0;
}

// Whether a kernel knows parts of tiles. Where another main kernel follows, its tiles fill the last round.
bool cuts_tiles(KernelRow const& row) { return is_op(row, "backward"); }

// Steps of the longest tile of a kernel that holds keys.
int64_t most_steps(Problem const& problem, KernelRow const& row, TileOrder const& order) {
  int32_t most = 0;
  for (int32_t block = 0; block < order.blocks; ++block) {
    int32_t const begin = block * row.block_n;
    QueryRange const range = query_range(begin, begin + row.block_n, int32_t(problem.seqlen_q),
                                         int32_t(problem.seqlen_k), problem.mask, row.block_m);
    most = std::max(most, range.end - range.first);
    if (sees_all(problem.mask)) break;  // all are alike
  }
  return heads_per_kv_head(problem) * most;
}

// Cuts the tiles of the last round, which not all SMs take part in, where the parts end sooner than whole tiles. Only
// for orders without a counter: either all tiles are alike, or they are few.
void cut_last_round(Problem const& problem, KernelRow const& row, int sms, TileOrder& order) {
  int64_t const last = order.whole % sms;
  if (last == 0) return;
  int64_t const steps = most_steps(problem, row, order);
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

Mask make_mask(int64_t window_left, int64_t window_right, int64_t attention_chunk, int64_t seqlen_q, int64_t seqlen_k) {
  // The last key is at the last query's position.
  Mask mask;
  if (window_left >= 0 && window_left < seqlen_k - 1) mask.left = int32_t(window_left);
  if (window_right >= 0 && window_right < seqlen_q - 1) mask.right = int32_t(window_right);
  // Rows before the first key see nothing with chunks, which they do with a window to the right.
  bool const one_chunk = attention_chunk >= seqlen_k && window_right == 0;
  if (attention_chunk > 0 && !one_chunk) mask.chunk = int32_t(std::min<int64_t>(attention_chunk, INT32_MAX));
  return mask;
}

int find_row(char const* op) {
  for (int id = 0; id < kKernelCount; ++id) {
    if (is_op(kKernelTable[id], op)) return id;
  }
  return -1;
}

bool is_op(KernelRow const& row, char const* op) { return std::strcmp(row.op, op) == 0; }

bool holds_keys(KernelRow const& row) { return is_op(row, "backward") || is_op(row, "backward_keys"); }

int select_forward(Problem const& problem) { return select(problem.fp8 ? "fp8_forward" : "forward", problem); }

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
  TileOrder order{0, 0, 1, 0, 1, 0, false};
  if (problem.packed) return order;
  bool const keys = holds_keys(row);
  int64_t const virtual_kv_heads = problem.batch * problem.kv_heads;
  order.blocks =
      keys ? ceil_div(int32_t(problem.seqlen_k), row.block_n) : ceil_div(int32_t(problem.seqlen_q), row.block_m);
  order.virtual_heads = int32_t(keys ? virtual_kv_heads : problem.batch * problem.heads);
  order.positions = order.whole = order.blocks * order.virtual_heads;
  order.reversed = grows(problem, row);
  // Without a mask, blocks of one head follow each other: what they walk is read by neighbours at the same time.
  if (!sees_all(problem.mask) && order.positions > 0) {
    int64_t const of_query_heads = keys ? 1 : heads_per_kv_head(problem);
    int64_t const walked = keys ? heads_per_kv_head(problem) * problem.seqlen_q : problem.seqlen_k;
    int64_t const head_bytes = std::max<int64_t>(1, walked * shared_bytes(problem, row));
    int64_t const head_tiles = of_query_heads * order.blocks;
    int64_t group = std::clamp<int64_t>(group_limit(row) / head_bytes, 1, virtual_kv_heads);
    // The last group is full or nearly so, for the sake of its long tiles.
    auto uneven = [&] { return virtual_kv_heads % group != 0 && 4 * (virtual_kv_heads % group) < 3 * group; };
    while (uneven()) --group;
    int64_t const least = std::min(virtual_kv_heads, (kGroupTiles + head_tiles / 2) / head_tiles);
    if (group < least) {
      group = least;
      while (uneven()) ++group;
    }
    order.group = int32_t(of_query_heads * group);
  }
  if (cuts_tiles(row) && !uses_counter(problem, order, sms)) cut_last_round(problem, row, sms, order);
  return order;
}

PackedOrder plan_packed_order(Problem const& problem, KernelRow const& row) {
  PackedOrder order{};
  order.batch = int32_t(problem.batch);
  order.reversed = grows(problem, row);
  if (!sees_all(problem.mask)) {
    // kGroupTiles in tokens that a head walks, if a sequence has as many queries as keys.
    int64_t const ratio = heads_per_kv_head(problem);
    int64_t const tokens = holds_keys(row) ? kGroupTiles * row.block_n * ratio : kGroupTiles * row.block_m / ratio;
    order.group_tokens = int32_t(
        std::min<int64_t>(std::max({group_limit(row) / shared_bytes(problem, row), tokens, int64_t(1)}), INT32_MAX));
  }
  return order;
}

int64_t most_tiles(Problem const& problem, KernelRow const& row) {
  return holds_keys(row) ? (problem.seqlen_k / row.block_n + problem.batch) * problem.kv_heads
                         : (problem.seqlen_q / row.block_m + problem.batch) * problem.heads;
}

bool uses_counter(Problem const& problem, TileOrder const& order, int sms) {
  return !sees_all(problem.mask) && order.blocks * order.virtual_heads > sms;
}

PartialSums plan_partial_sums(TileOrder const& order, KernelRow const& row) {
  int64_t const parts = order.positions - order.whole;
  return {parts * row.block_n * (row.head_dim + row.head_dim_v), 2 * parts / order.parts};
}

int64_t statistics_stride(Problem const& problem) {
  if (problem.packed) return statistics_begin(int32_t(problem.seqlen_q), int32_t(problem.batch));
  return (problem.seqlen_q + 127) / 128 * 128 + 128;
}

DqSums plan_dq_sums(Problem const& problem, KernelRow const& row) {
  // Two warpgroups share dQ of a block: 64 of its 128 rows each, or, of dQ^T, 64 of its 128 columns.
  bool const transposed = row.block_m != 2 * kRowsPerWarpgroup;
  int64_t const blocks = problem.packed ? sums_begin(int32_t(problem.seqlen_q), int32_t(problem.batch), row.block_m)
                                        : ceil_div(int32_t(problem.seqlen_q), row.block_m);
  int64_t const heads = problem.packed ? problem.heads : problem.batch * problem.heads;
  return {row.block_m, row.head_dim, transposed, blocks, heads * blocks * row.block_m * row.head_dim};
}

}  // namespace flash_attn3
