// The forward kernel and its launch. Persistent: a grid of at most one CTA an SM walks the tiles of the order.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include <stdexcept>
#include <string>

#include "host/params.h"
#include "kernels/forward/config.h"
#include "kernels/forward/consumer.h"
#include "kernels/forward/producer.h"

namespace flash_attn3 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(__grid_constant__ ForwardParams const params) {
  extern __shared__ uint8_t raw[];
  auto& storage =
      *reinterpret_cast<ForwardStorage<Config>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  if (threadIdx.x == 0) {
    for (int b = 0; b < Config::kQueryBuffers; ++b) {
      for (int w = 0; w < Config::kWarpgroups; ++w) {
        storage.query_full[b][w].init(1);
        storage.query_empty[b][w].init(Config::kOutputOverQuery ? 1 : 4);
      }
    }
    for (int s = 0; s < Config::kKeyStages; ++s) {
      storage.key_full[s].init(1);
      storage.key_empty[s].init(kConsumerWarps);
    }
    for (int s = 0; s < Config::kValueStages; ++s) {
      storage.value_full[s].init(1);
      storage.value_empty[s].init(kConsumerWarps);
    }
    storage.tiles.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  // Uniform in a warp, and known to be, so that WGMMA descriptors live in uniform registers.
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == Config::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0) == 0) {
      Producer<Config>{params, storage, cute::elect_one_sync() != 0}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Consumer<Config>(params, storage, warpgroup).run();
  }
}

template <class Config>
void launch_forward(ForwardParams const& params, int grid, cudaStream_t stream) {
  constexpr int kShared = sizeof(ForwardStorage<Config>) + 1024;  // dynamic shared memory starts 16-byte aligned
  static_assert(kShared <= Config::kSharedLimit, "shared memory of an SM");
  auto* const kernel = &forward_kernel<Config>;
  auto check = [](cudaError_t status, char const* what) {
    if (status != cudaSuccess)
      throw std::runtime_error(std::string("flash_attn3: ") + what + ": " + cudaGetErrorString(status));
  };
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
        "shared memory of a kernel");
  kernel<<<grid, Config::kThreads, kShared, stream>>>(params);
  check(cudaGetLastError(), "launch of a forward kernel");
}

}  // namespace flash_attn3
