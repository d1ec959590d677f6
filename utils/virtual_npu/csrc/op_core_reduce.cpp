// SPDX-License-Identifier: Apache-2.0
// Reductions, scans, sorting and counting.
#include "opapi.h"

VNPU_OP(aclnnReduceSum, In(self), Ints(dims), Bool(keepdim), Dtype(dtype), Out(out)) {
  return [=] { out.set(at::sum(self(), dims(), keepdim, dtype)); };
}
VNPU_OP(aclnnReduceNansum, In(self), Ints(dims), Bool(keepdim), Dtype(dtype), Out(out)) {
  return [=] { out.set(at::nansum(self(), dims(), keepdim, dtype)); };
}
VNPU_OP(aclnnMean, In(self), Ints(dims), Bool(keepdim), Dtype(dtype), Out(out)) {
  return [=] { out.set(at::mean(self(), dims(), keepdim, dtype)); };
}
VNPU_OP(aclnnProd, In(self), Dtype(dtype), Out(out)) {
  return [=] { out.set(at::prod(self(), static_cast<at::ScalarType>(dtype))); };
}
VNPU_OP(aclnnProdDim, In(self), Int(dim), Bool(keepdim), Dtype(dtype), Out(out)) {
  return [=] { out.set(at::prod(self(), dim(), keepdim, dtype)); };
}
VNPU_OP(aclnnLogSumExp, In(self), Ints(dims), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::logsumexp(self(), dims(), keepdim)); };
}
VNPU_OP(aclnnAmax, In(self), Ints(dims), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::amax(self(), dims(), keepdim)); };
}
VNPU_OP(aclnnAmin, In(self), Ints(dims), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::amin(self(), dims(), keepdim)); };
}
VNPU_OP(aclnnMax, In(self), Out(out)) {
  return [=] { out.set(at::max(self())); };
}
VNPU_OP(aclnnMin, In(self), Out(out)) {
  return [=] { out.set(at::min(self())); };
}
VNPU_OP(aclnnTrace, In(self), Out(out)) {
  return [=] { out.set(at::trace(self())); };
}
VNPU_OP(aclnnMedian, In(self), Out(out)) {
  return [=] { out.set(at::median(self())); };
}
VNPU_OP(aclnnNanMedian, In(self), Out(out)) {
  return [=] { out.set(at::nanmedian(self())); };
}

// (values, indices) = function(self, dim, keepdim)
#define WITH_INDICES(op, function)                                                          \
  VNPU_OP(aclnn##op, In(self), Int(dim), Bool(keepdim), Out(values), Out(indices)) {        \
    return [=] {                                                                            \
      const auto result = at::function(self(), dim, keepdim);                               \
      values.set(std::get<0>(result));                                                      \
      indices.set(std::get<1>(result));                                                     \
    };                                                                                      \
  }
WITH_INDICES(MaxDim, max)
WITH_INDICES(MinDim, min)
WITH_INDICES(MedianDim, median)
WITH_INDICES(NanMedianDim, nanmedian)

VNPU_OP(aclnnArgMax, In(self), Int(dim), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::argmax(self(), dim(), keepdim)); };
}
VNPU_OP(aclnnArgMin, In(self), Int(dim), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::argmin(self(), dim(), keepdim)); };
}

VNPU_OP(aclnnAminmax, In(self), Ints(dims), Bool(keepdim), Out(min), Out(max)) {
  return [=] {
    min.set(at::amin(self(), dims(), keepdim));
    max.set(at::amax(self(), dims(), keepdim));
  };
}
VNPU_OP(aclnnAminmaxDim, In(self), Int(dim), Bool(keepdim), Out(min), Out(max)) {
  return [=] {
    min.set(at::amin(self(), dim(), keepdim));
    max.set(at::amax(self(), dim(), keepdim));
  };
}
VNPU_OP(aclnnAminmaxAll, In(self), Out(min), Out(max)) {
  return [=] {
    min.set(at::min(self()));
    max.set(at::max(self()));
  };
}

