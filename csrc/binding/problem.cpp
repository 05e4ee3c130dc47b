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

bool is_fp8(Tensor const& t) { return t.scalar_type() == ScalarType::Float8_e4m3fn; }

// Elements of 16 bytes.
int64_t alignment_of(Tensor const& t) { return is_fp8(t) ? 16 : 8; }

// TMA reads 16-byte aligned rows with strides of multiples of 16 bytes below 2^40.
bool readable_by_tma(Tensor const& t) {
  int64_t const alignment = alignment_of(t);
  int64_t const last = t.dim() - 1;
  if (t.size(last) % alignment != 0 || (t.stride(last) != 1 && t.size(last) > 1)) return false;
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) return false;
  for (int64_t i = 0; i < last; ++i) {
    bool const regular = t.stride(i) % alignment == 0 && t.stride(i) < (int64_t(1) << 39);
    if (t.size(i) > 1 && !regular) return false;
  }
  return true;
}

// Uninitialised, contiguous, with the head dim rounded up to a multiple of 16 bytes.
Tensor empty_padded(Tensor const& t) {
  std::vector<int64_t> sizes = sizes_of(t);
  int64_t const alignment = alignment_of(t);
  sizes.back() = (sizes.back() + alignment - 1) / alignment * alignment;
  return empty_cuda(sizes, t.scalar_type(), t.get_device_index());
}

// Copies the columns that both have.
void copy_columns(Tensor target, Tensor source) {
  int64_t const last = target.dim() - 1;
  int64_t const columns = std::min(target.size(last), source.size(last));
  Tensor to = torch::stable::narrow(target, last, 0, columns);
  torch::stable::copy_(to, torch::stable::narrow(source, last, 0, columns));
}

// Lengths and numbers of tiles stay below it: the kernels count in int32, and go past the end by a tile and a CTA each.
constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;

// As a normal float32, also times log2(e): a zero times the -inf of a masked score would be NaN.
constexpr double kLeastScale = 0x1p-126, kMostScale = 0x1p127;
bool is_scale(double scale) { return scale >= kLeastScale && scale <= kMostScale; }

void check_scores(Scores const& s) {
  if (!is_scale(s.softmax_scale)) {
    fail("softmax_scale is ", s.softmax_scale, "; the kernels need a number from ", kLeastScale, " to ", kMostScale);
  }
  if (s.softcap != 0 && !(is_scale(s.softcap) && is_scale(s.softmax_scale / s.softcap))) {
    fail("softcap is ", s.softcap, " with softmax_scale ", s.softmax_scale, "; the kernels need 0 for none, or it and ",
         "softmax_scale / softcap from ", kLeastScale, " to ", kMostScale);
  }
  if (s.window_left < -1) fail("window_left is ", s.window_left, "; expected -1 for no bound, or a number of keys");
  if (s.window_right < -1) fail("window_right is ", s.window_right, "; expected -1 for no bound, or a number of keys");
  if (s.attention_chunk < 0) {
    fail("attention_chunk is ", s.attention_chunk, "; expected 0 for none, or a number of keys");
  }
}

// Returns the number of sequences.
int64_t check_lengths(Lengths const& in, Tensor const& q) {
  Tensor const& cu_q = in.cu_seqlens_q;
  if (cu_q.dim() != 1 || cu_q.size(0) < 1) {
    fail("cu_seqlens_q has shape ", shape_of(cu_q), "; expected (sequences + 1,), at least (1,)");
  }
  check_tensor("cu_seqlens_q", cu_q, {cu_q.size(0)}, ScalarType::Int, q);
  check_tensor("cu_seqlens_k", in.cu_seqlens_k, {cu_q.size(0)}, ScalarType::Int, q);
  int64_t const batch = cu_q.size(0) - 1;
  if (in.seqused_q) check_tensor("seqused_q", *in.seqused_q, {batch}, ScalarType::Int, q);
  if (in.seqused_k) check_tensor("seqused_k", *in.seqused_k, {batch}, ScalarType::Int, q);
  if (batch > kMost) fail("cu_seqlens_q has ", batch, " sequences; the kernels take up to ", kMost);
  return batch;
}

