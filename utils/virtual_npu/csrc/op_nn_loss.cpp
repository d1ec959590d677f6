// SPDX-License-Identifier: Apache-2.0
// Softmax and the losses, with their gradients.
#include "op_nn_common.h"

using namespace vnpu;

namespace {

at::Tensor reduced(const at::Tensor& loss, int64_t reduction) {
  if (reduction == at::Reduction::Mean) return loss.mean();
  if (reduction == at::Reduction::Sum) return loss.sum();
  return loss;
}

// What the gradient of a reduced loss is multiplied with, elementwise.
at::Tensor spread(const at::Tensor& grad, int64_t reduction, int64_t numel) {
  return reduction == at::Reduction::Mean ? grad / static_cast<double>(numel) : grad;
}

// Targets are int64 or int32; PyTorch's CPU kernels take int64.
void check_nll(const TensorArg& self, const TensorArg& target, const TensorArg& weight, int64_t reduction,
               int64_t dim) {
  check_floating(self);
  check_index(target);
  check_reduction(reduction);
  check(self.dim() >= 1 && self.dim() > dim, "self has shape ", self.shape());
  check(weight.dim() == 1 && weight.size(0) == self.size(dim), "weight has shape ", weight.shape(), ", but there are ",
        self.size(dim), " classes");
}

std::string reduction_name(int64_t reduction) {
  return reduction == 0 ? "none" : reduction == 1 ? "mean" : "sum";
}

int64_t reduction_of(const std::string& name) {
  for (int64_t i = 0; i < 3; ++i)
    if (reduction_name(i) == name) return i;
  throw OpError(kParamInvalid, text("reduction is '", name, "', expected 'none', 'mean' or 'sum'"));
}

}  // namespace

VNPU_OP(aclnnSoftmax, In(self), Int(dim), Out(out)) {
  check_floating(self);
  check_same_shape(self, out);
  check_dim(dim, self);
  return [=] { out.set(at::_softmax(wide(self()).to(wide(out()).scalar_type()), dim, false)); };
}

VNPU_OP(aclnnLogSoftmax, In(self), Int(dim), Out(out)) {
  check_floating(self);
  check_same_shape(self, out);
  check_dim(dim, self);
  return [=] { out.set(at::_log_softmax(wide(self()).to(wide(out()).scalar_type()), dim, false)); };
}

VNPU_OP(aclnnSoftmaxBackward, In(gradOutput), In(output), Int(dim), Out(gradInput)) {
  check_same_shape(gradOutput, output);
  check_dim(dim, output);
  return [=] {
    const at::Tensor g = wide(gradOutput()), y = wide(output());
    gradInput.set(at::_softmax_backward_data(g, y, dim, y.scalar_type()));
  };
}

VNPU_OP(aclnnLogSoftmaxBackward, In(gradOutput), In(output), Int(dim), Out(gradInput)) {
  check_same_shape(gradOutput, output);
  check_dim(dim, output);
  return [=] {
    const at::Tensor g = wide(gradOutput()), y = wide(output());
    gradInput.set(at::_log_softmax_backward_data(g, y, dim, y.scalar_type()));
  };
}

VNPU_OP(aclnnNLLLoss, In(self), In(target), In(weight), Int(reduction), Int(ignoreIndex), Out(out), Out(totalWeight)) {
  check_nll(self, target, weight, reduction, self.dim() - 1);
  return [=] {
    const at::Tensor x = wide(self());
    auto [loss, total] = at::nll_loss_forward(x, target().to(at::kLong), weight().to(x.scalar_type()), reduction,
                                              ignoreIndex);
    out.set(loss);
    totalWeight.set(total);
  };
}

VNPU_OP(aclnnNLLLossBackward, In(gradOutput), In(self), In(target), In(weight), Int(reduction), Int(ignoreIndex),
        In(totalWeight), Out(out)) {
  check_nll(self, target, weight, reduction, self.dim() - 1);
  return [=] {
    const at::Tensor x = wide(self());
    out.set(at::nll_loss_backward(gradOutput().to(x.scalar_type()), x, target().to(at::kLong),
                                  weight().to(x.scalar_type()), reduction, ignoreIndex,
                                  totalWeight().to(x.scalar_type())));
  };
}

