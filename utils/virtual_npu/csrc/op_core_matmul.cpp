// SPDX-License-Identifier: Apache-2.0
// Matrix multiplications other than the grouped one. float16 and bfloat16 are multiplied as PyTorch's CPU does it:
// products accumulated in float32, one rounding at the end. `cube_math_type` (how the hardware may treat float32) is
// ignored: float32 stays float32.
#include "opapi.h"

namespace {

void check_same_dtype(const vnpu::In& a, const vnpu::In& b) {
  vnpu::check(a.acl_dtype() == b.acl_dtype(), a.name(), " is ", vnpu::dtype_name(a.acl_dtype()), " but ", b.name(),
              " is ", vnpu::dtype_name(b.acl_dtype()));
}

void check_rank(const vnpu::In& x, int64_t rank) {
  vnpu::check(x.dim() == rank, x.name(), " has the shape ", x.shape(), ", expected ", rank, " dimensions");
}

void check_inner(const vnpu::In& a, const vnpu::In& b, int64_t b_dim = -2) {
  vnpu::check(a.size(-1) == b.size(b_dim), "the inner dimensions of ", a.name(), " ", a.shape(), " and ", b.name(), " ",
              b.shape(), " differ");
}

void check_product(const vnpu::In& a, const vnpu::In& b, int64_t rank) {
  check_rank(a, rank);
  check_rank(b, rank);
  check_inner(a, b);
  check_same_dtype(a, b);
}

}  // namespace

VNPU_OP(aclnnMm, In(self), In(mat2), Out(out), Int8(cube_math_type)) {
  check_product(self, mat2, 2);
  return [=] { out.set(at::mm(self(), mat2())); };
}
VNPU_OP(aclnnMatmul, In(self), In(mat2), Out(out), Int8(cube_math_type)) {
  vnpu::check(self.dim() > 0 && mat2.dim() > 0, "self ", self.shape(), " and mat2 ", mat2.shape(),
              " need at least one dimension");
  check_inner(self, mat2, mat2.dim() == 1 ? -1 : -2);
  check_same_dtype(self, mat2);
  return [=] { out.set(at::matmul(self(), mat2())); };
}
VNPU_OP(aclnnBatchMatMul, In(self), In(mat2), Out(out), Int8(cube_math_type)) {
  check_product(self, mat2, 3);
  vnpu::check(self.size(0) == mat2.size(0) || self.size(0) == 1 || mat2.size(0) == 1, "the batches of self ",
              self.shape(), " and mat2 ", mat2.shape(), " differ");
  return [=] { out.set(at::matmul(self(), mat2())); };
}
VNPU_OP(aclnnMv, In(self), In(vec), Out(out), Int8(cube_math_type)) {
  check_rank(self, 2);
  check_rank(vec, 1);
  check_inner(self, vec, -1);
  check_same_dtype(self, vec);
  return [=] { out.set(at::mv(self(), vec())); };
}
VNPU_OP(aclnnDot, In(self), In(tensor), Out(out)) {
  check_rank(self, 1);
  check_rank(tensor, 1);
  check_inner(self, tensor, -1);
  check_same_dtype(self, tensor);
  return [=] { out.set(at::dot(self(), tensor())); };
}

VNPU_OP(aclnnAddmm, In(self), In(mat1), In(mat2), Scalar(beta), Scalar(alpha), Out(out), Int8(cube_math_type)) {
  check_product(mat1, mat2, 2);
  return [=] { out.set(at::addmm(self(), mat1(), mat2(), beta(), alpha())); };
}
VNPU_OP(aclnnInplaceAddmm, InOut(self), In(mat1), In(mat2), Scalar(beta), Scalar(alpha), Int8(cube_math_type)) {
  check_product(mat1, mat2, 2);
  return [=] { self.set(at::addmm(self(), mat1(), mat2(), beta(), alpha())); };
}
VNPU_OP(aclnnBaddbmm, In(self), In(batch1), In(batch2), Scalar(beta), Scalar(alpha), Out(out), Int8(cube_math_type)) {
  check_product(batch1, batch2, 3);
  return [=] { out.set(at::baddbmm(self(), batch1(), batch2(), beta(), alpha())); };
}
VNPU_OP(aclnnAddbmm, In(self), In(batch1), In(batch2), Scalar(beta), Scalar(alpha), Out(out), Int8(cube_math_type)) {
  check_product(batch1, batch2, 3);
  return [=] { out.set(at::addbmm(self(), batch1(), batch2(), beta(), alpha())); };
}
VNPU_OP(aclnnAddmv, In(self), In(mat), In(vec), Scalar(alpha), Scalar(beta), Out(out), Int8(cube_math_type)) {
  check_rank(mat, 2);
  check_rank(vec, 1);
  check_inner(mat, vec, -1);
  check_same_dtype(mat, vec);
  return [=] { out.set(at::addmv(self(), mat(), vec(), beta(), alpha())); };
}
VNPU_OP(aclnnAddr, In(self), In(vec1), In(vec2), Scalar(beta), Scalar(alpha), Out(out)) {
  return [=] { out.set(at::addr(self(), vec1(), vec2(), beta(), alpha())); };
}
VNPU_OP(aclnnInplaceAddr, InOut(self), In(vec1), In(vec2), Scalar(beta), Scalar(alpha)) {
  return [=] { self.set(at::addr(self(), vec1(), vec2(), beta(), alpha())); };
}
