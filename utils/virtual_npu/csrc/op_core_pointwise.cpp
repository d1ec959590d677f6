// SPDX-License-Identifier: Apache-2.0
// Operators that work element by element: unary, binary, comparisons, logic, clamping.
#include "opapi.h"

// aclnnX(self, out) and aclnnInplaceX(self).
#define UNARY(op, function) \
  VNPU_OP(aclnn##op, In(self), Out(out)) { return [=] { out.set(at::function(self)); }; }
#define INPLACE_UNARY(op, function) \
  VNPU_OP(aclnnInplace##op, InOut(self)) { return [=] { self.set(at::function(self)); }; }
#define UNARY_PAIR(op, function) \
  UNARY(op, function)            \
  INPLACE_UNARY(op, function)

UNARY(Abs, abs)
UNARY_PAIR(Acos, acos)
UNARY_PAIR(Acosh, acosh)
UNARY_PAIR(Asin, asin)
UNARY_PAIR(Asinh, asinh)
UNARY_PAIR(Atan, atan)
UNARY_PAIR(Atanh, atanh)
UNARY(BitwiseNot, bitwise_not)
UNARY_PAIR(Ceil, ceil)
UNARY_PAIR(Cos, cos)
UNARY_PAIR(Cosh, cosh)
UNARY_PAIR(Erf, erf)
UNARY_PAIR(Erfc, erfc)
UNARY_PAIR(Erfinv, erfinv)
UNARY_PAIR(Exp, exp)
UNARY_PAIR(Exp2, exp2)
UNARY_PAIR(Expm1, expm1)
UNARY_PAIR(Floor, floor)
UNARY_PAIR(Frac, frac)
UNARY_PAIR(Log, log)
UNARY_PAIR(Log10, log10)
UNARY_PAIR(Log1p, log1p)
UNARY_PAIR(Log2, log2)
UNARY_PAIR(LogicalNot, logical_not)
UNARY(Neg, neg)
UNARY_PAIR(Reciprocal, reciprocal)
UNARY(Round, round)
UNARY_PAIR(Rsqrt, rsqrt)
UNARY_PAIR(Sin, sin)
UNARY_PAIR(Sinc, sinc)
UNARY_PAIR(Sinh, sinh)
UNARY_PAIR(Sqrt, sqrt)
UNARY_PAIR(Tan, tan)
UNARY(Trunc, trunc)
UNARY(AngleV2, angle)
UNARY(IsFinite, isfinite)
UNARY(IsNegInf, isneginf)
UNARY(IsPosInf, isposinf)
UNARY(Sign, sgn)  // of a complex number too
UNARY(Signbit, signbit)

// aclnnX(self, other, out) and aclnnInplaceX(self, other); Kind is In or Scalar.
#define BINARY(op, Kind, function) \
  VNPU_OP(aclnn##op, In(self), Kind(other), Out(out)) { return [=] { out.set(at::function(self(), other())); }; }
#define INPLACE_BINARY(op, Kind, function) \
  VNPU_OP(aclnnInplace##op, InOut(self), Kind(other)) { return [=] { self.set(at::function(self(), other())); }; }
#define BINARY_PAIR(op, Kind, function) \
  BINARY(op, Kind, function)            \
  INPLACE_BINARY(op, Kind, function)

BINARY_PAIR(Mul, In, mul)
BINARY_PAIR(Muls, Scalar, mul)
BINARY_PAIR(Div, In, div)
BINARY_PAIR(Divs, Scalar, div)
BINARY_PAIR(FloorDivide, In, floor_divide)
BINARY_PAIR(FloorDivides, Scalar, floor_divide)
BINARY_PAIR(FmodTensor, In, fmod)
BINARY_PAIR(FmodScalar, Scalar, fmod)
BINARY_PAIR(RemainderTensorTensor, In, remainder)
BINARY_PAIR(RemainderTensorScalar, Scalar, remainder)
BINARY_PAIR(PowTensorTensor, In, pow)
BINARY_PAIR(PowTensorScalar, Scalar, pow)
BINARY_PAIR(Atan2, In, atan2)
BINARY(Maximum, In, maximum)
BINARY(Minimum, In, minimum)
BINARY(LogAddExp, In, logaddexp)
BINARY(LogAddExp2, In, logaddexp2)
BINARY(XLogYTensor, In, xlogy)
BINARY_PAIR(XLogYScalarOther, Scalar, xlogy)
BINARY(Gcd, In, gcd)

BINARY_PAIR(EqTensor, In, eq)
BINARY_PAIR(EqScalar, Scalar, eq)
BINARY_PAIR(NeTensor, In, ne)
BINARY_PAIR(NeScalar, Scalar, ne)
BINARY_PAIR(LtTensor, In, lt)
BINARY_PAIR(LtScalar, Scalar, lt)
BINARY_PAIR(LeTensor, In, le)
BINARY_PAIR(LeScalar, Scalar, le)
BINARY_PAIR(GtTensor, In, gt)
BINARY_PAIR(GtScalar, Scalar, gt)
BINARY_PAIR(GeTensor, In, ge)
BINARY_PAIR(GeScalar, Scalar, ge)

BINARY_PAIR(LogicalAnd, In, logical_and)
BINARY_PAIR(LogicalOr, In, logical_or)
BINARY(LogicalXor, In, logical_xor)
BINARY_PAIR(BitwiseAndTensor, In, bitwise_and)
BINARY_PAIR(BitwiseAndScalar, Scalar, bitwise_and)
BINARY(BitwiseOrTensor, In, bitwise_or)
BINARY(BitwiseOrScalar, Scalar, bitwise_or)
BINARY_PAIR(BitwiseXorTensor, In, bitwise_xor)
BINARY_PAIR(BitwiseXorScalar, Scalar, bitwise_xor)
BINARY(LeftShift, In, bitwise_left_shift)
BINARY(LeftShifts, Scalar, bitwise_left_shift)
BINARY(RightShift, In, bitwise_right_shift)

VNPU_OP(aclnnPowScalarTensor, Scalar(self), In(exponent), Out(out)) {
  return [=] { out.set(at::pow(self(), exponent())); };
}
VNPU_OP(aclnnRemainderScalarTensor, Scalar(self), In(other), Out(out)) {
  return [=] { out.set(at::remainder(self(), other())); };
}
VNPU_OP(aclnnXLogYScalarSelf, Scalar(self), In(other), Out(out)) {
  return [=] { out.set(at::xlogy(self(), other())); };
}

// With alpha: self + alpha * other.
#define ADDITIVE(op, Kind, function)                                               \
  VNPU_OP(aclnn##op, In(self), Kind(other), Scalar(alpha), Out(out)) {             \
    return [=] { out.set(at::function(self(), other(), alpha())); };               \
  }
#define INPLACE_ADDITIVE(op, Kind, function)                                       \
  VNPU_OP(aclnnInplace##op, InOut(self), Kind(other), Scalar(alpha)) {             \
    return [=] { self.set(at::function(self(), other(), alpha())); };              \
  }

ADDITIVE(Add, In, add)
ADDITIVE(Adds, Scalar, add)
ADDITIVE(Sub, In, sub)
ADDITIVE(Subs, Scalar, sub)
ADDITIVE(Rsub, In, rsub)
ADDITIVE(Rsubs, Scalar, rsub)
INPLACE_ADDITIVE(Add, In, add)
INPLACE_ADDITIVE(Adds, Scalar, add)
INPLACE_ADDITIVE(Sub, In, sub)
INPLACE_ADDITIVE(Subs, Scalar, sub)

VNPU_OP(aclnnAddV3, Scalar(self), In(other), Scalar(alpha), Out(out)) {
  return [=] { out.set(at::add(at::scalar_tensor(self(), at::TensorOptions().dtype(out.dtype())), other(), alpha())); };
}

// Division with a rounding mode: 0 none, 1 towards zero, 2 down.
static std::optional<c10::string_view> rounding(int32_t mode) {
  vnpu::check(mode >= 0 && mode <= 2, "mode is ", mode, ", expected 0, 1 or 2");
  if (mode == 0) return std::nullopt;
  return mode == 1 ? "trunc" : "floor";
}
VNPU_OP(aclnnDivMod, In(self), In(other), Int32(mode), Out(out)) {
  const auto how = rounding(mode);
  return [=] { out.set(at::div(self(), other(), how)); };
}
VNPU_OP(aclnnDivMods, In(self), Scalar(other), Int32(mode), Out(out)) {
  const auto how = rounding(mode);
  return [=] { out.set(at::div(self(), other(), how)); };
}
VNPU_OP(aclnnInplaceDivMod, InOut(self), In(other), Int32(mode)) {
  const auto how = rounding(mode);
  return [=] { self.set(at::div(self(), other(), how)); };
}
VNPU_OP(aclnnInplaceDivMods, InOut(self), Scalar(other), Int32(mode)) {
  const auto how = rounding(mode);
  return [=] { self.set(at::div(self(), other(), how)); };
}

#define ADDC(op, function)                                                                      \
  VNPU_OP(aclnn##op, In(self), In(tensor1), In(tensor2), Scalar(value), Out(out)) {             \
    return [=] { out.set(at::function(self(), tensor1(), tensor2(), value())); };               \
  }                                                                                             \
  VNPU_OP(aclnnInplace##op, InOut(self), In(tensor1), In(tensor2), Scalar(value)) {             \
    return [=] { self.set(at::function(self(), tensor1(), tensor2(), value())); };              \
  }
ADDC(Addcmul, addcmul)
ADDC(Addcdiv, addcdiv)

#define LERP(op, Kind)                                                       \
  VNPU_OP(aclnn##op, In(self), In(end), Kind(weight), Out(out)) {            \
    return [=] { out.set(at::lerp(self(), end(), weight())); };              \
  }                                                                          \
  VNPU_OP(aclnnInplace##op, InOut(self), In(end), Kind(weight)) {            \
    return [=] { self.set(at::lerp(self(), end(), weight())); };             \
  }
LERP(Lerp, In)
LERP(Lerps, Scalar)

VNPU_OP(aclnnSWhere, In(condition), In(self), In(other), Out(out)) {
  return [=] { out.set(at::where(condition().to(at::kBool), self(), other())); };
}

VNPU_OP(aclnnClamp, In(self), OptScalar(min), OptScalar(max), Out(out)) {
  return [=] { out.set(at::clamp(self(), min(), max())); };
}
VNPU_OP(aclnnClampTensor, In(self), OptIn(min), OptIn(max), Out(out)) {
  return [=] { out.set(at::clamp(self(), min.opt(), max.opt())); };
}
BINARY(ClampMin, Scalar, clamp_min)
BINARY_PAIR(ClampMinTensor, In, clamp_min)
BINARY_PAIR(ClampMax, Scalar, clamp_max)
BINARY_PAIR(ClampMaxTensor, In, clamp_max)

VNPU_OP(aclnnIsClose, In(self), In(other), Double(rtol), Double(atol), Bool(equal_nan), Out(out)) {
  return [=] { out.set(at::isclose(self(), other(), rtol, atol, equal_nan)); };
}

VNPU_OP(aclnnNanToNum, In(self), Float(nan), Float(posinf), Float(neginf), Out(out)) {
  return [=] { out.set(at::nan_to_num(self(), nan(), posinf(), neginf())); };
}
VNPU_OP(aclnnInplaceNanToNum, InOut(self), Float(nan), Float(posinf), Float(neginf)) {
  return [=] { self.set(at::nan_to_num(self(), nan(), posinf(), neginf())); };
}

VNPU_OP(aclnnRoundDecimals, In(self), Int(decimals), Out(out)) {
  return [=] { out.set(at::round(self(), decimals())); };
}
VNPU_OP(aclnnInplaceRoundDecimals, InOut(self), Int(decimals)) {
  return [=] { self.set(at::round(self(), decimals())); };
}

VNPU_OP(aclnnComplex, In(real), In(imag), Out(out)) {
  return [=] { out.set(at::complex(real(), imag())); };
}

VNPU_OP(aclnnIsInTensorScalar, In(element), Scalar(test_elements), Bool(assume_unique), Bool(invert), Out(out)) {
  return [=] { out.set(at::isin(element(), test_elements(), assume_unique, invert)); };
}
VNPU_OP(aclnnIsInScalarTensor, Scalar(element), In(test_elements), Bool(assume_unique), Bool(invert), Out(out)) {
  return [=] { out.set(at::isin(element(), test_elements(), assume_unique, invert)); };
}

// The step of a gradient scaler. The scale and the tracker are given twice: as they are, and as outputs.
VNPU_OP(aclnnAmpUpdateScale, In(scale), In(tracker), In(found_inf), Double(growth), Double(backoff), Int(interval),
        Out(new_scale), Out(new_tracker)) {
  return [=] {
    at::Tensor next_scale = scale().clone();
    at::Tensor next_tracker = tracker().clone();
    at::_amp_update_scale_(next_scale, next_tracker, found_inf(), growth, backoff, interval);
    new_scale.set(next_scale);
    new_tracker.set(next_tracker);
  };
}
