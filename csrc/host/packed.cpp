#include "host/packed.h"

#include <algorithm>
#include <numeric>

namespace flash_attn3 {
namespace {

// One dimension of the batch, span after span.
struct Rows {
  int32_t const* cu_seqlens;
  int32_t const* seqused;
  int32_t batch, total;
  int32_t begin = 0, end = 0;  // that the present span owns
  int32_t used = 0;            // of a sequence

  void step(int32_t span) {
    int32_t const first = border_at(cu_seqlens, batch, total, span);
    int32_t const next = border_at(cu_seqlens, batch, total, span + 1);
    begin = end;
    end = std::max(begin, std::min(next, total));
    if (!is_sequence(span, batch)) return;
    used = seqused == nullptr ? used_rows(first, next, begin, total)
                              : used_rows(first, next, begin, total, seqused[span - 1]);
  }
};

void append(std::vector<Gap>& gaps, Gap const& gap) {
  if (!is_empty(gap)) gaps.push_back(gap);
}

}  // namespace

PackedLayout layout_of(PackedLengths const& lengths) {
  int32_t const batch = lengths.batch;
  Rows queries{lengths.cu_seqlens_q, lengths.seqused_q, batch, lengths.total_q};
  Rows keys{lengths.cu_seqlens_k, lengths.seqused_k, batch, lengths.total_k};
  PackedLayout layout;
  for (int32_t span = 0; span < batch + 2; ++span) {
    queries.step(span);
    keys.step(span);
    Sequence sequence{queries.begin, 0, keys.begin, 0};
    if (is_sequence(span, batch)) {
      sequence = sequence_of(queries.begin, queries.used, keys.begin, keys.used);
      layout.sequences.push_back(sequence);
    }
    bool const malformed = is_malformed(sequence);
    append(layout.query_gaps, gap_behind(sequence.q_begin, sequence.q_length, queries.end, malformed));
    append(layout.key_gaps, gap_behind(sequence.k_begin, sequence.k_length, keys.end, malformed));
  }
  layout.longest_first.resize(batch);
  std::iota(layout.longest_first.begin(), layout.longest_first.end(), 0);
  std::stable_sort(layout.longest_first.begin(), layout.longest_first.end(), [&](int32_t a, int32_t b) {
    return length_bucket(layout.sequences[a]) < length_bucket(layout.sequences[b]);
  });
  return layout;
}

std::vector<int32_t> first_blocks(PackedLayout const& layout, int32_t block, bool of_keys) {
  std::vector<int32_t> first{0};
  first.reserve(layout.longest_first.size() + 1);
  for (int32_t number : layout.longest_first) {
    first.push_back(first.back() + blocks_of(layout.sequences[number], block, of_keys));
  }
  return first;
}

}  // namespace flash_attn3
