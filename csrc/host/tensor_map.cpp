#include "host/tensor_map.h"

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>

namespace flash_attn3 {
namespace {

// The driver's encoder, found at run time so that the library also loads where there is no driver.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static auto* const function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t const status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "flash_attn3: the CUDA driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 is needed");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return function;
}

}  // namespace

CUtensorMap make_tensor_map(TensorView const& t, int rows, int columns) {
  int const element_bytes = t.type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  int const width = columns * element_bytes;
  cuuint64_t sizes[4] = {cuuint64_t(t.head_dim), cuuint64_t(t.sequence), cuuint64_t(t.heads), cuuint64_t(t.batch)};
  // The stride of a dimension of size 1 means nothing, and may be anything.
  auto bytes_of = [&](int64_t size, int64_t stride) { return size == 1 ? 16 : cuuint64_t(stride) * element_bytes; };
  cuuint64_t bytes[3] = {bytes_of(t.sequence, t.stride_sequence), bytes_of(t.heads, t.stride_head),
                         bytes_of(t.batch, t.stride_batch)};
  auto address = reinterpret_cast<uintptr_t>(t.data);
  if (t.packed) {
    sizes[1] = cuuint64_t(rows);
    sizes[3] = cuuint64_t(t.sequence) + 1;
    bytes[2] = bytes[0];
    address -= rows * bytes[0];  // no box reaches the rows before the tensor
  }
  cuuint32_t const box[4] = {cuuint32_t(columns), cuuint32_t(rows), 1, 1};
  cuuint32_t const element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  CUresult const status = encoder()(&map, t.type, 4, reinterpret_cast<void*>(address), sizes, bytes, box,
                                    element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    width == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                    : width == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                  : CU_TENSOR_MAP_SWIZZLE_32B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::ostringstream message;
    message << "flash_attn3: no TMA descriptor for " << t.name << " (driver error " << int(status) << "): shape ("
            << t.batch << ", " << t.sequence << ", " << t.heads << ", " << t.head_dim << "), strides ("
            << t.stride_batch << ", " << t.stride_sequence << ", " << t.stride_head << ", 1), address " << t.data;
    throw std::runtime_error(message.str());
  }
  return map;
}

}  // namespace flash_attn3
