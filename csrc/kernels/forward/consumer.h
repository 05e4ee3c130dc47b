// A consumer warpgroup: 64 query rows of a tile, keys walked from right to left.
//   S = Q K^T ; P = exp2(c S - reference) ; O += P V ; O /= row sum ; LSE
// In a step the warpgroup issues O += P V of the block before and S = Q K^T of this one together, waits for both and
// does the softmax while the tensor cores work for the other warpgroups. Blocks that need a mask, those at the right
// edge and those at the left, are walked in a loop of their own; the hot loop has neither compares nor a row maximum.
// Every warpgroup walks the blocks that its own rows need and only releases the others, so that an edge of the mask
// costs 64 rows' width. In the blocks that all of them walk without a mask they issue their GEMMs in turns (ping-pong):
// one's softmax then lies under the others' GEMMs.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "host/geometry.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"
#include "kernels/forward/config.h"

namespace flash_attn3 {

template <class Config>
struct Consumer {
  using Element = typename Config::Element;
  using Storage = ForwardStorage<Config>;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kScores = kBlockN / 2;             // accumulators of S a thread
  static constexpr int kOutputs = Config::kHeadDimV / 2;  // accumulators of O a thread
  static constexpr int kInWord = 4 / sizeof(Element);     // probabilities of a register
  static constexpr int kWords = kScores / kInWord;
  static_assert(kBlockN % (8 * kInWord) == 0, "P V sums over so many keys at a time");

  // Keys that the two rows of a thread see, counted from its own first column of block 0.
  struct SeenColumns {
    int begin[2], end[2];
  };

  ForwardParams const& params;
  Storage& storage;
  int const warpgroup;
  int const thread;  // in the warpgroup
  PipelineState<Config::kKeyStages> key_state{Role::kConsumer};
  PipelineState<Config::kValueStages> value_state{Role::kConsumer};
  int tiles = 0;                // so far, each with a slot
  int queries = 0;              // those of them in which the warpgroup has rows, each with a buffer of Q
  bool output_leaving = false;  // O of the tile before may still be read from its buffer

  __device__ __forceinline__ Consumer(ForwardParams const& p, Storage& s, int wg)
      : params(p), storage(s), warpgroup(wg), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    if (warpgroup == Config::kWarpgroups - 1) cutlass::arch::NamedBarrier::arrive(256, turn_barrier(0));
    for (;; ++tiles) {
      storage.tiles.wait(tiles);
      ForwardWalk const walk = look_at_walk();
      if (walk.first_row == ForwardWalk::kNoTile) break;
      process(walk);
      storage.tiles.release(tiles);
      release_unread(walk.below);
    }
    if (thread == 0) cute::tma_store_wait<0>();  // the buffer of O lives as long as the CTA
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

  __device__ __forceinline__ int query_buffer() const { return queries % Config::kQueryBuffers; }

  // O over Q: gives back the buffer from which O of the tile before leaves, once it has been read.
  __device__ __forceinline__ void release_left_queries() {
    if (output_leaving && thread == 0) {
      cute::tma_store_wait<0>();
      storage.query_empty[(opaque(queries) + 1) % Config::kQueryBuffers][warpgroup].arrive();
    }
    output_leaving = false;
  }

  // O elsewhere: gives Q back after the last Q K^T.
  __device__ __forceinline__ void release_read_queries() {
    if constexpr (!Config::kOutputOverQuery) arrive_warp(storage.query_empty[query_buffer()][warpgroup]);
  }

  // The slot of the present tile, held until release(): what is needed only outside the hot loop is read again, not
  // kept in registers through it.
  __device__ __forceinline__ int slot() const {
    compiler_fence();
    return opaque(tiles) % Storage::kSlots;
  }