VNPU_OP(aclnnAny, In(self), Ints(dims), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::any(self(), dims(), keepdim)); };
}
VNPU_OP(aclnnAll, In(self), Ints(dims), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::all(self(), dims(), keepdim)); };
}
VNPU_OP(aclnnEqual, In(self), In(other), Out(out)) {
  return [=] { out.fill(at::equal(self(), other())); };
}

VNPU_OP(aclnnNorm, In(self), Scalar(p), Ints(dims), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::norm(self(), p(), dims(), keepdim)); };
}
VNPU_OP(aclnnLinalgVectorNorm, In(self), Scalar(ord), Ints(dims), Bool(keepdim), Dtype(dtype), Out(out)) {
  return [=] {
    const auto over = dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims());
    out.set(at::linalg_vector_norm(self(), ord(), over, keepdim, dtype));
  };
}

static at::OptionalIntArrayRef optional_dims(at::IntArrayRef dims) {
  return dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims);
}
VNPU_OP(aclnnStd, In(self), Ints(dims), Int(correction), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::std(self(), optional_dims(dims), at::Scalar(correction()), keepdim)); };
}
VNPU_OP(aclnnVarCorrection, In(self), Ints(dims), Int(correction), Bool(keepdim), Out(out)) {
  return [=] { out.set(at::var(self(), optional_dims(dims), at::Scalar(correction()), keepdim)); };
}
VNPU_OP(aclnnVarMean, In(self), Ints(dims), Int(correction), Bool(keepdim), Out(var), Out(mean)) {
  return [=] {
    const auto result = at::var_mean(self(), optional_dims(dims), at::Scalar(correction()), keepdim);
    var.set(std::get<0>(result));
    mean.set(std::get<1>(result));
  };
}
VNPU_OP(aclnnStdMeanCorrection, In(self), Ints(dims), Int(correction), Bool(keepdim), Out(std), Out(mean)) {
  return [=] {
    const auto result = at::std_mean(self(), optional_dims(dims), at::Scalar(correction()), keepdim);
    std.set(std::get<0>(result));
    mean.set(std::get<1>(result));
  };
}

// Scans.
VNPU_OP(aclnnCumsum, In(self), Int(dim), Dtype(dtype), Out(out)) {
  return [=] { out.set(at::cumsum(self(), dim, dtype)); };
}
VNPU_OP(aclnnCumprod, In(self), Scalar(dim), Dtype(dtype), Out(out)) {
  return [=] { out.set(at::cumprod(self(), dim().toLong(), dtype)); };
}
#define SCAN_WITH_INDICES(op, function)                                             \
  VNPU_OP(aclnn##op, In(self), Int(dim), Out(values), Out(indices)) {               \
    return [=] {                                                                    \
      const auto result = at::function(self(), dim());                              \
      values.set(std::get<0>(result));                                              \
      indices.set(std::get<1>(result));                                             \
    };                                                                              \
  }
SCAN_WITH_INDICES(Cummax, cummax)
SCAN_WITH_INDICES(Cummin, cummin)

