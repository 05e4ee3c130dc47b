// Which kernel runs a problem and in which order its tiles come. Pure functions of integers, tested on a CPU.
#pragma once

#include <cstdint>

#include "host/kernel_table.h"
#include "host/params.h"

namespace flash_attn3 {

struct ForwardProblem {
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  bool causal;
  bool bf16;
};

// Row id of the kernel for a problem, or -1 if the build has none.
int select_forward(ForwardProblem const& problem);

// Order of the tiles of a kernel with block_m rows a tile. The product of the sizes must fit 31 bits.
TileOrder plan_order(ForwardProblem const& problem, int block_m);

// Whether CTAs take their tiles from a counter in global memory rather than by position: where tiles differ in length.
bool uses_counter(ForwardProblem const& problem, TileOrder const& order, int grid);

}  // namespace flash_attn3
