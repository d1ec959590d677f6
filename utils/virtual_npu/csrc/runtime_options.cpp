// SPDX-License-Identifier: Apache-2.0
// Versions, capabilities and options. Options are remembered and given back; there is no compiler and no profiler.
#include <cstring>
#include <map>

#include "acl/acl_op_compiler.h"
#include "runtime.h"

namespace vnpu {
namespace {

struct Options {
  std::mutex mutex;
  std::map<int, std::string> compile;
  std::map<int, int64_t> system;
};

// The CANN whose ways torch_npu is told to follow, and a driver of that time. torch_npu picks operators by it.
constexpr const char* kCannVersion = "9.1.0";
constexpr const char* kDriverVersion = "25.5.0";

// The figures of the chip that aclrtGetSocName names.
constexpr int64_t kCubeCores = 24, kVectorCores = 48, kL2Bytes = 192 << 20;

Options& options() {
  static auto* instance = new Options{{}, {{ACL_OP_JIT_COMPILE, "disable"}}, {{ACL_OPT_DETERMINISTIC, 0}}};
  return *instance;
}

}  // namespace
}  // namespace vnpu

using vnpu::Error;
using vnpu::guarded;

extern "C" {

aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  std::lock_guard<std::mutex> lock(vnpu::options().mutex);
  vnpu::options().compile[option] = value;
  return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt option) {
  std::lock_guard<std::mutex> lock(vnpu::options().mutex);
  return vnpu::options().compile[option].size() + 1;
}

aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
  return guarded([&] {
    std::lock_guard<std::mutex> lock(vnpu::options().mutex);
    const std::string& stored = vnpu::options().compile[option];
    if (length < stored.size() + 1) throw Error(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: the buffer is too short");
    std::memcpy(value, stored.c_str(), stored.size() + 1);
  });
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  std::lock_guard<std::mutex> lock(vnpu::options().mutex);
  vnpu::options().system[option] = value;
  return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  std::lock_guard<std::mutex> lock(vnpu::options().mutex);
  auto found = vnpu::options().system.find(option);
  if (found == vnpu::options().system.end()) {
    return vnpu::fail(ACL_ERROR_RT_SYSPARAMOPT_NOT_SET, "aclrtGetSysParamOpt: the option was not set");
  }
  *value = found->second;
  return ACL_SUCCESS;
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }

// An operator takes as long as it takes here: the limits on it have no effect, whatever they are.
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual != nullptr) *actual = timeout;
  return ACL_SUCCESS;
}

aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

// The CPU keeps infinities and NaNs; it has no saturating mode.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  if (mode == ACL_RT_OVERFLOW_MODE_INFNAN) return ACL_SUCCESS;
  return vnpu::fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "only the mode INFNAN (INF_NAN_MODE_ENABLE=1) is there");
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM:
      *value = vnpu::kCubeCores;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
      *value = vnpu::kVectorCores;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE:
      *value = vnpu::kL2Bytes;
      return ACL_SUCCESS;
    default:
      return vnpu::fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: no capability " + std::to_string(info));
  }
}

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
  *version = {};
  const char* text = name == ACL_PKG_NAME_DRIVER ? vnpu::kDriverVersion : vnpu::kCannVersion;
  std::strncpy(version->version, text, sizeof version->version - 1);
  return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char* package, char* version) {
  std::strcpy(version, std::string(package) == "driver" ? vnpu::kDriverVersion : vnpu::kCannVersion);
  return ACL_SUCCESS;
}

}  // extern "C"
