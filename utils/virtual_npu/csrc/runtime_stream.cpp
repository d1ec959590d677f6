// SPDX-License-Identifier: Apache-2.0
// Streams and events. A stream is a queue and a thread that empties it in order; the thread starts with the first task.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "runtime.h"

namespace vnpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kEventIpc = 0x40;  // ACL_EVENT_IPC, which older headers do not have

struct Task {
  std::string name;
  std::function<void()> work;
  bool control;  // runs whatever happened before it
};

// What one aclrtRecordEvent stands for. An event that is recorded again gets a new mark; who waits for the old one is
// not disturbed.
struct Mark {
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  Clock::time_point time;

  void reach() {
    std::lock_guard<std::mutex> lock(mutex);
    time = Clock::now();
    done = true;
    reached.notify_all();
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
  bool wait(int timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex);
    if (timeout_ms < 0) {
      reached.wait(lock, [&] { return done; });
      return true;
    }
    return reached.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return done; });
  }
};

struct Stream {
  Stream(int device, int id) : device(device), id(id), pid(::getpid()) {}

  const int device, id;
  const pid_t pid;  // a forked child has the stream but not its thread
  std::mutex mutex;
  std::condition_variable work_arrived, work_done;
  std::deque<Task> queue;
  uint64_t queued = 0, finished = 0;
  bool started = false, stopping = false, discarding = false;
  std::thread thread;

  void check_process() const {
    if (::getpid() == pid) return;
    throw Error(ACL_ERROR_RT_CONTEXT_NULL,
                "the NPU was initialised before this process was forked, and its streams did not come along (start the "
                "process with spawn, or fork before the first use of the NPU)");
  }

  void push(Task task) {
    check_process();
    std::lock_guard<std::mutex> lock(mutex);
    if (stopping) throw Error(ACL_ERROR_RT_STREAM_ABORT, "'" + task.name + "' was launched on a destroyed stream");
    if (!started) {
      thread = std::thread([this] { run(); });
      started = true;
    }
    queue.push_back(std::move(task));
    ++queued;
    work_arrived.notify_one();
  }

  void run() {
    set_current_device(device);
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      work_arrived.wait(lock, [&] { return !queue.empty() || stopping; });
      if (queue.empty()) return;
      Task task = std::move(queue.front());
      queue.pop_front();
      bool skip = !task.control && (discarding || peek_device_error(device) != ACL_SUCCESS);
      lock.unlock();
      if (!skip) execute(task);
      task.work = nullptr;  // what it held is released before anyone is told that it is done
      lock.lock();
      ++finished;
      work_done.notify_all();
    }
  }

  void execute(Task& task) {
    auto report = [&](int code, const std::string& what) {
      set_device_error(device, code, "'" + task.name + "' failed on device " + std::to_string(device) + ": " + what);
    };
    try {
      task.work();
    } catch (const Error& error) {
      report(error.code, error.message);
    } catch (const std::exception& error) {
      report(ACL_ERROR_RT_AICORE_EXCEPTION, error.what());
    } catch (...) {
      report(ACL_ERROR_RT_AICORE_EXCEPTION, "an exception that is no std::exception");
    }
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return finished == queued;
  }

  // Waits for what was queued before the call.
  bool wait(int timeout_ms) {
    check_process();
    std::unique_lock<std::mutex> lock(mutex);
    auto reached = [this, last = queued] { return finished >= last; };
    if (timeout_ms < 0) {
      work_done.wait(lock, reached);
      return true;
    }
    return work_done.wait_for(lock, std::chrono::milliseconds(timeout_ms), reached);
  }

  void ask_to_stop(bool discard) {
    std::lock_guard<std::mutex> lock(mutex);
    stopping = true;
    discarding = discarding || discard;
    work_arrived.notify_one();
  }

  // Ends the thread: after what is queued, or (`discard`) after the task that runs now. That one may be blocked for
  // ever (a collective whose peers are gone): then the thread is left alone after a while, and false is returned.
  bool stop(bool discard, Clock::time_point deadline) {
    if (::getpid() != pid) return false;
    ask_to_stop(discard);
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    bool done = wait(discard ? static_cast<int>(left > 0 ? left : 0) : -1);
    if (thread.joinable()) done ? thread.join() : thread.detach();
    return done;
  }
};

