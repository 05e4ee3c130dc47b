#include "binding/schedule.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "binding/problem.h"
#include "host/geometry.h"
#include "host/packed.h"
#include "host/plan.h"
#include "torch/csrc/stable/accelerator.h"

namespace flash_attn3 {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostRows = kMost - 1024;  // of a sequence: no block ends behind kMost

void check_count(char const* name, int64_t value, int64_t least, int64_t most = kMost) {
  if (value < least || value > most) fail(name, " is ", value, "; expected ", least, " to ", most);
}

KernelRow const& row_with_tiles(int64_t row) {
  if (row < 0 || row >= kKernelCount) fail("row is ", row, "; this build has ", kKernelCount, " kernels");
  KernelRow const& kernel = kKernelTable[row];
  if (kernel.block_m == 0) fail("row ", row, " is ", kernel.name, ", which has no tiles");
  return kernel;
}

void check_heads(int64_t heads, int64_t kv_heads) {
  check_count("heads", heads, 0);
  check_count("kv_heads", kv_heads, heads > 0 ? 1 : 0);
  if (heads > 0 && heads % kv_heads != 0) fail("heads is ", heads, "; expected a multiple of kv_heads, ", kv_heads);
}

void check_bounds(int64_t window_left, int64_t window_right, int64_t attention_chunk) {
  check_count("window_left", window_left, -1, std::numeric_limits<int64_t>::max());
  check_count("window_right", window_right, -1, std::numeric_limits<int64_t>::max());
  check_count("attention_chunk", attention_chunk, 0, std::numeric_limits<int64_t>::max());
}

Tensor table(std::vector<int64_t> const& lines, int columns) {
  Tensor result = empty_cpu({int64_t(lines.size() / columns), columns}, ScalarType::Long);
  if (!lines.empty()) std::memcpy(result.data_ptr(), lines.data(), lines.size() * sizeof(int64_t));
  return result;
}

struct Question {
  KernelRow const& row;
  Problem problem;
  int num_sms;
};

Question question(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                  int64_t window_left, int64_t window_right, int64_t attention_chunk, int64_t num_sms) {
  KernelRow const& kernel = row_with_tiles(row);
  check_count("batch", batch, 0);
  check_heads(heads, kv_heads);
  check_count("seqlen_q", seqlen_q, 0, kMostRows);
  check_count("seqlen_k", seqlen_k, 0, kMostRows);
  check_count("batch * heads", batch * heads, 0);
  check_count("batch * heads * blocks", batch * heads * (std::max(seqlen_q, seqlen_k) / kRowsPerWarpgroup + 1), 0);
  check_bounds(window_left, window_right, attention_chunk);
  check_count("num_sms", num_sms, 1);
  Mask const mask = make_mask(window_left, window_right, attention_chunk, seqlen_q, seqlen_k);
  return {kernel,
          {batch, heads, kv_heads, seqlen_q, seqlen_k, kernel.head_dim, kernel.head_dim_v, mask, true},
          int(num_sms)};
}

// Calls line(cta, position, tile) for every tile or part of one in the order of time.
template <class Line>
void each_tile(Question const& asked, TileOrder const& order, Line line) {
  Problem const& p = asked.problem;
  int const grid = std::min(order.positions, asked.num_sms);
  int32_t const heads = int32_t(holds_keys(asked.row) ? p.kv_heads : p.heads);
  bool const counter = uses_counter(p, order, asked.num_sms);
  for (int32_t step = 0; int64_t(step) * grid < order.positions; ++step) {
    for (int32_t cta = 0; cta < grid; ++cta) {
      int64_t const position = counter ? int64_t(step) * grid + cta : static_position(cta, grid, step);
      Tile const tile = tile_at(order, heads, position);
      if (tile.block >= 0) line(cta, position, tile);
    }
  }
}

Tensor schedule_of_queries(Question const& asked) {
  constexpr int kColumns = 10;
  Problem const& p = asked.problem;
  std::vector<int64_t> lines;
  if (p.batch * p.heads == 0 || p.seqlen_q == 0) return table(lines, kColumns);
  TileOrder const order = plan_order(p, asked.row, asked.num_sms);
  each_tile(asked, order, [&](int cta, int64_t position, Tile const& tile) {
    for (int w = 0; w < asked.row.block_m / kRowsPerWarpgroup; ++w) {
      int32_t const begin = tile.block * asked.row.block_m + w * kRowsPerWarpgroup;
      if (begin >= p.seqlen_q) continue;
      KeyRange const keys = key_range(begin, begin + kRowsPerWarpgroup, int32_t(p.seqlen_q), int32_t(p.seqlen_k),
                                      p.mask, asked.row.block_n);
      lines.insert(lines.end(), {cta, position, w, begin, tile.head, tile.batch, keys.begin, keys.end,
                                 keys.unmasked_begin, keys.unmasked_end});
    }
  });
  return table(lines, kColumns);
}

Tensor schedule_of_keys(Question const& asked) {
  constexpr int kColumns = 12;
  Problem const& p = asked.problem;
  std::vector<int64_t> lines;
  if (p.batch * p.heads == 0 || p.seqlen_q == 0 || p.seqlen_k == 0) return table(lines, kColumns);
  TileOrder const order = plan_order(p, asked.row, asked.num_sms);
  each_tile(asked, order, [&](int cta, int64_t position, Tile const& tile) {
    int32_t const begin = tile.block * asked.row.block_n;
    QueryRange const queries = query_range(begin, begin + asked.row.block_n, int32_t(p.seqlen_q), int32_t(p.seqlen_k),
                                           p.mask, asked.row.block_m);
    StepRange const steps = steps_of(tile, order.parts, int32_t(p.heads / p.kv_heads) * (queries.end - queries.first));
    lines.insert(lines.end(), {cta, position, tile.block, tile.head, tile.batch, queries.first, queries.end,
                               queries.unmasked_first, queries.unmasked_end, tile.part, steps.begin, steps.end});
  });
  return table(lines, kColumns);
}

// The arguments that say how a packed batch lies, on one device.
struct Packed {
  Tensor const &cu_seqlens_q, &cu_seqlens_k;
  std::optional<Tensor> const &seqused_q, &seqused_k;
  int64_t total_q, total_k;

