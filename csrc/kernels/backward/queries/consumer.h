// A consumer warpgroup: 64 query rows of a tile, keys walked from right to left.
//   S = Q K^T ; P = exp2(c S - LSE) ; dP = dO V^T ; dS = P (dP - delta) ; dQ += dS K ; dQ *= scale
// In a step the warpgroup issues S and dP, takes the exponentials while dP runs, then issues dQ and waits for it: while
// it does arithmetic the tensor cores work for the other warpgroups, which drift apart by themselves. That reaches the
// full rate, and K of one block only is held at a time. Blocks that need a mask come first, in a loop of their own.
// Every warpgroup walks the blocks that its own rows need and only releases the others.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "host/geometry.h"
#include "kernels/backward/queries/config.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"
#include "kernels/common/wgmma.h"

namespace flash_attn3 {

template <class Config>
struct QueriesConsumer {
  using Element = typename Config::Element;
  using Storage = QueriesStorage<Config>;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kScores = kBlockN / 2;            // accumulators of S, and of dP, a thread
  static constexpr int kOutputs = Config::kHeadDim / 2;  // accumulators of dQ a thread

  BackwardParams const& params;
  Storage& storage;
  int const warpgroup;
  int const thread;  // in the warpgroup
  PipelineState<Config::kKeyStages> key_state{Role::kConsumer};
  PipelineState<Config::kValueSlots> value_state{Role::kConsumer};
  PipelineState<Config::kRowBuffers> row_state{Role::kConsumer};
  PipelineState<1> output_state{Role::kProducer};

