// SPDX-License-Identifier: Apache-2.0
// Indexing, gathering, scattering, masks, and embeddings. Indices are checked by ATen when the operator runs: one that
// is out of range fails the device, as on the hardware.
#include "op_nn_common.h"

using namespace vnpu;

namespace {

at::Tensor longs(const at::Tensor& index) { return index.to(at::kLong); }

void check_mask(const TensorArg& mask) {
  check(mask.dtype() == at::kBool || mask.dtype() == at::kByte, "mask has dtype ", dtype_name(mask.acl_dtype()),
        ", expected bool");
}

// torch_npu passes an empty tensor for a dimension that is not indexed. (Where an index is really empty, there is
// nothing to compute.)
c10::List<std::optional<at::Tensor>> index_list(const Ins& indices) {
  c10::List<std::optional<at::Tensor>> list;
  for (const In& index : indices) {
    if (index.numel() == 0) {
      list.push_back(std::nullopt);
    } else {
      list.push_back(index.dtype() == at::kBool ? index() : longs(index()));
    }
  }
  return list;
}

void check_indices(const TensorArg& self, const Ins& indices) {
  check(!indices.empty() && static_cast<int64_t>(indices.size()) <= self.dim(), "there are ", indices.size(),
        " indices for self of shape ", self.shape());
  for (const In& index : indices)
    check(index.numel() == 0 || index.dtype() == at::kLong || index.dtype() == at::kInt || index.dtype() == at::kBool,
          "indices have dtype ", dtype_name(index.acl_dtype()), ", expected int64, int32 or bool");
}

// 0: replace, 1: add, 2: multiply
std::optional<c10::string_view> scatter_mode(int64_t reduction) {
  check(reduction >= 0 && reduction <= 2, "reduction is ", reduction, ", expected 0 (none), 1 (add) or 2 (multiply)");
  if (reduction == 0) return std::nullopt;
  return reduction == 1 ? "add" : "multiply";
}

at::Tensor scattered(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& src,
                     int64_t reduction) {
  const auto mode = scatter_mode(reduction);
  return mode ? at::scatter(self, dim, longs(index), src, *mode) : at::scatter(self, dim, longs(index), src);
}

at::Tensor scattered(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Scalar& value,
                     int64_t reduction) {
  const auto mode = scatter_mode(reduction);
  return mode ? at::scatter(self, dim, longs(index), value, *mode) : at::scatter(self, dim, longs(index), value);
}

void check_scatter(const TensorArg& self, int64_t dim, const TensorArg& index) {
  check_index(index);
  check_dim(dim, self);
  const auto rank = [](const TensorArg& x) { return std::max<int64_t>(x.dim(), 1); };
  check(index.numel() == 0 || rank(index) == rank(self), "index has shape ", index.shape(), " and self ",
        self.shape());
}

Work index_add(const TensorArg& self, int64_t dim, const In& index, const In& source, const Scalar& alpha,
               const Out& out) {
  check_index(index);
  check_dim(dim, self);
  check(index.dim() <= 1, "index has shape ", index.shape(), ", expected one dimension");
  check_same_dtype(self, source);
  return [=] {
    out.set(at::index_add(wide(self()), dim, longs(index()), wide(source()), alpha));
  };
}

at::Tensor filled(const at::Tensor& self, int64_t dim, at::IntArrayRef index, const at::Scalar& value) {
  return at::index_fill(self, dim, at::tensor(index, at::kLong), value);
}

}  // namespace

VNPU_OP(aclnnEmbedding, In(weight), In(indices), Out(out)) {
  check_index(indices);
  check(weight.dim() == 2, "weight has shape ", weight.shape(), ", expected two dimensions");
  return [=] { out.set(at::embedding(weight(), longs(indices()))); };
}

VNPU_OP(aclnnEmbeddingDenseBackward, In(grad), In(indices), Int(numWeights), Int(paddingIdx), Bool(scaleGradByFreq),
        Out(out)) {
  check_floating(grad);
  check_index(indices);
  check(grad.numel() == indices.numel() * out.size(-1), "grad has shape ", grad.shape(), ", indices ",
        indices.shape());
  return [=] {
    out.set(at::embedding_dense_backward(wide(grad()).reshape({indices.numel(), out.size(-1)}),
                                         longs(indices()).reshape({-1}), numWeights, paddingIdx, scaleGradByFreq));
  };
}

