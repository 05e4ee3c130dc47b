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

// The asm statements of CUTLASS's barriers do not say that memory changes, so the compiler may move plain reads and
// writes of shared memory over them. Who uses such goes through these.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// The same number, but the compiler does not compute what follows from it ahead of a loop, to hold it in registers
// there.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class Barrier>
__device__ __forceinline__ void wait_and_read(Barrier& barrier, uint32_t phase) {
  barrier.wait(phase);
  compiler_fence();
}

template <class Barrier>
__device__ __forceinline__ void write_and_arrive(Barrier& barrier) {
  compiler_fence();
  barrier.arrive();
}

}  // namespace flash_attn3
