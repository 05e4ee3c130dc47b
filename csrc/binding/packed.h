// A call on a packed batch: the workspace of "packed_schedule", its launch, and what it tells the other kernels.
#pragma once

#include <optional>

#include "binding/problem.h"

namespace flash_attn3 {

class PackedBatch {
 public:
  // int32 numbers of the workspace, a multiple of 4.
  static int64_t words(int64_t batch);

  // The workspace begins at a multiple of 16 bytes and needs no value. Checked lengths.
  PackedBatch(Problem const& problem, Lengths const& lengths, int32_t* workspace);

  // Has main kernel `index` of the call, 0 or 1, scheduled: the order of its tiles.
  PackedOrder order(int index, Problem const& problem, KernelRow const& row);
  int32_t* counter(int index) const { return params_.cleared + index; }

  PackedGaps query_gaps() const { return {params_.query_gaps, params_.gap_counts}; }
  PackedGaps key_gaps() const { return {params_.key_gaps, params_.gap_counts + 1}; }

  // Launches "packed_schedule".
  void schedule(cudaStream_t stream) const;

 private:
  Tensor cu_seqlens_q_, cu_seqlens_k_;
  std::optional<Tensor> seqused_q_, seqused_k_;
  int32_t* first_blocks_;
  PackedParams params_{};
};

// CTAs of a main kernel. Even without tiles there may be gaps to fill.
int packed_grid(Problem const& problem, KernelRow const& row, int sms);

}  // namespace flash_attn3
