// Which sequence of a packed batch owns a part of an array in which the sequences' parts follow each other.
#pragma once

#include "host/geometry.h"
#include "host/params.h"

namespace flash_attn3 {

struct OwnedPart {
  Sequence sequence;  // without rows if none owns it
  int32_t offset;     // from the begin of the sequence's part
};

// The owner of element `index`: the last sequence whose begin_of(q_begin, number), which increases, is not above it.
// All lanes of a warp call it together: each step asks 32 places at once. Reads past the L1, whose lines may be older
// than the kernel that wrote.
template <class BeginOf>
__device__ __forceinline__ OwnedPart owner_of(PackedOrder const& packed, int64_t index, BeginOf begin_of) {
  auto begin_of_number = [&](int number) { return begin_of(__ldcg(&packed.sequences[number].q_begin), number); };
  int begin = 0, left = packed.batch;  // the owner is in [begin, begin + left), if there is one
  while (left > 1) {
    int const stride = (left + 31) / 32;
    int const probe = int(threadIdx.x % 32) * stride;
    bool const below = probe < left && begin_of_number(begin + probe) <= index;
    int const last = max_int(0, __popc(__ballot_sync(0xffffffffu, below)) - 1);
    begin += last * stride;
    left = min_int(stride, left - last * stride);
  }
  if (packed.batch == 0) return {{0, 0, 0, 0}, 0};
  int4 const s = __ldcg(reinterpret_cast<int4 const*>(packed.sequences) + begin);
  int64_t const offset = index - begin_of(s.x, begin);
  if (offset < 0) return {{0, 0, 0, 0}, 0};
  return {{s.x, s.y, s.z, s.w}, int32_t(offset)};
}

}  // namespace flash_attn3
