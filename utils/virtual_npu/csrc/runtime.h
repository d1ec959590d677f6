// SPDX-License-Identifier: Apache-2.0
// What the files of the runtime share. Its globals are never destroyed: torch_npu calls into it from destructors that
// run late.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"
#include "vnpu.h"

namespace vnpu {

int device_count();                       // those this process may use: ASCEND_RT_VISIBLE_DEVICES applied
int physical_device(int device);          // the number without ASCEND_RT_VISIBLE_DEVICES
bool set_current_device(int device);      // false: there is no such device; -1: no device
int check_current_device();               // throws Error where the thread has none
void check_device(int device);            // throws Error where there is no such device

// An error with its ACL code. Entry points turn it into their return value with `guarded`.
struct Error : std::exception {
  Error(int code, std::string message) : code(code), message(std::move(message)) {}
  const char* what() const noexcept override { return message.c_str(); }
  int code;
  std::string message;
};

template <class F>
aclError guarded(F&& body) {
  try {
    body();
    return ACL_SUCCESS;
  } catch (const Error& error) {
    return fail(error.code, error.message);
  } catch (const std::exception& error) {
    return fail(ACL_ERROR_RT_INTERNAL_ERROR, error.what());
  }
}

int missing(const char* name);  // the result of a function that the stand-in does not have; says so on stderr

// The first error of asynchronous work on a device. It stays until the device is reset.
void set_device_error(int device, int code, const std::string& message);
void throw_device_error(int device);  // throws it, if there is one
int peek_device_error(int device);    // its code or ACL_SUCCESS
void clear_device_error(int device);

// Streams. A control task (the mark of an event, a wait for one) runs even when the device is in error, so that nobody
// waits for ever.
void enqueue_control(aclrtStream stream, std::function<void()> work);
void wait_stream(aclrtStream stream, int timeout_ms = -1);
void wait_device(int device, int timeout_ms = -1);
void release_streams(int device);  // the part of aclrtResetDevice

void record_sync(const char* what);  // a host synchronisation, for the trace

// Memory.
enum class Place { kPageable, kPinned, kDevice };
Place place_of(const void* pointer);
void check_bytes(const void* pointer, size_t bytes);  // throws where device memory ends before `bytes`

}  // namespace vnpu
