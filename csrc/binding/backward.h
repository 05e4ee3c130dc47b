// The backward operators: checks, workspace, copies where TMA cannot read a layout, three launches.
#pragma once

#include <optional>
#include <tuple>

#include "binding/tensors.h"

namespace flash_attn3 {

// flash_attn3::backward -> (dq, dk, dv): contiguous, in the shapes and the dtype of q, k and v
std::tuple<Tensor, Tensor, Tensor> backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v,
                                            Tensor out, Tensor lse, double softmax_scale, bool causal,
                                            bool deterministic);

// flash_attn3::backward_out; writes the caller's gradients through their strides
void backward_out(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                  Tensor dq, Tensor dk, Tensor dv, double softmax_scale, bool causal, bool deterministic);

}  // namespace flash_attn3
