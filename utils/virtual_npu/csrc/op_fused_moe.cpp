// SPDX-License-Identifier: Apache-2.0
// The fused operators of MoE layers: permuting tokens, SwiGLU, rotary embeddings, gating.
#include "op_nn_common.h"

using namespace vnpu;

namespace {

at::Tensor as_float(const at::Tensor& x) { return x.to(at::kFloat); }

void check_top_k(int64_t top_k) {
  check(top_k >= 1 && top_k <= 512, "topK is ", top_k, ", expected 1 to 512");
}

void check_sorted_indices(const In& indices, int64_t top_k) {
  check(indices.dtype() == at::kInt, "sortedIndices has dtype ", dtype_name(indices.acl_dtype()), ", expected int32");
  check(indices.dim() == 1, "sortedIndices has shape ", indices.shape(), ", expected one dimension");
  check_top_k(top_k);
  check(indices.numel() % top_k == 0, "sortedIndices has ", indices.numel(), " values, no multiple of topK, which is ",
        top_k);
}

void check_tokens(const TensorArg& tokens) {
  check_floating(tokens);
  check(tokens.dim() == 2, tokens.name(), " has shape ", tokens.shape(), ", expected two dimensions");
}

void check_unpadded(bool padded_mode) { check(!padded_mode, "paddedMode is true, only false is supported"); }

// sum over k of rows[sorted_indices[t * top_k + k]] * probs[t, k], in float32. A row past the end was dropped when the
// tokens were permuted and counts as zero.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& sorted_indices, const at::Tensor& probs, int64_t top_k) {
  const at::Tensor index = sorted_indices.to(at::kLong);
  const at::Tensor there = index < rows.size(0);
  at::Tensor picked = rows.size(0) == 0 ? at::zeros({index.size(0), rows.size(1)}, at::kFloat)
                                        : as_float(rows.index_select(0, at::where(there, index, 0)));
  picked = at::where(there.unsqueeze(1), picked, 0.0f).unflatten(0, {index.size(0) / top_k, top_k});
  if (probs.defined()) picked = picked * as_float(probs).reshape({-1, top_k, 1});
  return picked.sum(1);
}

void check_probs(const OptIn& probs, const In& sorted_indices, int64_t top_k) {
  if (!probs) return;
  check_floating(probs);
  check(probs.dim() == 2 && probs.numel() == sorted_indices.numel(), "probs has shape ", probs.shape(),
        ", sortedIndices has ", sorted_indices.numel(), " values; expected [tokens, topK]");
  check_top_k(top_k);
}

