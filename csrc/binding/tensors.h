// Tensors through torch's stable ABI: the few helpers that the operators share.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

// Lives in libtorch_cuda; weak, so that the library also loads beside a CPU-only torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_attn3 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error, a RuntimeError in Python, with the concatenated message.
template <class... Parts>
[[noreturn]] void fail(Parts const&... parts) {
  std::ostringstream message;
  message << "flash_attn3: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string shape_of(Tensor const& tensor) {
  std::ostringstream text;
  text << "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ")";
  return text.str();
}

inline Tensor empty_strided(std::vector<int64_t> const& sizes, ScalarType dtype, int32_t device_type, int32_t device) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int i = int(sizes.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * (sizes[i + 1] > 0 ? sizes[i + 1] : 1);
  int32_t code = 0;
  switch (dtype) {
    case ScalarType::BFloat16: code = aoti_torch_dtype_bfloat16(); break;
    case ScalarType::Half: code = aoti_torch_dtype_float16(); break;
    case ScalarType::Float: code = aoti_torch_dtype_float32(); break;
    case ScalarType::Int: code = aoti_torch_dtype_int32(); break;
    case ScalarType::Long: code = aoti_torch_dtype_int64(); break;
    case ScalarType::Float8_e4m3fn: code = aoti_torch_dtype_float8_e4m3fn(); break;
    case ScalarType::Byte: code = aoti_torch_dtype_uint8(); break;
    default: fail("no allocation of this dtype");
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), code, device_type, device,
                               &handle)) {
    std::ostringstream shape;
    for (int64_t size : sizes) shape << size << " ";
    fail("could not allocate a tensor of sizes ", shape.str(), "(out of memory?)");
  }
  return Tensor(handle);
}

inline Tensor empty_cpu(std::vector<int64_t> const& sizes, ScalarType dtype) {
  return empty_strided(sizes, dtype, aoti_torch_device_type_cpu(), 0);
}

inline Tensor empty_cuda(std::vector<int64_t> const& sizes, ScalarType dtype, int32_t device) {
  return empty_strided(sizes, dtype, aoti_torch_device_type_cuda(), device);
}

}  // namespace flash_attn3
