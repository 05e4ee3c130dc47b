#include "binding/problem.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "host/geometry.h"

namespace flash_attn3 {
namespace {

std::atomic<int64_t> launches[kMaxKernels];

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
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

// Uninitialised, contiguous, with the head dim rounded up to a multiple of 8.
Tensor empty_padded(Tensor const& t) {
  int64_t const columns = (t.size(3) + 7) / 8 * 8;
  return empty_cuda({t.size(0), t.size(1), t.size(2), columns}, t.scalar_type(), t.get_device_index());
}

// Copies the columns that both have.
void copy_columns(Tensor target, Tensor source) {
  int64_t const columns = std::min(target.size(3), source.size(3));
  Tensor to = torch::stable::narrow(target, 3, 0, columns);
  torch::stable::copy_(to, torch::stable::narrow(source, 3, 0, columns));
}

}  // namespace

Problem check_problem(Tensor const& q, Tensor const& k, Tensor const& v, double softmax_scale, bool causal) {
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
  Problem const p{q.size(0), q.size(2), k.size(2),
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

void check_tensor(char const* name, Tensor const& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype,
                  Tensor const& q) {
  bool fits = tensor.dim() == int64_t(sizes.size());
  int64_t i = 0;
  for (int64_t size : sizes) fits = fits && tensor.size(i++) == size;
  if (!fits) {
    std::ostringstream expected;
    for (int64_t size : sizes) expected << (expected.tellp() > 0 ? ", " : "") << size;
    fail(name, " has shape ", shape_of(tensor), "; expected (", expected.str(), ")");
  }
  if (tensor.scalar_type() != dtype) {
    fail(name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()), "; expected ",
         torch::headeronly::toString(dtype));
  }
  if (!tensor.is_cuda() || tensor.get_device_index() != q.get_device_index()) {
    fail(name, " is not on q's device, cuda:", q.get_device_index());
  }
}

void check_no_overlap(char const* name, Tensor const& tensor) {
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) == 0 && tensor.size(i) > 1) {
      fail(name, " has stride 0 in dimension ", i, "; its elements must not overlap");
    }
  }
}

void check_gpu(int32_t device) {
  int const major = device_attribute(cudaDevAttrComputeCapabilityMajor, device);
  int const minor = device_attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) {
    fail("this GPU has compute capability ", major, ".", minor, "; the kernels need 9.0 (H100, H200)");
  }
}

void fail_without_kernel(Problem const& problem, char const* pass) {
  fail("this build has no ", pass, " kernel for head dim ", problem.head_dim, ", value head dim ", problem.head_dim_v,
       ", ", problem.bf16 ? "bfloat16" : "float16", "; see torch.ops.flash_attn3.kernel_table()");
}

Tensor prepared(Tensor const& t) {
  if (t.numel() == 0 || readable_by_tma(t)) return t;
  Tensor copy = empty_padded(t);
  if (copy.size(3) != t.size(3)) torch::stable::zero_(copy);
  copy_columns(copy, t);
  return copy;
}

Tensor target_of(Tensor const& result) { return readable_by_tma(result) ? result : empty_padded(result); }

void deliver(Tensor const& target, Tensor const& result) {
  if (target.get() != result.get()) copy_columns(result, target);
}

TensorView view_of(char const* name, Tensor const& t, bool bf16) {
  return {name, t.data_ptr(), t.size(0), t.size(1), t.size(2), t.size(3), t.stride(0), t.stride(1), t.stride(2), bf16};
}

int multiprocessors(int32_t device) { return device_attribute(cudaDevAttrMultiProcessorCount, device); }

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr) fail("this torch has no CUDA support");
  if (aoti_torch_get_current_cuda_stream(device, &stream)) fail("no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

void launch(int row, ForwardParams const& params, int grid, cudaStream_t stream) {
  kKernelTable[row].forward(params, grid, stream);
  launches[row].fetch_add(1, std::memory_order_relaxed);
}

void launch(int row, BackwardParams const& params, int grid, cudaStream_t stream) {
  kKernelTable[row].backward(params, grid, stream);
  launches[row].fetch_add(1, std::memory_order_relaxed);
}

int64_t launch_count(int row) { return launches[row].load(std::memory_order_relaxed); }

void check_cuda(cudaError_t status, char const* what) {
  if (status != cudaSuccess) fail(what, ": ", cudaGetErrorString(status));
}

}  // namespace flash_attn3
