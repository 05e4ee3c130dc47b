// The kernel of dK and dV for wide heads and its launch. Persistent: a grid of at most one CTA an SM walks the tiles of
// the order.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include "host/params.h"
#include "kernels/backward/wide_keys/config.h"
#include "kernels/backward/wide_keys/consumer.h"
#include "kernels/backward/wide_keys/producer.h"
#include "kernels/common/launch.h"

namespace flash_attn3 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) wide_keys_kernel(__grid_constant__ BackwardParams const params) {
  auto& storage = shared_storage<WideKeysStorage<Config>>();
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4;  // of the one warpgroup that reads what the barrier guards
    storage.key_full.init(1);
    storage.key_empty.init(kWarps);
    storage.value_full.init(1);
    storage.value_empty.init(kWarps);
    for (int b = 0; b < Config::kBuffers; ++b) {
      storage.block_full[b].init(1);
      storage.block_empty[b].init(kWarps);
    }
    for (int w = 0; w < kWarps; ++w) {
      storage.p_full[w].init(1);
      storage.ds_full[w].init(1);
    }
    storage.tiles.init(Config::kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();

  // Uniform in a warp, and known to be, so that WGMMA descriptors live in uniform registers.
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 2) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0) == 0) {
      WideKeysProducer<Config>(params, storage, cute::elect_one_sync() != 0).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if (warpgroup == 0) {
      WideKeysScores<Config>(params, storage).run();
    } else {
      WideKeysValues<Config>(params, storage).run();
    }
  }
}

template <class Config>
void launch_wide_keys(BackwardParams const& params, int grid, cudaStream_t stream) {
  launch_persistent<WideKeysStorage<Config>, Config::kSharedLimit>(&wide_keys_kernel<Config>, params, grid,
                                                                   Config::kThreads, true, stream);
}

}  // namespace flash_attn3