VNPU_OP(aclnnIndex, In(self), Ins(indices), Out(out)) {
  check_indices(self, indices);
  return [=] {
    if (out.numel() > 0) out.set(at::index(self(), index_list(indices)));
  };
}

VNPU_OP(aclnnIndexPutImpl, InOut(selfRef), Ins(indices), In(values), Bool(accumulate), Bool(unsafe)) {
  check_indices(selfRef, indices);
  check_same_dtype(selfRef, values);
  // Nothing is written through an index that is really empty. The tensor for a dimension that is not indexed has the
  // dtype of self, and never stands alone.
  bool alone = true, empty = values.numel() == 0;
  for (const In& index : indices) {
    alone &= index.numel() == 0;
    empty |= index.numel() == 0 && (index.sizes() != at::IntArrayRef({0}) || index.dtype() != selfRef.dtype());
  }
  if (alone || empty) return [] {};
  return [=] {
    at::Tensor self = wide(selfRef());
    at::_index_put_impl_(self, index_list(indices), wide(values()), accumulate, false);
    if (self.scalar_type() != selfRef.dtype()) selfRef.set(self);  // else it was written in place
  };
}

VNPU_OP(aclnnIndexSelect, In(self), Int(dim), In(index), Out(out)) {
  check_index(index);
  check_dim(dim, self);
  return [=] { out.set(at::index_select(self(), dim, longs(index()))); };
}

VNPU_OP(aclnnIndexAdd, In(self), Int(dim), In(index), In(source), Scalar(alpha), Out(out)) {
  return index_add(self, dim, index, source, alpha, out);
}

VNPU_OP(aclnnIndexAddV2, In(self), Int(dim), In(index), In(source), Scalar(alpha), Int(mode), Out(out)) {
  return index_add(self, dim, index, source, alpha, out);  // `mode` chooses speed or precision
}

VNPU_OP(aclnnIndexCopy, In(self), Int(dim), In(index), In(source), Out(out)) {
  check_index(index);
  check_dim(dim, self);
  return [=] { out.set(at::index_copy(self(), dim, longs(index()), source())); };
}

VNPU_OP(aclnnInplaceIndexCopy, InOut(selfRef), Int(dim), In(index), In(source)) {
  check_index(index);
  check_dim(dim, selfRef);
  return [=] { selfRef.set(at::index_copy(selfRef(), dim, longs(index()), source())); };
}

VNPU_OP(aclnnIndexFill, In(self), Int(dim), In(index), Scalar(value), Out(out)) {
  check_index(index);
  check_dim(dim, self);
  return [=] { out.set(at::index_fill(self(), dim, longs(index()), value)); };
}

VNPU_OP(aclnnInplaceIndexFill, InOut(selfRef), Int(dim), In(index), Scalar(value)) {
  check_index(index);
  check_dim(dim, selfRef);
  return [=] { selfRef.set(at::index_fill(selfRef(), dim, longs(index()), value)); };
}

VNPU_OP(aclnnIndexFillTensor, In(self), Int(dim), Ints(index), Scalar(value), Out(out)) {
  check_dim(dim, self);
  return [=] { out.set(filled(self(), dim, index(), value)); };
}

VNPU_OP(aclnnInplaceIndexFillTensor, InOut(selfRef), Int(dim), Ints(index), Scalar(value)) {
  check_dim(dim, selfRef);
  return [=] { selfRef.set(filled(selfRef(), dim, index(), value)); };
}

VNPU_OP(aclnnGather, In(self), Int(dim), In(index), Out(out)) {
  check_scatter(self, dim, index);
  check_same_shape(index, out);
  return [=] { out.set(at::gather(self(), dim, longs(index()))); };
}

VNPU_OP(aclnnScatter, In(self), Int(dim), In(index), In(src), Int(reduction), Out(out)) {
  check_scatter(self, dim, index);
  check_same_dtype(self, src);
  scatter_mode(reduction);
  return [=] { out.set(scattered(wide(self()), dim, index(), wide(src()), reduction)); };
}

