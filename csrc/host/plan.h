// Which kernels run a problem and in which order their tiles come. Pure functions of integers, tested on a CPU.
#pragma once

#include <array>
#include <cstdint>

#include "host/kernel_table.h"
#include "host/params.h"

namespace flash_attn3 {

struct Problem {
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  bool causal;
  bool bf16;
};

// Row id of the kernel for a problem, or -1 if the build has none.
int select_forward(Problem const& problem);

// Row ids of the kernels of a backward pass in order of launch: the first before and, where there is one, the last
// after the main kernels. -1 each if the build lacks one of them.
std::array<int, 3> select_backward(Problem const& problem, bool deterministic);

bool is_op(KernelRow const& row, char const* op);

// Whether a CTA holds a block of keys and walks queries; otherwise it holds queries and walks keys.
bool holds_keys(KernelRow const& row);

// Order of the tiles of a kernel on so many SMs, and which tiles are cut. The positions must fit 31 bits.
TileOrder plan_order(Problem const& problem, KernelRow const& row, int sms);

// Whether CTAs take their tiles from a counter in global memory rather than by position: where tiles differ in length.
bool uses_counter(Problem const& problem, TileOrder const& order, int sms);

// Of the tiles that an order cuts.
struct PartialSums {
  int64_t count;   // floats
  int64_t counts;  // of parts that are there
};

PartialSums plan_partial_sums(TileOrder const& order, KernelRow const& row);

// Entries of a row of lse_log2 and delta: any block of up to 192 rows that begins below seqlen_q may be read whole.
int32_t statistics_stride(int64_t seqlen_q);

// How a kernel of `op` "backward" leaves dq_sums.
struct DqSums {
  int32_t block_m;
  int32_t columns;
  bool transposed;
  int64_t count;  // floats
};

DqSums plan_dq_sums(Problem const& problem, KernelRow const& row);

}  // namespace flash_attn3
