#include "binding/forward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "host/geometry.h"
#include "host/plan.h"
#include "host/tensor_map.h"
#include "torch/csrc/stable/accelerator.h"

namespace flash_attn3 {
namespace {

constexpr double kLog2E = 1.4426950408889634;
std::atomic<int64_t> launches[kMaxKernels];

void check_cuda(cudaError_t status, char const* what) {
  if (status != cudaSuccess) fail(what, ": ", cudaGetErrorString(status));
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

ForwardProblem check(Tensor const& q, Tensor const& k, Tensor const& v, double softmax_scale, bool causal) {
  struct Named {
    char const* name;
    Tensor const& tensor;
  };
  ScalarType const dtype = q.scalar_type();
  if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16) {
    fail("q has an unsupported dtype; the kernels take float16 and bfloat16");
  }
  for (Named const& t : {Named{"q", q}, Named{"k", k}, Named{"v", v}}) {
    if (t.tensor.dim() != 4) {
      fail(t.name, " has shape ", shape_of(t.tensor), "; expected 4 dimensions (batch, sequence, heads, head dim)");
    }
    if (!t.tensor.is_cuda()) fail(t.name, " is not a CUDA tensor; all of q, k and v must be on one CUDA device");
    if (t.tensor.scalar_type() != dtype) fail(t.name, " has another dtype than q; q, k and v must have the same");
    if (t.tensor.get_device_index() != q.get_device_index()) {
      fail(t.name, " is on cuda:", t.tensor.get_device_index(), " and q on cuda:", q.get_device_index(),
           "; all must be on one device");
    }
  }
  ForwardProblem const p{q.size(0), q.size(2), k.size(2),
                         q.size(1), k.size(1), q.size(3),
                         v.size(3), causal,    dtype == ScalarType::BFloat16};
  if (k.size(0) != p.batch) fail("k has shape ", shape_of(k), "; its batch size must be q's, ", p.batch);
  if (k.size(3) != p.head_dim) fail("k has shape ", shape_of(k), "; its head dim must be q's, ", p.head_dim);
  if (v.size(0) != p.batch || v.size(1) != p.seqlen_k || v.size(2) != p.kv_heads) {
    fail("v has shape ", shape_of(v), "; its batch, sequence and heads must be k's, ", shape_of(k));
  }
  if (p.kv_heads == 0 ? p.heads != 0 : p.heads % p.kv_heads != 0) {
    fail("q has ", p.heads, " heads and k ", p.kv_heads, "; q's must be a multiple of k's");
  }
  if (p.head_dim < 1 || p.head_dim_v < 1 || std::max(p.head_dim, p.head_dim_v) > 256) {
    fail("head dim ", p.head_dim, " with value head dim ", p.head_dim_v, "; the kernels take 1 to 256");
  }
  // As a normal float32, also times log2(e): a zero times the -inf of a masked score would be NaN.
  constexpr double kLeast = 0x1p-126, kMost = 0x1p127;
  if (!(softmax_scale >= kLeast && softmax_scale <= kMost)) {
    fail("softmax_scale is ", softmax_scale, "; the kernels need a number from ", kLeast, " to ", kMost);
  }
  constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max() - 1024;
  if (std::max(p.seqlen_q, p.seqlen_k) > kMaxLength) fail("a sequence is longer than ", kMaxLength);
  int64_t const tiles = p.batch * p.heads * ((p.seqlen_q + kRowsPerWarpgroup - 1) / kRowsPerWarpgroup);
  if (tiles > kMaxLength) fail("batch * heads * seqlen_q is too large: more than ", kMaxLength, " tiles of 64 rows");
  return p;
}

// TMA reads 16-byte aligned rows with strides of multiples of 16 bytes below 2^40.
bool readable_by_tma(Tensor const& t) {
  constexpr int64_t kAlignment = 8;  // elements of 2 bytes
  if (t.size(3) % kAlignment != 0 || (t.stride(3) != 1 && t.size(3) > 1)) return false;
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) return false;
  for (int i = 0; i < 3; ++i) {
    bool const regular = t.stride(i) % kAlignment == 0 && t.stride(i) < (int64_t(1) << 39);
    if (t.size(i) > 1 && !regular) return false;
  }
  return true;
}

// Copies the columns that both have.
void copy_columns(Tensor target, Tensor source) {
  int64_t const columns = std::min(target.size(3), source.size(3));
  Tensor to = torch::stable::narrow(target, 3, 0, columns);
  torch::stable::copy_(to, torch::stable::narrow(source, 3, 0, columns));
}

// The tensor itself, or a contiguous copy with the head dim filled up with zeros to a multiple of 8.
Tensor prepared(Tensor const& t) {
  if (t.numel() == 0 || readable_by_tma(t)) return t;
  int64_t const columns = (t.size(3) + 7) / 8 * 8;
  Tensor copy = empty_cuda({t.size(0), t.size(1), t.size(2), columns}, t.scalar_type(), t.get_device_index());
  if (columns != t.size(3)) torch::stable::zero_(copy);
  copy_columns(copy, t);
  return copy;
}

TensorView view_of(char const* name, Tensor const& t, bool bf16) {
  return {name, t.data_ptr(), t.size(0), t.size(1), t.size(2), t.size(3), t.stride(0), t.stride(1), t.stride(2), bf16};
}

void run(ForwardProblem const& problem, Tensor const& q_in, Tensor const& k_in, Tensor const& v_in, Tensor const& out,
         Tensor const& lse, double softmax_scale) {
  if (problem.batch == 0 || problem.heads == 0 || problem.seqlen_q == 0) return;
  int32_t const device = q_in.get_device_index();
  int const major = device_attribute(cudaDevAttrComputeCapabilityMajor, device);
  int const minor = device_attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) {
    fail("this GPU has compute capability ", major, ".", minor, "; the kernels need 9.0 (H100, H200)");
  }
  int const row_id = select_forward(problem);
  if (row_id < 0) {
    fail("this build has no kernel for head dim ", problem.head_dim, ", value head dim ", problem.head_dim_v, ", ",
         problem.bf16 ? "bfloat16" : "float16", "; see torch.ops.flash_attn3.kernel_table()");
  }
  KernelRow const& row = kKernelTable[row_id];

  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const q = prepared(q_in), k = prepared(k_in), v = prepared(v_in);
  int64_t const columns_out = (problem.head_dim_v + 7) / 8 * 8;
  bool const direct = out.size(3) == columns_out && readable_by_tma(out);
  Tensor target =
      direct ? out : empty_cuda({problem.batch, problem.seqlen_q, problem.heads, columns_out}, q.scalar_type(), device);

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
  params.order = plan_order(problem, row.block_m);
  params.heads = int32_t(problem.heads);
  params.heads_per_kv_head = int32_t(problem.heads / problem.kv_heads);
  params.seqlen_q = int32_t(problem.seqlen_q);
  params.seqlen_k = int32_t(problem.seqlen_k);
  params.scale = float(softmax_scale);
  params.scale_log2 = float(softmax_scale * kLog2E);
  params.causal = problem.causal;

