// SPDX-License-Identifier: Apache-2.0
// Operators over lists of tensors, and the optimizers' fused updates.
#include "op_nn_common.h"

using namespace vnpu;

namespace {

template <class A, class B>
void check_lists(const A& a, const B& b) {
  check(a.size() == b.size(), a.name(), " has ", a.size(), " tensors, ", b.name(), " ", b.size());
  for (size_t i = 0; i < a.size(); ++i)
    check(a[i].sizes() == b[i].sizes(), a.name(), "[", i, "] has shape ", a[i].shape(), ", ", b.name(), "[", i, "] ",
          b[i].shape());
}

void check_scalars(const Ins& x, const Scalars& scalars) {
  check(x.size() == scalars.size(), x.name(), " has ", x.size(), " tensors, but there are ", scalars.size(),
        " scalars");
}

// CANN's rounding modes of aclnnForeachRoundOffNumber.
at::Tensor rounded(const at::Tensor& x, int64_t mode) {
  switch (mode) {
    case 1: return at::round(x);
    case 2: return at::floor(x);
    case 3: return at::ceil(x);
    case 4: return at::round(x);
    case 5: return at::trunc(x);
    default: return at::frac(x);  // 7
  }
}

}  // namespace

// out[i] = f(a = x[i], i). Half precision is computed in float32 and rounded once.
#define VNPU_FOREACH_BODY(expression)                                  \
  return [=] {                                                         \
    for (size_t i = 0; i < out.size(); ++i) {                          \
      const at::Tensor a = wide(x[i]());                               \
      out.set(i, expression);                                          \
    }                                                                  \
  }

#define VNPU_FOREACH(name, expression)               \
  VNPU_OP(aclnnForeach##name, Ins(x), Outs(out)) {   \
    check_lists(x, out);                             \
    VNPU_FOREACH_BODY(expression);                   \
  }

#define VNPU_FOREACH_LIST(name, expression)                   \
  VNPU_OP(aclnnForeach##name, Ins(x), Ins(x2), Outs(out)) {   \
    check_lists(x, x2);                                       \
    check_lists(x, out);                                      \
    VNPU_FOREACH_BODY(expression);                            \
  }

#define VNPU_FOREACH_SCALAR(name, expression)                         \
  VNPU_OP(aclnnForeach##name, Ins(x), Scalar(scalar), Outs(out)) {    \
    check_lists(x, out);                                              \
    VNPU_FOREACH_BODY(expression);                                    \
  }

#define VNPU_FOREACH_SCALARS(name, expression)                          \
  VNPU_OP(aclnnForeach##name, Ins(x), Scalars(scalars), Outs(out)) {    \
    check_lists(x, out);                                                \
    check_scalars(x, scalars);                                          \
    VNPU_FOREACH_BODY(expression);                                      \
  }

VNPU_FOREACH(Abs, at::abs(a))
VNPU_FOREACH(Acos, at::acos(a))
VNPU_FOREACH(Asin, at::asin(a))
VNPU_FOREACH(Atan, at::atan(a))
VNPU_FOREACH(Cos, at::cos(a))
VNPU_FOREACH(Cosh, at::cosh(a))
VNPU_FOREACH(Erf, at::erf(a))
VNPU_FOREACH(Erfc, at::erfc(a))
VNPU_FOREACH(Exp, at::exp(a))
VNPU_FOREACH(Expm1, at::expm1(a))
VNPU_FOREACH(Log, at::log(a))
VNPU_FOREACH(Log10, at::log10(a))
VNPU_FOREACH(Log1p, at::log1p(a))
VNPU_FOREACH(Log2, at::log2(a))
VNPU_FOREACH(Neg, at::neg(a))
VNPU_FOREACH(Reciprocal, at::reciprocal(a))
VNPU_FOREACH(Sigmoid, at::sigmoid(a))
VNPU_FOREACH(Sign, at::sign(a))
VNPU_FOREACH(Sin, at::sin(a))
VNPU_FOREACH(Sinh, at::sinh(a))
VNPU_FOREACH(Sqrt, at::sqrt(a))
VNPU_FOREACH(Tan, at::tan(a))
VNPU_FOREACH(Tanh, at::tanh(a))
VNPU_FOREACH(Copy, a)