VNPU_OP(aclnnNLLLoss2d, In(self), In(target), In(weight), Int(reduction), Int(ignoreIndex), Out(out),
        Out(totalWeight)) {
  check_nll(self, target, weight, reduction, 1);
  return [=] {
    const at::Tensor x = wide(self());
    auto [loss, total] = at::nll_loss2d_forward(x, target().to(at::kLong), weight().to(x.scalar_type()), reduction,
                                                ignoreIndex);
    out.set(loss);
    totalWeight.set(total);
  };
}

VNPU_OP(aclnnNLLLoss2dBackward, In(gradOutput), In(self), In(target), In(weight), Int(reduction), Int(ignoreIndex),
        In(totalWeight), Out(out)) {
  check_nll(self, target, weight, reduction, 1);
  return [=] {
    const at::Tensor x = wide(self());
    out.set(at::nll_loss2d_backward(gradOutput().to(x.scalar_type()), x, target().to(at::kLong),
                                    weight().to(x.scalar_type()), reduction, ignoreIndex,
                                    totalWeight().to(x.scalar_type())));
  };
}

// torch_npu's npu_cross_entropy_loss. `target` without label smoothing only, as in CANN.
VNPU_OP(aclnnCrossEntropyLoss, In(input), In(target), OptIn(weight), Str(reduction), Int(ignoreIndex),
        Double(labelSmoothing), Double(lseSquareScaleForZloss), Bool(returnZloss), Out(loss), Out(logProb),
        OptOut(zloss), OptOut(lseForZloss)) {
  check_floating(input);
  check_index(target);
  check(labelSmoothing() == 0, "labelSmoothing is ", labelSmoothing(), ", only 0 is implemented here");
  check(lseSquareScaleForZloss() == 0 && !returnZloss, "the z-loss is not implemented here");
  const int64_t mode = reduction_of(reduction());
  return [=] {
    const at::Tensor log_prob = at::_log_softmax(wide(input()), 1, false);
    logProb.set(log_prob);
    std::optional<at::Tensor> w;
    if (weight) w = weight().to(log_prob.scalar_type());
    loss.set(std::get<0>(at::nll_loss_forward(log_prob, target().to(at::kLong), w, mode, ignoreIndex)));
  };
}

VNPU_OP(aclnnCrossEntropyLossGrad, In(gradLoss), In(logProb), In(target), OptIn(weight), OptIn(gradZloss),
        OptIn(lseForZloss), Str(reduction), Int(ignoreIndex), Double(labelSmoothing), Double(lseSquareScaleForZloss),
        Out(out)) {
  check(labelSmoothing() == 0, "labelSmoothing is ", labelSmoothing(), ", only 0 is implemented here");
  check(lseSquareScaleForZloss() == 0 && !gradZloss, "the z-loss is not implemented here");
  const int64_t mode = reduction_of(reduction());
  return [=] {
    const at::Tensor log_prob = wide(logProb()), labels = target().to(at::kLong);
    std::optional<at::Tensor> w;
    if (weight) w = weight().to(log_prob.scalar_type());
    const at::Tensor total = std::get<1>(at::nll_loss_forward(log_prob, labels, w, mode, ignoreIndex));
    const at::Tensor grad = at::nll_loss_backward(gradLoss().to(log_prob.scalar_type()), log_prob, labels, w, mode,
                                                  ignoreIndex, total);
    out.set(at::_log_softmax_backward_data(grad, log_prob, 1, log_prob.scalar_type()));
  };
}

VNPU_OP(aclnnMseLoss, In(self), In(target), Int(reduction), Out(out)) {
  check_reduction(reduction);
  return [=] { out.set(at::mse_loss(wide(self()), wide(target()), reduction)); };
}

VNPU_OP(aclnnMseLossBackward, In(gradOutput), In(self), In(target), Int(reduction), Out(gradInput)) {
  check_reduction(reduction);
  return [=] {
    const at::Tensor difference = wide(self()) - wide(target());
    gradInput.set(2 * difference * spread(wide(gradOutput()), reduction, difference.numel()));
  };
}

