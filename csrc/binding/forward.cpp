#include "binding/forward.h"

#include <algorithm>
#include <optional>

#include "binding/problem.h"
#include "host/geometry.h"
#include "torch/csrc/stable/accelerator.h"

namespace flash_attn3 {
namespace {

void run(Problem const& problem, Tensor const& q_in, Tensor const& k_in, Tensor const& v_in, Tensor const& out,
         Tensor const& lse, double softmax_scale) {
  if (problem.batch == 0 || problem.heads == 0 || problem.seqlen_q == 0) return;
  int32_t const device = q_in.get_device_index();
  check_gpu(device);
  int const id = select_forward(problem);
  if (id < 0) fail_without_kernel(problem, "forward");
  KernelRow const& row = kKernelTable[id];

  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const q = prepared(q_in), k = prepared(k_in), v = prepared(v_in), target = target_of(out);
  int const columns = chunk_columns(row.head_dim, row.head_dim_v);
  ForwardParams params;
  params.map_q = make_tensor_map(view_of("q", q, problem.bf16), kRowsPerWarpgroup, columns);
  params.map_o = make_tensor_map(view_of("out", target, problem.bf16), kRowsPerWarpgroup, columns);
  if (problem.seqlen_k > 0) {
    params.map_k = make_tensor_map(view_of("k", k, problem.bf16), row.block_n, columns);
    params.map_v = make_tensor_map(view_of("v", v, problem.bf16), row.block_n, columns);
  } else {
    params.map_k = params.map_v = params.map_q;  // never read
  }
  params.lse = static_cast<float*>(lse.data_ptr());
  int const sms = multiprocessors(device);
  params.order = plan_order(problem, row, sms);
  params.heads = int32_t(problem.heads);
  params.heads_per_kv_head = int32_t(problem.heads / problem.kv_heads);
  params.seqlen_q = int32_t(problem.seqlen_q);
  params.seqlen_k = int32_t(problem.seqlen_k);
  params.scale = float(softmax_scale);
  params.scale_log2 = float(softmax_scale * kLog2E);
  params.causal = problem.causal;

  cudaStream_t const stream = current_stream(device);
  int const grid = std::min(params.order.positions, sms);
  params.counter = nullptr;
  std::optional<Tensor> counter;
  if (uses_counter(problem, params.order, sms)) {
    counter = empty_cuda({1}, ScalarType::Int, device);
    params.counter = static_cast<int32_t*>(counter->data_ptr());
    check_cuda(cudaMemsetAsync(params.counter, 0, sizeof(int32_t), stream), "cudaMemsetAsync");
  }
  launch(id, params, grid, stream);
  deliver(target, out);
}

Tensor empty_lse(Problem const& p, Tensor const& q) {
  return empty_cuda({p.batch, p.heads, p.seqlen_q}, ScalarType::Float, q.get_device_index());
}

}  // namespace

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, double softmax_scale, bool causal) {
  Problem const p = check_problem(q, k, v, softmax_scale, causal);
  Tensor out = empty_cuda({p.batch, p.seqlen_q, p.heads, p.head_dim_v}, q.scalar_type(), q.get_device_index());
  Tensor lse = empty_lse(p, q);
  run(p, q, k, v, out, lse, softmax_scale);
  return {out, lse};
}

Tensor forward_out(Tensor q, Tensor k, Tensor v, Tensor out, double softmax_scale, bool causal) {
  Problem const p = check_problem(q, k, v, softmax_scale, causal);
  check_tensor("out", out, {p.batch, p.seqlen_q, p.heads, p.head_dim_v}, q.scalar_type(), q);
  check_no_overlap("out", out);
  Tensor lse = empty_lse(p, q);
  run(p, q, k, v, out, lse, softmax_scale);
  return lse;
}

}  // namespace flash_attn3