VNPU_FOREACH_LIST(DivList, at::div(a, wide(x2[i]())))
VNPU_FOREACH_LIST(MaximumList, at::maximum(a, wide(x2[i]())))
VNPU_FOREACH_LIST(MinimumList, at::minimum(a, wide(x2[i]())))
VNPU_FOREACH_LIST(MulList, at::mul(a, wide(x2[i]())))
VNPU_FOREACH_LIST(PowList, at::pow(a, wide(x2[i]())))

VNPU_FOREACH_SCALAR(AddScalarV2, at::add(a, scalar))
VNPU_FOREACH_SCALAR(DivScalarV2, at::div(a, scalar))
VNPU_FOREACH_SCALAR(MaximumScalarV2, at::clamp_min(a, scalar))
VNPU_FOREACH_SCALAR(MinimumScalarV2, at::clamp_max(a, scalar))
VNPU_FOREACH_SCALAR(MulScalarV2, at::mul(a, scalar))
VNPU_FOREACH_SCALAR(PowScalarV2, at::pow(a, scalar))
VNPU_FOREACH_SCALAR(SubScalarV2, at::sub(a, scalar))

VNPU_FOREACH_SCALARS(AddScalarList, at::add(a, scalars[i]))
VNPU_FOREACH_SCALARS(DivScalarList, at::div(a, scalars[i]))
VNPU_FOREACH_SCALARS(MaximumScalarList, at::clamp_min(a, scalars[i]))
VNPU_FOREACH_SCALARS(MinimumScalarList, at::clamp_max(a, scalars[i]))
VNPU_FOREACH_SCALARS(MulScalarList, at::mul(a, scalars[i]))
VNPU_FOREACH_SCALARS(PowScalarList, at::pow(a, scalars[i]))
VNPU_FOREACH_SCALARS(SubScalarList, at::sub(a, scalars[i]))

VNPU_OP(aclnnForeachAddListV2, Ins(x), Ins(x2), Scalar(alpha), Outs(out)) {
  check_lists(x, x2);
  check_lists(x, out);
  VNPU_FOREACH_BODY(at::add(a, wide(x2[i]()), alpha));
}

VNPU_OP(aclnnForeachSubListV2, Ins(x), Ins(x2), Scalar(alpha), Outs(out)) {
  check_lists(x, x2);
  check_lists(x, out);
  VNPU_FOREACH_BODY(at::sub(a, wide(x2[i]()), alpha));
}

VNPU_OP(aclnnForeachAddcdivScalarV2, Ins(x), Ins(x2), Ins(x3), Scalar(scalar), Outs(out)) {
  check_lists(x, x2);
  check_lists(x, x3);
  check_lists(x, out);
  VNPU_FOREACH_BODY(at::addcdiv(a, wide(x2[i]()), wide(x3[i]()), scalar));
}

VNPU_OP(aclnnForeachAddcmulScalarV2, Ins(x), Ins(x2), Ins(x3), Scalar(scalar), Outs(out)) {
  check_lists(x, x2);
  check_lists(x, x3);
  check_lists(x, out);
  VNPU_FOREACH_BODY(at::addcmul(a, wide(x2[i]()), wide(x3[i]()), scalar));
}

// torch_npu passes the scalars of these two as a tensor (the overload with a tensor of scalars).
VNPU_OP(aclnnForeachAddcdivScalarList, Ins(x), Ins(x2), Ins(x3), In(scalars), Outs(out)) {
  check_lists(x, out);
  check(scalars.numel() == static_cast<int64_t>(x.size()), "scalars has shape ", scalars.shape(), " for ", x.size(),
        " tensors");
  VNPU_FOREACH_BODY(at::addcdiv(a, wide(x2[i]()), wide(x3[i]()), scalars().reshape({-1})[i].item()));
}

VNPU_OP(aclnnForeachAddcmulScalarList, Ins(x), Ins(x2), Ins(x3), In(scalars), Outs(out)) {
  check_lists(x, out);
  check(scalars.numel() == static_cast<int64_t>(x.size()), "scalars has shape ", scalars.shape(), " for ", x.size(),
        " tensors");
  VNPU_FOREACH_BODY(at::addcmul(a, wide(x2[i]()), wide(x3[i]()), scalars().reshape({-1})[i].item()));
}