VNPU_OP(aclnnL1Loss, In(self), In(target), Int(reduction), Out(out)) {
  check_reduction(reduction);
  return [=] { out.set(reduced((wide(self()) - wide(target())).abs(), reduction)); };
}

VNPU_OP(aclnnL1LossBackward, In(gradOutput), In(self), In(target), Int(reduction), Out(gradInput)) {
  check_reduction(reduction);
  return [=] {
    const at::Tensor difference = wide(self()) - wide(target());
    gradInput.set(difference.sgn() * spread(wide(gradOutput()), reduction, difference.numel()));
  };
}

VNPU_OP(aclnnSmoothL1Loss, In(self), In(target), Int(reduction), Float(beta), Out(out)) {
  check_reduction(reduction);
  return [=] { out.set(at::smooth_l1_loss(wide(self()), wide(target()), reduction, beta)); };
}

VNPU_OP(aclnnSmoothL1LossBackward, In(gradOut), In(self), In(target), Int(reduction), Float(beta), Out(gradInput)) {
  check_reduction(reduction);
  return [=] {
    gradInput.set(at::smooth_l1_loss_backward(wide(gradOut()), wide(self()), wide(target()), reduction, beta));
  };
}

VNPU_OP(aclnnBinaryCrossEntropy, In(self), In(target), OptIn(weight), Int(reduction), Out(out)) {
  check_reduction(reduction);
  return [=] { out.set(at::binary_cross_entropy(wide(self()), wide(target()), wide(weight), reduction)); };
}

VNPU_OP(aclnnBinaryCrossEntropyBackward, In(gradOutput), In(self), In(target), OptIn(weight), Int(reduction),
        Out(out)) {
  check_reduction(reduction);
  return [=] {
    out.set(at::binary_cross_entropy_backward(wide(gradOutput()), wide(self()), wide(target()), wide(weight),
                                              reduction));
  };
}

VNPU_OP(aclnnBinaryCrossEntropyWithLogits, In(self), In(target), OptIn(weight), OptIn(posWeight), Int(reduction),
        Out(out)) {
  check_reduction(reduction);
  return [=] {
    out.set(at::binary_cross_entropy_with_logits(wide(self()), wide(target()), wide(weight), wide(posWeight),
                                                 reduction));
  };
}

VNPU_OP(aclnnBinaryCrossEntropyWithLogitsBackward, In(gradOutput), In(self), In(target), OptIn(weight),
        OptIn(posWeight), Int(reduction), Out(out)) {
  check_reduction(reduction);
  return [=] {
    const at::Tensor x = wide(self()), y = wide(target());
    at::Tensor grad;
    if (posWeight) {
      const at::Tensor t = wide(posWeight()) * y;
      grad = (t + 1 - y) * at::sigmoid(x) - t;
    } else {
      grad = at::sigmoid(x) - y;
    }
    if (weight) grad = grad * wide(weight());
    out.set(grad * spread(wide(gradOutput()), reduction, x.numel()));
  };
}

VNPU_OP(aclnnKlDiv, In(self), In(target), Int(reduction), Bool(logTarget), Out(out)) {
  check_reduction(reduction);
  return [=] { out.set(at::kl_div(wide(self()), wide(target()), reduction, logTarget)); };
}

VNPU_OP(aclnnKlDivBackward, In(gradOutput), In(self), In(target), Int(reduction), Bool(logTarget), Out(out)) {
  check_reduction(reduction);
  return [=] {
    const at::Tensor x = wide(self()), y = wide(target());
    const at::Tensor grad = logTarget ? -at::exp(y) : at::where(y > 0, -y, at::zeros_like(y));
    out.set(grad * spread(wide(gradOutput()), reduction, x.numel()));
  };
}

VNPU_OP(aclnnKlDivTargetBackward, In(gradOutput), In(self), In(target), Int(reduction), Bool(logTarget), Out(out)) {
  check_reduction(reduction);
  return [=] {
    const at::Tensor x = wide(self()), y = wide(target());
    // 0 log 0 counts as 0, and so does its gradient.
    const at::Tensor grad =
        logTarget ? at::exp(y) * (y + 1 - x) : at::where(y > 0, at::log(y) + 1 - x, at::zeros_like(y));
    out.set(grad * spread(wide(gradOutput()), reduction, x.numel()));
  };
}
