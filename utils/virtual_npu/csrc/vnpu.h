// What the three parts of the stand-in share: the runtime (libascendcl and the small libraries beside it),
// the operators (libopapi) and the collectives (libhccl). Implemented in runtime*.cpp; nothing here needs libtorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "acl/acl.h"

namespace vnpu {

// Stores `message` as what aclGetRecentErrMsg() returns next on this thread and gives back `code`, so that an entry
// point can `return vnpu::fail(ACL_ERROR_INVALID_PARAM, "...")`.
int fail(int code, const std::string& message);

// Queues `work` on a stream (nullptr: the default stream of the current device). Works of one stream run in order on a
// worker thread of that stream, never on the caller's. An exception out of `work` becomes the sticky error of the
// stream's device: the following synchronisations fail with it, and what is queued behind it does not run.
void enqueue(aclrtStream stream, const char* name, std::function<void()> work);

// The device that is current on the calling thread (inside `work`: the stream's device).
int current_device();
int device_of(aclrtStream stream);

// True for a pointer into memory of a virtual device (host memory of this process, but not the host's to touch).
bool is_device_memory(const void* pointer);

// The trace. `record` takes the inside of one JSON object, without the braces, e.g. "\"kind\":\"op\",\"name\":\"aclnnAdd\"";
// the time order, rank, device and thread are added by it. Call it at launch time, on the launching thread.
bool tracing();
void record(const std::string& json_fields);
std::string json_string(const std::string& text);  // quoted and escaped

}  // namespace vnpu