// Tiles of `rows` rows in all sequences, by the smallest tile.
int64_t most_tiles_of(Problem const& p, int64_t rows, int64_t heads) {
  int64_t const blocks = (rows + kRowsPerWarpgroup - 1) / kRowsPerWarpgroup;
  return heads * (p.packed ? blocks + p.batch : blocks * p.batch);
}

}  // namespace

Problem check_problem(Tensor const& q, Tensor const& k, Tensor const& v, std::optional<Tensor> const& sink,
                      Lengths const* lengths, Scores const& scores, bool fp8) {
  struct Named {
    char const* name;
    Tensor const& tensor;
  };
  bool const packed = lengths != nullptr;
  int64_t const dims = packed ? 3 : 4;
  ScalarType const dtype = q.scalar_type();
  bool const supported = fp8 ? is_fp8(q) : dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  if (!supported) {
    fail("q has dtype ", torch::headeronly::toString(dtype), "; this operator's kernels take ",
         fp8 ? "float8_e4m3fn" : "float16 and bfloat16");
  }
  for (Named const& t : {Named{"q", q}, Named{"k", k}, Named{"v", v}}) {
    if (t.tensor.dim() != dims) {
      fail(t.name, " has shape ", shape_of(t.tensor), "; expected ", dims,
           packed ? " dimensions (rows of all sequences, heads, head dim)"
                  : " dimensions (batch, sequence, heads, head dim)");
    }
    if (!t.tensor.is_cuda()) fail(t.name, " is not a CUDA tensor; all of q, k and v must be on one CUDA device");
    if (t.tensor.scalar_type() != dtype) fail(t.name, " has another dtype than q; q, k and v must have the same");
    if (t.tensor.get_device_index() != q.get_device_index()) {
      fail(t.name, " is on cuda:", t.tensor.get_device_index(), " and q on cuda:", q.get_device_index(),
           "; all must be on one device");
    }
  }
  int64_t const rows = dims - 3, heads = dims - 2, columns = dims - 1;  // dimensions
  Problem p{packed ? check_lengths(*lengths, q) : q.size(0),
            q.size(heads),
            k.size(heads),
            q.size(rows),
            k.size(rows),
            q.size(columns),
            v.size(columns),
            {},
            dtype != ScalarType::Half,
            packed,
            fp8};
  if (!packed && k.size(0) != p.batch) fail("k has shape ", shape_of(k), "; its batch size must be q's, ", p.batch);
  if (k.size(columns) != p.head_dim) fail("k has shape ", shape_of(k), "; its head dim must be q's, ", p.head_dim);
  for (int64_t i = 0; i < columns; ++i) {
    if (v.size(i) != k.size(i)) {
      fail("v has shape ", shape_of(v), "; all but its head dim must be k's, ", shape_of(k));
    }
  }
  if (p.kv_heads == 0 ? p.heads != 0 : p.heads % p.kv_heads != 0) {
    fail("q has ", p.heads, " heads and k ", p.kv_heads, "; q's must be a multiple of k's");
  }
  if (p.head_dim < 1 || p.head_dim_v < 1 || std::max(p.head_dim, p.head_dim_v) > 256) {
    fail("head dim ", p.head_dim, " with value head dim ", p.head_dim_v, "; the kernels take 1 to 256");
  }
  if (sink) check_tensor("sink", *sink, {p.heads}, ScalarType::Float, q);
  check_scores(scores);
  if (p.seqlen_q > kMost) fail("q has shape ", shape_of(q), "; the kernels take up to ", kMost, " rows");
  if (p.seqlen_k > kMost) fail("k has shape ", shape_of(k), "; the kernels take up to ", kMost, " rows");
  if (most_tiles_of(p, p.seqlen_q, p.heads) > kMost) {
    fail("q has shape ", shape_of(q), " with ", p.batch, " sequences: more than ", kMost,
         " tiles of 64 rows and a head");
  }
  if (most_tiles_of(p, p.seqlen_k, p.kv_heads) > kMost) {
    fail("k has shape ", shape_of(k), " with ", p.batch, " sequences: more than ", kMost,
         " tiles of 64 rows and a head");
  }
  p.mask = make_mask(scores.window_left, scores.window_right, scores.attention_chunk, packed ? kUnbounded : p.seqlen_q,
                     packed ? kUnbounded : p.seqlen_k);
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

void check_like_out(char const* name, Tensor const& tensor, Problem const& p, Tensor const& q) {
  if (p.packed) {
    check_tensor(name, tensor, {p.seqlen_q, p.heads, p.head_dim_v}, q.scalar_type(), q);
  } else {
    check_tensor(name, tensor, {p.batch, p.seqlen_q, p.heads, p.head_dim_v}, q.scalar_type(), q);
  }
}

void check_like_lse(char const* name, Tensor const& tensor, Problem const& p, Tensor const& q) {
  if (p.packed) {
    check_tensor(name, tensor, {p.heads, p.seqlen_q}, ScalarType::Float, q);
  } else {
    check_tensor(name, tensor, {p.batch, p.heads, p.seqlen_q}, ScalarType::Float, q);
  }
}

Tensor empty_out(Problem const& p, Tensor const& q) {
  std::vector<int64_t> sizes{p.batch, p.seqlen_q, p.heads, p.head_dim_v};
  if (p.packed) sizes.erase(sizes.begin());
  return empty_cuda(sizes, p.fp8 ? ScalarType::BFloat16 : q.scalar_type(), q.get_device_index());
}

Tensor empty_lse(Problem const& p, Tensor const& q) {
  std::vector<int64_t> sizes{p.batch, p.heads, p.seqlen_q};
  if (p.packed) sizes.erase(sizes.begin());
  return empty_cuda(sizes, ScalarType::Float, q.get_device_index());
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
       ", ",
       problem.fp8    ? "float8_e4m3fn"
       : problem.bf16 ? "bfloat16"
                      : "float16",
       "; see torch.ops.flash_attn3.kernel_table()");
}

