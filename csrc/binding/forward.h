// The forward operators: copies where TMA cannot read a layout, one launch.
#pragma once

#include <tuple>

#include "binding/tensors.h"

namespace flash_attn3 {

// flash_attn3::forward -> (out (B, Sq, H, Dv) contiguous, lse (B, H, Sq) fp32)
std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, double softmax_scale, bool causal);

// flash_attn3::forward_out -> lse; writes the caller's out through its strides
Tensor forward_out(Tensor q, Tensor k, Tensor v, Tensor out, double softmax_scale, bool causal);

}  // namespace flash_attn3