  __device__ __forceinline__ QueriesConsumer(BackwardParams const& p, Storage& s, int wg)
      : params(p), storage(s), warpgroup(wg), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = storage.tiles.take(tiles);
      if (tile.block < 0) break;
      process(tile);
    }
  }

  // One arrival a warp: each warp's quarter of a WGMMA retires on its own.
  __device__ __forceinline__ void release_keys() {
    arrive_warp(storage.key_empty[key_state.stage]);
    key_state.advance();
  }
  __device__ __forceinline__ void release_values() {
    arrive_warp(storage.value_empty[value_state.stage]);
    value_state.advance();
  }
  __device__ __forceinline__ void release_rows() {
    arrive_warp(storage.dout_empty[row_state.stage][warpgroup]);
    if constexpr (!Config::kOutputOverQuery) arrive_warp(storage.query_empty[row_state.stage][warpgroup]);
  }

  // Of a thread's two rows, eight apart: accumulator i of S, dP and dQ belongs to row (i / 2) % 2.
  struct Rows {
    float lse_log2[2];
    float delta[2];
  };

  __device__ __forceinline__ int row_in_warpgroup() const { return thread / 32 * 16 + thread % 32 / 4; }

  __device__ __forceinline__ Rows load_statistics(Tile const tile, int row) const {
    int64_t const head = int64_t(tile.batch) * params.heads + tile.head;
    int64_t const first = head * params.statistics_stride + row + row_in_warpgroup();
    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.lse_log2[r] = __ldg(params.lse_log2 + first + 8 * r);
      rows.delta[r] = __ldg(params.delta + first + 8 * r);
    }
    return rows;
  }

  __device__ __forceinline__ void process(Tile const tile) {
    int const tile_row = tile.block * Config::kBlockM;
    int const row = tile_row + warpgroup * kRowsPerWarpgroup;
    auto range = [&](int begin, int end) {
      return key_range(begin, end, params.seqlen_q, params.seqlen_k, params.causal, kBlockN);
    };
    int const tile_blocks = range(tile_row, tile_row + Config::kBlockM).key_blocks;
    KeyRange const keys = range(row, row + kRowsPerWarpgroup);

#pragma unroll 1
    for (int block = tile_blocks; block > keys.key_blocks; --block) {
      storage.key_full[key_state.stage].wait(key_state.phase);
      release_keys();
#pragma unroll
      for (int part = 0; part < Config::kValueParts; ++part) {
        storage.value_full[value_state.stage].wait(value_state.phase);
        release_values();
      }
    }
    if (row >= params.seqlen_q) return;  // its mover loads nothing

    Rows const rows = load_statistics(tile, row);
    float dq[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) dq[i] = 0.f;
    storage.query_full[row_state.stage][warpgroup].wait(row_state.phase);
    storage.dout_full[row_state.stage][warpgroup].wait(row_state.phase);
    int block = keys.key_blocks - 1;
    if (block < 0) release_rows();
#pragma unroll 1
    for (; block >= keys.unmasked; --block) step<true>(block, row, rows, dq);
#pragma unroll 1
    for (; block >= 0; --block) step<false>(block, row, rows, dq);
    write(dq);
    row_state.advance();
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int block, int row, Rows const& rows, float (&dq)[kOutputs]) {
    using RowTile = typename Config::RowTile;
    using KeyTile = typename Config::KeyTile;
    float s[kScores], dp[kScores], p[kScores];
    uint32_t ds[kScores / 2];
    Element* const k = storage.k[key_state.stage];  // (N, D)

    // S = Q K^T
    storage.key_full[key_state.stage].wait(key_state.phase);
    issue<typename Config::MmaScores>(
        RowTile::template sum_over_columns<Config::kHeadDim>(storage.q[row_state.stage][warpgroup]),
        KeyTile::template sum_over_columns<Config::kHeadDim>(k), s, false);
    // dP = dO V^T
    auto values = value_state;
#pragma unroll
    for (int part = 0; part < Config::kValueParts; ++part, values.advance()) {
      Element* const dout =
          storage.dout[row_state.stage][warpgroup] + part * (kRowsPerWarpgroup * Config::kPartColumns);
      storage.value_full[values.stage].wait(values.phase);
      issue<typename Config::MmaScores>(
          RowTile::template sum_over_columns<Config::kPartColumns>(dout),
          KeyTile::template sum_over_columns<Config::kPartColumns>(storage.v[values.stage]), dp, part > 0);
    }

    cute::warpgroup_wait<Config::kValueParts>();
    fence_accumulators(s);
#pragma unroll
    for (int i = 0; i < kScores; ++i) p[i] = exp2_approx(fmaf(s[i], params.scale_log2, -rows.lse_log2[(i >> 1) & 1]));
    if constexpr (Config::kValueParts == 2) {
      cute::warpgroup_wait<1>();
      release_values();
    }
    cute::warpgroup_wait<0>();
    fence_accumulators(dp);
    release_values();
    if (block == 0) release_rows();  // the last that this tile reads

#pragma unroll
    for (int i = 0; i < kScores; ++i) dp[i] = p[i] * (dp[i] - rows.delta[(i >> 1) & 1]);
    if constexpr (kMasked) mask(dp, block, row);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) ds[i / 2] = Packed<Element>::pack(dp[i], dp[i + 1]);

    // dQ += dS K
    fence_accumulators(dq);
    issue<typename Config::MmaQueries>(register_operand<Element>(ds), KeyTile::template sum_over_rows<kBlockN>(k), dq,
                                       true);
    cute::warpgroup_wait<0>();
    fence_accumulators(dq);
    release_keys();
  }

  // dS of keys that a row does not see becomes 0, whatever P (exp2 of anything) and dP are there. Columns are
  // compile-time numbers against a limit per row.
  __device__ __forceinline__ void mask(float (&ds)[kScores], int block, int row) const {
    int const first_column = block * kBlockN + thread % 4 * 2;
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limit[r] = visible_keys(row + row_in_warpgroup() + 8 * r, params.seqlen_q, params.seqlen_k, params.causal) -
                 first_column;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 >= limit[(i >> 1) & 1]) ds[i] = 0.f;
    }
  }

  // dQ into shared memory, from where its mover stores it.
  __device__ __forceinline__ void write(float (&dq)[kOutputs]) {
    // STSM.x4: lanes 8i..8i+7 hold the row addresses of 8x8 matrix i: rows 0-7 or 8-15, left or right 8 columns.
    // The TMA box swizzles its 16-byte units: 128-byte rows by row % 8, 64-byte rows by row / 2 % 4.
    constexpr int kUnits = Config::kChunk / 8;
    int const lane = thread % 32;
    int const stsm_row = thread / 32 * 16 + lane % 16;
    int const swizzle = kUnits == 8 ? stsm_row % 8 : stsm_row / 2 % 4;
    Element* const buffer = Config::kOutputOverQuery ? storage.q[row_state.stage][warpgroup] : storage.dq[warpgroup];
    cute::uint128_t* const row_units = reinterpret_cast<cute::uint128_t*>(buffer) + stsm_row * kUnits;
#pragma unroll
    for (int first = 0; first < Config::kHeadDim; first += Config::kOutputColumns) {
      if constexpr (Config::kOutputOverQuery) {
        cutlass::arch::NamedBarrier::sync(128, warpgroup);  // no warp's Q K^T reads these rows any more
      } else {
        storage.output_empty[warpgroup].wait(output_state.phase);
        output_state.advance();
      }
#pragma unroll
      for (int column = 0; column < Config::kOutputColumns; column += 16) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int const i = (first + column) / 2 + 2 * j;
          packed[j] = Packed<Element>::pack(dq[i] * params.scale, dq[i + 1] * params.scale);
        }
        int const chunk = column / Config::kChunk, unit = column % Config::kChunk / 8 + lane / 16;
        cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                      row_units[chunk * kRowsPerWarpgroup * kUnits + (unit ^ swizzle)]);
      }
      cute::tma_store_fence();  // by every writer, before it arrives
      arrive_warp(Config::kOutputOverQuery ? storage.query_empty[row_state.stage][warpgroup]
                                           : storage.output_full[warpgroup]);
    }
  }
};

}  // namespace flash_attn3
