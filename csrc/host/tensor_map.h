// TMA descriptors of 4-D attention tensors.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_attn3 {

// A (batch, sequence, head, head dim) tensor as the kernels see it; strides in elements, last one 1.
// Of a packed batch, all sequences follow each other in one, of batch 1.
struct TensorView {
  char const* name;  // for messages
  void* data;
  int64_t batch, sequence, heads, head_dim;
  int64_t stride_batch, stride_sequence, stride_head;
  CUtensorMapDataType type;  // of 16 bits, or UINT8 for e4m3
  bool packed;
};

// Boxes of `rows` rows by `columns` columns of 128, 64 or 32 bytes, their swizzle as wide, at the coordinates that
// tma_rows in geometry.h says. The pointer and the strides of dimensions longer than 1 must be multiples of 16 bytes.
// Throws std::runtime_error with the tensor's name, shape and strides.
CUtensorMap make_tensor_map(TensorView const& tensor, int rows, int columns);

}  // namespace flash_attn3
