// SPDX-License-Identifier: Apache-2.0
// The framework in which the operators (aclnn functions) of the stand-in are written.
//
//     VNPU_OP(aclnnAdd, In(self), In(other), Scalar(alpha), Out(out)) {
//       check(..., "...");                                      // phase 1: aclnnAddGetWorkspaceSize
//       return [=] { out.set(at::add(self, other, alpha)); };   // phase 2: on the stream's worker
//     }
//
// defines the C functions aclnnAddGetWorkspaceSize(const aclTensor* self, const aclTensor* other,
// const aclScalar* alpha, aclTensor* out, uint64_t*, aclOpExecutor**) and aclnnAdd(void*, uint64_t, aclOpExecutor*,
// aclrtStream). The body runs in phase 1, on the caller's thread: it checks, and gives back the work. An exception
// there is the status of phase 1 (161002 with `check`), with a message that names the operator. The work runs later,
// below autograd; an exception there is the sticky error of the device. Everything is captured by value ([=]): the
// caller destroys its handles before the work runs. The types of arguments:
//
//     In, OptIn           a tensor that is read            `self` or self() is an at::Tensor
//     Out, OptOut         a tensor that is written         out.set(tensor) copies and casts; shapes must agree
//     InOut, OptInOut     both                             as In and Out
//     Ins, Outs, InOuts   a list of tensors                list() is std::vector<at::Tensor>; list.set(i, tensor)
//     Scalar, OptScalar, Scalars, Ints, Bools
//     Int (int64_t), Int32, Int8, Bool, Float, Double, Dtype (aclDataType), Str (char*): plain values
//
// An absent optional tensor is an undefined at::Tensor; an absent list is an empty one.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "acl/acl_base.h"
#include "vnpu.h"

// The opaque types of the C interface. Handles share what they describe, so that it outlives them.
namespace vnpu {

struct Desc {
  std::vector<int64_t> sizes, strides, storage_sizes;
  int64_t offset = 0;  // in elements, from the start of the storage
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_UNDEFINED;
  void* storage = nullptr;
};

}  // namespace vnpu

struct aclTensor {
  std::shared_ptr<vnpu::Desc> desc;
};
struct aclScalar {
  at::Scalar value;
};
struct aclTensorList {
  std::vector<const aclTensor*> values;  // owned, as in CANN: destroyed with the list
};
struct aclScalarList {
  std::vector<const aclScalar*> values;  // owned
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclOpExecutor;

namespace vnpu {

// What aclnn functions return.
constexpr int kParamNullptr = 161001;  // ACLNN_ERR_PARAM_NULLPTR
constexpr int kParamInvalid = 161002;  // ACLNN_ERR_PARAM_INVALID
constexpr int kRuntimeError = 361001;  // ACLNN_ERR_RUNTIME_ERROR

struct OpError : std::runtime_error {
  OpError(int code_, const std::string& message) : std::runtime_error(message), code(code_) {}
  int code;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// In phase 1: refuses the call with ACLNN_ERR_PARAM_INVALID. In phase 2: fails the device.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) throw OpError(kParamInvalid, text(parts...));
}

at::ScalarType scalar_type(aclDataType dtype);  // throws for what ATen has not
std::string dtype_name(aclDataType dtype);      // "float32"
std::string shape_text(at::IntArrayRef sizes);  // "[2, 3]"

// One tensor argument.
class TensorArg {
 public:
  TensorArg(const char* name, const aclTensor* handle, bool required);

  bool present() const { return desc_ != nullptr; }
  explicit operator bool() const { return present(); }
  at::Tensor operator()() const;  // a view of the device memory; undefined where absent
  operator at::Tensor() const { return (*this)(); }

