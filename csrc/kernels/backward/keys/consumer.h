// A consumer warpgroup: 64 keys of a tile, queries walked block by block, for every query head of the group.
//   S^T = K Q^T ; P = exp2(c S - lse) ; dP^T = V dO^T ; dV += P^T dO ; dS = P (dP - delta) ; dK += dS^T Q ; dQ = dS K
// A step issues dP^T, dV | dS | dQ of the step before, dK | dQ leaves while dK runs | S^T of the next step |
// exponentials. dQ is a step late, so that nobody waits for the other warpgroup's dS^T, and the warpgroups take turns
// at the exponentials, which keeps them half a step apart: one's arithmetic then lies under the other's GEMMs. Without
// dQ there is room for S^T of the next step beside dS (kEarlyScores): dP^T, dV | dS | S^T of the next step, dK |
// exponentials, under dK.
#pragma once

#include "kernels/backward/keys/config.h"
#include "kernels/backward/keys/output.h"
#include "kernels/backward/keys/tile.h"
#include "kernels/common/softmax.h"

namespace flash_attn3 {

template <class Config>
struct KeysConsumer : KeysOutput<Config> {
  using Base = KeysOutput<Config>;
  using Base::Base, Base::params, Base::storage, Base::warpgroup, Base::thread, Base::kKeys, Base::kValues;
  using typename Base::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kScores = kBlockM / 2;  // accumulators a thread: S^T, dP^T
  static constexpr int kQueries = Config::kQueryGradientColumns / 2;
  static constexpr int kPreloaded = Config::kTransposed ? kBlockM / 16 : 1;  // pairs of statistics, see load_statistics

  uint32_t tile_phase = static_cast<uint32_t>(Role::kConsumer);
  int step = 0;  // so far: every step takes one stage of Q, one of dO, and buffer step % 2 of dS^T

  __device__ __forceinline__ void run() {
    if (warpgroup == 1) pass_turn();
    for (int tiles = 0;; ++tiles) {
      if (storage.tiles.look(tiles).block < 0) break;
      process(tiles);
    }
    if (thread == 0) cute::tma_store_wait<0>();  // the buffers of dV and dK live as long as the CTA
  }

  static __device__ __forceinline__ int query_stage(int of_step) {
    return PipelineState<Config::kQueryStages>::at(Role::kConsumer, of_step).stage;
  }