VNPU_OP(aclnnForeachLerpScalar, Ins(x), Ins(x2), Scalar(weight), Outs(out)) {
  check_lists(x, x2);
  check_lists(x, out);
  VNPU_FOREACH_BODY(at::lerp(a, wide(x2[i]()), weight));
}

VNPU_OP(aclnnForeachLerpList, Ins(x), Ins(x2), Ins(weights), Outs(out)) {
  check_lists(x, x2);
  check_lists(x, weights);
  check_lists(x, out);
  VNPU_FOREACH_BODY(at::lerp(a, wide(x2[i]()), wide(weights[i]())));
}

VNPU_OP(aclnnForeachPowScalarAndTensor, Scalar(scalar), Ins(x), Outs(out)) {
  check_lists(x, out);
  VNPU_FOREACH_BODY(at::pow(scalar, a));
}

VNPU_OP(aclnnForeachNorm, Ins(x), Scalar(scalar), Outs(out)) {
  check(x.size() == out.size(), "x has ", x.size(), " tensors, out ", out.size());
  VNPU_FOREACH_BODY(at::linalg_vector_norm(a, scalar).reshape(out[i].sizes()));
}

VNPU_OP(aclnnForeachZeroInplace, InOuts(x)) {
  return [=] {
    for (const InOut& tensor : x) tensor.fill(0);
  };
}

VNPU_OP(aclnnForeachRoundOffNumberV2, Ins(x), Scalar(roundMode), Outs(out)) {
  const auto mode = roundMode().toLong();
  check((mode >= 1 && mode <= 5) || mode == 7, "roundMode is ", mode, ", expected 1 to 5 or 7");
  check_lists(x, out);
  VNPU_FOREACH_BODY(rounded(a, mode));
}

VNPU_OP(aclnnForeachNonFiniteCheckAndUnscale, InOuts(scaledGrads), InOut(foundInf), In(invScale)) {
  check(foundInf.numel() == 1 && invScale.numel() == 1, "foundInf and invScale must have one element");
  return [=] {
    const at::Tensor scale = invScale().reshape({});
    for (const InOut& grad : scaledGrads) {
      const at::Tensor g = wide(grad());
      if (!g.isfinite().all().item<bool>()) foundInf.fill(1);
      grad.set(g * scale);
    }
  };
}

// One step of AdamW on one parameter. `step` counts the steps done before this one.
VNPU_OP(aclnnApplyAdamWV2, InOut(varRef), InOut(mRef), InOut(vRef), OptInOut(maxGradNormOptionalRef), In(grad),
        In(step), Float(lr), Float(beta1), Float(beta2), Float(weightDecay), Float(eps), Bool(amsgrad),
        Bool(maximize)) {
  check_same_shape(varRef, grad);
  check_same_shape(varRef, mRef);
  check_same_shape(varRef, vRef);
  check(step.numel() == 1, "step has shape ", step.shape(), ", expected one element");
  check(!amsgrad || maxGradNormOptionalRef, "amsgrad needs maxGradNormOptionalRef");
  return [=] {
    const double t = step().reshape({}).item().toDouble() + 1;
    const at::Tensor g = maximize ? -wide(grad()) : wide(grad());
    const at::Tensor m = at::lerp(wide(mRef()), g.to(wide(mRef()).scalar_type()), 1.0 - beta1());
    const at::Tensor v = wide(vRef()) * beta2() + (1.0 - beta2()) * g * g;
    at::Tensor second = v;
    if (amsgrad) {
      second = at::maximum(wide(maxGradNormOptionalRef()), v);
      maxGradNormOptionalRef.set(second);
    }
    const double correction1 = 1 - std::pow(beta1(), t), correction2 = 1 - std::pow(beta2(), t);
    const at::Tensor denominator = second.sqrt() / std::sqrt(correction2) + eps();
    const at::Tensor decayed = wide(varRef()) * (1.0 - lr() * weightDecay());
    varRef.set(decayed - lr() / correction1 * m / denominator);
    mRef.set(m);
    vRef.set(v);
  };
}