constexpr auto kPatience = std::chrono::seconds(5);

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
  std::map<int, Stream*> defaults;
  int next_id = 0;
};

void stop_at_exit();

Streams& streams() {
  static auto* instance = [] {
    std::atexit(stop_at_exit);
    return new Streams;
  }();
  return *instance;
}

// Stops the streams of a device (-1: of all); what they have not begun is dropped.
void stop_streams(int device) {
  std::vector<Stream*> stopped;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (Stream* stream : streams().all) {
      if (device == -1 || stream->device == device) stopped.push_back(stream);
    }
    for (Stream* stream : stopped) streams().all.erase(stream);
    for (auto entry = streams().defaults.begin(); entry != streams().defaults.end();) {
      entry = device == -1 || entry->first == device ? streams().defaults.erase(entry) : std::next(entry);
    }
  }
  for (Stream* stream : stopped) stream->ask_to_stop(true);
  auto deadline = Clock::now() + kPatience;
  for (Stream* stream : stopped) {
    if (stream->stop(true, deadline)) delete stream;
  }
}

// The workers compute with libtorch, whose globals are about to be destroyed.
void stop_at_exit() { stop_streams(-1); }

Stream* new_stream(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto* stream = new Stream(device, streams().next_id++);
  streams().all.insert(stream);
  return stream;
}

Stream* find(aclrtStream handle) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  if (handle == nullptr) {
    int device = check_current_device();
    Stream*& stream = streams().defaults[device];
    if (stream == nullptr) {
      stream = new Stream(device, streams().next_id++);
      streams().all.insert(stream);
    }
    return stream;
  }
  auto* stream = static_cast<Stream*>(handle);
  if (streams().all.count(stream) == 0) {
    throw Error(ACL_ERROR_RT_PARAM_INVALID, "the stream does not exist (it was destroyed, or never created)");
  }
  return stream;
}

std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  std::vector<Stream*> found;
  for (Stream* stream : streams().all) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // of the last record; null before the first

  std::shared_ptr<Mark> current() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
};

Event& event_of(aclrtEvent handle) {
  if (handle == nullptr) throw Error(ACL_ERROR_INVALID_PARAM, "the event is null");
  return *static_cast<Event*>(handle);
}

void destroy(aclrtStream handle, bool discard) {
  if (handle == nullptr) throw Error(ACL_ERROR_INVALID_PARAM, "the default stream cannot be destroyed");
  Stream* stream = find(handle);
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(stream);
  }
  if (stream->stop(discard, Clock::now() + kPatience)) delete stream;
}

}  // namespace

void enqueue(aclrtStream stream, const char* name, std::function<void()> work) {
  find(stream)->push({name, std::move(work), false});
}

void enqueue_control(aclrtStream stream, std::function<void()> work) {
  find(stream)->push({"event", std::move(work), true});
}

int device_of(aclrtStream stream) { return find(stream)->device; }

void wait_stream(aclrtStream handle, int timeout_ms) {
  Stream* stream = find(handle);
  if (!stream->wait(timeout_ms)) {
    throw Error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                "the stream was not done after " + std::to_string(timeout_ms) + " ms");
  }
  throw_device_error(stream->device);
}

void wait_device(int device, int timeout_ms) {
  for (Stream* stream : streams_of(device)) {
    if (!stream->wait(timeout_ms)) {
      throw Error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "device " + std::to_string(device) + " was not done after " +
                                                        std::to_string(timeout_ms) + " ms");
    }
  }
  throw_device_error(device);
}

void release_streams(int device) { stop_streams(device); }

}  // namespace vnpu

using vnpu::Error;
using vnpu::guarded;

extern "C" {

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return guarded([&] { *stream = vnpu::new_stream(vnpu::check_current_device()); });
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
  return guarded([&] { vnpu::destroy(stream, false); });
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return guarded([&] { vnpu::destroy(stream, true); });
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  return guarded([&] { *id = vnpu::find(stream)->id; });
}

