// What every persistent kernel's launch does: one CTA an SM with almost all of its shared memory.
#pragma once

#include <cuda_runtime.h>
#include <cute/arch/util.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_attn3 {

// Dynamic shared memory starts 16-byte aligned; swizzled tiles need 1024. An offset to the array, not a cast of an
// integer: the compiler then knows that what is found through it lies in shared memory.
template <class Storage>
__device__ __forceinline__ Storage& shared_storage() {
  extern __shared__ uint8_t raw[];
  return *reinterpret_cast<Storage*>(raw + (-cute::cast_smem_ptr_to_uint(raw) & 1023));
}

template <class Storage, int kLimit, class Params>
void launch_persistent(void (*kernel)(Params), Params const& params, int grid, int threads, cudaStream_t stream) {
  constexpr int kShared = sizeof(Storage) + 1024;
  static_assert(kShared <= kLimit, "shared memory of an SM");
  auto check = [](cudaError_t status, char const* what) {
    if (status != cudaSuccess)
      throw std::runtime_error(std::string("flash_attn3: ") + what + ": " + cudaGetErrorString(status));
  };
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
        "shared memory of a kernel");
  kernel<<<grid, threads, kShared, stream>>>(params);
  check(cudaGetLastError(), "launch of a kernel");
}

}  // namespace flash_attn3
