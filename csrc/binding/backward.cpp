// One allocation holds what lives between the kernels, all of it fp32 or int32:
//   lse_log2 (batch * heads or, packed, heads; stride) | delta (the same) | sums of dQ, "backward" only | tile
//   counters, counts of parts | partial sums of dK and dV, or lists of a packed batch (packed.cpp)
// "backward_prepare" fills the statistics and zeroes what follows them up to the counts of parts; what follows those
// needs no value. Every array begins at a multiple of 16 bytes.
#include "binding/backward.h"

#include <algorithm>

#include "binding/packed.h"
#include "binding/problem.h"
#include "host/geometry.h"
#include "torch/csrc/stable/accelerator.h"

namespace flash_attn3 {
namespace {

constexpr int kTileCounters = 4;  // two are used; 16 bytes

struct Inputs {
  Tensor const &dout, &q, &k, &v, &out, &lse;
  std::optional<Tensor> const &dlse, &sink;
  Lengths const* lengths;  // null: a dense batch
  Scores scores;
  bool deterministic;

  Problem check() const {
    Problem const problem = check_problem(q, k, v, sink, lengths, scores);
    check_like_out("dout", dout, problem, q);
    check_like_out("out", out, problem, q);
    check_like_lse("lse", lse, problem, q);
    if (dlse) check_like_lse("dlse", *dlse, problem, q);
    return problem;
  }
};

struct Gradients {
  Tensor dq, dk, dv;
};

// The tensors that the main kernels address through TMA.
struct Views {
  TensorView q, k, v, dout, dq, dk, dv;
};

// One of the main kernels: its tiles, and how it finds them.
struct MainKernel {
  int id;
  KernelRow const& row;
  TileOrder order;
  PackedOrder packed;
  int32_t* counter;  // null: by position
  int grid;
};

// Fills in what is particular to the kernel.
void launch_main(MainKernel const& kernel, Views const& views, BackwardParams& params, cudaStream_t stream) {
  KernelRow const& row = kernel.row;
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
  params.order = kernel.order;
  params.packed = kernel.packed;
  params.counter = kernel.counter;
  launch(kernel.id, params, kernel.grid, stream);
}

void set_problem(BackwardParams& params, Problem const& problem, Scores const& scores) {
  bool const packed = problem.packed;
  params.mask = problem.mask;
  params.batch = int32_t(problem.batch);
  params.heads = int32_t(problem.heads);
  params.kv_heads = int32_t(problem.kv_heads);
  params.heads_per_kv_head = int32_t(problem.heads / problem.kv_heads);
  params.seqlen_q = int32_t(problem.seqlen_q);
  params.seqlen_k = int32_t(problem.seqlen_k);
  params.statistics_stride = statistics_stride(problem);
  params.statistics_stride_batch = packed ? 0 : problem.heads * params.statistics_stride;
  params.lse_stride_head = problem.seqlen_q;
  params.lse_stride_batch = packed ? 0 : problem.heads * problem.seqlen_q;
  params.scale = float(scores.softmax_scale);
  params.scale_log2 = float((scores.softcap > 0 ? scores.softcap : scores.softmax_scale) * kLog2E);
  params.cap_scale = scores.softcap > 0 ? float(scores.softmax_scale / scores.softcap) : 0.f;
}

void set_dlse(BackwardParams& params, Tensor const& dlse) {
  int64_t const heads = dlse.dim() - 2;  // its dimension
  params.dlse = static_cast<float const*>(dlse.data_ptr());
  params.dlse_stride_batch = heads > 0 ? dlse.stride(0) : 0;
  params.dlse_stride_head = dlse.stride(heads);
  params.dlse_stride_sequence = dlse.stride(heads + 1);
}

void run(Problem const& problem, Inputs const& in, Gradients results, Tensor dsink) {
  bool const rows_exist = problem.batch > 0 && problem.heads > 0;
  bool const queries_meet_keys = rows_exist && problem.seqlen_q > 0 && problem.seqlen_k > 0;
  // Without keys there still are sinks, and rows of malformed sequences.
  bool const kernels_needed =
      queries_meet_keys || (rows_exist && (problem.packed || (in.sink && problem.seqlen_q > 0)));
  if (!kernels_needed) {
    for (Tensor* gradient : {&results.dq, &results.dk, &results.dv, &dsink}) torch::stable::zero_(*gradient);
    return;
  }
  int32_t const device = in.q.get_device_index();
  check_gpu(device);
  bool const capped = in.scores.softcap > 0;  // which the fused kernel does not know
  std::array<int, 3> const rows = select_backward(problem, in.deterministic || capped);
  if (rows[0] < 0) fail_without_kernel(problem, "backward");
  int const sink_row = in.sink ? row_of("backward_sink") : -1;
  KernelRow const& first_row = kKernelTable[rows[1]];
  bool const fused = is_op(first_row, "backward");

  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const q = prepared(in.q), k = prepared(in.k), v = prepared(in.v);
  Tensor const out = prepared(in.out), dout = prepared(in.dout), lse = contiguous(in.lse);
  Tensor dq = target_of(results.dq), dk = target_of(results.dk), dv = target_of(results.dv);
  std::optional<Tensor> const sink = contiguous(in.sink);
  if (!queries_meet_keys) {
    for (Tensor* gradient : {&dq, &dk, &dv}) torch::stable::zero_(*gradient);
  }

  BackwardParams params{};
  set_problem(params, problem, in.scores);
  params.head_dim = int32_t(dq.size(dq.dim() - 1));
  params.head_dim_v = int32_t(dv.size(dv.dim() - 1));
  params.out = strided(out);
  params.dout = strided(dout);
  params.dq = strided(dq);
  params.dk = strided(dk);
  params.dv = strided(dv);
  params.lse = static_cast<float const*>(lse.data_ptr());
  if (in.dlse) set_dlse(params, *in.dlse);
  params.sink = pointer_to<float const>(sink);
  params.dsink = static_cast<float*>(dsink.data_ptr());

  int const sms = multiprocessors(device);
  TileOrder const first_order = plan_order(problem, first_row, sms);
  PartialSums const partial = plan_partial_sums(first_order, first_row);
  DqSums const sums = fused ? plan_dq_sums(problem, first_row) : DqSums{};
  int64_t const statistics = (problem.packed ? 1 : problem.batch) * problem.heads * params.statistics_stride;
  int64_t const zeroing = fused ? 1 + (problem.packed ? 1 : problem.batch) * problem.kv_heads : 0;
  int64_t const cleared = kTileCounters + (partial.counts + zeroing + 3) / 4 * 4;
  int64_t const lists = problem.packed ? PackedBatch::words(problem.batch) : 0;
  Tensor const workspace =
      empty_cuda({2 * statistics + sums.count + cleared + partial.count + lists}, ScalarType::Float, device);
  params.lse_log2 = static_cast<float*>(workspace.data_ptr());
  params.delta = params.lse_log2 + statistics;
  params.dq_sums = params.delta + statistics;
  params.cleared = params.dq_sums + sums.count;
  params.cleared_count = cleared;
  auto* const counters = reinterpret_cast<int32_t*>(params.cleared);
  params.partial_counts = counters + kTileCounters;
  params.zeroing = params.partial_counts + partial.counts;
  params.partial_sums = params.cleared + cleared;
  params.sums_stride = sums.stride;
  params.sums_stride_batch = problem.packed ? 0 : problem.heads * sums.stride;
  params.dq_block_m = sums.block_m;
  params.dq_columns = sums.columns;
  params.dq_transposed = sums.transposed;

  std::optional<PackedBatch> batch;
  if (problem.packed) {
    batch.emplace(problem, *in.lengths, reinterpret_cast<int32_t*>(params.partial_sums + partial.count));
    params.query_gaps = batch->query_gaps();
    params.key_gaps = batch->key_gaps();
  }
  auto main_kernel = [&](int index, int id, TileOrder const& order) -> MainKernel {
    KernelRow const& row = kKernelTable[id];
    int const needed = batch ? packed_grid(problem, row, sms) : std::min(order.positions, sms);
    int const grid = fused ? sms : needed;  // CTAs without a tile help to zero the sums
    if (batch) return {id, row, order, batch->order(index, problem, row), counters + index, grid};
    int32_t* const counter = uses_counter(problem, order, sms) ? counters + index : nullptr;
    return {id, row, order, {}, counter, grid};
  };
  MainKernel const first = main_kernel(0, rows[1], first_order);
  std::optional<MainKernel> second;
  if (!fused) second.emplace(main_kernel(1, rows[2], plan_order(problem, kKernelTable[rows[2]], sms)));
  params.packed = first.packed;  // those before and after read the sequences

  cudaStream_t const stream = current_stream(device);
  if (batch) batch->schedule(stream);
  launch(rows[0], params, sms, stream);
  if (queries_meet_keys) {
    Views const views{view_of("q", q, problem),       view_of("k", k, problem),   view_of("v", v, problem),
                      view_of("dout", dout, problem), view_of("dq", dq, problem), view_of("dk", dk, problem),
                      view_of("dv", dv, problem)};
    launch_main(first, views, params, stream);
    if (second) {
      launch_main(*second, views, params, stream);
    } else {
      launch(rows[2], params, sms, stream);
    }
  }
  if (sink) launch(sink_row, params, sms, stream);
  deliver(dq, results.dq);
  deliver(dk, results.dk);
  deliver(dv, results.dv);
}

Tensor empty_dsink(Inputs const& in, Problem const& problem) {
  return empty_cuda({in.sink ? problem.heads : 0}, ScalarType::Float, in.q.get_device_index());
}

FourTensors run(Inputs const& in) {
  Problem const problem = in.check();
  auto empty_like = [](Tensor const& t) { return empty_cuda(sizes_of(t), t.scalar_type(), t.get_device_index()); };
  Gradients const results{empty_like(in.q), empty_like(in.k), empty_like(in.v)};
  Tensor const dsink = empty_dsink(in, problem);
  run(problem, in, results, dsink);
  return {results.dq, results.dk, results.dv, dsink};
}

Tensor run_into(Gradients const& results, Inputs const& in) {
  Problem const problem = in.check();
  struct Named {
    char const* name;
    Tensor const &gradient, &input;
  };
  for (Named const& t : {Named{"dq", results.dq, in.q}, Named{"dk", results.dk, in.k}, Named{"dv", results.dv, in.v}}) {
    Tensor const& input = t.input;
    if (problem.packed) {
      check_tensor(t.name, t.gradient, {input.size(0), input.size(1), input.size(2)}, in.q.scalar_type(), in.q);
    } else {
      check_tensor(t.name, t.gradient, {input.size(0), input.size(1), input.size(2), input.size(3)}, in.q.scalar_type(),
                   in.q);
    }
    check_no_overlap(t.name, t.gradient);
  }
  Tensor const dsink = empty_dsink(in, problem);
  run(problem, in, results, dsink);
  return dsink;
}

}  // namespace

FourTensors backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                     std::optional<Tensor> sink, double softmax_scale, int64_t window_left, int64_t window_right,
                     int64_t attention_chunk, double softcap, bool deterministic) {
  Scores const scores{softmax_scale, window_left, window_right, attention_chunk, softcap};
  return run({dout, q, k, v, out, lse, dlse, sink, nullptr, scores, deterministic});
}