// Stopping at the first failure is all that there is here.
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t mode) {
  if (mode == ACL_STOP_ON_FAILURE) return ACL_SUCCESS;
  return vnpu::fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtSetStreamFailureMode: only ACL_STOP_ON_FAILURE is there");
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  return guarded([&] {
    auto* found = vnpu::find(stream);
    vnpu::throw_device_error(found->device);
    *status = found->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  vnpu::record_sync("aclrtSynchronizeStream");
  return guarded([&] { vnpu::wait_stream(stream); });
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
  vnpu::record_sync("aclrtSynchronizeStreamWithTimeout");
  return guarded([&] { vnpu::wait_stream(stream, timeout_ms); });
}

aclError aclrtSynchronizeDevice() {
  vnpu::record_sync("aclrtSynchronizeDevice");
  return guarded([&] { vnpu::wait_device(vnpu::check_current_device()); });
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  vnpu::record_sync("aclrtSynchronizeDeviceWithTimeout");
  return guarded([&] { vnpu::wait_device(vnpu::check_current_device(), timeout_ms); });
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return guarded([&] {
    if (flag & vnpu::kEventIpc) throw Error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "events between processes are not there");
    *event = new vnpu::Event;
  });
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  return guarded([&] { delete &vnpu::event_of(event); });
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return guarded([&] {
    auto& target = vnpu::event_of(event);
    auto mark = std::make_shared<vnpu::Mark>();
    {
      std::lock_guard<std::mutex> lock(target.mutex);
      target.mark = mark;
    }
    vnpu::enqueue_control(stream, [mark] { mark->reach(); });
  });
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream) {
  return guarded([&] {
    auto& target = vnpu::event_of(event);
    std::lock_guard<std::mutex> lock(target.mutex);
    target.mark = nullptr;
  });
}

// An event that was never recorded is not waited for.
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return guarded([&] {
    if (auto mark = vnpu::event_of(event).current()) {
      vnpu::enqueue_control(stream, [mark] { mark->wait(-1); });
    }
  });
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout_ms) {
  vnpu::record_sync("aclrtSynchronizeEvent");
  return guarded([&] {
    auto mark = vnpu::event_of(event).current();
    if (mark != nullptr && !mark->wait(timeout_ms)) {
      throw Error(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
                  "the event was not reached after " + std::to_string(timeout_ms) + " ms");
    }
    if (vnpu::current_device() >= 0) vnpu::throw_device_error(vnpu::current_device());
  });
}

aclError aclrtSynchronizeEvent(aclrtEvent event) { return aclrtSynchronizeEventWithTimeout(event, -1); }

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  return guarded([&] {
    auto mark = vnpu::event_of(event).current();
    bool done = mark == nullptr || mark->query();
    *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  });
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  return guarded([&] {
    auto mark = vnpu::event_of(event).current();
    bool done = mark == nullptr || mark->query();
    *status = done ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  });
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  return guarded([&] {
    auto first = vnpu::event_of(start).current(), last = vnpu::event_of(end).current();
    if (first == nullptr || last == nullptr || !first->query() || !last->query()) {
      throw Error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: an event was not recorded yet");
    }
    *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
  });
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* timestamp) {
  return guarded([&] {
    auto mark = vnpu::event_of(event).current();
    if (mark == nullptr || !mark->query()) {
      throw Error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventGetTimestamp: the event was not recorded yet");
    }
    *timestamp = std::chrono::duration_cast<std::chrono::microseconds>(mark->time.time_since_epoch()).count();
  });
}

// Host functions in the order of the stream. A callback waits for nobody to subscribe: the stream's worker runs it.
aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  return guarded([&] { vnpu::enqueue(stream, "aclrtLaunchCallback", [function, data] { function(data); }); });
}

aclError aclrtLaunchHostFunc(aclrtStream stream, void (*function)(void*), void* data) {
  return guarded([&] { vnpu::enqueue(stream, "aclrtLaunchHostFunc", [function, data] { function(data); }); });
}

aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

// Nothing is ever left for a subscribed thread to process: it waits and finds nothing, as with a real idle stream.
aclError aclrtProcessReport(int32_t timeout_ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(timeout_ms < 0 ? 1000 : timeout_ms));
  return vnpu::fail(ACL_ERROR_RT_REPORT_TIMEOUT, "aclrtProcessReport: nothing to process");
}

}  // extern "C"
