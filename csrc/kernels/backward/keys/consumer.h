// A consumer warpgroup: 64 keys of a tile, queries walked block by block, for every query head of the group.
//   S^T = K Q^T ; P = exp2(c S - lse) ; dP^T = V dO^T ; dV += P^T dO ; dS = P (dP - delta) ; dK += dS^T Q ; dQ = dS K
// A step issues dP^T, dV | dS | dQ of the step before, dK | dQ leaves while dK runs | S^T of the next step |
// exponentials. dQ is a step late, so that nobody waits for the other warpgroup's dS^T, and the warpgroups take turns
// at the exponentials, which keeps them half a step apart: one's arithmetic then lies under the other's GEMMs.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "kernels/backward/keys/config.h"
#include "kernels/common/softmax.h"

namespace flash_attn3 {

template <class Config>
struct KeysConsumer {
  using Element = typename Config::Element;
  using Storage = KeysStorage<Config>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kScores = kBlockM / 2;  // accumulators a thread: S^T, dP^T
  static constexpr int kKeys = Config::kHeadDim / 2;
  static constexpr int kValues = Config::kHeadDimV / 2;
  static constexpr int kQueries = Config::kQueryGradientColumns / 2;
  static constexpr int kPreloaded = Config::kTransposed ? kBlockM / 16 : 1;  // pairs of statistics, see load_statistics

  BackwardParams const& params;
  Storage& storage;
  int const warpgroup;
  int const thread;  // in the warpgroup
  uint32_t tile_phase = static_cast<uint32_t>(Role::kConsumer);
  int step = 0;  // so far: every step takes one stage of Q, one of dO, and buffer step % 2 of dS^T

  __device__ __forceinline__ KeysConsumer(BackwardParams const& p, Storage& s, int wg)
      : params(p), storage(s), warpgroup(wg), thread(threadIdx.x % 128) {}

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
    walk(storage.tiles.look(tiles), dk, dv);
    Tile const tile = storage.tiles.look(tiles);
    if (tile.part < 0 || sum_parts(tile, dk, dv)) store(tile, dk, dv);
    storage.tiles.release(tiles);
  }

