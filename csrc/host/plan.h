// Which kernels run a problem and in which order their tiles come. Pure functions of integers, tested on a CPU.
#pragma once

#include <array>
#include <cstdint>

#include "host/kernel_table.h"
#include "host/params.h"

namespace flash_attn3 {

// Of a packed batch, `batch` is the number of sequences and the lengths are the rows of all together.
struct Problem {
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  Mask mask;
  bool bf16;
  bool packed = false;
  bool fp8 = false;  // e4m3 inputs; bf16 is then the type of out
};

// The mask of a caller's bounds, -1 for none. Those that hide nothing from a sequence of these lengths are dropped:
// what sees all keys runs without a mask, and a causal window as long as the sequence is causal. Lengths of a packed
// batch are not known: kUnbounded.
Mask make_mask(int64_t window_left, int64_t window_right, int64_t attention_chunk, int64_t seqlen_q, int64_t seqlen_k);

// Row id of the kernel for a problem, or -1 if the build has none. The kernel of a packed batch does not depend on its
// lengths, so that a sequence's result does not depend on the others.
int select_forward(Problem const& problem);

// Row ids of the kernels of a backward pass in order of launch: the first before and, where there is one, the last
// after the main kernels. -1 each if the build lacks one of them.
std::array<int, 3> select_backward(Problem const& problem, bool deterministic);

// Row id of an operation that has one row for all problems ("packed_schedule", "backward_sink"), or -1.
int find_row(char const* op);

bool is_op(KernelRow const& row, char const* op);

// Whether a CTA holds a block of keys and walks queries; otherwise it holds queries and walks keys.
bool holds_keys(KernelRow const& row);

// Order of the tiles of a kernel on so many SMs, and which tiles are cut; of a packed batch, an empty one. The
// positions must fit 31 bits.
TileOrder plan_order(Problem const& problem, KernelRow const& row, int sms);

// How a kernel walks the tiles of a packed batch; where its lists lie is left to the caller.
PackedOrder plan_packed_order(Problem const& problem, KernelRow const& row);

// Tiles of a packed batch are at most so many.
int64_t most_tiles(Problem const& problem, KernelRow const& row);

// Whether CTAs take their tiles from a counter in global memory rather than by position: where tiles differ in length.
bool uses_counter(Problem const& problem, TileOrder const& order, int sms);

// Of the tiles that an order cuts.
struct PartialSums {
  int64_t count;   // floats
  int64_t counts;  // of parts that are there
};

PartialSums plan_partial_sums(TileOrder const& order, KernelRow const& row);

// Entries of a head in lse_log2 and delta, see statistics_begin in geometry.h; a multiple of 128.
int64_t statistics_stride(Problem const& problem);

// How a kernel of `op` "backward" leaves dq_sums.
struct DqSums {
  int32_t block_m;
  int32_t columns;
  bool transposed;
  int64_t stride;  // blocks of a head
  int64_t count;   // floats
};

DqSums plan_dq_sums(Problem const& problem, KernelRow const& row);

}  // namespace flash_attn3