  // Turn barrier w: warpgroup w waits, the other arrives. Both have the same number of steps, and one token goes to and
  // fro for the life of the CTA.
  __device__ __forceinline__ void take_turn() const {
    cutlass::arch::NamedBarrier::sync(256, Config::kWarpgroups + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    cutlass::arch::NamedBarrier::arrive(256, Config::kWarpgroups + (warpgroup ^ 1));
  }

  // Number `tiles` of the CTA. It is looked up again for the output: registers in the loop are scarce.
  __device__ __forceinline__ void process(int tiles) {
    float dk[kKeys], dv[kValues];
    walk(storage.tiles.look(tiles), tiles, dk, dv);
    Tile const tile = storage.tiles.look(tiles);
    if (tile.part < 0 || this->sum_parts(tile, dk, dv)) {
      if constexpr (Config::kFused) {
        wait_empty(step);
        wait_empty(step + 1);
      }
      this->store(tile, dk, dv);
    }
    storage.tiles.release(tiles);
  }

  // The loop is rotated: a step begins with its P in registers and ends with that of the next one. So the compiler does
  // not move the exponentials past the issue of dP^T, and the barriers of what comes next are tested (there,
  // next_there, empty, full) well before they are needed.
  __device__ __forceinline__ void walk(Tile const& tile, int tiles, float (&dk)[kKeys], float (&dv)[kValues]) {
    QueryRange range = range_of<Config>(params, tile);
    // Not in uniform registers, which are scarce: each that descriptors lack is a move in every step.
    range.unmasked_first = opaque(range.unmasked_first);
    range.unmasked_end = opaque(range.unmasked_end);
    tiles = opaque(tiles);
    StepRange const steps = steps_of(tile, params.order.parts, params.heads_per_kv_head * (range.end - range.first));
    if (steps.begin >= steps.end) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kValues; ++i) dv[i] = 0.f;
      return;
    }
    int remaining = steps.end - steps.begin;
    bool first = true;
    Walk at(range, first_block(range, tile.block, params.mask), steps.begin);
    int sums = sums_of(tile, at);  // where dQ of the step before goes; in the first step, of this one
    float s[kScores];
    uint32_t p[kScores / 2];
    storage.key_full.wait(tile_phase);
    issue_scores(step, s, false);
    if (is_capped()) this->wait_left();
    bool there = probabilities<0>(step, tiles, at.block, range, s, p);
#pragma unroll 1
    for (;; ++step) {
      bool const last = --remaining == 0;
      float dp[kScores];
      uint32_t ds[kScores / 2];
      auto const gradient = PipelineState<Config::kGradientStages>::at(Role::kConsumer, step);
      if (!there) storage.gradient_full[gradient.stage].wait(gradient.phase);
      if (first) storage.value_full.wait(tile_phase);
      issue<typename Config::MmaScores>(own_rows<Config::kHeadDimV>(storage.v), gradient_rows(gradient.stage), dp,
                                        false);
      fence_accumulators(dv);
      issue<typename Config::MmaValues>(register_operand<Element>(p), gradient_columns(gradient.stage), dv, !first);
      float2 delta[kPreloaded];
      load_statistics(storage.delta[gradient.stage], delta);
      cute::warpgroup_wait<1>();
      fence_accumulators(dp);
      if (last) {
        arrive_warp(storage.value_empty);
        if constexpr (!Config::kFused) arrive_warp(storage.key_empty);
      }
      bool empty = false, full = false, next_there = false;
      if constexpr (Config::kFused) {
        empty = storage.score_empty[step & 1].test_wait((step >> 1 & 1) ^ 1);
        full = first || storage.score_full[(step - 1) & 1].test_wait((step - 1) >> 1 & 1);
      }
      if constexpr (Config::kEarlyScores) next_there = queries_there(step + 1);
      if (is_capped()) {
        uncap(dp, storage.delta[gradient.stage]);
        load_statistics(storage.delta[gradient.stage], delta);  // again: they need no registers meanwhile
      }
      score_gradients(p, dp, storage.delta[gradient.stage], delta, ds);

      if constexpr (Config::kEarlyScores) {
        if (last) {
          issue_keys(ds, dk, !first);
          cute::warpgroup_wait<1>();
          fence_accumulators(dv);
          arrive_warp(storage.gradient_empty[gradient.stage]);
        } else {
          at.advance(range);
          issue_scores(step + 1, s, next_there);
          issue_keys(ds, dk, !first);
          cute::warpgroup_wait<2>();
          fence_accumulators(dv);
          arrive_warp(storage.gradient_empty[gradient.stage]);
          there = probabilities<1>(step + 1, tiles, at.block, range, s, p);
        }
        cute::warpgroup_wait<0>();
        fence_accumulators(dk);
        arrive_warp(storage.query_empty[query_stage(step)]);
        first = false;
        if (last) break;
        continue;
      }

      float dq[kQueries];
      if constexpr (Config::kFused) {
        if (first) this->wait_left();
        publish(ds, empty);
        if (!full) storage.score_full[(step - 1) & 1].wait((step - 1) >> 1 & 1);
        issue_queries(step - 1, dq);  // in the first step of something else, and goes nowhere
      }
      issue_keys(ds, dk, !first);
      cute::warpgroup_wait<1>();
      if constexpr (Config::kFused) fence_accumulators(dq);
      fence_accumulators(dv);
      arrive_warp(storage.gradient_empty[gradient.stage]);
      next_there = queries_there(step + 1);
      if constexpr (Config::kFused) {
        if (!first) {
          arrive_warp(storage.score_empty[(step - 1) & 1]);
          add(sums, dq);
        }
      }
      cute::warpgroup_wait<0>();
      fence_accumulators(dk);
      arrive_warp(storage.query_empty[query_stage(step)]);
      if constexpr (Config::kFused) {
        if (!first) sums += from_the_step_before(at, range);
      }
      first = false;
      if (last) break;
      at.advance(range);
      issue_scores(step + 1, s, next_there);
      there = probabilities<0>(step + 1, tiles, at.block, range, s, p);
    }
    if constexpr (Config::kFused) {
      float dq[kQueries];
      storage.score_full[step & 1].wait(step >> 1 & 1);
      issue_queries(step, dq);
      cute::warpgroup_wait<0>();
      fence_accumulators(dq);
      arrive_warp(storage.score_empty[step & 1]);
      arrive_warp(storage.key_empty);
      add(sums, dq);
    }
    ++step;
    tile_phase ^= 1;
  }

