// What the operators share: checks of their arguments, tensors as TMA can address them, the GPU, and the launch
// counters. Tensors of a dense batch are (batch, sequence, heads, head dim), of a packed one (rows, heads, head dim).
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "binding/tensors.h"
#include "host/plan.h"
#include "host/tensor_map.h"

namespace flash_attn3 {

constexpr double kLog2E = 1.4426950408889634;

// How scores become probabilities, as the operators' schemas say it.
struct Scores {
  double softmax_scale;
  int64_t window_left, window_right, attention_chunk;
  double softcap;
};

// Where the sequences of a packed batch lie.
struct Lengths {
  Tensor const &cu_seqlens_q, &cu_seqlens_k;
  std::optional<Tensor> const &seqused_q, &seqused_k;
};

// The problem that q, k and v pose, packed if there are lengths; of 16-bit elements, or e4m3 if `fp8`. Fails on what no
// kernel takes.
Problem check_problem(Tensor const& q, Tensor const& k, Tensor const& v, std::optional<Tensor> const& sink,
                      Lengths const* lengths, Scores const& scores, bool fp8 = false);

// Another tensor of the problem must have this shape, this dtype and q's device.
void check_tensor(char const* name, Tensor const& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype,
                  Tensor const& q);

// The same of a tensor in the shape of out, or of lse.
void check_like_out(char const* name, Tensor const& tensor, Problem const& problem, Tensor const& q);
void check_like_lse(char const* name, Tensor const& tensor, Problem const& problem, Tensor const& q);

Tensor empty_out(Problem const& problem, Tensor const& q);
Tensor empty_lse(Problem const& problem, Tensor const& q);

// A tensor that a kernel writes must not overlap itself.
void check_no_overlap(char const* name, Tensor const& tensor);

// The current GPU must be one that the kernels run on.
void check_gpu(int32_t device);

[[noreturn]] void fail_without_kernel(Problem const& problem, char const* pass);

// The row that an operation has for all problems; fails if the build has none.
int row_of(char const* op);

// The tensor itself, or, where TMA cannot read it, a contiguous copy with the head dim filled up with zeros to a
// multiple of 16 bytes.
Tensor prepared(Tensor const& tensor);

// Where the kernels write the values of `result`: the tensor itself, or memory that `deliver` copies into it.
Tensor target_of(Tensor const& result);
void deliver(Tensor const& target, Tensor const& result);

// The tensor itself or a contiguous copy.
Tensor contiguous(Tensor const& tensor);
std::optional<Tensor> contiguous(std::optional<Tensor> const& tensor);

// Null if there is no tensor.
template <class T>
T* pointer_to(std::optional<Tensor> const& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

std::vector<int64_t> sizes_of(Tensor const& tensor);

TensorView view_of(char const* name, Tensor const& tensor, Problem const& problem);
StridedTensor strided(Tensor const& tensor);

int multiprocessors(int32_t device);
cudaStream_t current_stream(int32_t device);

// Launches the kernel of a row and counts it.
void launch(int row, ForwardParams const& params, int grid, cudaStream_t stream);
void launch(int row, BackwardParams const& params, int grid, cudaStream_t stream);
void launch(int row, Fp8Params const& params, int grid, cudaStream_t stream);
void launch(int row, PackedParams const& params, cudaStream_t stream);

// How often each row of the kernel table has been launched by this process.
int64_t launch_count(int row);

void check_cuda(cudaError_t status, char const* what);

}  // namespace flash_attn3