  int64_t batch() const { return cu_seqlens_q.size(0) - 1; }
};

// `first` is cu_seqlens_q, on whose device all of them are.
void check_lengths(char const* name, Tensor const& tensor, int64_t size, Tensor const& first) {
  if (tensor.dim() != 1 || tensor.size(0) != size) {
    fail(name, " has shape ", shape_of(tensor), "; expected (", size, ",)");
  }
  if (tensor.scalar_type() != ScalarType::Int) {
    fail(name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()), "; expected int32");
  }
  if (!tensor.is_contiguous()) fail(name, " is not contiguous");
  if (tensor.is_cuda() != first.is_cuda() || tensor.get_device_index() != first.get_device_index()) {
    fail(name, " is not on the device of cu_seqlens_q");
  }
}

void check_packed(Packed const& packed) {
  constexpr int64_t kMostSequences = kMost - 2048;
  Tensor const& first = packed.cu_seqlens_q;
  if (first.dim() != 1 || packed.batch() < 0 || packed.batch() > kMostSequences) {
    fail("cu_seqlens_q has shape ", shape_of(first), "; expected (batch + 1,)");
  }
  if (!first.is_cuda() && !first.is_cpu()) fail("cu_seqlens_q is neither on the CPU nor on a CUDA device");
  check_lengths("cu_seqlens_q", first, packed.batch() + 1, first);
  check_lengths("cu_seqlens_k", packed.cu_seqlens_k, packed.batch() + 1, first);
  if (packed.seqused_q) check_lengths("seqused_q", *packed.seqused_q, packed.batch(), first);
  if (packed.seqused_k) check_lengths("seqused_k", *packed.seqused_k, packed.batch(), first);
  check_count("total_q", packed.total_q, 0);
  check_count("total_k", packed.total_k, 0);
}

