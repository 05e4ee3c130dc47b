// How kernels are launched; persistent ones have one CTA an SM with almost all of its shared memory.
#pragma once

#include <cuda_runtime.h>
#include <cute/arch/util.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_attn3 {

inline void check_cuda_call(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("flash_attn3: ") + what + ": " + cudaGetErrorString(status));
  }
}

// Where dynamic shared memory starts: behind the KB that the system keeps for itself, aligned as swizzled tiles need
// it. As a number that the compiler knows it makes constants of WGMMA descriptors and barrier addresses, which else
// take uniform registers and moves in the loops.
constexpr uint32_t kSharedStart = 1024;

// In a kernel without static shared memory.
template <class Storage>
__device__ __forceinline__ Storage& shared_storage() {
  extern __shared__ uint8_t raw[];
  static_assert(alignof(Storage) <= kSharedStart);
  if (cute::cast_smem_ptr_to_uint(raw) != kSharedStart) __trap();
  return *static_cast<Storage*>(__cvta_shared_to_generic(kSharedStart));
}

// Kernels of one call follow each other without a gap (programmatic dependent launch): the next one's CTAs start where
// SMs run empty, once every CTA of this one has allowed it. The next one waits before it reads what this one writes, or
// overwrites what this one reads; the wait returns when every kernel before has ended and its writes are visible.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Launches a kernel that waits by wait_for_previous_kernel, if `overlaps`; else after everything before it.
template <class Params>
void launch_overlapping(void (*kernel)(Params), Params const& params, dim3 grid, int threads, int shared, bool overlaps,
                        cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = overlaps;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda_call(cudaLaunchKernelEx(&config, kernel, params), "launch of a kernel");
}

template <class Storage, int kLimit, class Params>
void launch_persistent(void (*kernel)(Params), Params const& params, int grid, int threads, bool overlaps,
                       cudaStream_t stream) {
  constexpr int kShared = sizeof(Storage);
  static_assert(kShared <= kLimit, "shared memory of an SM");
  check_cuda_call(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
                  "shared memory of a kernel");
  launch_overlapping(kernel, params, dim3(grid), threads, kShared, overlaps, stream);
}

}  // namespace flash_attn3
