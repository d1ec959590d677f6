// SPDX-License-Identifier: Apache-2.0
// The trace: one JSON object a line, appended to the file named by VIRTUAL_NPU_TRACE. A line is one write() to a
// file opened with O_APPEND, so the lines of several threads and ranks do not mix.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "runtime.h"

namespace vnpu {
namespace {

int trace_file() {
  static const int file = [] {
    const char* path = std::getenv("VIRTUAL_NPU_TRACE");
    if (path == nullptr || *path == '\0') return -1;
    int opened = ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (opened < 0) {
      std::fprintf(stderr, "virtual NPU: cannot write the trace file %s\n", path);
      std::_Exit(1);
    }
    return opened;
  }();
  return file;
}

}  // namespace

bool tracing() { return trace_file() >= 0; }

void record(const std::string& json_fields) {
  if (!tracing()) return;
  static uint64_t order = 0;
  static auto* mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);  // the lines of a process are in order
  const char* rank = std::getenv("RANK");
  auto now = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch());
  std::string line = "{\"order\":" + std::to_string(order++) + ",\"time_us\":" + std::to_string(now.count()) +
                     ",\"pid\":" + std::to_string(::getpid()) +
                     ",\"rank\":" + std::to_string(rank == nullptr ? 0 : std::atoi(rank)) +
                     ",\"device\":" + std::to_string(current_device()) +
                     ",\"thread\":" + std::to_string(::syscall(SYS_gettid)) + "," + json_fields + "}\n";
  if (::write(trace_file(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    std::fprintf(stderr, "virtual NPU: the trace could not be written; it would be incomplete\n");
    std::_Exit(1);
  }
}

void record_sync(const char* what) {
  if (tracing()) record("\"kind\":\"sync\",\"what\":\"" + std::string(what) + "\"");
}

std::string json_string(const std::string& text) {
  std::string quoted = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += static_cast<char>(c);
    } else if (c < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      quoted += escaped;
    } else {
      quoted += static_cast<char>(c);
    }
  }
  return quoted + "\"";
}

}  // namespace vnpu
