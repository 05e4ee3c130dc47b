// The kernel that holds keys, and its launch. Persistent: at most one CTA an SM walks the tiles of the order.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include "host/params.h"
#include "kernels/backward/keys/config.h"
#include "kernels/backward/keys/consumer.h"
#include "kernels/backward/keys/producer.h"
#include "kernels/backward/keys/zero.h"
#include "kernels/common/launch.h"

namespace flash_attn3 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_keys_kernel(__grid_constant__ BackwardParams const params) {
  auto& storage = shared_storage<KeysStorage<Config>>();
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  if (threadIdx.x == 0) {
    storage.key_full.init(1);
    storage.value_full.init(1);
    storage.key_empty.init(kConsumerWarps);
    storage.value_empty.init(kConsumerWarps);
    for (int s = 0; s < Config::kQueryStages; ++s) {
      storage.query_full[s].init(1);
      storage.query_empty[s].init(kConsumerWarps);
    }
    for (int s = 0; s < Config::kGradientStages; ++s) {
      storage.gradient_full[s].init(1);
      storage.gradient_empty[s].init(kConsumerWarps);
    }
    for (int b = 0; b < Config::kScoreBuffers; ++b) {
      storage.score_full[b].init(kConsumerWarps);
      storage.score_empty[b].init(kConsumerWarps);
    }
    storage.tiles.init(kConsumerWarps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();

  // Uniform in a warp, and known to be, so that WGMMA descriptors live in uniform registers.
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == Config::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0) == 0) {
      KeysProducer<Config>(params, storage, cute::elect_one_sync() != 0).run();
    } else if constexpr (Config::kFused) {
      SumsZeroing<Config>{params}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    KeysConsumer<Config>(params, storage, warpgroup).run();
  }
}

template <class Config>
void launch_backward_keys(BackwardParams const& params, int grid, cudaStream_t stream) {
  launch_persistent<KeysStorage<Config>, Config::kSharedLimit>(&backward_keys_kernel<Config>, params, grid,
                                                               Config::kThreads, true, stream);
}

}  // namespace flash_attn3