VNPU_OP(aclnnInplaceScatter, InOut(selfRef), Int(dim), In(index), In(src), Int(reduction)) {
  check_scatter(selfRef, dim, index);
  check_same_dtype(selfRef, src);
  scatter_mode(reduction);
  return [=] { selfRef.set(scattered(wide(selfRef()), dim, index(), wide(src()), reduction)); };
}

VNPU_OP(aclnnScatterValue, In(self), Int(dim), In(index), Scalar(value), Int(reduction), Out(out)) {
  check_scatter(self, dim, index);
  scatter_mode(reduction);
  return [=] { out.set(scattered(wide(self()), dim, index(), value(), reduction)); };
}

VNPU_OP(aclnnInplaceScatterValue, InOut(selfRef), Int(dim), In(index), Scalar(value), Int(reduction)) {
  check_scatter(selfRef, dim, index);
  scatter_mode(reduction);
  return [=] { selfRef.set(scattered(wide(selfRef()), dim, index(), value(), reduction)); };
}

VNPU_OP(aclnnScatterAdd, In(self), Int(dim), In(index), In(src), Out(out)) {
  check_scatter(self, dim, index);
  check_same_dtype(self, src);
  return [=] { out.set(at::scatter_add(wide(self()), dim, longs(index()), wide(src()))); };
}

VNPU_OP(aclnnInplaceMaskedFillScalar, InOut(selfRef), In(mask), Scalar(value)) {
  check_mask(mask);
  return [=] {
    at::Tensor self = selfRef();
    self.masked_fill_(mask().to(at::kBool), value);
  };
}

VNPU_OP(aclnnInplaceMaskedFillTensor, InOut(selfRef), In(mask), In(value)) {
  check_mask(mask);
  check(value.numel() == 1, "value has shape ", value.shape(), ", expected one element");
  return [=] {
    at::Tensor self = selfRef();
    self.masked_fill_(mask().to(at::kBool), value().reshape({}).to(self.scalar_type()));
  };
}

VNPU_OP(aclnnMaskedSelect, In(self), In(mask), Out(out)) {
  check_mask(mask);
  return blocking([=] { out.set_view(at::masked_select(self(), mask().to(at::kBool))); });
}

VNPU_OP(aclnnInplaceMaskedScatter, InOut(selfRef), In(mask), In(source)) {
  check_mask(mask);
  check_same_dtype(selfRef, source);
  return [=] {
    at::Tensor self = selfRef();
    self.masked_scatter_(mask().to(at::kBool), source());
  };
}

VNPU_OP(aclnnNonzero, In(self), Out(out)) {
  return blocking([=] { out.set_view(at::nonzero(self())); });
}

// As aclnnNonzero, but one row a dimension.
VNPU_OP(aclnnNonzeroV2, In(self), Out(out)) {
  return blocking([=] { out.set_view(at::nonzero(self()).t().contiguous()); });
}

VNPU_OP(aclnnTake, In(self), In(index), Out(out)) {
  check_index(index);
  return [=] { out.set(at::take(self(), longs(index()))); };
}

VNPU_OP(aclnnInplacePut, InOut(selfRef), In(index), In(source), Bool(accumulate)) {
  check_index(index);
  check_same_dtype(selfRef, source);
  return [=] {
    at::Tensor self = selfRef();
    self.put_(longs(index()), source(), accumulate);
  };
}

VNPU_OP(aclnnOneHot, In(self), Int(numClasses), In(onValue), In(offValue), Int(axis), Out(out)) {
  check_index(self);
  check(axis == -1 || axis == self.dim(), "axis is ", axis(), ", only the last is implemented here");
  check(onValue.numel() == 1 && offValue.numel() == 1, "onValue and offValue must have one element");
  return [=] {
    // CANN leaves the row of a class that is out of range at offValue.
    const at::Tensor hot = longs(self()).unsqueeze(-1).eq(at::arange(numClasses(), at::kLong));
    out.set(at::where(hot, onValue().reshape({}), offValue().reshape({})));
  };
}
