// The forward operators: copies where TMA cannot read a layout, one launch, and one before it for a packed batch.
#pragma once

#include <optional>
#include <tuple>

#include "binding/problem.h"
#include "binding/tensors.h"

namespace flash_attn3 {

// What follows from the problem and the scores alone.
void set_problem(ForwardParams& params, Problem const& problem, Scores const& scores);

// Sets and zeroes the tile counter of a dense batch, whose order is set, and returns its memory; none if it needs none.
std::optional<Tensor> tile_counter(ForwardParams& params, Problem const& problem, int32_t device, int sms,
                                   cudaStream_t stream);

// flash_attn3::forward -> (out (B, Sq, H, Dv) contiguous, lse (B, H, Sq) fp32)
std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sink, double softmax_scale,
                                   int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap);

// flash_attn3::forward_out -> lse; writes the caller's out through its strides
Tensor forward_out(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sink, Tensor out, double softmax_scale,
                   int64_t window_left, int64_t window_right, int64_t attention_chunk, double softcap);

// flash_attn3::forward_varlen -> (out (Tq, H, Dv) contiguous, lse (H, Tq) fp32)
std::tuple<Tensor, Tensor> forward_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                          std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
                                          std::optional<Tensor> sink, double softmax_scale, int64_t window_left,
                                          int64_t window_right, int64_t attention_chunk, double softcap);

// flash_attn3::forward_varlen_out -> lse
Tensor forward_varlen_out(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                          std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k, std::optional<Tensor> sink,
                          Tensor out, double softmax_scale, int64_t window_left, int64_t window_right,
                          int64_t attention_chunk, double softcap);

}  // namespace flash_attn3
