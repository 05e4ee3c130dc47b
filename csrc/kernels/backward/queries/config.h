// Compile-time configuration of one kernel that computes dQ, and its shared-memory plan.
//
// A CTA is one warpgroup that moves data and kWarpgroups consumer warpgroups, each of which holds 64 query rows (Q, dO)
// in shared memory and walks keys. All tiles lie as their TMA boxes leave them, in chunks of kChunk columns.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include "host/geometry.h"
#include "kernels/common/tiles.h"
#include "kernels/common/wgmma.h"

namespace flash_attn3 {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kKeyStages_, int kValueStages_>
struct QueriesConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kKeyStages = kKeyStages_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr int kWarpgroups = kBlockM / kRowsPerWarpgroup;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static_assert(kBlockM % kRowsPerWarpgroup == 0, "a warpgroup holds 64 rows");
  static_assert(kWarpgroups == 2 || kWarpgroups == 3, "register split is known for 2 and 3 consumer warpgroups");

  // 65536 registers an SM; ptxas starts from 65536 / kThreads each, setmaxnreg moves them to the consumers.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;
  static_assert(128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= 65536, "registers of an SM");

  static constexpr int kChunk = chunk_columns(kHeadDim, kHeadDimV);
  static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0, "head dims are multiples of the chunk");
  static_assert(kBlockN % 16 == 0, "dS K walks keys 16 at a time");

  // V comes in parts of its columns, each a slot of the ring. A single stage is cut in two: one half of the next block
  // then loads while dO V^T still reads the other.
  static constexpr int kValueParts = kValueStages == 1 && kHeadDimV % (2 * kChunk) == 0 ? 2 : 1;
  static constexpr int kValueSlots = kValueStages * kValueParts;
  static constexpr int kPartColumns = kHeadDimV / kValueParts;

  static constexpr int kQueryBytes = kRowsPerWarpgroup * kHeadDim * 2;  // of one warpgroup
  static constexpr int kDoutBytes = kRowsPerWarpgroup * kHeadDimV * 2;
  static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;  // of one stage
  static constexpr int kPartBytes = kBlockN * kPartColumns * 2;
  static constexpr int kRingBytes = kKeyStages * kKeyBytes + kValueSlots * kPartBytes;
  static constexpr int kRowBytes = kWarpgroups * (kQueryBytes + kDoutBytes);
  static constexpr int kSharedLimit = 232448;
  static constexpr int kControlBytes = 2048;  // barriers, tile slots, alignment

  // Where two buffers of Q and dO fit, the next tile's rows are there before this tile ends, and dQ leaves over the
  // rows of Q. Where only one fits, dQ leaves through what is left, if that holds a fraction of its columns: in rounds,
  // while the next rows load.
  static constexpr int kRowBuffers = kRingBytes + 2 * kRowBytes + kControlBytes <= kSharedLimit ? 2 : 1;
  static constexpr int output_columns() {
    constexpr int kFree = kSharedLimit - kControlBytes - kRingBytes - kRowBuffers * kRowBytes;
    for (int rounds = 1; kRowBuffers == 1 && kHeadDim / rounds >= kChunk; ++rounds) {
      int const columns = kHeadDim / rounds;
      if (kHeadDim % rounds == 0 && columns % kChunk == 0 && kBlockM * columns * 2 <= kFree) return columns;
    }
    return 0;
  }
  static constexpr bool kOutputOverQuery = output_columns() == 0;
  static constexpr int kOutputColumns = kOutputOverQuery ? kHeadDim : output_columns();  // of a round

  using RowTile = SharedTile<kRowsPerWarpgroup, kChunk>;  // Q (64, D), dO (64, DV)
  using KeyTile = SharedTile<kBlockN, kChunk>;            // K (N, D), V (N, DV)
  // S = Q K^T and dP = dO V^T; dQ += dS K; each for the 64 rows of one warpgroup.
  using MmaScores = SharedMma<Element, kBlockN, kSumOverColumns, kSumOverColumns>;
  using MmaQueries = RegisterMma<Element, kHeadDim, kSumOverRows>;
};

