// The workspace, of int32 numbers; B sequences and 2 main kernels:
//   sequences 4 B | gaps of queries 3 (B + 2) | gaps of keys, the same | longest_first B | first_block 2 (B + 1)
//   | counts of gaps 2 | tile counters 2
#include "binding/packed.h"

#include <algorithm>

#include "host/packed.h"

namespace flash_attn3 {
namespace {

constexpr int64_t kSequenceWords = sizeof(Sequence) / sizeof(int32_t);
constexpr int64_t kGapWords = sizeof(Gap) / sizeof(int32_t);
static_assert(kSequenceWords == 4, "a sequence is read as 16 bytes");

}  // namespace

int64_t PackedBatch::words(int64_t batch) {
  int64_t const lists = kSequenceWords * batch + 2 * kGapWords * most_gaps(batch) + batch;
  int64_t const words = lists + PackedParams::kOrders * (batch + 1) + 2 + PackedParams::kOrders;
  return (words + 3) / 4 * 4;
}

PackedBatch::PackedBatch(Problem const& problem, Lengths const& lengths, int32_t* workspace)
    : cu_seqlens_q_(contiguous(lengths.cu_seqlens_q)),
      cu_seqlens_k_(contiguous(lengths.cu_seqlens_k)),
      seqused_q_(contiguous(lengths.seqused_q)),
      seqused_k_(contiguous(lengths.seqused_k)) {
  int64_t const batch = problem.batch;
  params_.cu_seqlens_q = static_cast<int32_t const*>(cu_seqlens_q_.data_ptr());
  params_.cu_seqlens_k = static_cast<int32_t const*>(cu_seqlens_k_.data_ptr());
  params_.seqused_q = pointer_to<int32_t const>(seqused_q_);
  params_.seqused_k = pointer_to<int32_t const>(seqused_k_);
  params_.batch = int32_t(batch);
  params_.total_q = int32_t(problem.seqlen_q);
  params_.total_k = int32_t(problem.seqlen_k);
  params_.sequences = reinterpret_cast<Sequence*>(workspace);
  params_.query_gaps = reinterpret_cast<Gap*>(workspace + kSequenceWords * batch);
  params_.key_gaps = params_.query_gaps + most_gaps(batch);
  params_.longest_first = reinterpret_cast<int32_t*>(params_.key_gaps + most_gaps(batch));
  first_blocks_ = params_.longest_first + batch;
  params_.gap_counts = first_blocks_ + PackedParams::kOrders * (batch + 1);
  params_.cleared = params_.gap_counts + 2;
  params_.cleared_count = PackedParams::kOrders;
}

PackedOrder PackedBatch::order(int index, Problem const& problem, KernelRow const& row) {
  bool const of_keys = holds_keys(row);
  auto& list = params_.orders[index];
  list.first_block = first_blocks_ + index * (problem.batch + 1);
  list.block = of_keys ? row.block_n : row.block_m;
  list.of_keys = of_keys;
  PackedOrder order = plan_packed_order(problem, row);
  order.sequences = params_.sequences;
  order.longest_first = params_.longest_first;
  order.first_block = list.first_block;
  return order;
}

void PackedBatch::schedule(cudaStream_t stream) const {
  static int const row = row_of("packed_schedule");
  launch(row, params_, stream);
}

int packed_grid(Problem const& problem, KernelRow const& row, int sms) {
  return int(std::clamp<int64_t>(most_tiles(problem, row), 1, sms));
}

}  // namespace flash_attn3
