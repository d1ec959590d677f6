// SPDX-License-Identifier: Apache-2.0
// Element types of HCCL and the arithmetic of its reductions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace vnpu::hccl {

// The numbers of HcclDataType; spelled out because older headers lack the last ones.
enum DataType : uint32_t {
  kInt8 = 0,
  kInt16 = 1,
  kInt32 = 2,
  kFloat16 = 3,
  kFloat32 = 4,
  kInt64 = 5,
  kUint64 = 6,
  kUint8 = 7,
  kUint16 = 8,
  kUint32 = 9,
  kFloat64 = 10,
  kBfloat16 = 11,
  kInt128 = 12,
  kHifloat8 = 14,
  kFloat8E4m3 = 15,
  kFloat8E5m2 = 16,
  kFloat8E8m0 = 17,
};

// The numbers of HcclReduceOp.
enum ReduceOp : uint32_t { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };

size_t element_size(uint32_t dtype);  // 0: not a type of HCCL
std::string dtype_name(uint32_t dtype);
std::string reduce_op_name(uint32_t op);

// accumulator[i] = op(accumulator[i], input[i])
using ReduceFunction = void (*)(void* accumulator, const void* input, size_t count);

// nullptr where HCCL on an Atlas A2 does not take the combination: it reduces int8, int16, int32, int64, float16,
// float32 and bfloat16, and multiplies neither int16 nor bfloat16.
ReduceFunction reduce_function(uint32_t dtype, uint32_t op);

}  // namespace vnpu::hccl
