// SPDX-License-Identifier: Apache-2.0
// Normalisations.
#include "op_nn_common.h"

using namespace vnpu;

namespace {

at::Tensor as_float(const at::Tensor& x) { return x.to(at::kFloat); }

void check_normalized(const TensorArg& input, at::IntArrayRef shape) {
  const auto rank = static_cast<int64_t>(shape.size());
  check(rank >= 1 && rank <= input.dim() && input.sizes().slice(input.dim() - rank) == shape, "normalizedShape is ",
        shape_text(shape), ", but ", input.name(), " has shape ", input.shape());
}

Work layer_norm(const In& input, const Ints& shape, const OptIn& weight, const OptIn& bias, double eps, const Out& out,
                const OptOut& mean, const OptOut& rstd) {
  check_floating(input);
  check_normalized(input, shape());
  return [=] {
    const at::Tensor x = wide(input());
    auto cast = [&](const OptIn& t) {
      return t ? std::optional<at::Tensor>(t().to(x.scalar_type()).reshape(shape())) : std::nullopt;
    };
    auto [y, m, r] = at::native_layer_norm(x, shape(), cast(weight), cast(bias), eps);
    out.set(y);
    if (mean) mean.set(m.reshape(mean.sizes()));
    if (rstd) rstd.set(r.reshape(rstd.sizes()));
  };
}

// gamma spans the last dimensions of x. Gives the sizes of x as [rows, elements of gamma].
std::pair<int64_t, int64_t> rms_rows(const TensorArg& x, const TensorArg& gamma) {
  check_floating(x);
  check_normalized(x, gamma.sizes());
  return {gamma.numel() == 0 ? 0 : x.numel() / gamma.numel(), gamma.numel()};
}

}  // namespace

VNPU_OP(aclnnLayerNorm, In(input), Ints(normalizedShape), OptIn(weight), OptIn(bias), Double(eps), Out(out),
        OptOut(mean), OptOut(rstd)) {
  return layer_norm(input, normalizedShape, weight, bias, eps, out, mean, rstd);
}

VNPU_OP(aclnnFastLayerNorm, In(input), Ints(normalizedShape), OptIn(weight), OptIn(bias), Double(eps), Out(out),
        OptOut(mean), OptOut(rstd)) {
  return layer_norm(input, normalizedShape, weight, bias, eps, out, mean, rstd);
}

VNPU_OP(aclnnLayerNormBackward, In(gradOut), In(input), Ints(normalizedShape), In(mean), In(rstd), OptIn(weight),
        OptIn(bias), Bools(outputMask), OptOut(gradInput), OptOut(gradWeight), OptOut(gradBias)) {
  check_floating(input);
  check_normalized(input, normalizedShape());
  check(outputMask.size() == 3, "outputMask has ", outputMask.size(), " values, expected 3");
  return [=] {
    const at::Tensor x = wide(input());
    auto cast = [&](const at::Tensor& t) { return t.to(x.scalar_type()); };
    // PyTorch's CPU kernel gives no gradient of an absent weight; CANN does, for one of ones.
    const at::Tensor w = weight ? cast(weight()) : at::ones(normalizedShape(), x.options());
    const at::Tensor b = bias ? cast(bias()) : at::zeros(normalizedShape(), x.options());
    auto [gx, gw, gb] = at::native_layer_norm_backward(
        cast(gradOut()), x, normalizedShape(), cast(mean()), cast(rstd()), w.reshape(normalizedShape()),
        b.reshape(normalizedShape()), {outputMask[0], outputMask[1], outputMask[2]});
    if (outputMask[0]) gradInput.set(gx);
    if (outputMask[1] && gradWeight) gradWeight.set(gw.reshape(gradWeight.sizes()));
    if (outputMask[2] && gradBias) gradBias.set(gb.reshape(gradBias.sizes()));
  };
}

