// Registers the implementations of the operators whose schemas flash_attn3/ops.py defines.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "binding/forward.h"
#include "host/geometry.h"
#include "host/plan.h"

namespace flash_attn3 {
namespace {

// UTF-8 JSON, one object a row.
Tensor kernel_table() {
  std::ostringstream json;
  json << "[";
  for (int id = 0; id < kKernelCount; ++id) {
    KernelRow const& row = kKernelTable[id];
    json << (id ? ", " : "") << "{\"id\": " << id << ", \"name\": \"" << row.name << "\", \"op\": \"" << row.op
         << "\", \"dtype\": \"" << row.dtype << "\", \"head_dim\": " << row.head_dim
         << ", \"head_dim_v\": " << row.head_dim_v << ", \"block_m\": " << row.block_m
         << ", \"block_n\": " << row.block_n << "}";
  }
  json << "]";
  std::string const text = json.str();
  Tensor result = empty_cpu({int64_t(text.size())}, ScalarType::Byte);
  std::memcpy(result.data_ptr(), text.data(), text.size());
  return result;
}

Tensor launch_counts() {
  Tensor result = empty_cpu({kKernelCount}, ScalarType::Long);
  auto* const counts = static_cast<int64_t*>(result.data_ptr());
  for (int id = 0; id < kKernelCount; ++id) counts[id] = launch_count(id);
  return result;
}

int64_t select_kernel(int64_t head_dim, int64_t head_dim_v, int64_t seqlen_q, int64_t seqlen_k, bool causal,
                      bool bf16) {
  return select_forward({1, 1, 1, seqlen_q, seqlen_k, head_dim, head_dim_v, causal, bf16});
}

// What the kernel of a row would do, a line for each consumer warpgroup of each tile: cta, position in the order,
// warpgroup, first row, head, batch, key blocks, unmasked key blocks. CTAs that share a counter are numbered by
// position.
Tensor schedule(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                bool causal, int64_t num_sms) {
  if (row < 0 || row >= kKernelCount) fail("row is ", row, "; this build has ", kKernelCount, " kernels");
  if (heads < 0 || batch < 0 || seqlen_q < 0 || seqlen_k < 0 || num_sms < 1 ||
      (heads > 0 && (kv_heads < 1 || heads % kv_heads))) {
    fail("sizes must not be negative, num_sms at least 1 and heads a multiple of kv_heads");
  }
  if (batch * heads == 0 || seqlen_q == 0) return empty_cpu({0, 8}, ScalarType::Long);
  KernelRow const& kernel = kKernelTable[row];
  ForwardProblem const problem{batch,  heads, kv_heads, seqlen_q, seqlen_k, kernel.head_dim, kernel.head_dim_v,
                               causal, true};
  TileOrder const order = plan_order(problem, kernel.block_m);
  int const grid = int(std::min<int64_t>(order.num_tiles, num_sms));
  bool const counter = uses_counter(problem, order, grid);
  std::vector<int64_t> lines;
  for (int32_t step = 0; int64_t(step) * grid < order.num_tiles; ++step) {
    for (int32_t cta = 0; cta < grid; ++cta) {
      int64_t const position = counter ? int64_t(step) * grid + cta : static_position(cta, grid, step);
      Tile const tile = tile_at(order, int32_t(heads), causal, position);
      if (tile.query_block < 0) continue;
      for (int w = 0; w < kernel.block_m / kRowsPerWarpgroup; ++w) {
        int32_t const begin = tile.query_block * kernel.block_m + w * kRowsPerWarpgroup;
        KeyRange const keys =
            key_range(begin, begin + kRowsPerWarpgroup, int32_t(seqlen_q), int32_t(seqlen_k), causal, kernel.block_n);
        if (begin >= seqlen_q) continue;
        lines.insert(lines.end(), {cta, position, w, begin, tile.head, tile.batch, keys.key_blocks, keys.unmasked});
      }
    }
  }
  Tensor result = empty_cpu({int64_t(lines.size() / 8), 8}, ScalarType::Long);
  std::memcpy(result.data_ptr(), lines.data(), lines.size() * sizeof(int64_t));
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn3, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward_out", TORCH_BOX(&forward_out));
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn3, CompositeExplicitAutograd, m) {
  m.impl("kernel_table", TORCH_BOX(&kernel_table));
  m.impl("launch_counts", TORCH_BOX(&launch_counts));
  m.impl("select_kernel", TORCH_BOX(&select_kernel));
  m.impl("schedule", TORCH_BOX(&schedule));
}

}  // namespace flash_attn3
