// SPDX-License-Identifier: Apache-2.0
// The older way to launch an operator: by name, with descriptions and attributes, through a compiler. torch_npu falls
// back to it where libopapi has no function for an operator. The descriptions are kept; the launch fails and says
// which operator was asked for.
#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "runtime.h"

struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> dims;
  std::string name;
};

struct aclDataBuffer {
  void* data;
  size_t bytes;
};

// No operator reads its attributes.
struct aclopAttr {};

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  if (count < 0 || (count > 0 && dims == nullptr)) return nullptr;
  return new aclTensorDesc{type, format, std::vector<int64_t>(dims, dims + count), {}};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }

aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }

aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }

size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (index >= desc->dims.size()) return vnpu::fail(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: no such index");
  *size = desc->dims[index];
  return ACL_SUCCESS;
}

void aclSetTensorDescName(aclTensorDesc* desc, const char* name) { desc->name = name; }

aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
  desc->format = format;
  return ACL_SUCCESS;
}

aclError aclSetTensorShape(aclTensorDesc* desc, int count, const int64_t* dims) {
  desc->dims.assign(dims, dims + count);
  return ACL_SUCCESS;
}

aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }

aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }

void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }

aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}

aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  std::string message = std::string("the operator ") + type +
                        " was launched by name (aclopCompileAndExecute), which is not implemented: libopapi lacks the "
                        "aclnn function that torch_npu looked for first";
  static std::mutex mutex;
  static auto* told = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  if (told->insert(type).second) std::fprintf(stderr, "virtual NPU: %s\n", message.c_str());  // torch_npu tries again
  return vnpu::fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, message);
}

}  // extern "C"
