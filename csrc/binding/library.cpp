// Registers the implementations of the operators whose schemas flash_attn3/ops.py defines.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <string>
#include <tuple>

#include "binding/backward.h"
#include "binding/forward.h"
#include "binding/fp8.h"
#include "binding/problem.h"
#include "binding/schedule.h"
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

int64_t select_kernel(int64_t head_dim, int64_t head_dim_v, int64_t seqlen_q, int64_t seqlen_k, bool varlen,
                      bool bf16) {
  return select_forward({1, 1, 1, seqlen_q, seqlen_k, head_dim, head_dim_v, {}, bf16, varlen});
}

int64_t select_fp8(int64_t head_dim, int64_t head_dim_v, int64_t seqlen_q, int64_t seqlen_k) {
  Problem problem{1, 1, 1, seqlen_q, seqlen_k, head_dim, head_dim_v, {}, true};
  problem.fp8 = true;
  return select_forward(problem);
}

std::tuple<int64_t, int64_t, int64_t> select_backward_kernels(int64_t head_dim, int64_t head_dim_v, int64_t seqlen_q,
                                                              int64_t seqlen_k, int64_t window_left,
                                                              int64_t window_right, int64_t attention_chunk,
                                                              bool varlen, bool bf16, bool deterministic) {
  Mask const mask = make_mask(window_left, window_right, attention_chunk, varlen ? kUnbounded : seqlen_q,
                              varlen ? kUnbounded : seqlen_k);
  auto const [first, second, third] =
      select_backward({1, 1, 1, seqlen_q, seqlen_k, head_dim, head_dim_v, mask, bf16, varlen}, deterministic);
  return {first, second, third};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn3, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward_out", TORCH_BOX(&forward_out));
  m.impl("forward_varlen", TORCH_BOX(&forward_varlen));
  m.impl("forward_varlen_out", TORCH_BOX(&forward_varlen_out));
  m.impl("forward_fp8", TORCH_BOX(&forward_fp8));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward_out", TORCH_BOX(&backward_out));
  m.impl("backward_varlen", TORCH_BOX(&backward_varlen));
  m.impl("backward_varlen_out", TORCH_BOX(&backward_varlen_out));
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn3, CompositeExplicitAutograd, m) {
  m.impl("kernel_table", TORCH_BOX(&kernel_table));
  m.impl("launch_counts", TORCH_BOX(&launch_counts));
  m.impl("select_kernel", TORCH_BOX(&select_kernel));
  m.impl("select_fp8", TORCH_BOX(&select_fp8));
  m.impl("select_backward", TORCH_BOX(&select_backward_kernels));
  m.impl("schedule", TORCH_BOX(&schedule));
  m.impl("schedule_backward", TORCH_BOX(&schedule_backward));
  m.impl("schedule_varlen", TORCH_BOX(&schedule_varlen));
  m.impl("varlen_layout", TORCH_BOX(&varlen_layout));
}

}  // namespace flash_attn3