// Sorting. Equal values come in the order of their indices, whether or not `stable` was asked for.
VNPU_OP(aclnnSort, In(self), Bool(stable), Int(dim), Bool(descending), Out(values), Out(indices)) {
  return [=] {
    const auto result = at::sort(self(), /*stable=*/true, dim(), descending);
    values.set(std::get<0>(result));
    indices.set(std::get<1>(result));
  };
}
VNPU_OP(aclnnTopk, In(self), Int(k), Int(dim), Bool(largest), Bool(sorted), Out(values), Out(indices)) {
  return [=] {
    const auto result = at::topk(self(), k, dim(), largest, sorted);
    values.set(std::get<0>(result));
    indices.set(std::get<1>(result));
  };
}
VNPU_OP(aclnnKthvalue, In(self), Int(k), Int(dim), Bool(keepdim), Out(values), Out(indices)) {
  return [=] {
    const auto result = at::kthvalue(self(), k, dim(), keepdim);
    values.set(std::get<0>(result));
    indices.set(std::get<1>(result));
  };
}
VNPU_OP(aclnnSearchSorted, In(sorted), In(self), Bool(out_int32), Bool(right), OptIn(sorter), Out(out)) {
  return [=] { out.set(at::searchsorted(sorted(), self(), out_int32, right, std::nullopt, sorter.opt())); };
}
VNPU_OP(aclnnSearchSorteds, In(sorted), Scalar(self), Bool(out_int32), Bool(right), OptIn(sorter), Out(out)) {
  return [=] { out.set(at::searchsorted(sorted(), self(), out_int32, right, std::nullopt, sorter.opt())); };
}
VNPU_OP(aclnnBucketize, In(self), In(boundaries), Bool(out_int32), Bool(right), Out(out)) {
  return [=] { out.set(at::bucketize(self(), boundaries(), out_int32, right)); };
}

// Counting. PyTorch's CPU has no histc of integers, so they are counted as float64, which is exact up to 2^53.
VNPU_OP(aclnnHistc, In(self), Int(bins), Scalar(min), Scalar(max), Out(out)) {
  vnpu::check(self.acl_dtype() != ACL_BF16 && self.acl_dtype() != ACL_BOOL, "self is ",
              vnpu::dtype_name(self.acl_dtype()), ", which is not supported");
  return [=] {
    const bool narrow = self.dtype() == at::kHalf || self.dtype() == at::kBFloat16 || self.dtype() == at::kFloat;
    out.set(at::histc(self().to(narrow ? at::kFloat : at::kDouble), bins, min(), max()));
  };
}
VNPU_OP(aclnnBincount, In(self), OptIn(weights), Int(minlength), Out(out)) {
  return [=] { out.set(at::bincount(self(), weights.opt(), minlength)); };
}

// The sizes of the results of `unique` depend on the data, so the host waits for them.
VNPU_OP(aclnnUnique, In(self), Bool(sorted), Bool(return_inverse), Out(values), Out(inverse)) {
  return vnpu::blocking([=] {
    const auto [found, back] = at::_unique(self(), sorted, return_inverse);
    values.set_view(found);
    if (return_inverse) inverse.set_view(back);
  });
}
VNPU_OP(aclnnUnique2, In(self), Bool(sorted), Bool(return_inverse), Bool(return_counts), Out(values), Out(inverse),
        Out(counts)) {
  return vnpu::blocking([=] {
    const auto [found, back, count] = at::_unique2(self(), sorted, return_inverse, return_counts);
    values.set_view(found);
    if (return_inverse) inverse.set_view(back);
    counts.set_view(count);
  });
}
VNPU_OP(aclnnUniqueDim, In(self), Bool(sorted), Bool(return_inverse), Int(dim), Out(values), Out(inverse),
        Out(counts)) {
  return vnpu::blocking([=] {
    const auto [found, back, count] = at::unique_dim(self(), dim, sorted, return_inverse, true);
    values.set_view(found);
    if (return_inverse) inverse.set_view(back);
    counts.set_view(count);
  });
}
// dim 1000 stands for "no dim" in CANN's interface.
VNPU_OP(aclnnUniqueConsecutive, In(self), Bool(return_inverse), Bool(return_counts), Int(dim), Out(values),
        Out(inverse), Out(counts)) {
  return vnpu::blocking([=] {
    const auto over = dim() == 1000 ? std::optional<int64_t>() : std::optional<int64_t>(dim());
    const auto [found, back, count] = at::unique_consecutive(self(), return_inverse, return_counts, over);
    values.set_view(found);
    if (return_inverse) inverse.set_view(back);
    if (return_counts) counts.set_view(count);
  });
}