  // The description, also in phase 1.
  const char* name() const { return name_; }
  at::IntArrayRef sizes() const { return desc_->sizes; }
  at::IntArrayRef strides() const { return desc_->strides; }
  int64_t size(int64_t dim) const { return sizes()[at::maybe_wrap_dim(dim, this->dim())]; }
  int64_t stride(int64_t dim) const { return strides()[at::maybe_wrap_dim(dim, this->dim())]; }
  int64_t dim() const { return static_cast<int64_t>(desc_->sizes.size()); }
  int64_t numel() const { return c10::multiply_integers(desc_->sizes); }
  at::ScalarType dtype() const { return scalar_type(desc_->dtype); }
  aclDataType acl_dtype() const { return desc_->dtype; }
  aclFormat format() const { return desc_->format; }
  std::string shape() const { return shape_text(sizes()); }
  int64_t bytes() const;  // of the distinct elements
  std::string json() const;

 protected:
  const char* name_;
  std::shared_ptr<Desc> desc_;
};

class In : public TensorArg {
 public:
  using Raw = const aclTensor*;
  In(const char* name, Raw handle) : TensorArg(name, handle, true) {}
};

class OptIn : public TensorArg {
 public:
  using Raw = const aclTensor*;
  OptIn(const char* name, Raw handle) : TensorArg(name, handle, false) {}
  std::optional<at::Tensor> opt() const { return present() ? std::optional<at::Tensor>((*this)()) : std::nullopt; }
};

class WrittenTensor : public TensorArg {
 public:
  using TensorArg::TensorArg;
  // Writes `value` through the strides of this tensor, in its dtype. Nothing where the argument is absent.
  void set(const at::Tensor& value) const;
  void fill(const at::Scalar& value) const;
  // For outputs whose shape depends on data (with `blocking`): writes to the front of the memory and changes the shape
  // that aclGetViewShape gives.
  void set_view(const at::Tensor& value) const;
};

class Out : public WrittenTensor {
 public:
  using Raw = aclTensor*;
  Out(const char* name, Raw handle) : WrittenTensor(name, handle, true) {}
};

class OptOut : public WrittenTensor {
 public:
  using Raw = aclTensor*;
  OptOut(const char* name, Raw handle) : WrittenTensor(name, handle, false) {}
};

class InOut : public WrittenTensor {
 public:
  using Raw = aclTensor*;
  InOut(const char* name, Raw handle) : WrittenTensor(name, handle, true) {}
};

class OptInOut : public WrittenTensor {
 public:
  using Raw = aclTensor*;
  OptInOut(const char* name, Raw handle) : WrittenTensor(name, handle, false) {}
};

template <class Element, class RawList>
class ListArg {
 public:
  using Raw = RawList;
  ListArg(const char* name, Raw handle) : name_(name) {
    if (handle == nullptr) return;
    for (const aclTensor* tensor : handle->values) values_.emplace_back(name, const_cast<aclTensor*>(tensor));
  }

  std::vector<at::Tensor> operator()() const { return {values_.begin(), values_.end()}; }
  size_t size() const { return values_.size(); }
  bool empty() const { return values_.empty(); }
  const Element& operator[](size_t i) const { return values_.at(i); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  void set(size_t i, const at::Tensor& value) const { values_.at(i).set(value); }
  const char* name() const { return name_; }

 private:
  const char* name_;
  std::vector<Element> values_;
};

using Ins = ListArg<In, const aclTensorList*>;
using Outs = ListArg<Out, aclTensorList*>;
using InOuts = ListArg<InOut, aclTensorList*>;

class Scalar {
 public:
  using Raw = const aclScalar*;
  Scalar(const char* name, Raw handle) {
    if (handle == nullptr) throw OpError(kParamNullptr, text(name, " is a null pointer"));
    value_ = handle->value;
  }
  const at::Scalar& operator()() const { return value_; }
  operator const at::Scalar&() const { return value_; }

 private:
  at::Scalar value_;
};

class OptScalar {
 public:
  using Raw = const aclScalar*;
  OptScalar(const char*, Raw handle) {
    if (handle != nullptr) value_ = handle->value;
  }
  const std::optional<at::Scalar>& operator()() const { return value_; }
  explicit operator bool() const { return value_.has_value(); }
  at::Scalar value_or(const at::Scalar& other) const { return value_.value_or(other); }

