// The backward operators: checks, workspace, copies where TMA cannot read a layout, three to five launches.
#pragma once

#include <optional>
#include <tuple>

#include "binding/tensors.h"

namespace flash_attn3 {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// flash_attn3::backward -> (dq, dk, dv, dsink): contiguous, in the shapes and the dtype of q, k and v; dsink (H,) fp32,
// or (0,) without a sink
FourTensors backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                     std::optional<Tensor> sink, double softmax_scale, int64_t window_left, int64_t window_right,
                     int64_t attention_chunk, double softcap, bool deterministic);

// flash_attn3::backward_out -> dsink; writes the caller's gradients through their strides
Tensor backward_out(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                    std::optional<Tensor> sink, Tensor dq, Tensor dk, Tensor dv, double softmax_scale,
                    int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap,
                    bool deterministic);

// flash_attn3::backward_varlen, of a packed batch
FourTensors backward_varlen(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out,
                            Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> seqused_q,
                            std::optional<Tensor> seqused_k, std::optional<Tensor> sink, double softmax_scale,
                            int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap,
                            bool deterministic);

// flash_attn3::backward_varlen_out
Tensor backward_varlen_out(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out,
                           Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> seqused_q,
                           std::optional<Tensor> seqused_k, std::optional<Tensor> sink, Tensor dq, Tensor dk, Tensor dv,
                           double softmax_scale, int64_t window_left, int64_t window_right, int64_t attention_chunk,
                           double softcap, bool deterministic);

}  // namespace flash_attn3