  void* stream_handle = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr) fail("this torch has no CUDA support");
  if (aoti_torch_get_current_cuda_stream(device, &stream_handle)) fail("no current CUDA stream");
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  int const grid = std::min(params.order.num_tiles, device_attribute(cudaDevAttrMultiProcessorCount, device));
  params.counter = nullptr;
  Tensor counter;
  if (uses_counter(problem, params.order, grid)) {
    counter = empty_cuda({1}, ScalarType::Int, device);
    params.counter = static_cast<int32_t*>(counter.data_ptr());
    check_cuda(cudaMemsetAsync(params.counter, 0, sizeof(int32_t), stream), "cudaMemsetAsync");
  }
  row.launch(params, grid, stream);
  launches[row_id].fetch_add(1, std::memory_order_relaxed);
  if (!direct) {
    copy_columns(out, target);
  }
}

Tensor empty_lse(ForwardProblem const& p, Tensor const& q) {
  return empty_cuda({p.batch, p.heads, p.seqlen_q}, ScalarType::Float, q.get_device_index());
}

}  // namespace

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, double softmax_scale, bool causal) {
  ForwardProblem const p = check(q, k, v, softmax_scale, causal);
  Tensor out = empty_cuda({p.batch, p.seqlen_q, p.heads, p.head_dim_v}, q.scalar_type(), q.get_device_index());
  Tensor lse = empty_lse(p, q);
  run(p, q, k, v, out, lse, softmax_scale);
  return {out, lse};
}

Tensor forward_out(Tensor q, Tensor k, Tensor v, Tensor out, double softmax_scale, bool causal) {
  ForwardProblem const p = check(q, k, v, softmax_scale, causal);
  bool const fits = out.dim() == 4 && out.size(0) == p.batch && out.size(1) == p.seqlen_q && out.size(2) == p.heads &&
                    out.size(3) == p.head_dim_v;
  if (!fits) {
    fail("out has shape ", shape_of(out), "; expected (", p.batch, ", ", p.seqlen_q, ", ", p.heads, ", ", p.head_dim_v,
         ")");
  }
  if (out.scalar_type() != q.scalar_type() || !out.is_cuda() || out.get_device_index() != q.get_device_index()) {
    fail("out must have q's dtype and device");
  }
  for (int i = 0; i < 4; ++i) {
    if (out.stride(i) == 0 && out.size(i) > 1)
      fail("out has stride 0 in dimension ", i, "; its elements must not overlap");
  }
  Tensor lse = empty_lse(p, q);
  run(p, q, k, v, out, lse, softmax_scale);
  return lse;
}

int64_t launch_count(int row) { return launches[row].load(std::memory_order_relaxed); }

}  // namespace flash_attn3
