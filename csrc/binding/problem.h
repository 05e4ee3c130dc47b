// What the operators share: checks of q, k and v, tensors as TMA can address them, the GPU, and the launch counters.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "binding/tensors.h"
#include "host/plan.h"
#include "host/tensor_map.h"

namespace flash_attn3 {

constexpr double kLog2E = 1.4426950408889634;

// The problem that q (B, Sq, H, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv) pose. Fails on what no kernel takes.
Problem check_problem(Tensor const& q, Tensor const& k, Tensor const& v, double softmax_scale, bool causal);

// Another tensor of the problem must have this shape, this dtype and q's device.
void check_tensor(char const* name, Tensor const& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype,
                  Tensor const& q);

// A tensor that a kernel writes must not overlap itself.
void check_no_overlap(char const* name, Tensor const& tensor);

// The current GPU must be one that the kernels run on.
void check_gpu(int32_t device);

[[noreturn]] void fail_without_kernel(Problem const& problem, char const* pass);

// The tensor itself, or, where TMA cannot read it, a contiguous copy with the head dim filled up with zeros to a
// multiple of 8.
Tensor prepared(Tensor const& tensor);

// Where the kernels write the values of `result`: the tensor itself, or memory that `deliver` copies into it.
Tensor target_of(Tensor const& result);
void deliver(Tensor const& target, Tensor const& result);

TensorView view_of(char const* name, Tensor const& tensor, bool bf16);

int multiprocessors(int32_t device);
cudaStream_t current_stream(int32_t device);

// Launches the kernel of a row and counts it.
void launch(int row, ForwardParams const& params, int grid, cudaStream_t stream);
void launch(int row, BackwardParams const& params, int grid, cudaStream_t stream);

// How often each row of the kernel table has been launched by this process.
int64_t launch_count(int row);

void check_cuda(cudaError_t status, char const* what);

}  // namespace flash_attn3