int row_of(char const* op) {
  int const row = find_row(op);
  if (row < 0) fail("this build has no kernel ", op, "; see torch.ops.flash_attn3.kernel_table()");
  return row;
}

Tensor prepared(Tensor const& t) {
  if (t.numel() == 0 || readable_by_tma(t)) return t;
  Tensor copy = empty_padded(t);
  if (copy.size(copy.dim() - 1) != t.size(t.dim() - 1)) torch::stable::zero_(copy);
  copy_columns(copy, t);
  return copy;
}

Tensor target_of(Tensor const& result) { return readable_by_tma(result) ? result : empty_padded(result); }

void deliver(Tensor const& target, Tensor const& result) {
  if (target.get() != result.get()) copy_columns(result, target);
}

Tensor contiguous(Tensor const& t) {
  if (t.is_contiguous()) return t;
  Tensor copy = empty_cuda(sizes_of(t), t.scalar_type(), t.get_device_index());
  torch::stable::copy_(copy, t);
  return copy;
}

std::optional<Tensor> contiguous(std::optional<Tensor> const& t) {
  if (!t) return std::nullopt;
  return contiguous(*t);
}

std::vector<int64_t> sizes_of(Tensor const& t) {
  std::vector<int64_t> sizes(t.dim());
  for (int64_t i = 0; i < t.dim(); ++i) sizes[i] = t.size(i);
  return sizes;
}

TensorView view_of(char const* name, Tensor const& t, Problem const& problem) {
  int64_t const rows = t.dim() - 3;
  StridedTensor const s = strided(t);
  return {name,
          s.data,
          problem.packed ? 1 : t.size(0),
          t.size(rows),
          t.size(rows + 1),
          t.size(rows + 2),
          s.stride_batch,
          s.stride_sequence,
          s.stride_head,
          is_fp8(t)                                 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
          : t.scalar_type() == ScalarType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
          problem.packed};
}

StridedTensor strided(Tensor const& t) {
  int64_t const rows = t.dim() - 3;
  return {t.data_ptr(), rows > 0 ? t.stride(0) : 0, t.stride(rows), t.stride(rows + 1)};
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

void launch(int row, Fp8Params const& params, int grid, cudaStream_t stream) {
  kKernelTable[row].fp8(params, grid, stream);
  launches[row].fetch_add(1, std::memory_order_relaxed);
}

void launch(int row, PackedParams const& params, cudaStream_t stream) {
  kKernelTable[row].packed(params, 1, stream);
  launches[row].fetch_add(1, std::memory_order_relaxed);
}

int64_t launch_count(int row) { return launches[row].load(std::memory_order_relaxed); }

void check_cuda(cudaError_t status, char const* what) {
  if (status != cudaSuccess) fail(what, ": ", cudaGetErrorString(status));
}

}  // namespace flash_attn3
