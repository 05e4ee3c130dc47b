#include "binding/forward.h"

#include <algorithm>

#include "binding/packed.h"
#include "binding/problem.h"
#include "host/geometry.h"
#include "torch/csrc/stable/accelerator.h"

namespace flash_attn3 {
namespace {

struct Inputs {
  Tensor const &q, &k, &v;
  std::optional<Tensor> const& sink;
  Lengths const* lengths;  // null: a dense batch
  Scores scores;

  Problem check() const { return check_problem(q, k, v, sink, lengths, scores); }
};

void run(Problem const& problem, Inputs const& in, Tensor const& out, Tensor const& lse) {
  // A packed batch without sequences has rows that no sequence owns.
  if (problem.heads == 0 || problem.seqlen_q == 0 || (problem.batch == 0 && !problem.packed)) return;
  int32_t const device = in.q.get_device_index();
  check_gpu(device);
  int const id = select_forward(problem);
  if (id < 0) fail_without_kernel(problem, "forward");
  KernelRow const& row = kKernelTable[id];

  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const q = prepared(in.q), k = prepared(in.k), v = prepared(in.v), target = target_of(out);
  std::optional<Tensor> const sink = contiguous(in.sink);
  int const columns = chunk_columns(row.head_dim, row.head_dim_v);
  ForwardParams params{};
  params.map_q = make_tensor_map(view_of("q", q, problem), kRowsPerWarpgroup, columns);
  params.map_o = make_tensor_map(view_of("out", target, problem), kRowsPerWarpgroup, columns);
  if (problem.seqlen_k > 0) {
    params.map_k = make_tensor_map(view_of("k", k, problem), row.block_n, columns);
    params.map_v = make_tensor_map(view_of("v", v, problem), row.block_n, columns);
  } else {
    params.map_k = params.map_v = params.map_q;  // never read
  }
  set_problem(params, problem, in.scores);
  params.lse = static_cast<float*>(lse.data_ptr());
  params.sink = pointer_to<float const>(sink);
  params.head_dim_v = int32_t(target.size(target.dim() - 1));

  int const sms = multiprocessors(device);
  cudaStream_t const stream = current_stream(device);
  params.order = plan_order(problem, row, sms);
  std::optional<Tensor> workspace;  // the tile counter, or what the kernels of a packed batch share
  if (problem.packed) {
    workspace = empty_cuda({PackedBatch::words(problem.batch)}, ScalarType::Int, device);
    PackedBatch batch(problem, *in.lengths, static_cast<int32_t*>(workspace->data_ptr()));
    params.packed = batch.order(0, problem, row);
    params.gaps = batch.query_gaps();
    params.out = strided(target);
    params.counter = batch.counter(0);
    batch.schedule(stream);
    launch(id, params, packed_grid(problem, row, sms), stream);
  } else {
    workspace = tile_counter(params, problem, device, sms, stream);
    launch(id, params, std::min(params.order.positions, sms), stream);
  }
  deliver(target, out);
}

std::tuple<Tensor, Tensor> run(Inputs const& in) {
  Problem const problem = in.check();
  Tensor const out = empty_out(problem, in.q), lse = empty_lse(problem, in.q);
  run(problem, in, out, lse);
  return {out, lse};
}

Tensor run_into(Tensor const& out, Inputs const& in) {
  Problem const problem = in.check();
  check_like_out("out", out, problem, in.q);
  check_no_overlap("out", out);
  Tensor const lse = empty_lse(problem, in.q);
  run(problem, in, out, lse);
  return lse;
}

}  // namespace

void set_problem(ForwardParams& params, Problem const& problem, Scores const& scores) {
  params.lse_stride_head = problem.seqlen_q;
  params.lse_stride_batch = problem.packed ? 0 : problem.heads * problem.seqlen_q;
  params.mask = problem.mask;
  params.heads = int32_t(problem.heads);
  params.heads_per_kv_head = int32_t(problem.heads / problem.kv_heads);
  params.seqlen_q = int32_t(problem.seqlen_q);
  params.seqlen_k = int32_t(problem.seqlen_k);
  double const scale = scores.softcap > 0 ? scores.softcap : scores.softmax_scale;
  params.scale = float(scale);
  params.scale_log2 = float(scale * kLog2E);
  params.cap_scale = scores.softcap > 0 ? float(scores.softmax_scale / scores.softcap) : 0.f;
}

std::optional<Tensor> tile_counter(ForwardParams& params, Problem const& problem, int32_t device, int sms,
                                   cudaStream_t stream) {
  if (!uses_counter(problem, params.order, sms)) return std::nullopt;
  Tensor const counter = empty_cuda({1}, ScalarType::Int, device);
  params.counter = static_cast<int32_t*>(counter.data_ptr());
  check_cuda(cudaMemsetAsync(params.counter, 0, sizeof(int32_t), stream), "cudaMemsetAsync");
  return counter;
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sink, double softmax_scale,
                                   int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap) {
  return run({q, k, v, sink, nullptr, {softmax_scale, window_left, window_right, attention_chunk, softcap}});
}

Tensor forward_out(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sink, Tensor out, double softmax_scale,
                   int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap) {
  return run_into(out, {q, k, v, sink, nullptr, {softmax_scale, window_left, window_right, attention_chunk, softcap}});
}

std::tuple<Tensor, Tensor> forward_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                          std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
                                          std::optional<Tensor> sink, double softmax_scale, int64_t window_left,
                                          int64_t window_right, int64_t attention_chunk, double softcap) {
  Lengths const lengths{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  return run({q, k, v, sink, &lengths, {softmax_scale, window_left, window_right, attention_chunk, softcap}});
}

Tensor forward_varlen_out(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                          std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k, std::optional<Tensor> sink,
                          Tensor out, double softmax_scale, int64_t window_left, int64_t window_right,
                          int64_t attention_chunk, double softcap) {
  Lengths const lengths{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  return run_into(out, {q, k, v, sink, &lengths, {softmax_scale, window_left, window_right, attention_chunk, softcap}});
}

}  // namespace flash_attn3
