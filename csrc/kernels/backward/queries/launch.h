// The kernel that computes dQ, and its launch. Persistent: a grid of at most one CTA an SM walks the tiles of the
// order. Each tile is computed by one CTA in one order, without atomics: bitwise repeatable.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include <stdexcept>
#include <string>

#include "host/params.h"
#include "kernels/backward/queries/config.h"
#include "kernels/backward/queries/consumer.h"
#include "kernels/backward/queries/producer.h"

namespace flash_attn3 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_queries_kernel(__grid_constant__ BackwardParams const params) {
  extern __shared__ uint8_t raw[];
  auto& storage =
      *reinterpret_cast<QueriesStorage<Config>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) storage.init();
  __syncthreads();

  // Uniform in a warp, and known to be, so that WGMMA descriptors live in uniform registers.
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == Config::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    bool const elected = cute::elect_one_sync() != 0;
    if (warp == 0) {
      QueriesKeyProducer<Config>{params, storage, elected}.run();
    } else if (warp <= Config::kWarpgroups) {
      QueriesRowMover<Config>(params, storage, warp - 1, elected).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    QueriesConsumer<Config>(params, storage, warpgroup).run();
  }
}

template <class Config>
void launch_backward_queries(BackwardParams const& params, int grid, cudaStream_t stream) {
  constexpr int kShared = sizeof(QueriesStorage<Config>) + 1024;  // dynamic shared memory starts 16-byte aligned
  static_assert(kShared <= Config::kSharedLimit, "shared memory of an SM");
  auto* const kernel = &backward_queries_kernel<Config>;
  auto check = [](cudaError_t status, char const* what) {
    if (status != cudaSuccess)
      throw std::runtime_error(std::string("flash_attn3: ") + what + ": " + cudaGetErrorString(status));
  };
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
        "shared memory of a kernel");
  kernel<<<grid, Config::kThreads, kShared, stream>>>(params);
  check(cudaGetLastError(), "launch of a backward_queries kernel");
}

}  // namespace flash_attn3
