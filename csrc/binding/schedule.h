// What the kernels would do, asked without a GPU; and how a packed batch lies, of the host or of the kernel itself.
#pragma once

#include <optional>
#include <tuple>

#include "binding/tensors.h"

namespace flash_attn3 {

// flash_attn3::schedule, of a row whose CTAs hold queries: a line for each 64 rows of each tile: cta, position in the
// order, warpgroup, first row, head, batch, key blocks (begin, end), those that need no mask (begin, end). CTAs that
// share a counter are numbered by position.
Tensor schedule(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                int64_t window_left, int64_t window_right, int64_t attention_chunk, int64_t num_sms);

// flash_attn3::schedule_backward, of any main kernel of a backward pass. Where CTAs hold keys, a line for each tile or
// part of one: cta, position in the order, block of keys, key head, batch, query blocks (first, end), those that need
// no mask (first, end), part (-1: the whole tile), its steps (begin, end); else as above.
Tensor schedule_backward(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q,
                         int64_t seqlen_k, int64_t window_left, int64_t window_right, int64_t attention_chunk,
                         int64_t num_sms);

// flash_attn3::schedule_varlen, of any main kernel on a packed batch: a line for each position: position, block, head
// (of keys where CTAs hold keys), sequence, and the sequence's q_begin, q_length, k_begin, k_length. CPU tensors.
Tensor schedule_varlen(int64_t row, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> seqused_q,
                       std::optional<Tensor> seqused_k, int64_t total_q, int64_t total_k, int64_t heads,
                       int64_t kv_heads, int64_t window_left, int64_t window_right, int64_t attention_chunk);

// flash_attn3::varlen_layout -> (sequences (B, 4), longest_first (B), first_block (B + 1) of blocks of so many queries
// or keys, gaps of queries (n, 3), gaps of keys (m, 3)), int32 on the device of cu_seqlens_q: of CPU tensors by the
// host, of CUDA tensors by the kernel "packed_schedule", after a synchronisation.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> varlen_layout(Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                                                 std::optional<Tensor> seqused_q,
                                                                 std::optional<Tensor> seqused_k, int64_t total_q,
                                                                 int64_t total_k, int64_t block, bool of_keys);

}  // namespace flash_attn3