  // S^T of a step, when its Q is there.
  __device__ __forceinline__ void issue_scores(int of_step, float (&s)[kScores], bool there) {
    auto const state = PipelineState<Config::kQueryStages>::at(Role::kConsumer, of_step);
    if (!there) storage.query_full[state.stage].wait(state.phase);
    issue<typename Config::MmaScores>(
        own_rows<Config::kHeadDim>(storage.k),
        Config::QueryTile::template sum_over_columns<Config::kHeadDim>(storage.q[state.stage]), s, false);
  }

  __device__ __forceinline__ bool queries_there(int of_step) const {
    auto const state = PipelineState<Config::kQueryStages>::at(Role::kConsumer, of_step);
    return storage.query_full[state.stage].test_wait(state.phase);
  }

  // dK += dS^T Q, or = in the first step.
  __device__ __forceinline__ void issue_keys(uint32_t (&ds)[kScores / 2], float (&dk)[kKeys], bool accumulate) const {
    fence_accumulators(dk);
    issue<typename Config::MmaKeys>(register_operand<Element>(ds), query_columns(), dk, accumulate);
  }

  // Waits for S^T, after which kInFlight more are issued, and turns it into P, in turns. Returns whether dO of the step
  // is there already.
  template <int kInFlight>
  __device__ __forceinline__ bool probabilities(int of_step, int tiles, int block, QueryRange const& range,
                                                float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
    float const* const rows = storage.lse_log2[query_stage(of_step)];
    float2 lse[kPreloaded];
    load_statistics(rows, lse);
    cute::warpgroup_wait<kInFlight>();
    fence_accumulators(s);
    if (is_capped()) cap(s, of_step);
    if (block < range.unmasked_first || block >= range.unmasked_end) mask(s, tiles, block);
    auto const gradient = PipelineState<Config::kGradientStages>::at(Role::kConsumer, of_step);
    bool const there = storage.gradient_full[gradient.stage].test_wait(gradient.phase);
    take_turn();
    exponentials(s, rows, lse, p);
    pass_turn();
    return there;
  }

  // Operands. The warpgroup's own 64 keys, and the block of queries by rows or by columns.
  template <int kColumns>
  __device__ __forceinline__ auto own_rows(Element const* tile) const {
    return Config::KeyTile::template sum_over_columns<kColumns>(tile +
                                                                warpgroup * (kRowsPerWarpgroup * Config::kChunk));
  }
  __device__ __forceinline__ auto query_columns() const {
    return Config::QueryTile::template sum_over_rows<kBlockM>(storage.q[query_stage(step)]);
  }
  __device__ __forceinline__ auto gradient_rows(int stage) const {
    return Config::QueryTile::template sum_over_columns<Config::kHeadDimV>(storage.dout[stage]);
  }
  __device__ __forceinline__ auto gradient_columns(int stage) const {
    return Config::QueryTile::template sum_over_rows<kBlockM>(storage.dout[stage]);
  }

