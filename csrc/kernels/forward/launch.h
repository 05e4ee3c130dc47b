// The forward kernel and its launch. Persistent: a grid of at most one CTA an SM walks the tiles of the order. The last
// warp of the producer warpgroup fills the rows of a packed batch that no sequence computes.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include "host/params.h"
#include "kernels/common/gaps.h"
#include "kernels/common/launch.h"
#include "kernels/forward/config.h"
#include "kernels/forward/consumer.h"
#include "kernels/forward/producer.h"

namespace flash_attn3 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(__grid_constant__ typename Config::Params const params) {
  using Storage = ForwardStorage<Config>;
  auto& storage = shared_storage<Storage>();
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
    storage.nearly_loaded.init(1);
    storage.tiles.init(kConsumerWarps + 2, 1 + Config::kWarpgroups);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();  // all above overlaps it

  // Uniform in a warp, and known to be, so that WGMMA descriptors live in uniform registers.
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == Config::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    bool const elected = cute::elect_one_sync() != 0;
    if (warp == 0) {
      TileGiver<Config>{params, storage, elected}.run();
    } else if (warp == 1) {
      KeyLoader<Config>{params, storage, elected}.run();
    } else if (warp == 2) {
      QueryLoader<Config>{params, storage, elected}.run();
    } else if (params.gaps.gaps != nullptr) {
      int const thread = blockIdx.x * 32 + threadIdx.x % 32, threads = gridDim.x * 32;
      fill_gaps<typename Config::Output>(params.gaps, params.out, params.heads, params.head_dim_v, thread, threads);
      fill_lse_gaps(params.gaps, params.lse, params.lse_stride_head, params.heads, thread, threads);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Consumer<Config>(params, storage, warpgroup).run();
  }
}

template <class Config>
void launch_forward(typename Config::Params const& params, int grid, cudaStream_t stream) {
  launch_persistent<ForwardStorage<Config>, Config::kSharedLimit>(
      &forward_kernel<Config>, params, grid, Config::kThreads, params.packed.sequences != nullptr, stream);
}

}  // namespace flash_attn3
