// Host side: what every binding needs.
#pragma once
#include "tvm_ffi_utils.h"

namespace santa {

inline void check(cudaError_t status, const char* stage) {
  TVM_FFI_ICHECK(status == cudaSuccess) << stage << " did not launch: " << cudaGetErrorString(status);
}

template <class T>
T* data(TensorView tensor) { return static_cast<T*>(tensor.data_ptr()); }

template <class T>
T* data(ffi::Optional<TensorView> tensor) { return tensor.has_value() ? data<T>(tensor.value()) : nullptr; }

}  // namespace santa