PackedLayout layout_of_host(Packed const& packed) {
  return layout_of(
      PackedLengths{pointer_to<int32_t const>(packed.cu_seqlens_q), pointer_to<int32_t const>(packed.cu_seqlens_k),
                    pointer_to<int32_t const>(packed.seqused_q), pointer_to<int32_t const>(packed.seqused_k),
                    int32_t(packed.batch()), int32_t(packed.total_q), int32_t(packed.total_k)});
}

// (n) int32, or (n, columns) of structures that consist of so many.
template <class Value>
Tensor tensor_of(std::vector<Value> const& values) {
  constexpr int64_t kColumns = sizeof(Value) / sizeof(int32_t);
  std::vector<int64_t> sizes{int64_t(values.size())};
  if (kColumns > 1) sizes.push_back(kColumns);
  Tensor result = empty_cpu(sizes, ScalarType::Int);
  if (!values.empty()) std::memcpy(result.data_ptr(), values.data(), values.size() * sizeof(Value));
  return result;
}

using Layout = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Layout layout_of_kernel(Packed const& packed, int32_t block, bool of_keys) {
  int const row = row_of("packed_schedule");
  int32_t const device = packed.cu_seqlens_q.get_device_index();
  check_gpu(device);
  torch::stable::accelerator::DeviceGuard const guard(device);
  auto ints_on_gpu = [&](std::vector<int64_t> const& sizes) { return empty_cuda(sizes, ScalarType::Int, device); };
  int64_t const batch = packed.batch();
  Tensor const sequences = ints_on_gpu({batch, 4}), longest_first = ints_on_gpu({batch});
  Tensor const first_block = ints_on_gpu({batch + 1}), gap_counts = ints_on_gpu({2});
  Tensor query_gaps = ints_on_gpu({most_gaps(batch), 3}), key_gaps = ints_on_gpu({most_gaps(batch), 3});

  PackedParams params{};
  params.cu_seqlens_q = pointer_to<int32_t const>(packed.cu_seqlens_q);
  params.cu_seqlens_k = pointer_to<int32_t const>(packed.cu_seqlens_k);
  params.seqused_q = pointer_to<int32_t const>(packed.seqused_q);
  params.seqused_k = pointer_to<int32_t const>(packed.seqused_k);
  params.batch = int32_t(batch);
  params.total_q = int32_t(packed.total_q);
  params.total_k = int32_t(packed.total_k);
  params.sequences = pointer_to<Sequence>(sequences);
  params.longest_first = pointer_to<int32_t>(longest_first);
  params.orders[0] = {pointer_to<int32_t>(first_block), block, of_keys};
  params.query_gaps = pointer_to<Gap>(query_gaps);
  params.key_gaps = pointer_to<Gap>(key_gaps);
  params.gap_counts = pointer_to<int32_t>(gap_counts);
  cudaStream_t const stream = current_stream(device);
  launch(row, params, stream);

  int32_t counts[2];
  check_cuda(cudaMemcpyAsync(counts, gap_counts.data_ptr(), sizeof(counts), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "packed_schedule");
  return {sequences, longest_first, first_block, torch::stable::narrow(query_gaps, 0, 0, counts[0]),
          torch::stable::narrow(key_gaps, 0, 0, counts[1])};
}

}  // namespace

Tensor schedule(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                int64_t window_left, int64_t window_right, int64_t attention_chunk, int64_t num_sms) {
  Question const asked =
      question(row, batch, heads, kv_heads, seqlen_q, seqlen_k, window_left, window_right, attention_chunk, num_sms);
  if (holds_keys(asked.row)) fail("row ", row, " is ", asked.row.name, "; ask schedule_backward");
  return schedule_of_queries(asked);
}

