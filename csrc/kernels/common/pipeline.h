// Position in a ring of shared-memory stages: which stage, and the parity of the mbarrier phase that its round waits
// for.
#pragma once

#include <cstdint>

namespace flash_attn3 {

enum class Role : uint32_t { kConsumer = 0, kProducer = 1 };  // a producer's first round finds every stage empty

template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase;

  __device__ __forceinline__ explicit PipelineState(Role role) : phase(static_cast<uint32_t>(role)) {}

  // Of the use number `count`, from 0.
  static __device__ __forceinline__ PipelineState at(Role role, int count) {
    PipelineState state(role);
    state.stage = count % kStages;
    state.phase ^= count / kStages & 1;
    return state;
  }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace flash_attn3
