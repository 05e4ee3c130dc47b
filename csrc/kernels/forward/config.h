// Compile-time configuration of one forward kernel, and its shared-memory plan.
//
// A CTA is one producer warpgroup and kWarpgroups consumer warpgroups of 64 query rows. Rows of Q, K, V and O lie in
// shared memory in chunks of kChunk columns, each chunk as wide as the swizzle of its TMA boxes; WGMMA reads the same
// layout.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "host/geometry.h"
#include "kernels/common/tiles.h"

namespace flash_attn3 {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kWarpgroups_, int kBlockN_, int kKeyStages_,
          int kValueStages_>
struct ForwardConfig {
  using Element = Element_;
  using Output = Element;
  using Params = ForwardParams;
  static constexpr bool kScaled = false;  // whether Q, K and V have scales
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kBlockM = kWarpgroups * kRowsPerWarpgroup;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kKeyStages = kKeyStages_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;

  // 65536 registers an SM; ptxas starts from 65536 / kThreads each, setmaxnreg moves them to the consumers.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;
  static_assert(128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= 65536, "registers of an SM");

  static constexpr int kChunk = chunk_columns(kHeadDim, kHeadDimV);
  static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0, "head dims are multiples of the chunk");
  static_assert(kBlockN % 16 == 0, "P V walks keys 16 at a time");
  static_assert(kWarpgroups == 2 || kWarpgroups == 3, "register split is known for 2 and 3 consumer warpgroups");

  static constexpr int kQueryBytes = kRowsPerWarpgroup * kHeadDim * 2;  // of one warpgroup
  static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;              // of one stage
  static constexpr int kValueBytes = kBlockN * kHeadDimV * 2;
  static constexpr int kRingBytes = kKeyStages * kKeyBytes + kValueStages * kValueBytes;
  static constexpr int kSharedLimit = 232448;
  static constexpr int kControlBytes = 2048;  // barriers, tiles

  // O leaves over the rows of Q that the warpgroup has done with. Where two buffers of Q fit, the next tile's Q is
  // there before this tile ends. Where only one fits, O leaves through what is left, if that holds a fraction of its
  // columns: in rounds, while the next Q loads.
  static constexpr int kQueryBuffers =
      kRingBytes + 2 * kWarpgroups * kQueryBytes + kControlBytes <= kSharedLimit ? 2 : 1;
  static constexpr int output_columns() {
    constexpr int kFree = kSharedLimit - kControlBytes - kRingBytes - kQueryBuffers * kWarpgroups * kQueryBytes;
    for (int rounds = 1; kQueryBuffers == 1 && kHeadDimV / rounds >= kChunk; ++rounds) {
      int const columns = kHeadDimV / rounds;
      if (kHeadDimV % rounds == 0 && columns % kChunk == 0 && kWarpgroups * kRowsPerWarpgroup * columns * 2 <= kFree) {
        return columns;
      }
    }
    return 0;
  }
  static constexpr int kOutputColumns = output_columns();  // of the buffer of O; 0: over Q
  static constexpr bool kOutputOverQuery = kOutputColumns == 0;
  static_assert(!kOutputOverQuery || kHeadDimV <= kHeadDim, "O fits over Q");

  static constexpr int kOutputChunk = kChunk;

  using KMajorAtom = std::conditional_t<kChunk == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MnMajorAtom = std::conditional_t<kChunk == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  using Rows = cute::Int<kRowsPerWarpgroup>;
  using N = cute::Int<kBlockN>;
  using D = cute::Int<kHeadDim>;
  using Dv = cute::Int<kHeadDimV>;
  using LayoutQ = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<Rows, D>{}));  // (64, D)
  using LayoutK =
      decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<N, D, cute::Int<kKeyStages>>{}));  // (N, D, STAGES)
  // V as the B operand of P V: (DV, N), head dim contiguous; key blocks of a chunk follow each other as in its TMA box.
  using LayoutVt = decltype(cute::tile_to_shape(MnMajorAtom{}, cute::Shape<Dv, N, cute::Int<kValueStages>>{},
                                                cute::Step<cute::_2, cute::_1, cute::_3>{}));  // (DV, N, STAGES)

  // S = Q K^T and O += P V, each for the 64 rows of one warpgroup.
  using MmaQk = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Rows, N, D>>()));
  using MmaPv =
      decltype(cute::make_tiled_mma(cute::SM90::GMMA::rs_op_selector<Element, Element, float, cute::Shape<Rows, Dv, N>,
                                                                     cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
};

// How a warpgroup walks a tile.
struct alignas(16) ForwardWalk {
  KeyRange keys;         // its own blocks
  int32_t above, below;  // how many more the tile has, which the warpgroup releases as they come
  // Blocks in which the warpgroups of the tile issue in turns; if there are none, keys.unmasked_begin and 0.
  int32_t turns_begin, turns_end;
  int32_t last_in_turn;  // not 0: it passes the turn to warpgroup 0
  int32_t first_row;     // of the warpgroup's own 64, or one of these
  static constexpr int32_t kNoRows = -1, kNoTile = -2;
  // Of kernels whose inputs have scales: what Q K^T and P V are times.
  float score_scale, value_scale;
};

// Barriers in shared memory: who arrives -> who waits, and what the waiter may then do.
// - query_full[b][w]: producer and TMA bytes -> warpgroup w reads its 64 rows of Q in buffer b; a use for each tile in
//   which w has rows
// - query_empty[b][w]: one thread of w, when O has left these rows, or each warp of w after its last Q K^T if O leaves
//   elsewhere -> producer overwrites them
// - key_full[s]: producer and TMA bytes -> all consumers read K of stage s
// - key_empty[s]: each consumer warp, after Q K^T -> producer overwrites stage s
// - value_full[s], value_empty[s]: the same for V and P V
// - nearly_loaded: the warp that loads K and V, a few blocks before the end of a tile -> the next tile is looked for
// - tiles: see TileSlots; walks go with a tile
// Named barriers: w, the 128 threads of warpgroup w have O in shared memory; kWarpgroups + w, the turn of w
// (consumer.h).

template <class Config>
struct ForwardStorage {
  using Element = typename Config::Element;
  using Output = typename Config::Output;
  using Barrier = cutlass::arch::ClusterBarrier;
  using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

  alignas(1024) Element q[Config::kQueryBuffers][Config::kWarpgroups][cute::cosize_v<typename Config::LayoutQ>];
  alignas(1024) Element k[cute::cosize_v<typename Config::LayoutK>];
  alignas(1024) Element v[cute::cosize_v<typename Config::LayoutVt>];
  alignas(
      1024) Output o[Config::kWarpgroups][Config::kOutputOverQuery ? 8 : kRowsPerWarpgroup * Config::kOutputColumns];
  TransactionBarrier query_full[Config::kQueryBuffers][Config::kWarpgroups];
  Barrier query_empty[Config::kQueryBuffers][Config::kWarpgroups];
  TransactionBarrier key_full[Config::kKeyStages];
  Barrier key_empty[Config::kKeyStages];
  TransactionBarrier value_full[Config::kValueStages];
  Barrier value_empty[Config::kValueStages];
  Barrier nearly_loaded;
  // Short sequences have tiles in which not all warpgroups have rows: with as many on their way, all are busy.
  static constexpr int kSlots = 4;
  TileSlots<kSlots> tiles;
  ForwardWalk walks[kSlots][Config::kWarpgroups];
};

}  // namespace flash_attn3
