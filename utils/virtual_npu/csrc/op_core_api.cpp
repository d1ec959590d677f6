// SPDX-License-Identifier: Apache-2.0
// The C functions that make and destroy arguments of operators, and what is behind opapi.h.
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <dlfcn.h>

#include <cstring>
#include <future>

#include "opapi.h"

#define VNPU_EXPORT extern "C" __attribute__((visibility("default")))

struct aclOpExecutor {
  std::string op;
  std::function<void()> work;
  bool waits = false;
  std::vector<std::string> records;
};

namespace {

// Copies of internal_copy records of the plan that is being made on this thread.
thread_local std::vector<std::string> pending_records;

std::optional<at::ScalarType> find_scalar_type(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_UINT16: return at::kUInt16;
    case ACL_UINT32: return at::kUInt32;
    case ACL_UINT64: return at::kUInt64;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX32: return at::kComplexHalf;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    default: break;
  }
  switch (static_cast<int>(dtype)) {  // by number: the headers of torch_npu 2.9 lack the names
    case 35: return at::kFloat8_e5m2;
    case 36: return at::kFloat8_e4m3fn;
    default: return std::nullopt;
  }
}

bool is_plain_format(aclFormat format) {
  switch (format) {
    case ACL_FORMAT_UNDEFINED:
    case ACL_FORMAT_ND:
    case ACL_FORMAT_NCL:
    case ACL_FORMAT_NCHW:
    case ACL_FORMAT_NHWC:
    case ACL_FORMAT_NCDHW:
    case ACL_FORMAT_NDHWC:
    case ACL_FORMAT_HWCN:
    case ACL_FORMAT_NC:
      return true;
    default:
      return false;
  }
}

template <class T>
T read_value(const void* value) {
  T result;
  std::memcpy(&result, value, sizeof(T));
  return result;
}

at::Scalar read_scalar(const void* value, aclDataType dtype) {
  switch (vnpu::scalar_type(dtype)) {
    case at::kFloat: return read_value<float>(value);
    case at::kDouble: return read_value<double>(value);
    case at::kHalf: return read_value<at::Half>(value);
    case at::kBFloat16: return read_value<at::BFloat16>(value);
    case at::kChar: return read_value<int8_t>(value);
    case at::kShort: return read_value<int16_t>(value);
    case at::kInt: return read_value<int32_t>(value);
    case at::kLong: return read_value<int64_t>(value);
    case at::kByte: return read_value<uint8_t>(value);
    case at::kUInt16: return read_value<uint16_t>(value);
    case at::kUInt32: return read_value<uint32_t>(value);
    case at::kUInt64: return read_value<uint64_t>(value);
    case at::kBool: return read_value<bool>(value);
    case at::kComplexFloat: return read_value<c10::complex<float>>(value);
    case at::kComplexDouble: return read_value<c10::complex<double>>(value);
    default: throw vnpu::OpError(vnpu::kParamInvalid, "no scalar of dtype " + vnpu::dtype_name(dtype));
  }
}

std::string json_ints(at::IntArrayRef values) {
  std::string json = "[";
  for (size_t i = 0; i < values.size(); i++) json += (i ? "," : "") + std::to_string(values[i]);
  return json + "]";
}

std::string json_scalar(const at::Scalar& value) {
  if (value.isBoolean()) return value.toBool() ? "true" : "false";
  if (value.isIntegral(false)) return std::to_string(value.toLong());
  std::ostringstream stream;
  stream << value;
  // JSON has no NaN, no infinity and no complex number.
  const bool finite = value.isFloatingPoint() && std::isfinite(value.toDouble());
  return finite ? stream.str() : vnpu::json_string(stream.str());
}

void append(std::string& list, const std::string& item) {
  if (!list.empty()) list += ",";
  list += item;
}