  // dQ of a step, this warpgroup's half: 64 queries, or 64 columns of dQ^T.
  __device__ __forceinline__ void issue_queries(int of_step, float (&dq)[kQueries]) const {
    Element const* const scores = storage.ds[of_step & 1];
    if constexpr (Config::kTransposed) {
      issue<typename Config::MmaQueries>(
          Config::KeyTile::template sum_over_rows<kBlockN>(storage.k + warpgroup * (kBlockN * Config::kChunk)),
          Config::ScoreTile::template sum_over_rows<kBlockN>(scores), dq, false);
    } else {
      issue<typename Config::MmaQueries>(
          Config::ScoreTile::template sum_over_rows<kBlockN>(scores + warpgroup * (kBlockN * 64)),
          Config::KeyTile::template sum_over_rows<kBlockN>(storage.k), dq, false);
    }
  }

  // Scores of rows that do not see a key become -inf. Rows (columns of S^T) are compile-time numbers against the rows
  // that see the thread's key. The tile is read again from its slot: registers in the loop are scarce.
  __device__ __forceinline__ void mask(float (&s)[kScores], int tiles, int block) const {
    Tile const tile = storage.tiles.tile[tiles % storage.tiles.kSlots];
    int const key = tile.block * kBlockN + warpgroup * kRowsPerWarpgroup + thread / 32 * 16 + thread % 32 / 4;
    int const first_row = block * kBlockM + thread % 4 * 2;
    Span seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) seen[r] = rows_from(first_row, key + 8 * r, tile.sequence, params.mask);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 < seen[(i >> 1) & 1].begin) s[i] = -INFINITY;
    }
    if (!forgets(params.mask)) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 >= seen[(i >> 1) & 1].end) s[i] = -INFINITY;
    }
  }

  // Softcap is left to the kernel without dQ: code for it here would lie in the way of every step.
  __device__ __forceinline__ bool is_capped() const {
    if constexpr (Config::kFused) return false;
    return params.cap_scale != 0.f;
  }

  // The factors of dS (tile.h), by each thread in the rows of its warp of the buffer of dS^T: pair i, of
  // accumulators 2 i and 2 i + 1.
  __device__ __forceinline__ uint32_t volatile* factors(int of_step) const {
    int const own = opaque(int(threadIdx.x));
    return reinterpret_cast<uint32_t*>(storage.ds[of_step & 1]) + own / 32 * 512 + own % 32;
  }
  static constexpr int factor(int i) { return i / 16 * (kBlockN * 32) + i % 16 * 32; }
  __device__ __forceinline__ void cap(float (&s)[kScores], int of_step) {
    uint32_t volatile* const places = factors(of_step);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      places[factor(i)] = cap_scores(s[2 * i], s[2 * i + 1], params.cap_scale);
    }
  }
  __device__ __forceinline__ void uncap(float (&dp)[kScores], float const* rows) const {
    uint32_t const volatile* const places = factors(step);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      float2 const delta = statistic(rows, j);
#pragma unroll
      for (int i = 2 * j; i < 2 * j + 2; ++i) cap_gradients(dp[2 * i], dp[2 * i + 1], delta, places[factor(i)]);
    }
    __syncwarp();  // before dS^T overwrites them
  }

  // The statistics of the two rows that accumulators 4 j .. 4 j + 3 belong to. Volatile, so that the compiler does not
  // load all of them ahead into registers that are not there.
  __device__ __forceinline__ float2 statistic(float const* rows, int j) const {
    float2 pair;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(cute::cast_smem_ptr_to_uint(rows + 8 * j + thread % 4 * 2)));
    return pair;
  }
  // As many as there are registers for, before the accumulators are waited for: their latency would follow it.
  __device__ __forceinline__ void load_statistics(float const* rows, float2 (&pairs)[kPreloaded]) const {
#pragma unroll
    for (int j = 0; j < kPreloaded; ++j) pairs[j] = statistic(rows, j);
  }

  __device__ __forceinline__ void exponentials(float const (&s)[kScores], float const* rows,
                                               float2 const (&lse)[kPreloaded], uint32_t (&p)[kScores / 2]) const {
    float const c = params.scale_log2;
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      float2 const l = j < kPreloaded ? lse[j] : statistic(rows, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const i = 4 * j + 2 * r;
        p[i / 2] = Packed<Element>::pack(exp2_approx(fmaf(s[i], c, -l.x)), exp2_approx(fmaf(s[i + 1], c, -l.y)));
      }
    }
  }

  // dS = P (dP - delta) with P from its 16-bit words, so that it need not stay in fp32 beside them.
  __device__ __forceinline__ void score_gradients(uint32_t const (&p)[kScores / 2], float const (&dp)[kScores],
                                                  float const* rows, float2 const (&delta)[kPreloaded],
                                                  uint32_t (&ds)[kScores / 2]) const {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      float2 const d = j < kPreloaded ? delta[j] : statistic(rows, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const i = 4 * j + 2 * r;
        float2 const probability = Packed<Element>::unpack(p[i / 2]);
        ds[i / 2] = Packed<Element>::pack(probability.x * (dp[i] - d.x), probability.y * (dp[i + 1] - d.y));
      }
    }
  }

  // dS^T of this step into its buffer, for both warpgroups.
  __device__ __forceinline__ void publish(uint32_t const (&ds)[kScores / 2], bool empty) {
    if (!empty) wait_empty(step);
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      uint32_t const words[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      this->template store_matrices<8>(
          thread, this->region(0) + (step & 1) * Config::kScoreElements + i / 4 * (kBlockN * 64), i % 4 * 2, words);
    }
    cutlass::arch::fence_view_async_shared();
    arrive_warp(storage.score_full[step & 1]);
  }

  // Until every warp has read what step `of_step - 2` left in the buffer that `of_step` fills.
  __device__ __forceinline__ void wait_empty(int of_step) {
    storage.score_empty[of_step & 1].wait((of_step >> 1 & 1) ^ 1);
  }

  // Number of a block in dq_sums.
  __device__ __forceinline__ int sums_of(Tile const& tile, Walk const& at) const {
    int const head = tile.head * params.heads_per_kv_head + at.head;
    bool const packed = params.packed.sequences != nullptr;
    int64_t const first = tile.batch * params.sums_stride_batch + head * params.sums_stride +
                          (packed ? sums_begin(tile.sequence.q_begin, tile.batch, kBlockM) : 0);
    return int(first) + at.block;
  }

  // From the block before the present one to the present one, in dq_sums.
  __device__ __forceinline__ int from_the_step_before(Walk const& at, QueryRange const& range) const {
    int blocks = 1;
    if (at.block == range.first) blocks -= range.end - range.first;
    if (at.block == at.start) blocks += int(params.sums_stride);
    return blocks;
  }

  // Fragment order (params.h): four accumulators of a thread are 16 bytes, those of a warp 512 contiguous ones.
  __device__ __forceinline__ void add(int sums, float const (&dq)[kQueries]) const {
    constexpr int kBlock = kBlockM * Config::kHeadDim;
    float* const target = params.dq_sums + int64_t(sums) * kBlock + (warpgroup * (kBlock / 2) + thread * 4);
#pragma unroll
    for (int i = 0; i < kQueries; i += 4) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target + i * 128), "f"(dq[i]),
                   "f"(dq[i + 1]), "f"(dq[i + 2]), "f"(dq[i + 3])
                   : "memory");
    }
  }
};

}  // namespace flash_attn3