at::Tensor turned(const at::Tensor& x, int64_t mode) {  // rotate_half, or pairs of neighbours
  if (mode == 0) {
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  const at::Tensor pairs = x.unflatten(-1, {x.size(-1) / 2, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

at::Tensor turned_back(const at::Tensor& x, int64_t mode) { return -turned(x, mode); }  // the transpose of a rotation

void check_rotary(const TensorArg& x, const In& cos, const In& sin, int64_t mode) {
  check_floating(x);
  check_same_dtype(x, cos);
  check_same_dtype(x, sin);
  check_same_shape(cos, sin);
  check(mode == 0 || mode == 1, "mode is ", mode, ", expected 0 (half) or 1 (interleave)");
  check(x.dim() == 4 && cos.dim() == 4, x.name(), " has shape ", x.shape(), ", cos ", cos.shape(),
        "; expected four dimensions");
  check(x.size(3) == cos.size(3) && x.size(3) % 2 == 0, x.name(), " has shape ", x.shape(), ", cos ", cos.shape(),
        "; expected one even last dimension");
  for (int64_t i = 0; i < 3; ++i)
    check(cos.size(i) == x.size(i) || cos.size(i) == 1, "cos has shape ", cos.shape(), ", ", x.name(), " ", x.shape());
}

Work rotary(const In& x, const In& cos, const In& sin, int64_t mode, const Out& out) {
  check_rotary(x, cos, sin, mode);
  return [=] {
    const at::Tensor v = as_float(x());
    out.set(v * as_float(cos()) + turned(v, mode) * as_float(sin()));
  };
}

Work gating(const In& x, const OptIn& finished, int64_t k, const Out& y, const Out& expert_index,
            const Out& row_index) {
  check_floating(x);
  check(x.dim() == 2 || x.dim() == 3, "x has shape ", x.shape(), ", expected two or three dimensions");
  const int64_t experts = x.size(-1), rows = experts == 0 ? 0 : x.numel() / experts;
  check(k >= 1 && k <= experts && k <= 1024, "k is ", k, " for ", experts, " experts");
  return [=] {
    auto [values, indices] = at::topk(at::softmax(as_float(x()).reshape({rows, experts}), -1), k);
    if (finished) indices = at::where(finished().reshape({rows, 1}).to(at::kBool), experts, indices);
    y.set(values.reshape(y.sizes()));
    expert_index.set(indices.reshape(expert_index.sizes()));
    const at::Tensor numbers = at::arange(rows * k, at::kLong).reshape({k, rows}).t();
    row_index.set(numbers.reshape(row_index.sizes()));
  };
}

}  // namespace

// permuted[sortedIndices[i]] = tokens[i / topK]: the pairs of a token and an expert in the order of the experts.
VNPU_OP(aclnnMoeTokenPermute, In(tokens), In(indices), Int(numOutTokens), Bool(paddedMode), Out(permuteTokensOut),
        Out(sortedIndicesOut)) {
  check_tokens(tokens);
  check_index(indices);
  check_unpadded(paddedMode);
  check(indices.dim() == 1 || indices.dim() == 2, "indices has shape ", indices.shape(),
        ", expected one or two dimensions");
  const int64_t top_k = indices.dim() == 1 ? 1 : indices.size(1);
  check_top_k(top_k);
  check(indices.size(0) == tokens.size(0), "indices has shape ", indices.shape(), ", tokens ", tokens.shape());
  check(indices.numel() < 16777215, "indices has ", indices.numel(), " values, expected less than 16777215");
  check(sortedIndicesOut.dtype() == at::kInt, "sortedIndices has dtype ", dtype_name(sortedIndicesOut.acl_dtype()));
  const int64_t rows = permuteTokensOut.size(0);
  check(rows >= 0 && rows <= indices.numel(), "numOutTokens is ", numOutTokens(), " for ", indices.numel(), " indices");
  return [=] {
    const at::Tensor order = at::argsort(indices().reshape({-1}), /*stable=*/true, 0);
    const at::Tensor position = at::empty_like(order).scatter(0, order, at::arange(order.size(0), at::kLong));
    sortedIndicesOut.set(position);
    permuteTokensOut.set(tokens().index_select(0, at::floor_divide(order.narrow(0, 0, rows), top_k)));
  };
}

VNPU_OP(aclnnMoeTokenPermuteGrad, In(permutedOutputGrad), In(sortedIndices), Int(numTopk), Bool(paddedMode), Out(out)) {
  check_tokens(permutedOutputGrad);
  check_sorted_indices(sortedIndices, numTopk);
  check_unpadded(paddedMode);
  check(out.dim() == 2 && out.size(0) * numTopk == sortedIndices.numel(), "out has shape ", out.shape(),
        ", sortedIndices has ", sortedIndices.numel(), " values");
  return [=] { out.set(combine(permutedOutputGrad(), sortedIndices(), at::Tensor(), numTopk)); };
}

VNPU_OP(aclnnMoeTokenUnpermute, In(permutedTokens), In(sortedIndices), OptIn(probs), Bool(paddedMode),
        Ints(restoreShape), Out(out)) {
  check_tokens(permutedTokens);
  check_unpadded(paddedMode);
  const int64_t top_k = probs && probs.dim() == 2 ? probs.size(1) : 1;
  check_sorted_indices(sortedIndices, top_k);
  check_probs(probs, sortedIndices, top_k);
  return [=] { out.set(combine(permutedTokens(), sortedIndices(), probs(), top_k)); };
}

VNPU_OP(aclnnMoeTokenUnpermuteGrad, OptIn(permuteTokens), In(unpermutedTokensGrad), In(sortedIndices), OptIn(probs),
        Bool(paddedMode), Ints(restoreShape), Out(permutedTokensGradOut), OptOut(probsGradOut)) {
  check_tokens(unpermutedTokensGrad);
  check_unpadded(paddedMode);
  const int64_t top_k = probs && probs.dim() == 2 ? probs.size(1) : 1;
  check_sorted_indices(sortedIndices, top_k);
  check_probs(probs, sortedIndices, top_k);
  check(!probs || permuteTokens, "permuteTokens is needed for the gradient of probs");
  check(unpermutedTokensGrad.size(0) * top_k == sortedIndices.numel(), "unpermutedTokensGrad has shape ",
        unpermutedTokensGrad.shape(), ", sortedIndices has ", sortedIndices.numel(), " values, topK is ", top_k);
  return [=] {
    const at::Tensor index = sortedIndices().to(at::kLong);
    const at::Tensor grad = as_float(unpermutedTokensGrad()).repeat_interleave(top_k, 0);  // one row a pair
    at::Tensor rows = grad;
    if (probs) rows = rows * as_float(probs()).reshape({-1, 1});
    const at::Tensor there = at::nonzero(index < permutedTokensGradOut.size(0)).squeeze(1);
    at::Tensor out = permutedTokensGradOut();
    out.index_copy_(0, index.index_select(0, there), rows.index_select(0, there).to(out.scalar_type()));
    if (probs && probsGradOut) {
      const at::Tensor tokens = as_float(permuteTokens());
      at::Tensor products = at::zeros({index.size(0)}, at::kFloat);
      products.index_copy_(0, there, (tokens.index_select(0, index.index_select(0, there)) *
                                      grad.index_select(0, there)).sum(1));
      probsGradOut.set(products.reshape(probs.sizes()));
    }
  };
}

VNPU_OP(aclnnSwiGlu, In(x), Int(dim), Out(out)) {
  check_floating(x);
  check(x.size(check_dim(dim, x)) % 2 == 0, "dimension ", dim(), " of x, which has shape ", x.shape(), ", is odd");
  return [=] {
    const auto halves = wide(x()).chunk(2, dim);
    out.set(at::silu(halves[0]) * halves[1]);
  };
}

VNPU_OP(aclnnSwiGluGrad, In(yGrad), In(x), Int(dim), Out(out)) {
  check_floating(x);
  check(x.size(check_dim(dim, x)) % 2 == 0, "dimension ", dim(), " of x, which has shape ", x.shape(), ", is odd");
  check_same_dtype(yGrad, x);
  return [=] {
    const auto halves = wide(x()).chunk(2, dim);
    const at::Tensor g = wide(yGrad());
    out.set(at::cat({at::silu_backward(g * halves[1], halves[0]), g * at::silu(halves[0])}, dim));
  };
}

VNPU_OP(aclnnRotaryPositionEmbedding, In(x), In(cos), In(sin), Int(mode), Out(out)) {
  return rotary(x, cos, sin, mode, out);
}

VNPU_OP(aclnnRotaryPositionEmbeddingV2, In(x), In(cos), In(sin), Int(mode), OptIn(rotate), Out(out)) {
  check(!rotate, "rotate is not implemented here");
  return rotary(x, cos, sin, mode, out);
}

// Without x there is no gradient of cos and sin, and their memory stays as it is.
VNPU_OP(aclnnRotaryPositionEmbeddingGrad, In(dy), In(cos), In(sin), OptIn(x), Int(mode), Out(dxOut), OptOut(dcosOut),
        OptOut(dsinOut)) {
  check_rotary(dy, cos, sin, mode);
  return [=] {
    const at::Tensor g = as_float(dy());
    dxOut.set(g * as_float(cos()) + turned_back(g * as_float(sin()), mode));
    if (!x) return;
    const at::Tensor v = as_float(x());
    dcosOut.set(at::sum_to(g * v, cos.sizes()));
    dsinOut.set(at::sum_to(g * turned(v, mode), cos.sizes()));
  };
}

VNPU_OP(aclnnMoeGatingTopKSoftmax, In(x), OptIn(finished), Int(k), Out(yOut), Out(expertIdxOut), Out(rowIdxOut)) {
  return gating(x, finished, k, yOut, expertIdxOut, rowIdxOut);
}

// The experts of all pairs, sorted; out[e] is where the pairs of expert e end.
VNPU_OP(aclnnMoeComputeExpertTokens, In(sortedExperts), Int(numExperts), Out(out)) {
  check(sortedExperts.dtype() == at::kInt && sortedExperts.dim() == 1, "sortedExperts has shape ",
        sortedExperts.shape(), " and dtype ", dtype_name(sortedExperts.acl_dtype()), ", expected one dimension, int32");
  check(numExperts >= 1 && numExperts <= 2048, "numExperts is ", numExperts(), ", expected 1 to 2048");
  return [=] {
    out.set(at::searchsorted(sortedExperts().contiguous(), at::arange(numExperts(), at::kInt), false, true));
  };
}
