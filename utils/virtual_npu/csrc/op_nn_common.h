// SPDX-License-Identifier: Apache-2.0
// Helpers of the neural network operators.
#pragma once

#include "opapi.h"

namespace vnpu {

// Half precision is computed in float32, as the hardware's kernels accumulate; everything else in its own dtype.
inline at::Tensor wide(const at::Tensor& x) {
  if (!x.defined()) return x;
  const auto dtype = x.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? x.to(at::kFloat) : x;
}

inline std::optional<at::Tensor> wide(const OptIn& x) {
  return x ? std::optional<at::Tensor>(wide(x())) : std::nullopt;
}

inline void check_floating(const TensorArg& x) {
  check(at::isFloatingType(x.dtype()), x.name(), " has dtype ", dtype_name(x.acl_dtype()),
        ", expected float16, bfloat16 or float32");
}

inline void check_index(const TensorArg& x) {
  check(x.dtype() == at::kLong || x.dtype() == at::kInt, x.name(), " has dtype ", dtype_name(x.acl_dtype()),
        ", expected int64 or int32");
}

inline void check_same_dtype(const TensorArg& a, const TensorArg& b) {
  check(a.acl_dtype() == b.acl_dtype(), a.name(), " and ", b.name(), " must have one dtype, got ",
        dtype_name(a.acl_dtype()), " and ", dtype_name(b.acl_dtype()));
}

inline void check_same_shape(const TensorArg& a, const TensorArg& b) {
  check(a.sizes() == b.sizes(), a.name(), " and ", b.name(), " must have one shape, got ", a.shape(), " and ",
        b.shape());
}

inline int64_t check_dim(int64_t dim, const TensorArg& x) {
  const int64_t rank = std::max<int64_t>(x.dim(), 1);
  check(dim >= -rank && dim < rank, "dim is ", dim, ", but ", x.name(), " has shape ", x.shape());
  return dim < 0 ? dim + rank : dim;
}

inline void check_reduction(int64_t reduction) {
  check(reduction >= 0 && reduction <= 2, "reduction is ", reduction, ", expected 0 (none), 1 (mean) or 2 (sum)");
}

}  // namespace vnpu
