// SPDX-License-Identifier: Apache-2.0
// Random numbers: each result is a function of the seed and offset that torch_npu's generator hands over, and of
// nothing else, so a run can be repeated. The stream of numbers is not the hardware's.
#include <ATen/CPUGeneratorImpl.h>

#include "opapi.h"

namespace {

// Neighbouring (seed, offset) must give unrelated states: the constants are those of splitmix64.
uint64_t mix(uint64_t seed, uint64_t offset) {
  uint64_t x = seed + 0x9E3779B97F4A7C15ull * (offset + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

at::Generator generator(uint64_t seed, uint64_t offset) {
  return at::make_generator<at::CPUGeneratorImpl>(mix(seed, offset));
}

// Drawn packed, and in float32 for the narrower types, so that neither strides nor dtype change the draw.
at::Tensor packed(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype == at::kDouble ? at::kDouble : at::kFloat));
}

at::Tensor standard_normal(const vnpu::TensorArg& like, int64_t seed, int64_t offset) {
  return packed(like.sizes(), like.dtype()).normal_(0, 1, generator(seed, offset));
}

// One bit an element, as CANN packs them: 1 = kept.
at::Tensor keep_bits(int64_t count, double p, int64_t seed, int64_t offset, int64_t bytes) {
  const int64_t bits = bytes * 8;
  vnpu::check(count <= bits, "the mask has room for ", bits, " elements, not for ", count);
  at::Tensor keep = at::zeros({bits}, at::kByte);
  if (p < 1) keep.narrow(0, 0, count).bernoulli_(1 - p, generator(seed, offset));
  const at::Tensor weights = at::pow(2, at::arange(8, at::kInt)).to(at::kByte);
  return (keep.view({bytes, 8}) * weights).sum(1, false, at::kByte);
}

at::Tensor unpack(const at::Tensor& mask, at::IntArrayRef sizes) {
  const at::Tensor shifts = at::arange(8, at::kByte);
  const at::Tensor bits = at::bitwise_and(at::bitwise_right_shift(mask.contiguous().view({-1, 1}), shifts), 1);
  return bits.flatten().narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
}

at::Tensor drop(const at::Tensor& self, const at::Tensor& mask, double p) {
  if (p >= 1) return at::zeros_like(self);
  return at::where(unpack(mask, self.sizes()).to(at::kBool), self / (1 - p), at::zeros({}, self.options()));
}

}  // namespace

VNPU_OP(aclnnInplaceNormal, Out(self), Float(mean), Float(std), Int(seed), Int(offset)) {
  return [=] { self.set(packed(self.sizes(), self.dtype()).normal_(mean, std, generator(seed, offset))); };
}
VNPU_OP(aclnnNormalFloatFloat, Float(mean), Float(std), Int(seed), Int(offset), Out(out)) {
  return [=] { out.set(packed(out.sizes(), out.dtype()).normal_(mean, std, generator(seed, offset))); };
}
VNPU_OP(aclnnNormalFloatTensor, Float(mean), In(std), Int(seed), Int(offset), Out(out)) {
  return [=] { out.set(standard_normal(out, seed, offset) * std() + mean()); };
}
VNPU_OP(aclnnNormalTensorFloat, In(mean), Float(std), Int(seed), Int(offset), Out(out)) {
  return [=] { out.set(standard_normal(out, seed, offset) * std() + mean()); };
}
VNPU_OP(aclnnNormalTensorTensor, In(mean), In(std), Int(seed), Int(offset), Out(out)) {
  return [=] { out.set(standard_normal(out, seed, offset) * std() + mean()); };
}

VNPU_OP(aclnnInplaceUniform, Out(self), Double(from), Double(to), Int(seed), Int(offset)) {
  return [=] { self.set(packed(self.sizes(), self.dtype()).uniform_(from, to, generator(seed, offset))); };
}
VNPU_OP(aclnnInplaceRandom, Out(self), Int(from), Int(to), Int(seed), Int(offset)) {
  return [=] {
    self.set(at::empty(self.sizes(), self.dtype()).random_(from, std::optional<int64_t>(to), generator(seed, offset)));
  };
}
VNPU_OP(aclnnInplaceRandomWithoutFromTo, Out(self), Int(seed), Int(offset)) {
  return [=] { self.set(at::empty(self.sizes(), self.dtype()).random_(generator(seed, offset))); };
}
VNPU_OP(aclnnInplaceBernoulli, Out(self), Scalar(p), Int(seed), Int(offset)) {
  return [=] {
    self.set(packed(self.sizes(), self.dtype()).bernoulli_(p().toDouble(), generator(seed, offset)));
  };
}
VNPU_OP(aclnnInplaceBernoulliTensor, Out(self), In(p), Int(seed), Int(offset)) {
  return [=] { self.set(packed(self.sizes(), self.dtype()).bernoulli_(p(), generator(seed, offset))); };
}
VNPU_OP(aclnnSimThreadExponential, Out(self), Int(count), Double(lambd), Int(seed), Int(offset)) {
  vnpu::check(count == self.numel(), "count is ", count(), " but self has ", self.numel(), " elements");
  return [=] { self.set(packed(self.sizes(), self.dtype()).exponential_(lambd, generator(seed, offset))); };
}
VNPU_OP(aclnnRandperm, Int(n), Int(seed), Int(offset), Out(out)) {
  return [=] { out.set(at::randperm(n, generator(seed, offset), at::kLong)); };
}
VNPU_OP(aclnnMultinomial, In(self), Int(num_samples), Bool(replacement), Int(seed), Int(offset), Out(out)) {
  return [=] { out.set(at::multinomial(self(), num_samples, replacement, generator(seed, offset))); };
}

VNPU_OP(aclnnDropoutGenMask, Ints(shape), Double(p), Int(seed), Int(offset), Out(mask)) {
  const int64_t count = c10::multiply_integers(shape());
  return [=] { mask.set(keep_bits(count, p, seed, offset, mask.numel()).view(mask.sizes())); };
}
VNPU_OP(aclnnDropoutGenMaskV2, Ints(shape), Double(p), Int(seed), Int(offset), Dtype(dtype), Out(mask)) {
  const int64_t count = c10::multiply_integers(shape());
  return [=] { mask.set(keep_bits(count, p, seed, offset, mask.numel()).view(mask.sizes())); };
}
VNPU_OP(aclnnDropoutDoMask, In(self), In(mask), Double(p), Out(out)) {
  return [=] { out.set(drop(self(), mask(), p)); };
}
VNPU_OP(aclnnDropoutV3, In(self), OptIn(noise_shape), Double(p), Int(seed), Int(offset), Out(out), Out(mask)) {
  vnpu::check(!noise_shape, "noise_shape is not supported by the virtual NPU");
  return [=] {
    const at::Tensor bits = keep_bits(self.numel(), p, seed, offset, mask.numel());
    out.set(drop(self(), bits, p));
    mask.set(bits.view(mask.sizes()));
  };
}