 private:
  std::optional<at::Scalar> value_;
};

class Scalars {
 public:
  using Raw = const aclScalarList*;
  Scalars(const char*, Raw handle) {
    if (handle == nullptr) return;
    for (const aclScalar* scalar : handle->values) values_.push_back(scalar->value);
  }
  const std::vector<at::Scalar>& operator()() const { return values_; }
  operator at::ArrayRef<at::Scalar>() const { return values_; }
  size_t size() const { return values_.size(); }
  const at::Scalar& operator[](size_t i) const { return values_.at(i); }

 private:
  std::vector<at::Scalar> values_;
};

class Ints {  // an absent array is an empty one
 public:
  using Raw = const aclIntArray*;
  Ints(const char*, Raw handle) {
    if (handle != nullptr) values_ = handle->values;
  }
  at::IntArrayRef operator()() const { return values_; }
  operator at::IntArrayRef() const { return values_; }
  size_t size() const { return values_.size(); }
  bool empty() const { return values_.empty(); }
  int64_t operator[](size_t i) const { return values_.at(i); }

 private:
  std::vector<int64_t> values_;
};

class Bools {
 public:
  using Raw = const aclBoolArray*;
  Bools(const char*, Raw handle) {
    if (handle != nullptr) values_ = handle->values;
  }
  const std::vector<bool>& operator()() const { return values_; }
  size_t size() const { return values_.size(); }
  bool operator[](size_t i) const { return values_.at(i); }

 private:
  std::vector<bool> values_;
};

template <class T>
class Value {
 public:
  using Raw = T;
  Value(const char*, T value) : value_(value) {}
  T operator()() const { return value_; }
  operator T() const { return value_; }

 private:
  T value_;
};

using Int = Value<int64_t>;
using Int32 = Value<int32_t>;
using Int8 = Value<int8_t>;
using Bool = Value<bool>;
using Float = Value<float>;
using Double = Value<double>;

class Dtype {
 public:
  using Raw = aclDataType;
  Dtype(const char*, Raw value) : value_(value) {}
  aclDataType acl() const { return value_; }
  bool defined() const { return value_ != ACL_DT_UNDEFINED; }
  operator at::ScalarType() const { return scalar_type(value_); }
  operator std::optional<at::ScalarType>() const {
    return defined() ? std::optional<at::ScalarType>(scalar_type(value_)) : std::nullopt;
  }

 private:
  aclDataType value_;
};

class Str {
 public:
  using Raw = const char*;
  Str(const char*, Raw value) : value_(value == nullptr ? "" : value) {}
  const std::string& operator()() const { return value_; }
  operator const std::string&() const { return value_; }

 private:
  std::string value_;
};

// The work of an operator. `blocking(work)`: phase 2 waits for it, as CANN's does where the output's shape depends on
// data; that is a synchronisation of the host and traced as one.
struct Work {
  template <class F, class = std::enable_if_t<std::is_invocable_v<F&>>>
  Work(F run_) : run(std::move(run_)) {}  // NOLINT: implicit, so that a body can return a lambda
  std::function<void()> run;
  bool waits = false;
};

template <class F>
Work blocking(F run) {
  Work work(std::move(run));
  work.waits = true;
  return work;
}

// Collects what the trace says of one launch.
class Record {
 public:
  void add(const In& x) { input(x); }
  void add(const OptIn& x) { input(x); }
  void add(const Out& x) { output(x); }
  void add(const OptOut& x) { output(x); }
  void add(const InOut& x) { input(x), output(x); }
  void add(const OptInOut& x) { input(x), output(x); }
  void add(const Ins& list) {
    for (const In& x : list) input(x);
  }
  void add(const Outs& list) {
    for (const Out& x : list) output(x);
  }
  void add(const InOuts& list) {
    for (const InOut& x : list) add(x);
  }
  template <class T>
  void add(const T&) {}  // attributes: see `attribute`

