// SPDX-License-Identifier: Apache-2.0
// The grouped matrix multiplication without quantisation, as CANN documents it for Atlas A2 and A3.
//
// Refused at once with ACLNN_ERR_PARAM_INVALID is what CANN refuses: it looks at shapes, strides, dtypes and flags, and
// never at the values of a group list that is on the device. Where those values would make the hardware read or write
// out of bounds, the stand-in fails the device instead. What CANN leaves unwritten is filled with NaN, because the
// caching allocator hands out blocks that still hold plausible numbers.
//
// Products are accumulated in float32 and rounded once to the dtype of the result.
#include <cstdlib>
#include <limits>

#include "opapi.h"

namespace {

using vnpu::check;
using vnpu::In;
using vnpu::Ins;
using vnpu::Outs;
using vnpu::text;
using vnpu::WrittenTensor;

constexpr int64_t kMaxInnerAxis = 65535;
constexpr size_t kMaxGroupsOfTensor = 1024;
constexpr size_t kMaxListLength = 128;

enum GroupType : int64_t { kNoSplit = -1, kSplitM = 0, kSplitK = 2 };
enum class Version { kV1, kV4, kV5 };

const char* name_of(Version version) {
  switch (version) {
    case Version::kV1: return "aclnnGroupedMatmul";
    case Version::kV4: return "aclnnGroupedMatmulV4";
    default: return "aclnnGroupedMatmulV5";
  }
}

struct Call {
  Version version;
  Ins x, weight, bias;
  Outs y;
  std::optional<vnpu::OptIn> group_tensor;          // V4, V5
  std::optional<std::vector<int64_t>> group_array;  // V1
  int64_t split_item, group_type, group_list_type;
};

std::string describe(const vnpu::TensorArg& x) {
  return text(x.name(), " ", x.shape(), " with strides ", vnpu::shape_text(x.strides()));
}

// CANN tells a transposed matrix by its strides alone: packed, with the last two dimensions swapped.
bool looks_transposed(const vnpu::TensorArg& x) {
  if (x.stride(-2) != 1 || x.stride(-1) != x.size(-2)) return false;
  int64_t packed = x.size(-1) * x.size(-2);
  for (int64_t dim = x.dim() - 3; dim >= 0; dim--) {
    if (x.stride(dim) != packed) return false;
    packed *= x.size(dim);
  }
  return true;
}

// For operands that must not be transposed a 1 x 1 matrix, which is both, does not count. A matrix of one row does:
// [1, K] with strides (1, 1) looks transposed, although it is contiguous for PyTorch.
bool looks_transposed_and_not_one_by_one(const vnpu::TensorArg& x) {
  return looks_transposed(x) && x.size(-1) * x.size(-2) != 1;
}

bool packed(const vnpu::TensorArg& x) {
  int64_t expected = 1;
  for (int64_t dim = x.dim() - 1; dim >= 0; dim--) {
    if (x.size(dim) != 1 && x.stride(dim) != expected) return false;
    expected *= x.size(dim);
  }
  return true;
}

bool any_transposed(const Ins& list) {
  for (const In& x : list) {
    if (looks_transposed_and_not_one_by_one(x)) return true;
  }
  return false;
}

void check_rank(const vnpu::TensorArg& x, int64_t rank) {
  check(x.dim() == rank, x.name(), " has the shape ", x.shape(), ", expected ", rank, " dimensions here");
}

template <class List>
void check_ranks(const List& list, int64_t rank) {
  for (const auto& x : list) check_rank(x, rank);
}

void check_dims_equal(const vnpu::TensorArg& a, int64_t a_dim, const vnpu::TensorArg& b, int64_t b_dim,
                      const char* what) {
  check(a.size(a_dim) == b.size(b_dim), what, " does not match: ", a.name(), " ", a.shape(), ", ", b.name(), " ",
        b.shape());
}

void check_inner_axis(const vnpu::TensorArg& x, int64_t dim) {
  check(x.size(dim) <= kMaxInnerAxis, "the inner axis of ", x.name(), " ", x.shape(), " has ", x.size(dim),
        " elements, at most ", kMaxInnerAxis, " are possible");
}

void check_dtypes(const Call& call) {
  const aclDataType dtype = call.x[0].acl_dtype();
  const aclDataType weight_dtype = call.weight[0].acl_dtype();
  check((dtype == ACL_FLOAT || dtype == ACL_FLOAT16 || dtype == ACL_BF16) && dtype == weight_dtype,
        "x of dtype ", vnpu::dtype_name(dtype), " and weight of dtype ", vnpu::dtype_name(weight_dtype),
        " are not supported together: both float16, both bfloat16 or both float32 (the virtual NPU has no quantised "
        "grouped matmul)");
  check(call.version != Version::kV1 || dtype != ACL_FLOAT,
        "with an integer list as group_list float32 is not supported; use a tensor");
  const auto check_list = [](const auto& list, aclDataType expected, const char* name, const char* why) {
    for (size_t i = 0; i < list.size(); i++) {
      check(list[i].acl_dtype() == expected, name, "[", i, "] is ", vnpu::dtype_name(list[i].acl_dtype()),
            ", expected ", vnpu::dtype_name(expected), why);
    }
  };
  check_list(call.x, dtype, "x", "");
  check_list(call.weight, dtype, "weight", "");
  check_list(call.y, dtype, "y", ": the result has the dtype of x");
  check_list(call.bias, dtype == ACL_BF16 ? ACL_FLOAT : dtype, "bias",
             dtype == ACL_BF16 ? " (bfloat16 goes with a float32 bias)" : "");
}

// The group list, as far as phase 1 sees it. `groups`: how many the other operands have.
void check_group_list(const Call& call, bool required, size_t groups, const std::string& counted_by) {
  if (call.version == Version::kV1) {
    check(call.group_array.has_value() || !required, "group_list is required here");
    if (!call.group_array) return;
    const std::vector<int64_t>& list = *call.group_array;
    check(list.size() <= kMaxListLength, "group_list has ", list.size(), " entries, an integer list at most ",
          kMaxListLength);
    int64_t previous = 0;
    for (int64_t end : list) {
      check(end >= previous, "group_list ", vnpu::shape_text(list), " must be non-negative and must not decrease");
      previous = end;
    }
    check(list.size() == groups || groups == 1, "group_list has ", list.size(), " entries, but ", counted_by, " has ",
          groups, " groups");
    return;
  }
  const vnpu::OptIn& list = *call.group_tensor;
  check(list.present() || !required, "group_list is required with group_type ", call.group_type);
  if (!list.present()) return;
  const auto entries = static_cast<size_t>(list.size(0));
  check(entries <= kMaxGroupsOfTensor, "group_list has ", entries, " entries, at most ", kMaxGroupsOfTensor,
        " are possible");
  check(entries == groups || groups == 1, "group_list has ", entries, " entries, but ", counted_by, " has ", groups,
        " groups");
  check(list.acl_dtype() == ACL_INT64, "group_list is ", vnpu::dtype_name(list.acl_dtype()),
        ", only int64 is supported");
}

// V1: the ends of a list on the host are compared with the rows that each operand has.
template <class List>
void check_rows_against_array(const Call& call, const List& list) {
  if (!call.group_array) return;
  int64_t previous = 0;
  for (size_t i = 0; i < list.size(); i++) {
    const int64_t end = (*call.group_array)[i];
    check(list[i].size(0) == end - previous, list.name(), "[", i, "] has ", list[i].size(0),
          " rows, group_list gives it ", end - previous);
    previous = end;
  }
}

void check_split_m(const Call& call) {
  const Ins& x = call.x;
  const Ins& weight = call.weight;
  const Outs& y = call.y;
  check(!any_transposed(x), "with group_type 0 x can not be transposed, but x is ", describe(x[0]),
        ". Pass x.contiguous(), or x.clone(memory_format=torch.contiguous_format) where it is a single row that "
        "PyTorch takes for contiguous");
  const bool weight_transposed = looks_transposed(weight[0]);
  const bool one_y = y.size() == 1;
  if (one_y) {
    check(call.split_item == 2 || call.split_item == 3, "a single y needs split_item 2 or 3, it is ", call.split_item);
  } else {
    check(call.version == Version::kV1 && x.size() == 1 && weight.size() == y.size(),
          "with group_type 0 and a tensor as group_list several y are not supported (x ", x.size(), ", weight ",
          weight.size(), ", y ", y.size(), " tensors); use split_item 3");
    check(call.split_item == 0 || call.split_item == 1, "several y need split_item 0 or 1, it is ", call.split_item);
  }
  check(x.size() == 1 || x.size() == weight.size(), "x has ", x.size(), " tensors but weight ", weight.size());
  check_ranks(x, 2);
  check_ranks(y, 2);
  const bool one_weight = weight.size() == 1;
  check_ranks(weight, one_weight ? 3 : 2);
  int64_t x_rows = 0;
  for (size_t i = 0; i < std::max(x.size(), weight.size()); i++) {
    const In& xi = x[x.size() == 1 ? 0 : i];
    const In& wi = weight[one_weight ? 0 : i];
    const vnpu::Out& yi = y[one_y ? 0 : i];
    check(looks_transposed(wi) == weight_transposed, "either all weights are transposed or none");
    check_dims_equal(xi, 1, wi, -2, "k");
    check_dims_equal(wi, -1, yi, 1, "n");
    check_inner_axis(xi, 1);
    if (!weight_transposed) check_inner_axis(wi, -1);
  }
  for (const In& xi : x) x_rows += xi.size(0);
  if (one_y) check(y[0].size(0) == x_rows, "x has ", x_rows, " rows but y ", y[0].shape());

  if (one_weight) {
    check_group_list(call, true, static_cast<size_t>(weight[0].size(0)), text("weight ", weight[0].shape()));
  } else {
    check_group_list(call, x.size() == 1, weight.size(), "weight");
    if (x.size() > 1) {
      check_rows_against_array(call, x);
    } else if (!one_y) {
      check_rows_against_array(call, y);
    } else if (call.group_array) {
      const int64_t last = call.group_array->back();
      check(last == x_rows, "the last entry of group_list is ", last, ", x has ", x_rows, " rows");
    }
  }
}

void check_split_k(const Call& call) {
  check(call.bias.empty(), "with group_type 2 there is no bias");
  check(call.x.size() == 1 && call.weight.size() == 1 && call.y.size() == 1,
        "with group_type 2 x, weight and y are single tensors, given are ", call.x.size(), ", ", call.weight.size(),
        " and ", call.y.size());
  const In& x = call.x[0];
  const In& weight = call.weight[0];
  const vnpu::Out& y = call.y[0];
  check_rank(x, 2);
  check_rank(weight, 2);
  check(looks_transposed(x), "with group_type 2 x must be the transpose of a packed matrix, but x is ", describe(x),
        ", expected strides [1, ", x.size(0), "]. Pass x.contiguous().t()");
  check(!looks_transposed_and_not_one_by_one(weight),
        "x and weight can not be transposed at the same time, but weight is ", describe(weight));
  check_rank(y, 3);
  check_dims_equal(x, 1, weight, 0, "k");
  check_dims_equal(x, 0, y, 1, "m");
  check_dims_equal(weight, 1, y, 2, "n");
  check_inner_axis(x, 0);
  check_inner_axis(weight, 1);
  check_group_list(call, true, static_cast<size_t>(y.size(0)), text("y ", y.shape()));
}

void check_no_split(const Call& call) {
  check(!any_transposed(call.x), "with group_type -1 x can not be transposed");
  check(call.split_item == 0 || call.split_item == 1, "several y need split_item 0 or 1, it is ", call.split_item);
  check(call.x.size() == call.y.size() && call.x.size() == call.weight.size(),
        "with group_type -1 x, weight and y are lists of one length, given are ", call.x.size(), ", ",
        call.weight.size(), " and ", call.y.size());
  check(!call.group_tensor || !call.group_tensor->present(), "with group_type -1 there is no group_list");
  for (size_t i = 0; i < call.x.size(); i++) {
    const In& x = call.x[i];
    const In& weight = call.weight[i];
    const vnpu::Out& y = call.y[i];
    check(x.dim() >= 2 && x.dim() <= 6, "x[", i, "] has the shape ", x.shape(), ", expected 2 to 6 dimensions");
    check_rank(weight, 2);
    check(looks_transposed(weight) == looks_transposed(call.weight[0]), "either all weights are transposed or none");
    check(call.version != Version::kV1 || !looks_transposed(weight),
          "with lists of x, weight and y a transposed weight is not supported");
    check(x.dim() == 2 || !call.group_array, "with x of more than 2 dimensions there is no group_list");
    check_dims_equal(x, -1, weight, 0, "k");
    check_inner_axis(x, -1);
    if (!looks_transposed(weight)) check_inner_axis(weight, 1);
    std::vector<int64_t> expected = x.sizes().vec();
    expected.back() = weight.size(1);
    check(y.sizes() == at::IntArrayRef(expected), "y[", i, "] has the shape ", y.shape(), ", expected ",
          vnpu::shape_text(expected));
  }
  if (call.group_array) {
    check(call.group_array->size() == call.x.size(), "group_list has ", call.group_array->size(), " entries, x has ",
          call.x.size(), " tensors");
    check_rows_against_array(call, call.x);
  }
}

void check_bias(const Call& call, size_t groups) {
  if (call.bias.empty()) return;
  check(call.bias.size() == call.weight.size(), "bias has ", call.bias.size(), " tensors but weight ",
        call.weight.size());
  const bool stacked = call.weight[0].dim() == 3;
  for (size_t i = 0; i < call.bias.size(); i++) {
    const In& bias = call.bias[i];
    check_rank(bias, stacked ? 2 : 1);
    check(!stacked || bias.size(0) == static_cast<int64_t>(groups), "bias has the shape ", bias.shape(), " for ",
          groups, " groups");
    check_dims_equal(bias, -1, call.weight[i], -1, "n");
  }
}

void check_group_flags(const Call& call) {
  check(call.group_type != 1, "group_type 1 (groups along n) is not supported");
  check(call.group_type == kNoSplit || call.group_type == kSplitM || call.group_type == kSplitK,
        "group_type must be -1, 0 or 2, it is ", call.group_type);
  check(call.split_item >= 0 && call.split_item <= 3, "split_item must be 0, 1, 2 or 3, it is ", call.split_item);
  check(call.split_item < 2 || call.group_type != kNoSplit, "split_item ", call.split_item,
        " (a single y) does not go with group_type -1");
  check(call.group_list_type == 0 || call.group_list_type == 1, "group_list_type must be 0 (ends) or 1 (counts) "
        "without quantisation, it is ", call.group_list_type);
  if (call.group_tensor && call.group_tensor->present()) {
    check(call.group_tensor->dim() == 1, "group_list has the shape ", call.group_tensor->shape(),
          ", expected 1 dimension");
  }
}

void record_copies(const Call& call) {
  const char* op = name_of(call.version);
  for (const In& x : call.x) {
    if (!packed(x) && !(call.group_type == kSplitK && looks_transposed(x))) {
      vnpu::record_internal_copy(op, x, "x is not packed");
    }
  }
  for (const In& weight : call.weight) {
    if (!packed(weight) && !looks_transposed(weight)) {
      vnpu::record_internal_copy(op, weight, "weight is neither packed nor a packed transpose");
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// On the worker.

void poison(const at::Tensor& unwritten) { unwritten.fill_(std::numeric_limits<double>::quiet_NaN()); }

// Ends of the groups, from a list on the device whose values nobody has looked at yet.
std::vector<int64_t> group_ends(const at::Tensor& list, int64_t list_type, int64_t rows, const char* what) {
  const at::Tensor entries = list.contiguous();
  const int64_t* values = entries.const_data_ptr<int64_t>();
  std::vector<int64_t> ends(values, values + entries.numel());
  const std::string given = vnpu::shape_text(ends);
  int64_t previous = 0;
  for (size_t i = 0; i < ends.size(); i++) {
    if (list_type == 1) ends[i] += previous;
    check(ends[i] >= previous, "group_list ", given, list_type == 1 ? " has a negative count" : " decreases",
          " at entry ", i, ". An NPU does not check this and would compute garbage");
    previous = ends[i];
  }
  check(previous <= rows, "group_list ", given, " ends at ", previous, ", but there are only ", rows, " ", what,
        ". An NPU does not check this and would read out of bounds");
  return ends;
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!bias.defined()) return at::matmul(x, weight);
  return at::matmul(x.to(at::kFloat), weight.to(at::kFloat)).add_(bias.to(at::kFloat)).to(x.scalar_type());
}

at::Tensor weight_of(const Call& call, size_t group) {
  return call.weight[0].dim() == 3 ? call.weight[0]().select(0, group) : call.weight[group]();
}

at::Tensor bias_of(const Call& call, size_t group) {
  if (call.bias.empty()) return {};
  return call.bias.size() == 1 && call.bias[0].dim() == 2 ? call.bias[0]().select(0, group) : call.bias[group]();
}

void run_no_split(const Call& call) {
  for (size_t i = 0; i < call.x.size(); i++) {
    call.y.set(i, product(call.x[i](), weight_of(call, i), bias_of(call, i)));
  }
}

void run_split_m(const Call& call) {
  // Rows of all x in one row. They are in one tensor already where x is not a list.
  const at::Tensor x = call.x.size() == 1 ? call.x[0]() : at::cat(call.x());
  const size_t groups = call.weight[0].dim() == 3 ? call.weight[0].size(0) : call.weight.size();
  std::vector<int64_t> ends;
  if (call.x.size() > 1) {
    for (const In& xi : call.x) ends.push_back((ends.empty() ? 0 : ends.back()) + xi.size(0));
  } else if (call.group_array) {
    ends = *call.group_array;
  } else {
    ends = group_ends((*call.group_tensor)(), call.group_list_type, x.size(0), "rows in x");
  }
  check(ends.size() == groups, "group_list has ", ends.size(), " entries for ", groups,
        " groups of weight. An NPU would read out of bounds");
  if (call.x.size() > 1 && call.group_tensor && call.group_tensor->present()) {
    const auto given = group_ends((*call.group_tensor)(), call.group_list_type, x.size(0), "rows in x");
    check(given == ends, "group_list ends at ", vnpu::shape_text(given), ", the tensors of x at ",
          vnpu::shape_text(ends));
  }
  // CANN starts no kernel at all where x is empty.
  const bool nothing_runs = x.numel() == 0;
  int64_t start = 0;
  for (size_t i = 0; i < groups && !nothing_runs; i++) {
    const int64_t rows = ends[i] - start;
    if (rows > 0) {
      const at::Tensor result = product(x.narrow(0, start, rows), weight_of(call, i), bias_of(call, i));
      (call.y.size() == 1 ? call.y[0]().narrow(0, start, rows) : call.y[i]()).copy_(result);
    }
    start = ends[i];
  }
  if (call.y.size() == 1) poison(call.y[0]().narrow(0, start, call.y[0].size(0) - start));
}

void run_split_k(const Call& call) {
  const at::Tensor x = call.x[0]();
  const at::Tensor weight = call.weight[0]();
  const at::Tensor y = call.y[0]();
  const auto ends = group_ends((*call.group_tensor)(), call.group_list_type, x.size(1), "columns in x");
  if (x.numel() == 0) {
    // CANN up to about 8.5 returns here without writing y; later ones fill it with zeros where only k is 0.
    const char* newer = std::getenv("VIRTUAL_NPU_GMM_ZERO_EMPTY_K");
    if (newer != nullptr && std::string(newer) == "1") {
      y.zero_();
    } else {
      poison(y);
    }
    return;
  }
  check(static_cast<int64_t>(ends.size()) == y.size(0), "group_list has ", ends.size(), " entries for ", y.size(0),
        " groups of y. An NPU would write out of bounds");
  int64_t start = 0;
  for (size_t i = 0; i < ends.size(); i++) {
    const int64_t length = ends[i] - start;
    if (length > 0) {
      y.select(0, i).copy_(at::mm(x.narrow(1, start, length), weight.narrow(0, start, length)));
    } else {
      y.select(0, i).zero_();
    }
    start = ends[i];
  }
}

vnpu::Work plan(const Call& call) {
  check(!call.x.empty() && !call.weight.empty() && !call.y.empty(), "x, weight and y need at least one tensor, given "
        "are ", call.x.size(), ", ", call.weight.size(), " and ", call.y.size());
  check_group_flags(call);
  check_dtypes(call);
  for (const Ins* list : {&call.x, &call.weight}) {
    check(list->size() <= kMaxListLength, list->name(), " has ", list->size(), " tensors, at most ", kMaxListLength,
          " are possible");
    for (const In& x : *list) {
      check(x.dim() >= 2, x.name(), " has the shape ", x.shape(), ", expected at least 2 dimensions");
    }
  }
  size_t groups = call.weight.size();
  if (call.group_type == kNoSplit) {
    check_no_split(call);
  } else if (call.group_type == kSplitM) {
    check_split_m(call);
    if (call.weight[0].dim() == 3) groups = call.weight[0].size(0);
  } else {
    check_split_k(call);
  }
  check_bias(call, groups);
  record_copies(call);
  return [call] {
    if (call.group_type == kNoSplit) {
      run_no_split(call);
    } else if (call.group_type == kSplitM) {
      run_split_m(call);
    } else {
      run_split_k(call);
    }
  };
}

// An empty tensor as an optional argument is none.
template <class... Lists>
void check_absent(const std::string& why, const Lists&... lists) {
  const auto check_one = [&](const auto& list) {
    for (const auto& x : list) check(x.numel() == 0, list.name(), " ", x.shape(), " is given, but ", why);
  };
  (check_one(lists), ...);
}

const std::string kNotQuantised = "the virtual NPU has only the grouped matmul without quantisation";

void check_tuning(const vnpu::Ints& tuning, const Ins& x) {
  if (tuning.empty()) return;
  int64_t rows = 0;
  for (const In& xi : x) rows = std::max(rows, xi.size(0));
  check(tuning[0] >= 0 && tuning[0] <= rows, "tuning_config is ", tuning[0], ", expected 0 to ", rows,
        " (the rows of x)");
}

}  // namespace

VNPU_OP(aclnnGroupedMatmulV5, Ins(x), Ins(weight), Ins(bias), Ins(scale), Ins(offset), Ins(antiquant_scale),
        Ins(antiquant_offset), Ins(per_token_scale), OptIn(group_list), Ins(activation_input),
        Ins(activation_quant_scale), Ins(activation_quant_offset), Int(split_item), Int(group_type),
        Int(group_list_type), Int(act_type), Ints(tuning_config), Outs(y), Outs(activation_out),
        Outs(dynamic_quant_scale_out)) {
  check_absent(kNotQuantised, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input,
               activation_quant_scale, activation_quant_offset, activation_out, dynamic_quant_scale_out);
  check(act_type == 0, "without quantisation there is no activation, but act_type is ", act_type());
  check_tuning(tuning_config, x);
  return plan({Version::kV5, x, weight, bias, y, group_list, std::nullopt, split_item, group_type, group_list_type});
}

VNPU_OP(aclnnGroupedMatmulV4, Ins(x), Ins(weight), Ins(bias), Ins(scale), Ins(offset), Ins(antiquant_scale),
        Ins(antiquant_offset), Ins(per_token_scale), OptIn(group_list), Ins(activation_input),
        Ins(activation_quant_scale), Ins(activation_quant_offset), Int(split_item), Int(group_type),
        Int(group_list_type), Int(act_type), Outs(y), Outs(activation_out), Outs(dynamic_quant_scale_out)) {
  check_absent(kNotQuantised, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input,
               activation_quant_scale, activation_quant_offset, activation_out, dynamic_quant_scale_out);
  check(act_type == 0, "without quantisation there is no activation, but act_type is ", act_type());
  return plan({Version::kV4, x, weight, bias, y, group_list, std::nullopt, split_item, group_type, group_list_type});
}

// The first version: the group list is on the host, and groups are told from the lengths of the lists.
VNPU_OP(aclnnGroupedMatmul, Ins(x), Ins(weight), Ins(bias), Ins(scale), Ins(offset), Ins(antiquant_scale),
        Ins(antiquant_offset), Ints(group_list), Int(split_item), Outs(y)) {
  check_absent(kNotQuantised, scale, offset, antiquant_scale, antiquant_offset);
  const bool all_single = x.size() == 1 && weight.size() == 1 && y.size() == 1;
  check(weight.size() != 1 || all_single, "weight must be a list of one tensor a group, it has only one");
  const int64_t group_type = all_single || (x.size() > 1 && y.size() > 1) ? kNoSplit : kSplitM;
  std::optional<std::vector<int64_t>> ends;
  if (!group_list.empty()) ends = group_list().vec();
  return plan({Version::kV1, x, weight, bias, y, std::nullopt, ends, split_item, group_type, 0});
}

// y += x^T weight for each group of rows, in float32. y is [groups, m, n], or the same memory as [groups * m, n].
VNPU_OP(aclnnGroupedMatmulAdd, In(x), In(weight), In(group_list), InOut(y), Bool(transpose_x), Bool(transpose_weight),
        Int(group_type)) {
  check(transpose_x && !transpose_weight && group_type == kSplitK, "transpose_x must be true, transpose_weight false "
        "and group_type 2; they are ", transpose_x(), ", ", transpose_weight(), " and ", group_type());
  check_rank(x, 2);
  check_rank(weight, 2);
  check((x.acl_dtype() == ACL_FLOAT16 || x.acl_dtype() == ACL_BF16) && x.acl_dtype() == weight.acl_dtype(), "x is ",
        vnpu::dtype_name(x.acl_dtype()), " and weight ", vnpu::dtype_name(weight.acl_dtype()),
        ", expected both float16 or both bfloat16");
  check(y.acl_dtype() == ACL_FLOAT, "y is ", vnpu::dtype_name(y.acl_dtype()), ", expected float32");
  check(group_list.acl_dtype() == ACL_INT64, "group_list is ", vnpu::dtype_name(group_list.acl_dtype()),
        ", only int64 is supported");
  check_rank(group_list, 1);
  const int64_t groups = group_list.size(0);
  check(groups >= 1 && groups <= static_cast<int64_t>(kMaxGroupsOfTensor), "group_list has ", groups,
        " entries, expected 1 to ", kMaxGroupsOfTensor);
  check_dims_equal(x, 0, weight, 0, "k");
  check_inner_axis(x, 1);
  check_inner_axis(weight, 1);
  const std::vector<int64_t> stacked{groups, x.size(1), weight.size(1)};
  const std::vector<int64_t> flat{groups * x.size(1), weight.size(1)};
  check(y.sizes() == at::IntArrayRef(stacked) || y.sizes() == at::IntArrayRef(flat), "y has the shape ", y.shape(),
        ", expected ", vnpu::shape_text(stacked), " or ", vnpu::shape_text(flat));
  check(packed(y), "y must be packed, it is ", describe(y));
  return [=] {
    const at::Tensor rows = x();
    const at::Tensor other = weight();
    const at::Tensor sum = y().view(stacked);
    const auto ends = group_ends(group_list(), 0, rows.size(0), "rows in x");
    int64_t start = 0;
    for (int64_t i = 0; i < groups; i++) {
      const int64_t length = ends[i] - start;
      if (length > 0) {
        sum.select(0, i).addmm_(rows.narrow(0, start, length).t().to(at::kFloat),
                                other.narrow(0, start, length).to(at::kFloat));
      }
      start = ends[i];
    }
  };
}
