// SPDX-License-Identifier: Apache-2.0
// Activations and their gradients.
#include "op_nn_common.h"

using namespace vnpu;

namespace {

const char* gelu_mode(int64_t mode) {
  check(mode == 0 || mode == 1, "approximate is ", mode, ", expected 0 (none) or 1 (tanh)");
  return mode == 0 ? "none" : "tanh";
}

std::string gelu_mode(const std::string& mode) {
  check(mode == "none" || mode == "tanh", "approximate is '", mode, "', expected 'none' or 'tanh'");
  return mode;
}

}  // namespace

// y = f(x), and in place.
#define VNPU_ACTIVATION(name, expression)                   \
  VNPU_OP(aclnn##name, In(self), Out(out)) {                \
    return [=] {                                            \
      const at::Tensor x = wide(self());                    \
      out.set(expression);                                  \
    };                                                      \
  }

#define VNPU_ACTIVATION_INPLACE(name, expression)           \
  VNPU_OP(aclnnInplace##name, InOut(self)) {                \
    return [=] {                                            \
      const at::Tensor x = wide(self());                    \
      self.set(expression);                                 \
    };                                                      \
  }

VNPU_ACTIVATION(Relu, at::relu(x))
VNPU_ACTIVATION_INPLACE(Relu, at::relu(x))
VNPU_ACTIVATION(Silu, at::silu(x))
VNPU_ACTIVATION(Mish, at::mish(x))
VNPU_ACTIVATION_INPLACE(Mish, at::mish(x))
VNPU_ACTIVATION(Hardswish, at::hardswish(x))
VNPU_ACTIVATION_INPLACE(Hardswish, at::hardswish(x))
VNPU_ACTIVATION(Hardsigmoid, at::hardsigmoid(x))
VNPU_ACTIVATION_INPLACE(Hardsigmoid, at::hardsigmoid(x))
VNPU_ACTIVATION(Gelu, at::gelu(x))

VNPU_OP(aclnnSigmoid, In(self), Out(out)) {
  return [=] { out.set(at::sigmoid(wide(self()))); };
}
VNPU_OP(aclnnInplaceSigmoid, InOut(self)) {
  return [=] { self.set(at::sigmoid(wide(self()))); };
}
VNPU_OP(aclnnTanh, In(self), Out(out)) {
  return [=] { out.set(at::tanh(wide(self()))); };
}
VNPU_OP(aclnnInplaceTanh, InOut(self)) {
  return [=] { self.set(at::tanh(wide(self()))); };
}

VNPU_OP(aclnnGeluV2, In(self), Int(approximate), Out(out)) {
  const std::string mode = gelu_mode(approximate());
  return [=] { out.set(at::gelu(wide(self()), mode)); };
}

VNPU_OP(aclnnSoftplus, In(self), Scalar(beta), Scalar(threshold), Out(out)) {
  return [=] { out.set(at::softplus(wide(self()), beta, threshold)); };
}

VNPU_OP(aclnnElu, In(self), Scalar(alpha), Scalar(scale), Scalar(inputScale), Out(out)) {
  return [=] { out.set(at::elu(wide(self()), alpha, scale, inputScale)); };
}
VNPU_OP(aclnnInplaceElu, InOut(self), Scalar(alpha), Scalar(scale), Scalar(inputScale)) {
  return [=] { self.set(at::elu(wide(self()), alpha, scale, inputScale)); };
}

VNPU_OP(aclnnLeakyRelu, In(self), Scalar(negativeSlope), Out(out)) {
  return [=] { out.set(at::leaky_relu(wide(self()), negativeSlope)); };
}
VNPU_OP(aclnnInplaceLeakyRelu, InOut(self), Scalar(negativeSlope)) {
  return [=] { self.set(at::leaky_relu(wide(self()), negativeSlope)); };
}

VNPU_OP(aclnnHardtanh, In(self), Scalar(clipValueMin), Scalar(clipValueMax), Out(out)) {
  return [=] { out.set(at::hardtanh(wide(self()), clipValueMin, clipValueMax)); };
}
VNPU_OP(aclnnInplaceHardtanh, InOut(self), Scalar(clipValueMin), Scalar(clipValueMax)) {
  return [=] { self.set(at::hardtanh(wide(self()), clipValueMin, clipValueMax)); };
}

