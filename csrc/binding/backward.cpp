// One allocation holds what lives between the kernels, all of it fp32 or int32:
//   lse_log2 (batch * heads, stride) | delta (the same) | sums of dQ, "backward" only | tile counters, counts of parts
//   | partial sums of dK and dV
// The first kernel fills the statistics and zeroes what follows them up to the partial sums, which need no value, so
// nothing else has to be launched before it. Every array begins at a multiple of 16 bytes.
#include "binding/backward.h"

#include <algorithm>
#include <limits>

#include "binding/problem.h"
#include "host/geometry.h"
#include "torch/csrc/stable/accelerator.h"

namespace flash_attn3 {
namespace {

constexpr int kTileCounters = 4;  // two are used; 16 bytes

struct Inputs {
  Tensor const &dout, &q, &k, &v, &out, &lse;
  std::optional<Tensor> const& dlse;
};

struct Gradients {
  Tensor dq, dk, dv;
};

Problem check(Inputs const& in, double softmax_scale, bool causal) {
  Problem const p = check_problem(in.q, in.k, in.v, softmax_scale, causal);
  ScalarType const dtype = in.q.scalar_type();
  check_tensor("dout", in.dout, {p.batch, p.seqlen_q, p.heads, p.head_dim_v}, dtype, in.q);
  check_tensor("out", in.out, {p.batch, p.seqlen_q, p.heads, p.head_dim_v}, dtype, in.q);
  check_tensor("lse", in.lse, {p.batch, p.heads, p.seqlen_q}, ScalarType::Float, in.q);
  if (in.dlse) check_tensor("dlse", *in.dlse, {p.batch, p.heads, p.seqlen_q}, ScalarType::Float, in.q);
  constexpr int64_t kMostTiles = std::numeric_limits<int32_t>::max() - 1024;
  int64_t const tiles = p.batch * p.kv_heads * ((p.seqlen_k + 63) / 64);
  if (tiles > kMostTiles) fail("batch * kv_heads * seqlen_k is too large: more than ", kMostTiles, " tiles of 64 keys");
  return p;
}

StridedTensor strided(Tensor const& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

Tensor contiguous(Tensor const& lse) {
  if (lse.is_contiguous()) return lse;
  Tensor copy = empty_cuda({lse.size(0), lse.size(1), lse.size(2)}, ScalarType::Float, lse.get_device_index());
  torch::stable::copy_(copy, lse);
  return copy;
}

// The tensors that the kernels address through TMA.
struct Views {
  TensorView q, k, v, dout, dq, dk, dv;
};

// Fills in what is particular to one of the main kernels and launches it.
void launch_main(int id, TileOrder const& order, Problem const& problem, Views const& views, BackwardParams& params,
                 int32_t* counter, int sms, cudaStream_t stream) {
  KernelRow const& row = kKernelTable[id];
  int const columns = chunk_columns(row.head_dim, row.head_dim_v);
  int const query_rows = holds_keys(row) ? row.block_m : kRowsPerWarpgroup;
  params.map_q = make_tensor_map(views.q, query_rows, columns);
  params.map_dout = make_tensor_map(views.dout, query_rows, columns);
  params.map_k = make_tensor_map(views.k, row.block_n, columns);
  params.map_v = make_tensor_map(views.v, row.block_n, columns);
  if (holds_keys(row)) {
    params.map_dk = make_tensor_map(views.dk, kRowsPerWarpgroup, columns);
    params.map_dv = make_tensor_map(views.dv, kRowsPerWarpgroup, columns);
  } else {
    params.map_dq = make_tensor_map(views.dq, kRowsPerWarpgroup, columns);
  }
  params.order = order;
  params.counter = uses_counter(problem, order, sms) ? counter : nullptr;
  launch(id, params, std::min(order.positions, sms), stream);
}

void run(Problem const& problem, Inputs const& in, Gradients results, double softmax_scale, bool deterministic) {
  if (problem.batch == 0 || problem.heads == 0 || problem.seqlen_q == 0 || problem.seqlen_k == 0) {
    for (Tensor* gradient : {&results.dq, &results.dk, &results.dv}) torch::stable::zero_(*gradient);
    return;  // no query meets a key
  }
  int32_t const device = in.q.get_device_index();
  check_gpu(device);
  std::array<int, 3> const rows = select_backward(problem, deterministic);
  if (rows[0] < 0) fail_without_kernel(problem, "backward");
  KernelRow const& first = kKernelTable[rows[1]];
  bool const fused = is_op(first, "backward");

  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const q = prepared(in.q), k = prepared(in.k), v = prepared(in.v);
  Tensor const out = prepared(in.out), dout = prepared(in.dout), lse = contiguous(in.lse);
  Tensor const dq = target_of(results.dq), dk = target_of(results.dk), dv = target_of(results.dv);

  int const sms = multiprocessors(device);
  TileOrder const order = plan_order(problem, first, sms);
  PartialSums const partial = plan_partial_sums(order, first);
  DqSums const sums = fused ? plan_dq_sums(problem, first) : DqSums{};
  int32_t const stride = statistics_stride(problem.seqlen_q);
  int64_t const statistics = problem.batch * problem.heads * stride;
  int64_t const counters = kTileCounters + (partial.counts + 3) / 4 * 4;
  int64_t const cleared = sums.count + counters;
  Tensor const workspace = empty_cuda({2 * statistics + cleared + partial.count}, ScalarType::Float, device);

  BackwardParams params{};
  params.lse_log2 = static_cast<float*>(workspace.data_ptr());
  params.delta = params.lse_log2 + statistics;
  params.dq_sums = params.cleared = params.delta + statistics;
  params.cleared_count = cleared;
  auto* const counter = reinterpret_cast<int32_t*>(params.dq_sums + sums.count);
  params.partial_counts = counter + kTileCounters;
  params.partial_sums = params.cleared + cleared;
  params.batch = int32_t(problem.batch);
  params.heads = int32_t(problem.heads);
  params.kv_heads = int32_t(problem.kv_heads);
  params.heads_per_kv_head = int32_t(problem.heads / problem.kv_heads);
  params.seqlen_q = int32_t(problem.seqlen_q);
  params.seqlen_k = int32_t(problem.seqlen_k);
  params.head_dim = int32_t(q.size(3));
  params.head_dim_v = int32_t(v.size(3));
  params.statistics_stride = stride;
  params.scale = float(softmax_scale);
  params.scale_log2 = float(softmax_scale * kLog2E);
  params.causal = problem.causal;
  params.out = strided(out);
  params.dout = strided(dout);
  params.dq = strided(dq);
  params.lse = static_cast<float const*>(lse.data_ptr());
  if (in.dlse) {
    params.dlse = static_cast<float const*>(in.dlse->data_ptr());
    params.dlse_stride_batch = in.dlse->stride(0);
    params.dlse_stride_head = in.dlse->stride(1);
    params.dlse_stride_sequence = in.dlse->stride(2);
  }
  params.dq_block_m = sums.block_m;
  params.dq_columns = sums.columns;
  params.dq_transposed = sums.transposed;

  bool const bf16 = problem.bf16;
  Views const views{view_of("q", q, bf16),       view_of("k", k, bf16),   view_of("v", v, bf16),
                    view_of("dout", dout, bf16), view_of("dq", dq, bf16), view_of("dk", dk, bf16),
                    view_of("dv", dv, bf16)};
  cudaStream_t const stream = current_stream(device);
  launch(rows[0], params, sms, stream);
  launch_main(rows[1], order, problem, views, params, counter, sms, stream);
  if (fused) {
    launch(rows[2], params, sms, stream);
  } else {
    TileOrder const second = plan_order(problem, kKernelTable[rows[2]], sms);
    launch_main(rows[2], second, problem, views, params, counter + 1, sms, stream);
  }
  deliver(dq, results.dq);
  deliver(dk, results.dk);
  deliver(dv, results.dv);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v,
                                            Tensor out, Tensor lse, double softmax_scale, bool causal,
                                            bool deterministic) {
  Inputs const in{dout, q, k, v, out, lse, dlse};
  Problem const problem = check(in, softmax_scale, causal);
  auto empty_like = [&](Tensor const& t) {
    return empty_cuda({t.size(0), t.size(1), t.size(2), t.size(3)}, t.scalar_type(), t.get_device_index());
  };
  Gradients const results{empty_like(q), empty_like(k), empty_like(v)};
  run(problem, in, results, softmax_scale, deterministic);
  return {results.dq, results.dk, results.dv};
}

void backward_out(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                  Tensor dq, Tensor dk, Tensor dv, double softmax_scale, bool causal, bool deterministic) {
  Inputs const in{dout, q, k, v, out, lse, dlse};
  Problem const p = check(in, softmax_scale, causal);
  ScalarType const dtype = q.scalar_type();
  check_tensor("dq", dq, {p.batch, p.seqlen_q, p.heads, p.head_dim}, dtype, q);
  check_tensor("dk", dk, {p.batch, p.seqlen_k, p.kv_heads, p.head_dim}, dtype, q);
  check_tensor("dv", dv, {p.batch, p.seqlen_k, p.kv_heads, p.head_dim_v}, dtype, q);
  check_no_overlap("dq", dq);
  check_no_overlap("dk", dk);
  check_no_overlap("dv", dv);
  run(p, in, {dq, dk, dv}, softmax_scale, deterministic);
}

}  // namespace flash_attn3
