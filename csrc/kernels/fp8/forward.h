// The forward for e4m3 inputs: the kernel of kernels/forward with another configuration.
#pragma once

#include "kernels/forward/launch.h"
#include "kernels/fp8/config.h"

namespace flash_attn3 {

template <class Config>
void launch_fp8_forward(Fp8Params const& params, int grid, cudaStream_t stream) {
  launch_forward<Config>(params, grid, stream);
}

}  // namespace flash_attn3
