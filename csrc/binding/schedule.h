// What the kernels would do, asked without a GPU.
#pragma once

#include "binding/tensors.h"

namespace flash_attn3 {

// flash_attn3::schedule, of a row whose CTAs hold queries: a line for each 64 rows of each tile: cta, position in the
// order, warpgroup, first row, head, batch, key blocks, unmasked key blocks. CTAs that share a counter are numbered by
// position.
Tensor schedule(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                bool causal, int64_t num_sms);

// flash_attn3::schedule_backward, of any main kernel of a backward pass. Where CTAs hold keys, a line for each tile or
// part of one: cta, position in the order, block of keys, key head, batch, first query block, first unmasked one, end,
// part (-1: the whole tile), first step, end of the steps; else as above.
Tensor schedule_backward(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q,
                         int64_t seqlen_k, bool causal, int64_t num_sms);

}  // namespace flash_attn3
