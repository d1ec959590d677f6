// SPDX-License-Identifier: Apache-2.0
#include "hccl_reduce.h"

#include <cstring>
#include <type_traits>

namespace vnpu::hccl {
namespace {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Half {
  uint16_t bits;
};

struct Bfloat {
  uint16_t bits;
};

float widen(Half half) {
  uint32_t sign = (half.bits & 0x8000u) << 16;
  uint32_t magnitude = (half.bits & 0x7fffu) << 13;
  // The exponent is rebased by a multiplication, which also normalises subnormal numbers.
  uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  if (magnitude >= 0x0f800000u) scaled |= 0x7f800000u;  // infinity or NaN
  return bits_as<float>(scaled | sign);
}

float widen(Bfloat value) { return bits_as<float>(static_cast<uint32_t>(value.bits) << 16); }

// Both round to nearest, ties to even.
void narrow(float value, Half* half) {
  uint32_t bits = bits_as<uint32_t>(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude >= 0x47800000u) {  // 65536 and above
    result = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the multiple of 2^-24 in the low bits
    result = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  half->bits = static_cast<uint16_t>(sign | result);
}

void narrow(float value, Bfloat* result) {
  uint32_t bits = bits_as<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    result->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
  } else {
    result->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

// A NaN in either operand is the result of min and max too: memory read before it was written must show.
template <ReduceOp Op, class T>
T combine(T a, T b) {
  if constexpr (Op == kSum || Op == kProd) {
    if constexpr (std::is_integral_v<T>) {
      // Wraps around, as the hardware does. uint64_t also keeps int16 * int16 from being promoted to int.
      uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
      return static_cast<T>(Op == kSum ? x + y : x * y);
    } else {
      return Op == kSum ? a + b : a * b;
    }
  } else {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a) return a;
      if (b != b) return b;
    }
    if constexpr (Op == kMax) return a < b ? b : a;
    return b < a ? b : a;
  }
}

template <ReduceOp Op, class T>
void reduce(void* accumulator, const void* input, size_t count) {
  T* a = static_cast<T*>(accumulator);
  const T* b = static_cast<const T*>(input);
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_arithmetic_v<T>) {
      a[i] = combine<Op, T>(a[i], b[i]);
    } else {
      // Computed in float32 and rounded to the 16 bit type after every operand: HCCL reduces in place in the type
      // of the data ("inline reduce"), so no wider accumulator may be relied on.
      narrow(combine<Op, float>(widen(a[i]), widen(b[i])), &a[i]);
    }
  }
}

template <class T>
ReduceFunction select(uint32_t op, bool multiplies = true) {
  switch (op) {
    case kSum:
      return reduce<kSum, T>;
    case kProd:
      return multiplies ? reduce<kProd, T> : nullptr;
    case kMax:
      return reduce<kMax, T>;
    case kMin:
      return reduce<kMin, T>;
    default:
      return nullptr;
  }
}

}  // namespace

size_t element_size(uint32_t dtype) {
  switch (dtype) {
    case kInt8:
    case kUint8:
    case kHifloat8:
    case kFloat8E4m3:
    case kFloat8E5m2:
    case kFloat8E8m0:
      return 1;
    case kInt16:
    case kUint16:
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kUint32:
    case kFloat32:
      return 4;
    case kInt64:
    case kUint64:
    case kFloat64:
      return 8;
    case kInt128:
      return 16;
    default:
      return 0;
  }
}

std::string dtype_name(uint32_t dtype) {
  switch (dtype) {
    case kInt8:
      return "int8";
    case kInt16:
      return "int16";
    case kInt32:
      return "int32";
    case kFloat16:
      return "float16";
    case kFloat32:
      return "float32";
    case kInt64:
      return "int64";
    case kUint64:
      return "uint64";
    case kUint8:
      return "uint8";
    case kUint16:
      return "uint16";
    case kUint32:
      return "uint32";
    case kFloat64:
      return "float64";
    case kBfloat16:
      return "bfloat16";
    case kInt128:
      return "int128";
    case kHifloat8:
      return "hifloat8";
    case kFloat8E4m3:
      return "float8_e4m3";
    case kFloat8E5m2:
      return "float8_e5m2";
    case kFloat8E8m0:
      return "float8_e8m0";
    default:
      return "data type " + std::to_string(dtype);
  }
}

std::string reduce_op_name(uint32_t op) {
  switch (op) {
    case kSum:
      return "sum";
    case kProd:
      return "prod";
    case kMax:
      return "max";
    case kMin:
      return "min";
    default:
      return "reduction " + std::to_string(op);
  }
}

ReduceFunction reduce_function(uint32_t dtype, uint32_t op) {
  switch (dtype) {
    case kInt8:
      return select<int8_t>(op);
    case kInt16:
      return select<int16_t>(op, /*multiplies=*/false);
    case kInt32:
      return select<int32_t>(op);
    case kInt64:
      return select<int64_t>(op);
    case kFloat16:
      return select<Half>(op);
    case kFloat32:
      return select<float>(op);
    case kBfloat16:
      return select<Bfloat>(op, /*multiplies=*/false);
    default:
      return nullptr;
  }
}

}  // namespace vnpu::hccl