VNPU_OP(aclnnGroupNorm, In(self), OptIn(gamma), OptIn(beta), Int(N), Int(C), Int(HxW), Int(group), Double(eps),
        Out(out), Out(meanOut), Out(rstdOut)) {
  check_floating(self);
  check(group > 0 && C % group == 0, "C is ", C(), ", not a multiple of group, which is ", group());
  check(self.numel() == N * C * HxW, "self has shape ", self.shape(), ", expected ", N(), " x ", C(), " x ", HxW(),
        " elements");
  return [=] {
    auto [y, mean, rstd] = at::native_group_norm(wide(self()).contiguous(), wide(gamma), wide(beta), N, C, HxW, group,
                                                 eps);
    out.set(y);
    meanOut.set(mean);
    rstdOut.set(rstd);
  };
}

VNPU_OP(aclnnGroupNormBackward, In(gradOut), In(input), In(mean), In(rstd), OptIn(gamma), Int(N), Int(C), Int(HxW),
        Int(group), Bools(outputMask), OptOut(gradInput), OptOut(gradGamma), OptOut(gradBeta)) {
  check_floating(input);
  check(outputMask.size() == 3, "outputMask has ", outputMask.size(), " values, expected 3");
  return [=] {
    const at::Tensor x = wide(input()).contiguous();
    auto [gx, gw, gb] = at::native_group_norm_backward(
        wide(gradOut()).contiguous(), x, wide(mean()), wide(rstd()), wide(gamma), N, C, HxW, group,
        {outputMask[0], outputMask[1], outputMask[2]});
    if (outputMask[0]) gradInput.set(gx);
    if (outputMask[1]) gradGamma.set(gw);
    if (outputMask[2]) gradBeta.set(gb);
  };
}

VNPU_OP(aclnnRmsNorm, In(x), In(gamma), Double(epsilon), Out(yOut), OptOut(rstdOut)) {
  const auto [rows, columns] = rms_rows(x, gamma);
  return [=, rows = rows, columns = columns] {
    const at::Tensor v = as_float(x()).reshape({rows, columns});
    const at::Tensor rstd = at::rsqrt(v.square().mean(1, true) + epsilon());
    yOut.set((v * rstd * as_float(gamma()).reshape({columns})).reshape(x.sizes()));
    if (rstdOut) rstdOut.set(rstd.reshape(rstdOut.sizes()));
  };
}

// The sum is rounded to the dtype of x1 before it is normalised, and given back.
VNPU_OP(aclnnAddRmsNorm, In(x1), In(x2), In(gamma), Double(epsilon), Out(yOut), OptOut(rstdOut), Out(xOut)) {
  check_same_shape(x1, x2);
  check_same_dtype(x1, x2);
  const auto [rows, columns] = rms_rows(x1, gamma);
  return [=, rows = rows, columns = columns] {
    const at::Tensor sum = (as_float(x1()) + as_float(x2())).to(x1.dtype());
    const at::Tensor v = as_float(sum).reshape({rows, columns});
    const at::Tensor rstd = at::rsqrt(v.square().mean(1, true) + epsilon());
    yOut.set((v * rstd * as_float(gamma()).reshape({columns})).reshape(x1.sizes()));
    if (rstdOut) rstdOut.set(rstd.reshape(rstdOut.sizes()));
    xOut.set(sum);
  };
}

VNPU_OP(aclnnRmsNormGrad, In(dy), In(x), In(rstd), In(gamma), Out(dxOut), Out(dgammaOut)) {
  check_same_shape(dy, x);
  const auto [rows, columns] = rms_rows(x, gamma);
  check(rstd.numel() == rows, "rstd has shape ", rstd.shape(), ", expected ", rows, " values");
  check(dgammaOut.dtype() == at::kFloat, "dgammaOut has dtype ", dtype_name(dgammaOut.acl_dtype()),
        ", expected float32");
  return [=, rows = rows, columns = columns] {
    const at::Tensor g = as_float(dy()).reshape({rows, columns});
    const at::Tensor r = as_float(rstd()).reshape({rows, 1});
    const at::Tensor normalized = as_float(x()).reshape({rows, columns}) * r;
    const at::Tensor weighted = g * as_float(gamma()).reshape({columns});
    const at::Tensor dx = r * (weighted - normalized * (weighted * normalized).mean(1, true));
    dxOut.set(dx.reshape(x.sizes()));
    dgammaOut.set((g * normalized).sum(0).reshape(gamma.sizes()));
  };
}
