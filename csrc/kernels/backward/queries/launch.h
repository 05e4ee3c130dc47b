// The kernel that computes dQ, and its launch. Persistent: a grid of at most one CTA an SM walks the tiles of the
// order. Each tile is computed by one CTA in one order, without atomics: bitwise repeatable.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include "host/params.h"
#include "kernels/backward/queries/config.h"
#include "kernels/backward/queries/consumer.h"
#include "kernels/backward/queries/producer.h"
#include "kernels/common/launch.h"

namespace flash_attn3 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_queries_kernel(__grid_constant__ BackwardParams const params) {
  auto& storage = shared_storage<QueriesStorage<Config>>();
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
  // All that it reads was there before "backward_keys" let it start. But whatever follows this kernel takes it that
  // everything before has ended, once this kernel has.
  wait_for_previous_kernel();
}

template <class Config>
void launch_backward_queries(BackwardParams const& params, int grid, cudaStream_t stream) {
  constexpr bool kOverlaps = true;
  launch_persistent<QueriesStorage<Config>, Config::kSharedLimit>(&backward_queries_kernel<Config>, params, grid,
                                                                  Config::kThreads, kOverlaps, stream);
}

}  // namespace flash_attn3