  // Known to be uniform: loops, stages and WGMMA descriptors that come from it live in uniform registers.
  __device__ __forceinline__ ForwardWalk look_at_walk() const {
    ForwardWalk const walk = storage.walks[slot()][warpgroup];
    auto of_lane_0 = [](int value) { return __shfl_sync(0xffffffffu, value, 0); };
    return {{of_lane_0(walk.keys.begin), of_lane_0(walk.keys.end), of_lane_0(walk.keys.unmasked_begin),
             of_lane_0(walk.keys.unmasked_end)},
            of_lane_0(walk.above),
            of_lane_0(walk.below),
            of_lane_0(walk.turns_begin),
            of_lane_0(walk.turns_end),
            of_lane_0(walk.last_in_turn),
            of_lane_0(walk.first_row),
            walk.score_scale,
            walk.value_scale};
  }

  // The `count` next blocks of the tile, which the warpgroup does not need.
  __device__ __forceinline__ void release_unread(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      storage.key_full[key_state.stage].wait(key_state.phase);
      release_keys();
      storage.value_full[value_state.stage].wait(value_state.phase);
      release_values();
    }
  }

  __device__ __forceinline__ void process(ForwardWalk const& walk) {
    release_unread(walk.above);
    if (walk.first_row == ForwardWalk::kNoRows) return;

    auto const query = PipelineState<Config::kQueryBuffers>::at(Role::kConsumer, queries);
    storage.query_full[query.stage][warpgroup].wait(query.phase);
    float o[kOutputs], inverse[2];
    OnlineSoftmax<Element> softmax(of_scores(params.scale_log2, walk));
    if (walk.keys.begin < walk.keys.end) {
      attend(walk, softmax, o, inverse);
    } else {
      release_read_queries();
      finish(softmax, inverse);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] = 0.f;
    }
    store(o, inverse);
    ++queries;
  }

  // Turn barrier w: warpgroup w waits, its predecessor arrives. One token goes round for the life of the CTA: the last
  // pass of a tile is what warpgroup 0 takes in the next one, so nobody can pass twice before the other has taken. In
  // which blocks, and why that cannot end in a deadlock: TileGiver::give_walks.
  static __device__ __forceinline__ uint32_t turn_barrier(int warpgroup) { return Config::kWarpgroups + warpgroup; }

  __device__ __forceinline__ void attend(ForwardWalk const& walk, OnlineSoftmax<Element>& softmax, float (&o)[kOutputs],
                                         float (&inverse)[2]) {
    KeyRange const& keys = walk.keys;
    float s[kScores];
    uint32_t p[kWords];
    int block = keys.end - 1;
    storage.key_full[key_state.stage].wait(key_state.phase);
    cute::warpgroup_arrive();
    multiply_qk(s);
    cute::warpgroup_commit_batch();
    release_left_queries();
    SeenColumns const seen = look_at_seen_columns();
    cute::warpgroup_wait<0>();
    fence(s);
    release_keys();
    if (is_capped()) cap(s, walk);
    if (block >= keys.unmasked_end || block < keys.unmasked_begin) mask(s, block, seen, block < keys.unmasked_begin);
    softmax.template exact<true>(s, p, o);

    int const first_pv = block - 1;  // before the step of this block O holds nothing
    --block;
    if (is_capped()) {
      attend_capped(s, p, o, softmax, block, first_pv);
    } else {
      attend_in_legs(walk, seen, s, p, o, softmax, block, first_pv);
    }
    release_read_queries();

    storage.value_full[value_state.stage].wait(value_state.phase);
    fence(o);
    cute::warpgroup_arrive();
    multiply_pv(p, o, block < first_pv);
    cute::warpgroup_commit_batch();
    finish(softmax, inverse);
    cute::warpgroup_wait<0>();
    fence(o);
    release_values();
  }

  // The blocks below the first. Legs: down to `masked_to` with a mask, from there to `to` without one, in turns below
  // `turns_end`. The first leg has the right edge and ends with the turns; the next ones have what is left of the
  // unmasked blocks, and the left edge.
  __device__ __forceinline__ void attend_in_legs(ForwardWalk const& walk, SeenColumns seen, float (&s)[kScores],
                                                 uint32_t (&p)[kWords], float (&o)[kOutputs],
                                                 OnlineSoftmax<Element>& softmax, int& block, int first_pv) {
    int masked_to = walk.keys.unmasked_end, to = walk.turns_begin, turns_end = walk.turns_end;
    bool last = to == walk.keys.begin, left_edge = false;
#pragma unroll 1
    for (;;) {
#pragma unroll 1
      for (; block >= masked_to; --block) {
        multiply_both(s, p, o, block < first_pv, false, false);
        mask(s, block, seen, left_edge);
        softmax.template exact<false>(s, p, o);
      }
#pragma unroll 1
      for (; block >= to; --block) {
        multiply_both(s, p, o, block < first_pv, block < turns_end, walk.last_in_turn);
        softmax.unchecked_maximum(s, p, o);
      }
      if (last) break;
      KeyRange const left = look_at_walk().keys;
      last = block < left.unmasked_begin;
      masked_to = last ? left.begin : block + 1;
      to = last ? left.begin : left.unmasked_begin;
      turns_end = 0;
      left_edge = true;
      seen = look_at_seen_columns();
    }
  }

  // The same with softcap, in one loop without turns: its code in the other loops, though jumped over, made them up to
  // twice as long and short sequences 3 to 4 % slower.
  __device__ __forceinline__ void attend_capped(float (&s)[kScores], uint32_t (&p)[kWords], float (&o)[kOutputs],
                                                OnlineSoftmax<Element>& softmax, int& block, int first_pv) {
    ForwardWalk const walk = look_at_walk();
    KeyRange const& keys = walk.keys;
#pragma unroll 1
    for (; block >= keys.begin; --block) {
      multiply_both(s, p, o, block < first_pv, false, false);
      cap(s, walk);
      if (block >= keys.unmasked_end || block < keys.unmasked_begin) {
        mask(s, block, look_at_seen_columns(), block < keys.unmasked_begin);
      }
      softmax.template exact<false>(s, p, o);
    }
  }

  // O += P V of the block before, S = Q K^T of this one. V is given back while Q K^T still runs.
  __device__ __forceinline__ void multiply_both(float (&s)[kScores], uint32_t (&p)[kWords], float (&o)[kOutputs],
                                                bool accumulate, bool in_turn, bool last_in_turn) {
    storage.value_full[value_state.stage].wait(value_state.phase);
    storage.key_full[key_state.stage].wait(key_state.phase);
    if (in_turn) cutlass::arch::NamedBarrier::sync(256, turn_barrier(warpgroup));
    fence(s);
    fence(o);
    cute::warpgroup_arrive();
    multiply_pv(p, o, accumulate);
    cute::warpgroup_commit_batch();
    multiply_qk(s);
    cute::warpgroup_commit_batch();
    if (in_turn) cutlass::arch::NamedBarrier::arrive(256, turn_barrier(last_in_turn ? 0 : warpgroup + 1));
    cute::warpgroup_wait<1>();
    release_values();
    cute::warpgroup_wait<0>();
    fence(s);
    fence(o);
    release_keys();
  }

  template <int kCount>
  static __device__ __forceinline__ void fence(float (&accumulators)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(accumulators[i]);
  }

  // The accumulator of a warpgroup's 64 x (8 * atoms) tile, as WGMMA numbers its registers.
  template <int kCount>
  static __device__ __forceinline__ auto accumulator(float (&values)[kCount]) {
    using namespace cute;
    return make_tensor(&values[0], Layout<Shape<Shape<_2, _2, Int<kCount / 4>>, _1, _1>>{});
  }

  // S = Q K^T
  __device__ __forceinline__ void multiply_qk(float (&s)[kScores]) {
    using namespace cute;
    typename Config::MmaQk mma;
    auto const slice = mma.get_slice(0);
    // Of many columns: descriptors of Q are computed in each step; kept in registers through the loops, others spill.
    int const owner = Config::kHeadDim > 128 ? opaque(warpgroup) : warpgroup;
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[query_buffer()][owner]), typename Config::LayoutQ{});  // (64, D)
    Tensor sK = make_tensor(make_smem_ptr(storage.k), typename Config::LayoutK{});  // (N, D, STAGES)
    Tensor tSrQ = slice.partition_fragment_A(sQ);                                   // (MMA, 1, D/16)
    Tensor tSrK = slice.partition_fragment_B(sK)(_, _, _, key_state.stage);         // (MMA, 1, D/16)
    Tensor tSrS = accumulator(s);
    mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int k = 0; k < size<2>(tSrQ); ++k) {
      cute::gemm(mma, tSrQ(_, _, k), tSrK(_, _, k), tSrS);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  }

  // O += P V, or O = P V where O holds nothing yet.
  __device__ __forceinline__ void multiply_pv(uint32_t (&p)[kWords], float (&o)[kOutputs], bool accumulate) {
    using namespace cute;
    typename Config::MmaPv mma;
    auto const slice = mma.get_slice(0);
    Tensor sVt = make_tensor(make_smem_ptr(storage.v), typename Config::LayoutVt{});  // (DV, N, STAGES)
    Tensor tOrV = slice.partition_fragment_B(sVt)(_, _, _, value_state.stage);        // (MMA, 1, N/16)
    // Accumulators of S, packed, are the A operand as they lie: (MMA, 1, N/16), of 8-bit elements (MMA, 1, N/32).
    Tensor tOrP = make_tensor(reinterpret_cast<Element*>(&p[0]),
                              Layout<Shape<Shape<Int<kInWord>, _2, _2>, _1, Int<kBlockN / (8 * kInWord)>>>{});
    Tensor tOrO = accumulator(o);
    mma.accumulate_ = accumulate ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
#pragma unroll
    for (int k = 0; k < size<2>(tOrP); ++k) {
      cute::gemm(mma, tOrP(_, _, k), tOrV(_, _, k), tOrO);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  }

  // Softcap: scores in units of the cap. The hot loop branches over it.
  __device__ __forceinline__ void cap(float (&s)[kScores], ForwardWalk const& walk) const {
    float const scale = Config::kScaled ? params.cap_scale * walk.score_scale : params.cap_scale;
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = tanh_by_exp2(scale * s[i]);
  }
  // `scale` as it is for the scores of a tile; those in units of the cap have no other.
  __device__ __forceinline__ float of_scores(float scale, ForwardWalk const& walk) const {
    if constexpr (!Config::kScaled) return scale;
    if (is_capped()) return scale;
    // A normal number, for a zero times the -inf of a masked score would be NaN; which negative scales become.
    float const scaled = scale * walk.score_scale;
    return scaled >= 0.f ? fmaxf(scaled, 0x1p-126f) : NAN;
  }
  __device__ __forceinline__ bool is_capped() const { return __builtin_expect(params.cap_scale != 0.f, false); }

  __device__ __forceinline__ SeenColumns look_at_seen_columns() const {
    int const place = slot();
    Sequence const sequence = storage.tiles.tile[place].sequence;
    int const i = opaque(thread);
    int const first_row = storage.walks[place][warpgroup].first_row + i / 32 * 16 + i % 32 / 4;
    SeenColumns seen;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Span const keys = visible_keys(first_row + 8 * r, sequence.q_length, sequence.k_length, params.mask);
      seen.begin[r] = keys.begin - i % 4 * 2;
      seen.end[r] = keys.end - i % 4 * 2;
    }
    return seen;
  }

  // Scores of keys that a row does not see become -inf. Columns are compile-time numbers against the limits of a row.
  // Left limits fall only into the blocks below those without a mask.
  static __device__ __forceinline__ void mask(float (&s)[kScores], int block, SeenColumns const& seen, bool left_edge) {
    int const column = block * kBlockN;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 >= seen.end[(i >> 1) & 1] - column) s[i] = -INFINITY;
    }
    if (left_edge) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i / 4 * 8 + i % 2 < seen.begin[(i >> 1) & 1] - column) s[i] = -INFINITY;
      }
    }
  }

  // What O is to be multiplied by; writes the LSE. Done while the last P V runs.
  __device__ __forceinline__ void finish(OnlineSoftmax<Element>& softmax, float (&inverse)[2]) const {
    int const place = slot();
    Tile const& tile = storage.tiles.tile[place];
    int const row = storage.walks[place][warpgroup].first_row + thread / 32 * 16 + thread % 32 / 4;
    float lse[2];
    // Opaque, or ptxas gives the sink a register for the whole tile.
    float sink = __int_as_float(opaque(__float_as_int(-INFINITY)));
    if (params.sink != nullptr) sink = __ldg(params.sink + tile.head);
    ForwardWalk const& walk = storage.walks[place][warpgroup];
    softmax.finish(of_scores(params.scale, walk), sink, inverse, lse);
    if constexpr (Config::kScaled) inverse[0] *= walk.value_scale, inverse[1] *= walk.value_scale;
    if (thread % 4 == 0) {
      float* const head_lse = params.lse + tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r < tile.sequence.q_length) head_lse[tile.sequence.q_begin + row + 8 * r] = lse[r];
      }
    }
  }

  // O through shared memory and TMA, which clips rows and columns outside the tensor.
  __device__ __forceinline__ void store(float (&o)[kOutputs], float const (&inverse)[2]) {
    using namespace cute;
    int const lane = thread % 32, warp = thread / 32;
    // STSM.x4: lanes 8i..8i+7 hold the row addresses of 8x8 matrix i: rows 0-7 or 8-15, left or right 8 columns.
    // The TMA box swizzles its 16-byte units: 128-byte rows by row % 8, 64-byte rows by row / 2 % 4.
    constexpr int kColumns = Config::kOutputOverQuery ? Config::kHeadDimV : Config::kOutputColumns;
    using Output = typename Config::Output;
    constexpr int kChunk = Config::kOutputChunk, kUnits = kChunk / 8;
    int const stsm_row = warp * 16 + lane % 16;
    int const swizzle = kUnits == 8 ? stsm_row % 8 : stsm_row / 2 % 4;
    Output* buffer = storage.o[warpgroup];
    if constexpr (Config::kOutputOverQuery) buffer = storage.q[opaque(queries) % Config::kQueryBuffers][warpgroup];
    uint128_t* const row_units = reinterpret_cast<uint128_t*>(buffer) + stsm_row * kUnits;
#pragma unroll
    for (int first = 0; first < Config::kHeadDimV; first += kColumns) {
      if constexpr (Config::kOutputOverQuery) {
        // The last P V was issued by all four warps after the last Q K^T of each had retired: nobody reads these rows.
        release_left_queries();
      } else {
        if (thread == 0) tma_store_wait<0>();  // the copy before has read the buffer
        cutlass::arch::NamedBarrier::sync(128, warpgroup);
      }
#pragma unroll
      for (int column = 0; column < kColumns; column += 16) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int const i = (first + column) / 2 + 2 * j;
          packed[j] = Packed<Output>::pack(o[i] * inverse[j & 1], o[i + 1] * inverse[j & 1]);
        }
        int const chunk = column / kChunk, unit = column % kChunk / 8 + lane / 16;
        SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                row_units[chunk * kRowsPerWarpgroup * kUnits + (unit ^ swizzle)]);
      }
      tma_store_fence();
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
      if (thread == 0) {
        int const place = slot();
        Tile const& tile = storage.tiles.tile[place];
        TmaRows const rows = query_rows(params, tile, storage.walks[place][warpgroup].first_row, kRowsPerWarpgroup);
#pragma unroll
        for (int column = 0; column < kColumns; column += kChunk) {
          SM90_TMA_STORE_4D::copy(&params.map_o, buffer + column * kRowsPerWarpgroup, first + column, rows.sequence,
                                  tile.head, rows.batch);
        }
        tma_store_arrive();
      }
    }
    output_leaving = Config::kOutputOverQuery;
    if constexpr (Config::kQueryBuffers == 1) release_left_queries();  // the next tile waits for it
  }
};

}  // namespace flash_attn3
