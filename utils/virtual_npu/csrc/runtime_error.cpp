// SPDX-License-Identifier: Apache-2.0
// Error messages, the sticky errors of devices, the log.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "runtime.h"

namespace vnpu {
namespace {

struct Recent {
  std::string message, handed_out;
};

Recent& recent() {
  static thread_local Recent instance;
  return instance;
}

struct DeviceErrors {
  std::mutex mutex;
  std::map<int, std::pair<int, std::string>> by_device;
};

DeviceErrors& device_errors() {
  static auto* instance = new DeviceErrors;
  return *instance;
}

}  // namespace

int fail(int code, const std::string& message) {
  recent().message = "virtual NPU: " + message;
  return code;
}

int missing(const char* name) {
  std::fprintf(stderr, "virtual NPU: %s is not implemented\n", name);
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, std::string(name) + " is not implemented");
}

void set_device_error(int device, int code, const std::string& message) {
  std::lock_guard<std::mutex> lock(device_errors().mutex);
  device_errors().by_device.emplace(device, std::make_pair(code, message));  // the first one stays
}

void throw_device_error(int device) {
  std::lock_guard<std::mutex> lock(device_errors().mutex);
  auto found = device_errors().by_device.find(device);
  if (found != device_errors().by_device.end()) throw Error(found->second.first, found->second.second);
}

int peek_device_error(int device) {
  std::lock_guard<std::mutex> lock(device_errors().mutex);
  auto found = device_errors().by_device.find(device);
  return found == device_errors().by_device.end() ? ACL_SUCCESS : found->second.first;
}

void clear_device_error(int device) {
  std::lock_guard<std::mutex> lock(device_errors().mutex);
  device_errors().by_device.erase(device);
}

}  // namespace vnpu

extern "C" {

// Reading takes the message away, as in CANN; the pointer is good until the next call on this thread.
const char* aclGetRecentErrMsg() {
  auto& mine = vnpu::recent();
  if (mine.message.empty()) return nullptr;
  mine.handed_out = std::move(mine.message);
  mine.message.clear();
  return mine.handed_out.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return vnpu::peek_device_error(vnpu::current_device()); }

aclError aclrtGetLastError(aclrtLastErrLevel) { return vnpu::peek_device_error(vnpu::current_device()); }

// torch_npu's own log. CANN writes it to a file; here it goes to stderr where the level asks for it, as CANN does with
// ASCEND_SLOG_PRINT_TO_STDOUT=1.
void aclAppLog(aclLogLevel level, const char* function, const char* file, uint32_t line, const char* format, ...) {
  static const int threshold = [] {
    const char* wanted = std::getenv("ASCEND_SLOG_PRINT_TO_STDOUT");
    if (wanted == nullptr || std::string(wanted) != "1") return static_cast<int>(ACL_ERROR) + 1;
    const char* text = std::getenv("ASCEND_GLOBAL_LOG_LEVEL");
    return text == nullptr ? static_cast<int>(ACL_ERROR) : std::atoi(text);
  }();
  if (static_cast<int>(level) < threshold) return;
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "[virtual NPU log %d] %s:%u %s: %s\n", static_cast<int>(level), file, line, function, text);
}

}  // extern "C"
