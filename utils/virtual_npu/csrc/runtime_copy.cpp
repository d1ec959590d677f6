// SPDX-License-Identifier: Apache-2.0
// Copies and fills. The plain ones act at once and know no stream: who forgets to synchronise first reads old bytes,
// as on the device. The asynchronous ones act in the order of their stream.
#include <cstring>

#include "runtime.h"

namespace vnpu {
namespace {

const char* direction_of(const void* destination, const void* source) {
  bool from = is_device_memory(source), to = is_device_memory(destination);
  return from ? (to ? "d2d" : "d2h") : (to ? "h2d" : "h2h");
}

void record_copy(const void* destination, const void* source, size_t bytes, bool async) {
  if (!tracing()) return;
  record(std::string("\"kind\":\"copy\",\"direction\":\"") + direction_of(destination, source) +
         "\",\"bytes\":" + std::to_string(bytes) + ",\"async\":" + (async ? "true" : "false"));
}

void check_copy(const void* destination, size_t room, const void* source, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room) {
    throw Error(ACL_ERROR_INVALID_PARAM, "a copy of " + std::to_string(bytes) + " bytes into room for " +
                                             std::to_string(room));
  }
  check_bytes(destination, bytes);
  check_bytes(source, bytes);
  bool from = is_device_memory(source), to = is_device_memory(destination);
  bool good = kind == ACL_MEMCPY_DEFAULT || (kind == ACL_MEMCPY_HOST_TO_HOST && !from && !to) ||
              ((kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE) && !from && to) ||
              (kind == ACL_MEMCPY_DEVICE_TO_HOST && from && !to) ||
              ((kind == ACL_MEMCPY_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_INNER_DEVICE_TO_DEVICE ||
                kind == ACL_MEMCPY_INTER_DEVICE_TO_DEVICE) && from && to);
  if (!good) {
    throw Error(ACL_ERROR_RT_PARAM_INVALID, "a copy of kind " + std::to_string(static_cast<int>(kind)) +
                                                " between addresses that are " + direction_of(destination, source));
  }
}

}  // namespace
}  // namespace vnpu

using vnpu::guarded;

extern "C" {

aclError aclrtMemcpy(void* destination, size_t room, const void* source, size_t bytes, aclrtMemcpyKind kind) {
  return guarded([&] {
    if (bytes == 0) return;
    vnpu::check_copy(destination, room, source, bytes, kind);
    vnpu::record_copy(destination, source, bytes, false);
    std::memmove(destination, source, bytes);
  });
}

// Pageable host memory makes the copy blocking, in the order of the stream all the same.
aclError aclrtMemcpyAsync(void* destination, size_t room, const void* source, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return guarded([&] {
    if (bytes == 0) return;
    vnpu::check_copy(destination, room, source, bytes, kind);
    bool pageable = vnpu::place_of(destination) == vnpu::Place::kPageable ||
                    vnpu::place_of(source) == vnpu::Place::kPageable;
    vnpu::record_copy(destination, source, bytes, !pageable);
    vnpu::enqueue(stream, "aclrtMemcpyAsync", [=] { std::memmove(destination, source, bytes); });
    if (pageable) vnpu::wait_stream(stream);
  });
}

aclError aclrtMemset(void* pointer, size_t room, int32_t value, size_t bytes) {
  return guarded([&] {
    if (bytes > room) throw vnpu::Error(ACL_ERROR_INVALID_PARAM, "aclrtMemset: more bytes than there is room for");
    std::memset(pointer, value, bytes);
  });
}

aclError aclrtMemsetAsync(void* pointer, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  return guarded([&] {
    if (bytes > room) throw vnpu::Error(ACL_ERROR_INVALID_PARAM, "aclrtMemsetAsync: more bytes than there is room for");
    vnpu::enqueue(stream, "aclrtMemsetAsync", [=] { std::memset(pointer, value, bytes); });
  });
}

}  // extern "C"
