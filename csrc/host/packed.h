// How a packed batch lies in its tensors, from cu_seqlens and seqused: the rules, which the kernel "packed_schedule"
// (kernels/packed/schedule.h) and its twin on the host share, and the twin. docs/kernels/packed.md explains them.
//
// With m_b = the largest of 0 and cu[0..b], at most the total, sequence b owns the rows [m_b, m_{b+1}); what lies
// before m_0 and behind m_B belongs to none. Nothing overflows, whatever the integers are, and every row that comes
// out lies in the tensor.
#pragma once

#include <cstdint>
#include <vector>

#include "host/geometry.h"
#include "host/params.h"

namespace flash_attn3 {

// Borders 0 .. batch + 2 of one dimension of the batch: its begin, cu_seqlens, its end. Span s lies between the borders
// s and s + 1: sequence s - 1, or the rows before the first and behind the last one.
FLASH_ATTN3_HD int32_t border_at(int32_t const* cu_seqlens, int32_t batch, int32_t total, int32_t number) {
  return number == 0 ? 0 : number <= batch + 1 ? cu_seqlens[number - 1] : total;
}
FLASH_ATTN3_HD bool is_sequence(int32_t span, int32_t batch) { return span >= 1 && span <= batch; }

// Gaps that a batch can have, of queries or of keys: one behind the used rows of each span.
constexpr int64_t most_gaps(int64_t batch) { return batch + 2; }

constexpr int32_t kMalformed = -1;

// Rows of a sequence that count: from its begin in cu_seqlens to the next one's, or `used` of them; kMalformed where
// these contradict each other, or where the sequence does not begin where it owns rows.
FLASH_ATTN3_HD int32_t used_rows(int32_t begin, int32_t end, int32_t owned_begin, int32_t total) {
  return begin < owned_begin || end < begin || end > total ? kMalformed : end - begin;
}
FLASH_ATTN3_HD int32_t used_rows(int32_t begin, int32_t end, int32_t owned_begin, int32_t total, int32_t used) {
  int32_t const length = used_rows(begin, end, owned_begin, total);
  return used < 0 || used > length ? kMalformed : used;
}

// Of the rows that a sequence owns and those that count.
FLASH_ATTN3_HD Sequence sequence_of(int32_t q_begin, int32_t q_rows, int32_t k_begin, int32_t k_rows) {
  bool const malformed = q_rows == kMalformed || k_rows == kMalformed;
  return {q_begin, malformed ? 0 : q_rows, k_begin, malformed ? kMalformed : k_rows};
}
FLASH_ATTN3_HD bool is_malformed(Sequence const& sequence) { return sequence.k_length == kMalformed; }

// What a span that owns the rows [begin, end) leaves unused; empty if the bounds are equal.
FLASH_ATTN3_HD Gap gap_behind(int32_t begin, int32_t length, int32_t end, bool malformed) {
  return {begin + max_int(0, length), end, malformed};
}
FLASH_ATTN3_HD bool is_empty(Gap const& gap) { return gap.begin == gap.end; }

// Sequences come longest first by buckets of a quarter of an octave of q_length + k_length. Bucket 0 has the longest.
constexpr int32_t kLengthBuckets = 128;

FLASH_ATTN3_HD int32_t length_bucket(Sequence const& sequence) {
  uint32_t const length = uint32_t(sequence.q_length) + uint32_t(max_int(0, sequence.k_length));
#if defined(__CUDA_ARCH__)
  int32_t const octave = 31 - __clz(int32_t(length | 1));
#else
  int32_t const octave = 31 - __builtin_clz(length | 1);
#endif
  // 0 .. 3 are their own buckets; from 4 on, two bits below the highest one count.
  uint32_t const rank = length < 4 ? length : uint32_t(octave - 1) * 4 + (length >> (octave - 2) & 3);
  return kLengthBuckets - 1 - int32_t(rank);
}

// Blocks of one head; 0 of a malformed sequence.
FLASH_ATTN3_HD int32_t blocks_of(Sequence const& sequence, int32_t block, bool of_keys) {
  int32_t const length = of_keys ? sequence.k_length : sequence.q_length;
  return length <= 0 ? 0 : (length - 1) / block + 1;
}

// What "packed_schedule" reads, on the host.
struct PackedLengths {
  int32_t const *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  int32_t const *seqused_q, *seqused_k;        // null, or (batch)
  int32_t batch;
  int32_t total_q, total_k;
};

// What it writes, the same number for number.
struct PackedLayout {
  std::vector<Sequence> sequences;
  std::vector<int32_t> longest_first;
  std::vector<Gap> query_gaps, key_gaps;
};

PackedLayout layout_of(PackedLengths const& lengths);

// (batch + 1): blocks of the sequences before each place of longest_first.
std::vector<int32_t> first_blocks(PackedLayout const& layout, int32_t block, bool of_keys);

}  // namespace flash_attn3
