// The forward operator for e4m3 inputs: V transposed into memory of the call, then one launch.
#pragma once

#include <optional>
#include <tuple>

#include "binding/tensors.h"

namespace flash_attn3 {

// flash_attn3::forward_fp8 -> (out (B, Sq, H, Dv) bfloat16 contiguous, lse (B, H, Sq) fp32)
std::tuple<Tensor, Tensor> forward_fp8(Tensor q, Tensor k, Tensor v, std::optional<Tensor> q_descale,
                                       std::optional<Tensor> k_descale, std::optional<Tensor> v_descale,
                                       std::optional<Tensor> sink, double softmax_scale, int64_t window_left,
                                       int64_t window_right, int64_t attention_chunk, double softcap);

}  // namespace flash_attn3
