// Compile-time configuration of one forward kernel for e4m3 inputs: ForwardConfig's counterpart, with the same members.
//
// Both GEMMs are e4m3 with fp32 accumulators, and e4m3 WGMMA takes its B operand with the sum running along rows only.
// K lies so; V comes transposed, a block of keys after the other, as kernels/fp8/transpose.h has written it. O is
// bfloat16 and twice as wide as Q, so it leaves through a buffer of its own.
#pragma once

#include "host/fp8_params.h"
#include "kernels/forward/config.h"

namespace flash_attn3 {

template <int kHeadDim_, int kHeadDimV_, int kWarpgroups_, int kBlockN_, int kKeyStages_, int kValueStages_>
struct Fp8Config {
  using Element = cutlass::float_e4m3_t;
  using Output = cutlass::bfloat16_t;
  using Params = Fp8Params;
  static constexpr bool kScaled = true;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kBlockM = kWarpgroups * kRowsPerWarpgroup;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kKeyStages = kKeyStages_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;

  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;

  static constexpr int kChunk = fp8_chunk_columns(kHeadDim);  // of Q and K
  static constexpr int kOutputChunk = 64;
  static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kOutputChunk == 0, "head dims are multiples of the chunk");
  static_assert(kBlockN % 32 == 0 && kBlockN <= kTransposedKeys, "P V walks keys 32 at a time");
  static_assert(kWarpgroups == 2 || kWarpgroups == 3, "register split is known for 2 and 3 consumer warpgroups");

  static constexpr int kQueryBytes = kRowsPerWarpgroup * kHeadDim;  // of one warpgroup
  static constexpr int kKeyBytes = kBlockN * kHeadDim;              // of one stage
  static constexpr int kValueBytes = kTransposedKeys * kHeadDimV;
  static constexpr int kRingBytes = kKeyStages * kKeyBytes + kValueStages * kValueBytes;
  static constexpr int kSharedLimit = 232448;
  static constexpr int kControlBytes = 2048;  // barriers, tiles

  static constexpr int kQueryBuffers = 2;
  static constexpr int output_columns() {
    constexpr int kFree = kSharedLimit - kControlBytes - kRingBytes - kQueryBuffers * kWarpgroups * kQueryBytes;
    int columns = kHeadDimV;
    while (kBlockM * columns * 2 > kFree) columns /= 2;
    return columns;
  }
  static constexpr int kOutputColumns = output_columns();
  static constexpr bool kOutputOverQuery = false;
  static_assert(kOutputColumns % kOutputChunk == 0, "a buffer of O has whole chunks");

  template <int kBytes>
  using KMajorAtom = std::conditional_t<kBytes == 128, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        std::conditional_t<kBytes == 64, cute::GMMA::Layout_K_SW64_Atom<Element>,
                                                           cute::GMMA::Layout_K_SW32_Atom<Element>>>;
  using Rows = cute::Int<kRowsPerWarpgroup>;
  using N = cute::Int<kBlockN>;
  using D = cute::Int<kHeadDim>;
  using Dv = cute::Int<kHeadDimV>;
  using LayoutQ = decltype(cute::tile_to_shape(KMajorAtom<kChunk>{}, cute::Shape<Rows, D>{}));  // (64, D)
  using LayoutK = decltype(cute::tile_to_shape(KMajorAtom<kChunk>{},
                                               cute::Shape<N, D, cute::Int<kKeyStages>>{}));  // (N, D, STAGES)
  // (DV, 128, STAGES), of which the sum runs over the first N columns.
  using LayoutVt = decltype(cute::tile_to_shape(
      KMajorAtom<kTransposedKeys>{}, cute::Shape<Dv, cute::Int<kTransposedKeys>, cute::Int<kValueStages>>{}));

  using MmaQk = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Rows, N, D>>()));
  using MmaPv =
      decltype(cute::make_tiled_mma(cute::SM90::GMMA::rs_op_selector<Element, Element, float, cute::Shape<Rows, Dv, N>,
                                                                     cute::GMMA::Major::K, cute::GMMA::Major::K>()));
};

}  // namespace flash_attn3