VNPU_OP(aclnnThreshold, In(self), Scalar(threshold), Scalar(value), Out(out)) {
  return [=] { out.set(at::threshold(self(), threshold, value)); };
}
VNPU_OP(aclnnInplaceThreshold, InOut(self), Scalar(threshold), Scalar(value)) {
  return [=] { self.set(at::threshold(self(), threshold, value)); };
}

VNPU_OP(aclnnGlu, In(self), Int(dim), Out(out)) {
  check_dim(dim, self);
  return [=] { out.set(at::glu(wide(self()), dim)); };
}

// The buffer is one of PyTorch's CPU kernel; CANN's is empty, and so the gradient does without it.
VNPU_OP(aclnnLogSigmoidForward, In(self), Out(out), OptOut(buffer)) {
  return [=] { out.set(at::log_sigmoid(wide(self()))); };
}
VNPU_OP(aclnnLogSigmoid, In(self), Out(out)) {
  return [=] { out.set(at::log_sigmoid(wide(self()))); };
}

// Gradients. g and x are in float32 where the arguments are in half precision.
#define VNPU_GRADIENT(name, expression)                                    \
  VNPU_OP(aclnn##name, In(gradOutput), In(self), Out(gradInput)) {         \
    return [=] {                                                           \
      const at::Tensor g = wide(gradOutput()), x = wide(self());           \
      gradInput.set(expression);                                           \
    };                                                                     \
  }

VNPU_GRADIENT(SiluBackward, at::silu_backward(g, x))
VNPU_GRADIENT(GeluBackward, at::gelu_backward(g, x))
VNPU_GRADIENT(MishBackward, at::mish_backward(g, x))
VNPU_GRADIENT(HardswishBackward, at::hardswish_backward(g, x))
VNPU_GRADIENT(HardswishBackwardV2, at::hardswish_backward(g, x))
VNPU_GRADIENT(HardsigmoidBackward, at::hardsigmoid_backward(g, x))
VNPU_GRADIENT(SigmoidBackward, at::sigmoid_backward(g, x))  // `self` is the output
VNPU_GRADIENT(TanhBackward, at::tanh_backward(g, x))        // `self` is the output

VNPU_OP(aclnnGeluBackwardV2, In(gradOutput), In(self), Str(approximate), Out(gradInput)) {
  const std::string mode = gelu_mode(approximate());
  return [=] { gradInput.set(at::gelu_backward(wide(gradOutput()), wide(self()), mode)); };
}

VNPU_OP(aclnnSoftplusBackward, In(gradOutput), In(self), Scalar(beta), Scalar(threshold), Out(gradInput)) {
  return [=] { gradInput.set(at::softplus_backward(wide(gradOutput()), wide(self()), beta, threshold)); };
}

VNPU_OP(aclnnThresholdBackward, In(gradOutput), In(self), Scalar(threshold), Out(gradInput)) {
  return [=] { gradInput.set(at::threshold_backward(wide(gradOutput()), wide(self()), threshold)); };
}

VNPU_OP(aclnnLeakyReluBackward, In(gradOutput), In(self), Scalar(negativeSlope), Bool(selfIsResult), Out(gradInput)) {
  return [=] {
    gradInput.set(at::leaky_relu_backward(wide(gradOutput()), wide(self()), negativeSlope, selfIsResult));
  };
}

VNPU_OP(aclnnEluBackward, In(gradOutput), Scalar(alpha), Scalar(scale), Scalar(inputScale), Bool(isResult),
        In(selfOrResult), Out(gradInput)) {
  return [=] {
    gradInput.set(at::elu_backward(wide(gradOutput()), alpha, scale, inputScale, isResult, wide(selfOrResult())));
  };
}

VNPU_OP(aclnnHardtanhBackward, In(gradOutput), In(self), Scalar(min), Scalar(max), Out(gradInput)) {
  return [=] { gradInput.set(at::hardtanh_backward(wide(gradOutput()), wide(self()), min, max)); };
}

VNPU_OP(aclnnGluBackward, In(gradOutput), In(self), Int(dim), Out(gradInput)) {
  check_dim(dim, self);
  return [=] { gradInput.set(at::glu_backward(wide(gradOutput()), wide(self()), dim)); };
}

VNPU_OP(aclnnLogSigmoidBackward, In(gradOutput), In(self), OptIn(buffer), Out(gradInput)) {
  return [=] { gradInput.set(wide(gradOutput()) * at::sigmoid(-wide(self()))); };
}