// Barriers in shared memory: who arrives -> who waits, and what the waiter may then do. Warp 0 of the producer
// warpgroup loads K and V; its warp 1 + w moves the rows of warpgroup w.
// - query_full[b][w], dout_full[b][w]: mover of w and TMA bytes -> warpgroup w reads its rows of Q, dO in buffer b
// - dout_empty[b][w]: each warp of w, after its last dO V^T -> mover overwrites dO
// - query_empty[b][w]: each warp of w, when dQ lies over its rows of Q -> mover stores dQ, then overwrites them; or, if
//   dQ leaves elsewhere, after its last Q K^T -> mover overwrites them
// - output_full[w]: each warp of w, when a round of dQ lies in its buffer -> mover stores it
// - output_empty[w]: mover, when that has been read -> warpgroup w writes the next round
// - key_full[s]: warp 0 and TMA bytes -> all consumers read K of stage s
// - key_empty[s]: each consumer warp, after dS K -> warp 0 overwrites stage s
// - value_full[s], value_empty[s]: the same for a part of V and dO V^T
// - tiles: see TileSlots; warp 0 gives, movers and consumers take
// Buffers of rows are counted by the tiles in which w has rows at all, stages by blocks, the same for all warpgroups.
// Named barrier w: dQ over Q, all four warps of w are past their last Q K^T.

template <class Config>
struct QueriesStorage {
  using Element = typename Config::Element;
  using Barrier = cutlass::arch::ClusterBarrier;
  using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;
  static constexpr int kBuffers = Config::kRowBuffers, kWarpgroups = Config::kWarpgroups;
  static constexpr int kOutputElements = Config::kOutputOverQuery ? 8 : kRowsPerWarpgroup * Config::kOutputColumns;

  alignas(1024) Element q[kBuffers][kWarpgroups][Config::kQueryBytes / 2];
  alignas(1024) Element dout[kBuffers][kWarpgroups][Config::kDoutBytes / 2];
  alignas(1024) Element k[Config::kKeyStages][Config::kKeyBytes / 2];
  alignas(1024) Element v[Config::kValueSlots][Config::kPartBytes / 2];
  alignas(1024) Element dq[kWarpgroups][kOutputElements];
  TransactionBarrier query_full[kBuffers][kWarpgroups];
  Barrier query_empty[kBuffers][kWarpgroups];
  TransactionBarrier dout_full[kBuffers][kWarpgroups];
  Barrier dout_empty[kBuffers][kWarpgroups];
  Barrier output_full[kWarpgroups];
  Barrier output_empty[kWarpgroups];
  TransactionBarrier key_full[Config::kKeyStages];
  Barrier key_empty[Config::kKeyStages];
  TransactionBarrier value_full[Config::kValueSlots];
  Barrier value_empty[Config::kValueSlots];
  TileSlots<2> tiles;

  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4;  // of a warpgroup
    for (int w = 0; w < kWarpgroups; ++w) {
      for (int b = 0; b < kBuffers; ++b) {
        query_full[b][w].init(1);
        query_empty[b][w].init(kWarps);
        dout_full[b][w].init(1);
        dout_empty[b][w].init(kWarps);
      }
      output_full[w].init(kWarps);
      output_empty[w].init(1);
    }
    for (int s = 0; s < Config::kKeyStages; ++s) {
      key_full[s].init(1);
      key_empty[s].init(kWarpgroups * kWarps);
    }
    for (int s = 0; s < Config::kValueSlots; ++s) {
      value_full[s].init(1);
      value_empty[s].init(kWarpgroups * kWarps);
    }
    tiles.init(kWarpgroups * (kWarps + 1));
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace flash_attn3