// A worker computes on one thread: the machine's cores are shared by all ranks and streams, and sums come out the same
// whatever the number of cores. OpenMP's setting belongs to the calling thread alone, unlike at::set_num_threads, but
// ATen overwrites it at its first use on a thread: hence get_num_threads before.
void use_one_thread() {
  static thread_local const bool done = [] {
    at::get_num_threads();
    if (auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
    return true;
  }();
  (void)done;
}

}  // namespace

namespace vnpu {

at::ScalarType scalar_type(aclDataType dtype) {
  const auto found = find_scalar_type(dtype);
  check(found.has_value(), "the virtual NPU does not know the data type ", dtype_name(dtype));
  return *found;
}

std::string dtype_name(aclDataType dtype) {
  const auto found = find_scalar_type(dtype);
  if (!found) return "aclDataType " + std::to_string(static_cast<int>(dtype));
  switch (*found) {
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kByte: return "uint8";
    case at::kBool: return "bool";
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: return c10::toString(*found);
  }
}

std::string shape_text(at::IntArrayRef sizes) {
  std::string result = "[";
  for (size_t i = 0; i < sizes.size(); i++) result += (i ? ", " : "") + std::to_string(sizes[i]);
  return result + "]";
}

TensorArg::TensorArg(const char* name, const aclTensor* handle, bool required) : name_(name) {
  if (handle == nullptr) {
    if (required) throw OpError(kParamNullptr, text(name, " is a null pointer"));
    return;
  }
  desc_ = handle->desc;
  const auto* start = static_cast<const char*>(desc_->storage);
  check(is_plain_format(desc_->format), name, " (", shape(), ") is stored in the private format ",
        static_cast<int>(desc_->format), " (FRACTAL_NZ is 29), which the virtual NPU does not have");
  check(numel() == 0 || is_device_memory(start), name, " (", shape(), ") is not in the memory of a virtual NPU");
}

at::Tensor TensorArg::operator()() const {
  if (!present()) return {};
  const at::ScalarType type = dtype();
  auto* start = static_cast<char*>(desc_->storage);
  if (start != nullptr) start += desc_->offset * static_cast<int64_t>(c10::elementSize(type));
  return at::from_blob(start, desc_->sizes, desc_->strides, at::TensorOptions().dtype(type).device(at::kCPU));
}

int64_t TensorArg::bytes() const {
  if (!present()) return 0;
  const auto type = find_scalar_type(desc_->dtype);
  int64_t count = type ? static_cast<int64_t>(c10::elementSize(*type)) : 1;
  for (size_t i = 0; i < desc_->sizes.size(); i++) {
    if (desc_->strides[i] != 0 || desc_->sizes[i] == 0) count *= desc_->sizes[i];
  }
  return count;
}

std::string TensorArg::json() const {
  return "{\"name\":" + json_string(name_) + ",\"shape\":" + json_ints(sizes()) +
         ",\"dtype\":" + json_string(dtype_name(desc_->dtype)) + ",\"strides\":" + json_ints(strides()) +
         ",\"bytes\":" + std::to_string(bytes()) + "}";
}

void WrittenTensor::set(const at::Tensor& value) const {
  if (!present()) return;
  check(value.sizes() == sizes(), "the result for ", name_, " has the shape ", shape_text(value.sizes()),
        ", the memory given for it ", shape());
  (*this)().copy_(value);
}

void WrittenTensor::fill(const at::Scalar& value) const {
  if (present()) (*this)().fill_(value);
}

void WrittenTensor::set_view(const at::Tensor& value) const {
  if (!present()) return;
  check(value.numel() <= numel(), "the result for ", name_, " has the shape ", shape_text(value.sizes()),
        ", the memory given for it has only room for ", shape());
  at::Tensor memory = at::from_blob((*this)().data_ptr(), value.sizes(), at::TensorOptions().dtype(dtype()));
  memory.copy_(value);
  desc_->sizes = value.sizes().vec();
  desc_->strides = memory.strides().vec();
}

void Record::input(const TensorArg& x) {
  if (!x.present()) return;
  append(inputs_, x.json());
  bytes_read_ += x.bytes();
}

void Record::output(const TensorArg& x) {
  if (!x.present()) return;
  append(outputs_, x.json());
  bytes_written_ += x.bytes();
}

void Record::attribute_text(const char* name, const std::string& json_value) {
  append(attributes_, json_string(name) + ":" + json_value);
}

void Record::attribute(const char* name, const Scalar& value) { attribute_text(name, json_scalar(value())); }

void Record::attribute(const char* name, const Ints& value) { attribute_text(name, json_ints(value())); }

void Record::attribute(const char* name, const Dtype& value) {
  attribute_text(name, json_string(dtype_name(value.acl())));
}

std::string Record::json(const char* op) const {
  return "\"kind\":\"op\",\"name\":" + json_string(op) + ",\"inputs\":[" + inputs_ + "],\"outputs\":[" + outputs_ +
         "],\"attrs\":{" + attributes_ + "},\"bytes_read\":" + std::to_string(bytes_read_) +
         ",\"bytes_written\":" + std::to_string(bytes_written_);
}

void record_internal_copy(const char* op, const TensorArg& x, const std::string& reason) {
  if (!tracing()) return;
  pending_records.push_back("\"kind\":\"internal_copy\",\"name\":" + json_string(op) +
                            ",\"bytes\":" + std::to_string(x.bytes()) + ",\"tensor\":" + x.json() +
                            ",\"reason\":" + json_string(reason));
}

int start_plan(const char* op, uint64_t* workspace, aclOpExecutor** executor) {
  pending_records.clear();
  if (workspace == nullptr || executor == nullptr) {
    return fail(kParamNullptr, text(op, ": workspaceSize or executor is a null pointer"));
  }
  return 0;
}

void finish_plan(const char* op, Work work, const std::string& record, uint64_t* workspace, aclOpExecutor** executor) {
  std::vector<std::string> records = std::move(pending_records);
  if (!record.empty()) records.push_back(record);
  *workspace = 0;
  *executor = new aclOpExecutor{op, std::move(work.run), work.waits, std::move(records)};
}

int plan_failed(const char* op) {
  try {
    throw;
  } catch (const OpError& error) {
    return fail(error.code, text(op, ": ", error.what()));
  } catch (const c10::Error& error) {
    return fail(kParamInvalid, text(op, ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return fail(kParamInvalid, text(op, ": ", error.what()));
  }
}

int launch(const char* op, aclOpExecutor* executor, aclrtStream stream) {
  if (executor == nullptr) return fail(kParamNullptr, text(op, ": the executor is a null pointer"));
  std::unique_ptr<aclOpExecutor> plan(executor);
  if (plan->op != op) return fail(kParamInvalid, text(op, " was given the executor of ", plan->op));
  for (const std::string& line : plan->records) record(line);

  auto finished = std::make_shared<std::promise<void>>();
  auto wait = finished->get_future();
  enqueue(stream, op, [name = plan->op, work = std::move(plan->work), finished = std::move(finished)] {
    use_one_thread();
    c10::AutoGradMode no_grad(false);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      work();
    } catch (const c10::Error& error) {
      throw std::runtime_error(text(name, ": ", error.what_without_backtrace()));
    } catch (const std::exception& error) {
      throw std::runtime_error(text(name, ": ", error.what()));
    }
    finished->set_value();
  });
  if (!plan->waits) return 0;
  if (tracing()) record("\"kind\":\"sync\",\"what\":" + json_string(op));
  try {
    wait.get();  // the promise breaks where the work failed or did not run
    return 0;
  } catch (const std::future_error&) {
    return fail(kRuntimeError, text(op, ": the stream stopped before the operator was done"));
  }
}

}  // namespace vnpu

// ---------------------------------------------------------------------------------------------------------------------

VNPU_EXPORT aclTensor* aclCreateTensor(const int64_t* view_dims, uint64_t view_dims_num, aclDataType data_type,
                                       const int64_t* stride, int64_t offset, aclFormat format,
                                       const int64_t* storage_dims, uint64_t storage_dims_num, void* tensor_data) {
  auto desc = std::make_shared<vnpu::Desc>();
  desc->sizes.assign(view_dims, view_dims + view_dims_num);
  if (stride != nullptr) {
    desc->strides.assign(stride, stride + view_dims_num);
  } else {
    const auto packed = c10::contiguous_strides(desc->sizes);
    desc->strides.assign(packed.begin(), packed.end());
  }
  desc->storage_sizes.assign(storage_dims, storage_dims + storage_dims_num);
  desc->offset = offset;
  desc->dtype = data_type;
  desc->format = format;
  desc->storage = tensor_data;
  return new aclTensor{std::move(desc)};
}

VNPU_EXPORT aclScalar* aclCreateScalar(void* value, aclDataType data_type) {
  try {
    return new aclScalar{read_scalar(value, data_type)};
  } catch (const std::exception& error) {
    vnpu::fail(vnpu::kParamInvalid, std::string("aclCreateScalar: ") + error.what());
    return nullptr;
  }
}

VNPU_EXPORT aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) {
  return new aclIntArray{std::vector<int64_t>(value, value + size)};
}

