// SPDX-License-Identifier: Apache-2.0
// Devices, contexts and what they say of themselves.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <regex>
#include <sstream>
#include <vector>

#include "runtime.h"

// A context is the device it belongs to; every thread may make one current.
struct VirtualContext {
  int device;
};

namespace vnpu {
namespace {

// An Atlas A2 chip: what the documentation of CANN says of bf16, grouped matmul and so on holds for it.
constexpr const char* kSocName = "Ascend910B2";

int configured_count() {
  const char* text = std::getenv("VIRTUAL_NPU_DEVICES");
  int count = text == nullptr ? 1 : std::atoi(text);
  return count < 0 ? 0 : count;
}

// ASCEND_RT_VISIBLE_DEVICES="2,0" makes device 2 the first and device 0 the second; as in the real runtime the list
// ends at the first number that is no device.
std::vector<int> visible_devices() {
  std::vector<int> visible;
  int count = configured_count();
  const char* text = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int device = 0; device < count; ++device) visible.push_back(device);
    return visible;
  }
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    char* end = nullptr;
    long device = std::strtol(item.c_str(), &end, 10);
    if (end == item.c_str() || device < 0 || device >= count) break;
    visible.push_back(static_cast<int>(device));
  }
  return visible;
}

const std::vector<int>& devices() {
  static const auto* instance = new std::vector<int>(visible_devices());
  return *instance;
}

thread_local int thread_device = -1;

VirtualContext* context_of(int device) {
  static auto* contexts = [] {
    auto* all = new std::vector<VirtualContext*>;
    for (int d = 0; d < device_count(); ++d) all->push_back(new VirtualContext{d});
    return all;
  }();
  return contexts->at(device);
}

// The devices in use, for aclrtGetPrimaryCtxState.
std::vector<std::atomic<bool>>& active() {
  static auto* instance = new std::vector<std::atomic<bool>>(device_count());
  return *instance;
}

std::atomic<bool> initialized{false};

// A thread that has set no device uses this one, where the configuration given to aclInit names it.
std::atomic<int> default_device{-1};

int read_default_device(const char* path) {
  if (path == nullptr) return -1;
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::smatch found;
  return std::regex_search(text, found, std::regex("\"default_device\"\\s*:\\s*\"(\\d+)\"")) ? std::stoi(found[1]) : -1;
}

}  // namespace

int device_count() { return static_cast<int>(devices().size()); }

int physical_device(int device) { return devices().at(device); }

int current_device() { return thread_device >= 0 ? thread_device : default_device.load(); }

bool set_current_device(int device) {
  if (device < -1 || device >= device_count()) return false;
  thread_device = device;
  return true;
}

int check_current_device() {
  int device = current_device();
  if (device < 0) throw Error(ACL_ERROR_RT_CONTEXT_NULL, "no device was set on this thread (aclrtSetDevice)");
  return device;
}

void check_device(int device) {
  if (device >= 0 && device < device_count()) return;
  throw Error(ACL_ERROR_RT_INVALID_DEVICEID,
              "device " + std::to_string(device) + " does not exist: there are " + std::to_string(device_count()) +
                  " (VIRTUAL_NPU_DEVICES, ASCEND_RT_VISIBLE_DEVICES)");
}

}  // namespace vnpu

using vnpu::Error;
using vnpu::guarded;

extern "C" {

aclError aclInit(const char* configuration) {
  if (vnpu::initialized.exchange(true)) return vnpu::fail(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before");
  int device = vnpu::read_default_device(configuration);
  if (device < vnpu::device_count()) vnpu::default_device = device;
  return ACL_SUCCESS;
}

aclError aclFinalize() {
  if (!vnpu::initialized.exchange(false)) return vnpu::fail(ACL_ERROR_UNINITIALIZE, "aclInit was not called");
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(vnpu::device_count());
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  return guarded([&] {
    vnpu::check_device(device);
    vnpu::set_current_device(device);
    vnpu::active()[device] = true;
  });
}

aclError aclrtGetDevice(int32_t* device) {
  return guarded([&] { *device = vnpu::check_current_device(); });
}

aclError aclrtResetDevice(int32_t device) {
  return guarded([&] {
    vnpu::check_device(device);
    vnpu::release_streams(device);
    vnpu::active()[device] = false;
    vnpu::clear_device_error(device);
    if (vnpu::current_device() == device) vnpu::set_current_device(-1);
  });
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* is_active) {
  return guarded([&] {
    vnpu::check_device(device);
    if (flags != nullptr) *flags = 0;
    if (is_active != nullptr) *is_active = vnpu::active()[device] ? 1 : 0;
  });
}

aclError aclrtResetDeviceForce(int32_t device) { return aclrtResetDevice(device); }

aclError aclrtGetCurrentContext(aclrtContext* context) {
  return guarded([&] { *context = vnpu::context_of(vnpu::check_current_device()); });
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context == nullptr) return vnpu::fail(ACL_ERROR_INVALID_PARAM, "aclrtSetCurrentContext: the context is null");
  int device = static_cast<VirtualContext*>(context)->device;
  vnpu::set_current_device(device);
  vnpu::active()[device] = true;
  return ACL_SUCCESS;
}

const char* aclrtGetSocName() { return vnpu::kSocName; }

aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t device, int32_t peer) {
  return guarded([&] {
    vnpu::check_device(device);
    vnpu::check_device(peer);
    *can_access = device == peer ? 0 : 1;
  });
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
  return guarded([&] { vnpu::check_device(peer); });
}

aclError aclrtDeviceDisablePeerAccess(int32_t peer) {
  return guarded([&] { vnpu::check_device(peer); });
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = ::getpid();
  return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t device, int32_t* const logical) {
  return guarded([&] {
    vnpu::check_device(device);
    *logical = vnpu::physical_device(device);
  });
}

}  // extern "C"
