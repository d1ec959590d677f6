// SPDX-License-Identifier: Apache-2.0
// Operators that create, fill, copy or rearrange.
#include "opapi.h"

VNPU_OP(aclnnInplaceZero, Out(self)) {
  return [=] { self.fill(0); };
}
VNPU_OP(aclnnInplaceOne, Out(self)) {
  return [=] { self.fill(1); };
}
VNPU_OP(aclnnInplaceFillScalar, Out(self), Scalar(value)) {
  return [=] { self.fill(value()); };
}
VNPU_OP(aclnnInplaceFillTensor, Out(self), In(value)) {
  return [=] { self().fill_(value()); };
}
VNPU_OP(aclnnInplaceFillDiagonal, InOut(self), Scalar(value), Bool(wrap)) {
  return [=] { self().fill_diagonal_(value(), wrap); };
}

VNPU_OP(aclnnArange, Scalar(start), Scalar(end), Scalar(step), Out(out)) {
  return [=] { out.set(at::arange(start(), end(), step(), out.dtype())); };
}
// As arange, with the end in it.
VNPU_OP(aclnnRange, Scalar(start), Scalar(end), Scalar(step), Out(out)) {
  return [=] { out.set(at::range(start(), end(), step(), out.dtype())); };
}
VNPU_OP(aclnnLinspace, Scalar(start), Scalar(end), Int(steps), Out(out)) {
  return [=] { out.set(at::linspace(start(), end(), steps, out.dtype())); };
}
VNPU_OP(aclnnLogSpace, Scalar(start), Scalar(end), Int(steps), Double(base), Out(out)) {
  return [=] { out.set(at::logspace(start(), end(), steps, base, out.dtype())); };
}
VNPU_OP(aclnnEye, Int(n), Int(m), Out(out)) {
  return [=] { out.set(at::eye(n, m, out.dtype())); };
}

VNPU_OP(aclnnInplaceCopy, Out(self), In(source)) {
  return [=] {
    const at::Tensor values = source();  // broadcast to self; a single element whatever the number of its dimensions
    self().copy_(values.numel() == 1 ? values.reshape({}) : values);
  };
}
VNPU_OP(aclnnCast, In(self), Dtype(dtype), Out(out)) {
  vnpu::check(dtype.acl() == out.acl_dtype(), "dtype is ", vnpu::dtype_name(dtype.acl()), " but out is ",
              vnpu::dtype_name(out.acl_dtype()));
  return [=] { out.set(self()); };
}

VNPU_OP(aclnnCat, Ins(tensors), Int(dim), Out(out)) {
  return [=] { out.set(at::cat(tensors(), dim)); };
}
VNPU_OP(aclnnStack, Ins(tensors), Int(dim), Out(out)) {
  return [=] { out.set(at::stack(tensors(), dim)); };
}
VNPU_OP(aclnnSplitWithSize, In(self), Ints(sizes), Int(dim), Outs(outs)) {
  vnpu::check(sizes.size() == outs.size(), sizes.size(), " sizes but ", outs.size(), " outputs");
  return [=] {
    const auto parts = at::split_with_sizes(self(), sizes, dim);
    for (size_t i = 0; i < parts.size(); i++) outs.set(i, parts[i]);
  };
}
// Chunks along dim of every tensor, padded with zeros to a multiple of the number of chunks, flattened behind dim, and
// concatenated there (FSDP2's copy-in for reduce-scatter).
VNPU_OP(aclnnChunkCat, Ins(tensors), Int(dim), Int(num_chunks), Out(out)) {
  return [=] { out.set(at::_chunk_cat(tensors(), dim, num_chunks)); };
}

VNPU_OP(aclnnFlip, In(self), Ints(dims), Out(out)) {
  return [=] { out.set(at::flip(self(), dims)); };
}
VNPU_OP(aclnnRoll, In(self), Ints(shifts), Ints(dims), Out(out)) {
  return [=] { out.set(at::roll(self(), shifts, dims)); };
}
VNPU_OP(aclnnConstantPadNd, In(self), Ints(pad), Scalar(value), Out(out)) {
  return [=] { out.set(at::constant_pad_nd(self(), pad, value())); };
}
VNPU_OP(aclnnRepeat, In(self), Ints(repeats), Out(out)) {
  return [=] { out.set(self().repeat(repeats)); };
}

VNPU_OP(aclnnTril, In(self), Int(diagonal), Out(out)) {
  return [=] { out.set(at::tril(self(), diagonal)); };
}
VNPU_OP(aclnnTriu, In(self), Int(diagonal), Out(out)) {
  return [=] { out.set(at::triu(self(), diagonal)); };
}
VNPU_OP(aclnnInplaceTril, InOut(self), Int(diagonal)) {
  return [=] { self.set(at::tril(self(), diagonal)); };
}
VNPU_OP(aclnnInplaceTriu, InOut(self), Int(diagonal)) {
  return [=] { self.set(at::triu(self(), diagonal)); };
}

// repeat_interleave. `total` is the size of the result, which the host knew already.
VNPU_OP(aclnnRepeatInterleave, In(self), In(repeats), Int(total), Out(out)) {
  return [=] { out.set(at::repeat_interleave(self(), repeats(), std::nullopt, total)); };
}
VNPU_OP(aclnnRepeatInterleaveWithDim, In(self), In(repeats), Int(dim), Int(total), Out(out)) {
  return [=] { out.set(at::repeat_interleave(self(), repeats(), dim, total)); };
}
VNPU_OP(aclnnRepeatInterleaveInt, In(self), Int(repeats), Int(total), Out(out)) {
  return [=] { out.set(at::repeat_interleave(self(), repeats, std::nullopt, total)); };
}
VNPU_OP(aclnnRepeatInterleaveIntWithDim, In(self), Int(repeats), Int(dim), Int(total), Out(out)) {
  return [=] { out.set(at::repeat_interleave(self(), repeats, dim, total)); };
}
VNPU_OP(aclnnRepeatInterleaveTensor, In(repeats), Int(total), Out(out)) {
  return [=] { out.set(at::repeat_interleave(repeats(), std::optional<int64_t>(total()))); };
}
VNPU_OP(aclnnRepeatInterleaveGrad, In(grad), In(repeats), Int(dim), Out(out)) {
  return [=] {
    const at::Tensor source = at::repeat_interleave(repeats().to(at::kLong));
    out.set(at::zeros(out.sizes(), grad().options()).index_add(dim, source, grad()));
  };
}