VNPU_EXPORT aclFloatArray* aclCreateFloatArray(const float* value, uint64_t size) {
  return new aclFloatArray{std::vector<float>(value, value + size)};
}

VNPU_EXPORT aclBoolArray* aclCreateBoolArray(const bool* value, uint64_t size) {
  return new aclBoolArray{std::vector<bool>(value, value + size)};
}

VNPU_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* value, uint64_t size) {
  return new aclTensorList{std::vector<const aclTensor*>(value, value + size)};
}

VNPU_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* value, uint64_t size) {
  return new aclScalarList{std::vector<const aclScalar*>(value, value + size)};
}

VNPU_EXPORT int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return 0;
}

VNPU_EXPORT int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return 0;
}

VNPU_EXPORT int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return 0;
}

VNPU_EXPORT int aclDestroyFloatArray(const aclFloatArray* array) {
  delete array;
  return 0;
}

VNPU_EXPORT int aclDestroyBoolArray(const aclBoolArray* array) {
  delete array;
  return 0;
}

VNPU_EXPORT int aclDestroyTensorList(const aclTensorList* list) {
  if (list != nullptr) {
    for (const aclTensor* tensor : list->values) delete tensor;
  }
  delete list;
  return 0;
}

VNPU_EXPORT int aclDestroyScalarList(const aclScalarList* list) {
  if (list != nullptr) {
    for (const aclScalar* scalar : list->values) delete scalar;
  }
  delete list;
  return 0;
}

// The caller owns the array (delete[]).
VNPU_EXPORT int aclGetViewShape(const aclTensor* tensor, int64_t** view_dims, uint64_t* view_dims_num) {
  if (tensor == nullptr || view_dims == nullptr || view_dims_num == nullptr) {
    return vnpu::fail(vnpu::kParamNullptr, "aclGetViewShape: null pointer");
  }
  const std::vector<int64_t>& sizes = tensor->desc->sizes;
  *view_dims = new int64_t[sizes.size()];
  std::copy(sizes.begin(), sizes.end(), *view_dims);
  *view_dims_num = sizes.size();
  return 0;
}

// CANN pools memory between these; here every argument owns its own, so there is nothing to do.
VNPU_EXPORT int InitHugeMemThreadLocal(void*, bool) { return 0; }
VNPU_EXPORT void UnInitHugeMemThreadLocal(void*, bool) {}
VNPU_EXPORT void ReleaseHugeMem(void*, bool) {}