  // The loop is rotated: a step begins with its P in registers and ends with that of the next one. So the compiler does
  // not move the exponentials past the issue of dP^T, and the barriers of what comes next are tested (there,
  // next_there, empty, full) well before they are needed.
  __device__ __forceinline__ void walk(Tile const tile, float (&dk)[kKeys], float (&dv)[kValues]) {
    int const key = tile.block * kBlockN;
    QueryRange const range = query_range(key, key + kBlockN, params.seqlen_q, params.seqlen_k, params.causal, kBlockM);
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
    Walk at(range, tile.block, steps.begin, params.causal);
    int64_t sums = sums_of(tile, at);  // where dQ of the step before goes; in the first step, of this one
    float s[kScores];
    uint32_t p[kScores / 2];
    storage.key_full.wait(tile_phase);
    issue_scores(step, s, false);
    bool there = probabilities(step, key, at.block, range, s, p);
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
      bool empty = false, full = false;
      if constexpr (Config::kFused) {
        empty = storage.score_empty[step & 1].test_wait((step >> 1 & 1) ^ 1);
        full = first || storage.score_full[(step - 1) & 1].test_wait((step - 1) >> 1 & 1);
      }
      score_gradients(p, dp, storage.delta[gradient.stage], delta, ds);

      float dq[kQueries];
      if constexpr (Config::kFused) {
        if (first) wait_left();
        publish(ds, empty);
        if (!full) storage.score_full[(step - 1) & 1].wait((step - 1) >> 1 & 1);
        issue_queries(step - 1, dq);  // in the first step of something else, and goes nowhere
      }
      fence_accumulators(dk);
      issue<typename Config::MmaKeys>(register_operand<Element>(ds), query_columns(), dk, !first);
      cute::warpgroup_wait<1>();
      if constexpr (Config::kFused) fence_accumulators(dq);
      fence_accumulators(dv);
      arrive_warp(storage.gradient_empty[gradient.stage]);
      auto const next = PipelineState<Config::kQueryStages>::at(Role::kConsumer, step + 1);
      bool const next_there = storage.query_full[next.stage].test_wait(next.phase);
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
      there = probabilities(step + 1, key, at.block, range, s, p);
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

  // Waits for S^T and turns it into P, in turns. Returns whether dO of the step is there already.
  __device__ __forceinline__ bool probabilities(int of_step, int key, int block, QueryRange const range,
                                                float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
    float const* const rows = storage.lse_log2[query_stage(of_step)];
    float2 lse[kPreloaded];
    load_statistics(rows, lse);
    cute::warpgroup_wait<0>();
    fence_accumulators(s);
    if (block < range.unmasked) mask(s, key, block);
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

  // Scores of rows that do not see a key become -inf. Rows (columns of S^T) are compile-time numbers against the first
  // row that sees the thread's key.
  __device__ __forceinline__ void mask(float (&s)[kScores], int key, int block) const {
    int const own_key = key + warpgroup * kRowsPerWarpgroup + thread / 32 * 16 + thread % 32 / 4;
    int const first_row = block * kBlockM + thread % 4 * 2;
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const k = own_key + 8 * r;
      int const sees = params.causal ? k - (params.seqlen_k - params.seqlen_q) : 0;
      limit[r] = k < params.seqlen_k ? sees - first_row : kBlockM;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 < limit[(i >> 1) & 1]) s[i] = -INFINITY;
    }
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

  // The 64 rows of this warpgroup in one of the four chunks of the dS^T buffers.
  __device__ __forceinline__ Element* region(int i) const {
    return storage.ds[i / 2] + i % 2 * (kBlockN * 64) + warpgroup * Config::kRegionElements;
  }

  // STSM.x4 stores 16 rows x 16 columns a warp: lane l holds the address of row l % 16, left or right 8 columns.
  template <int kUnits>
  __device__ __forceinline__ void store_matrices(int own, Element* rows, int unit, uint32_t const (&words)[4]) const {
    int const row = own / 32 * 16 + own % 16;
    int const swizzle = kUnits == 8 ? row % 8 : row / 2 % 4;
    cute::SM90_U32x4_STSM_N::copy(
        words[0], words[1], words[2], words[3],
        reinterpret_cast<cute::uint128_t*>(rows)[row * kUnits + ((unit + own % 32 / 16) ^ swizzle)]);
  }

  // dS^T of this step into its buffer, for both warpgroups.
  __device__ __forceinline__ void publish(uint32_t const (&ds)[kScores / 2], bool empty) {
    if (!empty) wait_empty(step);
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      uint32_t const words[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      store_matrices<8>(thread, region(0) + (step & 1) * Config::kScoreElements + i / 4 * (kBlockN * 64), i % 4 * 2,
                        words);
    }
    cutlass::arch::fence_view_async_shared();
    arrive_warp(storage.score_full[step & 1]);
  }

  // Until every warp has read what step `of_step - 2` left in the buffer that `of_step` fills.
  __device__ __forceinline__ void wait_empty(int of_step) {
    storage.score_empty[of_step & 1].wait((of_step >> 1 & 1) ^ 1);
  }

  // Start of a block in dq_sums.
  __device__ __forceinline__ int64_t sums_of(Tile const tile, Walk const at) const {
    int const head = tile.head * params.heads_per_kv_head + at.head;
    int const blocks = ceil_div(params.seqlen_q, kBlockM);
    return ((int64_t(tile.batch) * params.heads + head) * blocks + at.block) * (kBlockM * Config::kHeadDim);
  }

  // From the block before the present one to the present one, in dq_sums.
  __device__ __forceinline__ int64_t from_the_step_before(Walk const at, QueryRange const range) const {
    int blocks = 1;
    if (at.block == range.first) blocks -= range.end - range.first;
    if (at.block == at.start) blocks += ceil_div(params.seqlen_q, kBlockM);
    return int64_t(blocks) * (kBlockM * Config::kHeadDim);
  }

  // Fragment order (params.h): four accumulators of a thread are 16 bytes, those of a warp 512 contiguous ones.
  __device__ __forceinline__ void add(int64_t sums, float const (&dq)[kQueries]) const {
    float* const target = params.dq_sums + sums + (warpgroup * (kBlockM * Config::kHeadDim / 2) + thread * 4);
#pragma unroll
    for (int i = 0; i < kQueries; i += 4) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target + i * 128), "f"(dq[i]),
                   "f"(dq[i + 1]), "f"(dq[i + 2]), "f"(dq[i + 3])
                   : "memory");
    }
  }

  // A part of a cut tile: leaves its dK and dV in fp32. The part that comes last sums all in their order, whoever it
  // is, and returns true. Each warpgroup does so for its own keys.
  __device__ __forceinline__ bool sum_parts(Tile const tile, float (&dk)[kKeys], float (&dv)[kValues]) {
    constexpr int64_t kPartFloats = kBlockN * (Config::kHeadDim + Config::kHeadDimV);
    int const parts = params.order.parts;
    float* const slot = params.partial_sums + int64_t(tile.slot) * parts * kPartFloats + warpgroup * (kPartFloats / 2) +
                        opaque(thread) * 4;
    float* const own = slot + tile.part * kPartFloats;
    write_fragments(own, dk);
    write_fragments(own + kKeys * 128, dv);
    compiler_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    if (thread == 0) {
      __threadfence();  // releases what the barrier has shown this thread, the writes of all
      storage.parts_before[warpgroup] = atomicAdd(params.partial_counts + tile.slot * 2 + warpgroup, 1);
      __threadfence();  // and acquires those of the other parts
    }
    compiler_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    compiler_fence();
    if (storage.parts_before[warpgroup] != parts - 1) return false;
    sum_fragments(slot, parts, dk);
    sum_fragments(slot + kKeys * 128, parts, dv);
    return true;
  }

  template <int kCount>
  static __device__ __forceinline__ void write_fragments(float* target, float const (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      __stcg(reinterpret_cast<float4*>(target + i * 128),
             make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]));
    }
  }
  template <int kCount>
  static __device__ __forceinline__ void sum_fragments(float const* first, int parts, float (&values)[kCount]) {
    constexpr int64_t kPartFloats = kBlockN * (Config::kHeadDim + Config::kHeadDimV);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = 0.f;
#pragma unroll 1
    for (int part = 0; part < parts; ++part, first += kPartFloats) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        float4 const more = __ldcg(reinterpret_cast<float4 const*>(first + i * 128));
        values[i] += more.x, values[i + 1] += more.y, values[i + 2] += more.z, values[i + 3] += more.w;
      }
    }
  }

  // dV and scale * dK through shared memory and TMA, which clips rows and columns outside the tensors.
  __device__ __forceinline__ void store(Tile const tile, float (&dk)[kKeys], float (&dv)[kValues]) {
    if constexpr (Config::kFused) {
      wait_empty(step);
      wait_empty(step + 1);
    }
    wait_left();
    constexpr int kValueChunks = Config::kHeadDimV / Config::kChunk;
    int const own = opaque(thread);
    stage<0>(own, dv, 1.f);
    stage<kValueChunks>(own, dk, params.scale);
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    int const row = tile.block * kBlockN + warpgroup * kRowsPerWarpgroup;
    if (thread == 0) {
#pragma unroll
      for (int i = 0; i < kValueChunks; ++i) {
        cute::SM90_TMA_STORE_4D::copy(&params.map_dv, chunk(i), i * Config::kChunk, row, tile.head, tile.batch);
      }
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / Config::kChunk; ++i) {
        cute::SM90_TMA_STORE_4D::copy(&params.map_dk, chunk(kValueChunks + i), i * Config::kChunk, row, tile.head,
                                      tile.batch);
      }
      cute::tma_store_arrive();
    }
  }

  // Until dV and dK of the tile before have left the buffers.
  __device__ __forceinline__ void wait_left() const {
    if (thread == 0) cute::tma_store_wait<0>();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
  }

  // Chunk number i of what leaves: dV, then dK.
  __device__ __forceinline__ Element* chunk(int i) const {
    constexpr int kPerRegion = Config::kRegionElements / Config::kOutputChunk;
    return region(i / kPerRegion) + i % kPerRegion * Config::kOutputChunk;
  }

  template <int kFirstChunk, int kCount>
  __device__ __forceinline__ void stage(int own, float const (&values)[kCount], float factor) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = Packed<Element>::pack(values[i + 2 * j] * factor, values[i + 2 * j + 1] * factor);
      }
      int const column = i * 2;
      store_matrices<Config::kChunk / 8>(own, chunk(kFirstChunk + column / Config::kChunk), column % Config::kChunk / 8,
                                         words);
    }
  }
};

}  // namespace flash_attn3