  template <class T>
  void attribute(const char* name, const Value<T>& value) {
    attribute_text(name, std::is_same_v<T, bool> ? (value() ? "true" : "false") : text(+value()));
  }
  void attribute(const char* name, const Scalar& value);
  void attribute(const char* name, const Ints& value);
  void attribute(const char* name, const Dtype& value);
  template <class T>
  void attribute(const char*, const T&) {}

  std::string json(const char* op) const;

 private:
  void input(const TensorArg& x);
  void output(const TensorArg& x);
  void attribute_text(const char* name, const std::string& json_value);

  std::string inputs_, outputs_, attributes_;
  int64_t bytes_read_ = 0, bytes_written_ = 0;
};

int start_plan(const char* op, uint64_t* workspace, aclOpExecutor** executor);
void finish_plan(const char* op, Work work, const std::string& record, uint64_t* workspace, aclOpExecutor** executor);
int plan_failed(const char* op);  // called in a catch block
int launch(const char* op, aclOpExecutor* executor, aclrtStream stream);

// The arguments are built inside the try, because building one checks it.
template <class... Args, class... Raws>
int plan(const char* op, uint64_t* workspace, aclOpExecutor** executor, Work (*body)(const Args&...),
         std::pair<const char*, Raws>... raws) {
  if (int status = start_plan(op, workspace, executor)) return status;
  try {
    std::tuple<Args...> args{Args(raws.first, raws.second)...};
    Work work = std::apply(body, args);
    std::string json;
    if (tracing()) {
      Record record;
      std::apply([&](const auto&... arg) { (record.add(arg), ...), (record.attribute(raws.first, arg), ...); }, args);
      json = record.json(op);
    }
    finish_plan(op, std::move(work), json, workspace, executor);
    return 0;
  } catch (...) {
    return plan_failed(op);
  }
}

// Says in the trace ({"kind":"internal_copy"}) that the operator copies an argument in order to be able to work. Call
// it in phase 1; it is recorded at the launch.
void record_internal_copy(const char* op, const TensorArg& x, const std::string& reason);

}  // namespace vnpu

// VNPU_OP. Each argument is Type(name); pasting a prefix in front of Type makes the three forms that are needed.
#define VNPU_PARENS ()
#define VNPU_EXPAND(...) VNPU_EXPAND3(VNPU_EXPAND3(VNPU_EXPAND3(VNPU_EXPAND3(__VA_ARGS__))))
#define VNPU_EXPAND3(...) VNPU_EXPAND2(VNPU_EXPAND2(VNPU_EXPAND2(VNPU_EXPAND2(__VA_ARGS__))))
#define VNPU_EXPAND2(...) VNPU_EXPAND1(VNPU_EXPAND1(VNPU_EXPAND1(VNPU_EXPAND1(__VA_ARGS__))))
#define VNPU_EXPAND1(...) __VA_ARGS__
#define VNPU_FOR_EACH(macro, ...) VNPU_EXPAND(VNPU_FOR_EACH_HELPER(macro, __VA_ARGS__))
#define VNPU_FOR_EACH_HELPER(macro, first, ...) \
  macro(first) __VA_OPT__(, VNPU_FOR_EACH_AGAIN VNPU_PARENS(macro, __VA_ARGS__))
#define VNPU_FOR_EACH_AGAIN() VNPU_FOR_EACH_HELPER

#define VNPU_RAW(argument) VNPU_RAW_##argument
#define VNPU_PAIR(argument) VNPU_PAIR_##argument
#define VNPU_TYPED(argument) [[maybe_unused]] VNPU_TYPED_##argument

#define VNPU_PAIR_OF(name) std::make_pair(#name, name)

#define VNPU_RAW_In(name) const aclTensor* name
#define VNPU_RAW_OptIn(name) const aclTensor* name
#define VNPU_RAW_Out(name) aclTensor* name
#define VNPU_RAW_OptOut(name) aclTensor* name
#define VNPU_RAW_InOut(name) aclTensor* name
#define VNPU_RAW_OptInOut(name) aclTensor* name
#define VNPU_RAW_Ins(name) const aclTensorList* name
#define VNPU_RAW_Outs(name) aclTensorList* name
#define VNPU_RAW_InOuts(name) aclTensorList* name
#define VNPU_RAW_Scalar(name) const aclScalar* name
#define VNPU_RAW_OptScalar(name) const aclScalar* name
#define VNPU_RAW_Scalars(name) const aclScalarList* name
#define VNPU_RAW_Ints(name) const aclIntArray* name
#define VNPU_RAW_Bools(name) const aclBoolArray* name
#define VNPU_RAW_Int(name) int64_t name
#define VNPU_RAW_Int32(name) int32_t name
#define VNPU_RAW_Int8(name) int8_t name
#define VNPU_RAW_Bool(name) bool name
#define VNPU_RAW_Float(name) float name
#define VNPU_RAW_Double(name) double name
#define VNPU_RAW_Dtype(name) aclDataType name
#define VNPU_RAW_Str(name) const char* name

#define VNPU_PAIR_In(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_OptIn(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Out(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_OptOut(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_InOut(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_OptInOut(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Ins(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Outs(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_InOuts(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Scalar(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_OptScalar(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Scalars(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Ints(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Bools(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Int(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Int32(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Int8(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Bool(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Float(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Double(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Dtype(name) VNPU_PAIR_OF(name)
#define VNPU_PAIR_Str(name) VNPU_PAIR_OF(name)

#define VNPU_TYPED_In(name) const vnpu::In& name
#define VNPU_TYPED_OptIn(name) const vnpu::OptIn& name
#define VNPU_TYPED_Out(name) const vnpu::Out& name
#define VNPU_TYPED_OptOut(name) const vnpu::OptOut& name
#define VNPU_TYPED_InOut(name) const vnpu::InOut& name
#define VNPU_TYPED_OptInOut(name) const vnpu::OptInOut& name
#define VNPU_TYPED_Ins(name) const vnpu::Ins& name
#define VNPU_TYPED_Outs(name) const vnpu::Outs& name
#define VNPU_TYPED_InOuts(name) const vnpu::InOuts& name
#define VNPU_TYPED_Scalar(name) const vnpu::Scalar& name
#define VNPU_TYPED_OptScalar(name) const vnpu::OptScalar& name
#define VNPU_TYPED_Scalars(name) const vnpu::Scalars& name
#define VNPU_TYPED_Ints(name) const vnpu::Ints& name
#define VNPU_TYPED_Bools(name) const vnpu::Bools& name
#define VNPU_TYPED_Int(name) const vnpu::Int& name
#define VNPU_TYPED_Int32(name) const vnpu::Int32& name
#define VNPU_TYPED_Int8(name) const vnpu::Int8& name
#define VNPU_TYPED_Bool(name) const vnpu::Bool& name
#define VNPU_TYPED_Float(name) const vnpu::Float& name
#define VNPU_TYPED_Double(name) const vnpu::Double& name
#define VNPU_TYPED_Dtype(name) const vnpu::Dtype& name
#define VNPU_TYPED_Str(name) const vnpu::Str& name

#define VNPU_OP(op, ...)                                                                                              \
  static vnpu::Work op##Body(VNPU_FOR_EACH(VNPU_TYPED, __VA_ARGS__));                                                 \
  extern "C" __attribute__((visibility("default"))) int op##GetWorkspaceSize(                                         \
      VNPU_FOR_EACH(VNPU_RAW, __VA_ARGS__), uint64_t* vnpu_workspace, aclOpExecutor** vnpu_executor) {                \
    return vnpu::plan(#op, vnpu_workspace, vnpu_executor, op##Body, VNPU_FOR_EACH(VNPU_PAIR, __VA_ARGS__));           \
  }                                                                                                                   \
  extern "C" __attribute__((visibility("default"))) int op(void*, uint64_t, aclOpExecutor* executor,                  \
                                                           aclrtStream stream) {                                      \
    return vnpu::launch(#op, executor, stream);                                                                       \
  }                                                                                                                   \
  static vnpu::Work op##Body(VNPU_FOR_EACH(VNPU_TYPED, __VA_ARGS__))
