#include "binding/fp8.h"

#include <algorithm>

#include "binding/forward.h"
#include "binding/problem.h"
#include "host/fp8_params.h"
#include "host/geometry.h"
#include "torch/csrc/stable/accelerator.h"

namespace flash_attn3 {
namespace {

// Any strides: scales of a whole tensor are often expanded ones.
Descale descale_of(char const* name, std::optional<Tensor> const& scales, Problem const& problem, Tensor const& q) {
  if (!scales) return {nullptr, 0, 0};
  check_tensor(name, *scales, {problem.batch, problem.kv_heads}, ScalarType::Float, q);
  return {static_cast<float const*>(scales->data_ptr()), scales->stride(0), scales->stride(1)};
}

// Transposed V as the kernel walks it: a box is a block of keys with all head dims.
CUtensorMap map_of_transposed(Fp8Params const& params, KernelRow const& row, int64_t columns, int64_t heads) {
  int64_t const blocks = ceil_div(params.seqlen_k, row.block_n), block_bytes = columns * kTransposedKeys;
  TensorView const view{"transposed v",
                        params.transposed,
                        heads,
                        columns,
                        blocks,
                        kTransposedKeys,
                        blocks * block_bytes,
                        kTransposedKeys,
                        block_bytes,
                        CU_TENSOR_MAP_DATA_TYPE_UINT8,
                        false};
  return make_tensor_map(view, row.head_dim_v, kTransposedKeys);
}

}  // namespace

std::tuple<Tensor, Tensor> forward_fp8(Tensor q, Tensor k, Tensor v, std::optional<Tensor> q_descale,
                                       std::optional<Tensor> k_descale, std::optional<Tensor> v_descale,
                                       std::optional<Tensor> sink, double softmax_scale, int64_t window_left,
                                       int64_t window_right, int64_t attention_chunk, double softcap) {
  Scores const scores{softmax_scale, window_left, window_right, attention_chunk, softcap};
  Problem const problem = check_problem(q, k, v, sink, nullptr, scores, true);
  Fp8Params params{};
  params.q_descale = descale_of("q_descale", q_descale, problem, q);
  params.k_descale = descale_of("k_descale", k_descale, problem, q);
  params.v_descale = descale_of("v_descale", v_descale, problem, q);
  Tensor const out = empty_out(problem, q), lse = empty_lse(problem, q);
  if (problem.heads == 0 || problem.seqlen_q == 0 || problem.batch == 0) return {out, lse};
  int32_t const device = q.get_device_index();
  check_gpu(device);
  int const id = select_forward(problem);
  if (id < 0) fail_without_kernel(problem, "forward");
  KernelRow const& row = kKernelTable[id];
  int const transpose = row_of("fp8_transpose");

  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const queries = prepared(q), keys = prepared(k), values = prepared(v), target = target_of(out);
  std::optional<Tensor> const sinks = contiguous(sink);
  int const columns = fp8_chunk_columns(row.head_dim);
  set_problem(params, problem, scores);
  params.map_q = make_tensor_map(view_of("q", queries, problem), kRowsPerWarpgroup, columns);
  params.map_o = make_tensor_map(view_of("out", target, problem), kRowsPerWarpgroup, 64);
  params.lse = static_cast<float*>(lse.data_ptr());
  params.sink = pointer_to<float const>(sinks);
  params.block_n = row.block_n;
  params.batch = int32_t(problem.batch);

  int const sms = multiprocessors(device);
  cudaStream_t const stream = current_stream(device);
  std::optional<Tensor> transposed;
  if (problem.seqlen_k > 0) {
    int64_t const heads = problem.batch * problem.kv_heads, value_columns = values.size(3);
    int64_t const blocks = ceil_div(params.seqlen_k, row.block_n);
    transposed = empty_cuda({heads * blocks * value_columns * kTransposedKeys}, ScalarType::Byte, device);
    params.transposed = static_cast<uint8_t*>(transposed->data_ptr());
    params.v = strided(values);
    params.head_dim_v = int32_t(value_columns);
    launch(transpose, params, 0, stream);
    params.map_k = make_tensor_map(view_of("k", keys, problem), row.block_n, columns);
    params.map_v = map_of_transposed(params, row, value_columns, heads);
  } else {
    params.map_k = params.map_v = params.map_q;  // never read
  }
  params.head_dim_v = int32_t(target.size(3));
  params.order = plan_order(problem, row, sms);
  std::optional<Tensor> const counter = tile_counter(params, problem, device, sms, stream);
  launch(id, params, std::min(params.order.positions, sms), stream);
  deliver(target, out);
  return {out, lse};
}

}  // namespace flash_attn3