Tensor schedule_backward(int64_t row, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q,
                         int64_t seqlen_k, int64_t window_left, int64_t window_right, int64_t attention_chunk,
                         int64_t num_sms) {
  Question const asked =
      question(row, batch, heads, kv_heads, seqlen_q, seqlen_k, window_left, window_right, attention_chunk, num_sms);
  return holds_keys(asked.row) ? schedule_of_keys(asked) : schedule_of_queries(asked);
}

Tensor schedule_varlen(int64_t row, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> seqused_q,
                       std::optional<Tensor> seqused_k, int64_t total_q, int64_t total_k, int64_t heads,
                       int64_t kv_heads, int64_t window_left, int64_t window_right, int64_t attention_chunk) {
  constexpr int kColumns = 8;
  KernelRow const& kernel = row_with_tiles(row);
  Packed const packed{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, total_q, total_k};
  if (cu_seqlens_q.is_cuda()) fail("cu_seqlens_q is a CUDA tensor; the host needs lengths on the CPU");
  check_packed(packed);
  check_heads(heads, kv_heads);
  check_bounds(window_left, window_right, attention_chunk);
  std::vector<int64_t> lines;
  if (heads == 0) return table(lines, kColumns);

  bool const keys = holds_keys(kernel);
  Problem problem{packed.batch(), heads, kv_heads, total_q, total_k, kernel.head_dim, kernel.head_dim_v, {}, true};
  problem.mask = make_mask(window_left, window_right, attention_chunk, kUnbounded, kUnbounded);
  problem.packed = true;
  int64_t const tiles = most_tiles(problem, kernel);
  if (tiles > kMost) fail("heads is ", heads, "; a batch of up to ", tiles, " tiles is too large");

  PackedLayout const layout = layout_of_host(packed);
  std::vector<int32_t> const first = first_blocks(layout, keys ? kernel.block_n : kernel.block_m, keys);
  PackedOrder order = plan_packed_order(problem, kernel);
  order.sequences = layout.sequences.data();
  order.longest_first = layout.longest_first.data();
  order.first_block = first.data();
  // As TileFinder in kernels/common/tiles.h.
  int32_t const group = int32_t(heads / kv_heads), tile_heads = int32_t(keys ? kv_heads : heads);
  for (int32_t position = 0; position < int64_t(first.back()) * tile_heads; ++position) {
    int32_t const* const after =
        std::upper_bound(order.first_block, order.first_block + order.batch, position / tile_heads);
    int32_t const place = int32_t(after - order.first_block) - 1;
    int32_t const number = order.longest_first[place], blocks = first[place + 1] - first[place];
    Sequence const& sequence = order.sequences[number];
    int32_t const tokens = keys ? sequence.q_length * group : sequence.k_length;
    Tile const tile = tile_in_sequence(order, number, sequence, blocks, tile_heads, keys ? 1 : group, tokens,
                                       position - first[place] * tile_heads);
    lines.insert(lines.end(), {position, tile.block, tile.head, tile.batch, tile.sequence.q_begin,
                               tile.sequence.q_length, tile.sequence.k_begin, tile.sequence.k_length});
  }
  return table(lines, kColumns);
}

Layout varlen_layout(Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> seqused_q,
                     std::optional<Tensor> seqused_k, int64_t total_q, int64_t total_k, int64_t block, bool of_keys) {
  Packed const packed{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, total_q, total_k};
  check_packed(packed);
  check_count("block", block, 1);
  if (cu_seqlens_q.is_cuda()) return layout_of_kernel(packed, int32_t(block), of_keys);
  PackedLayout const layout = layout_of_host(packed);
  return {tensor_of(layout.sequences), tensor_of(layout.longest_first),
          tensor_of(first_blocks(layout, int32_t(block), of_keys)), tensor_of(layout.query_gaps),
          tensor_of(layout.key_gaps)};
}

}  // namespace flash_attn3