Tensor backward_out(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                    std::optional<Tensor> sink, Tensor dq, Tensor dk, Tensor dv, double softmax_scale,
                    int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap,
                    bool deterministic) {
  Scores const scores{softmax_scale, window_left, window_right, attention_chunk, softcap};
  return run_into({dq, dk, dv}, {dout, q, k, v, out, lse, dlse, sink, nullptr, scores, deterministic});
}

FourTensors backward_varlen(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out,
                            Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> seqused_q,
                            std::optional<Tensor> seqused_k, std::optional<Tensor> sink, double softmax_scale,
                            int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap,
                            bool deterministic) {
  Lengths const lengths{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  Scores const scores{softmax_scale, window_left, window_right, attention_chunk, softcap};
  return run({dout, q, k, v, out, lse, dlse, sink, &lengths, scores, deterministic});
}

Tensor backward_varlen_out(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out,
                           Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> seqused_q,
                           std::optional<Tensor> seqused_k, std::optional<Tensor> sink, Tensor dq, Tensor dk, Tensor dv,
                           double softmax_scale, int64_t window_left, int64_t window_right, int64_t attention_chunk,
                           double softcap, bool deterministic) {
  Lengths const lengths{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  Scores const scores{softmax_scale, window_left, window_right, attention_chunk, softcap};
  return run_into({dq, dk, dv}, {dout, q, k, v, out, lse, dlse, sink, &lengths, scores, deterministic});
}

}  // namespace flash_attn3
