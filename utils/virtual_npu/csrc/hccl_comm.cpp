// SPDX-License-Identifier: Apache-2.0
#include "hccl_comm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "hccl_reduce.h"
#include "runtime.h"

namespace vnpu::hccl {
namespace {

constexpr char kMagic[16] = "vnpu hccl root1";
constexpr uint32_t kMaxRanks = 64;
constexpr uint64_t kChunkBytes = 512 << 10;  // of a point-to-point channel
constexpr auto kTick = std::chrono::milliseconds(100);
constexpr int kSpins = 50;

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

}  // namespace

struct Header {
  std::atomic<uint64_t> token;
  std::atomic<uint32_t> rank_count;
  std::atomic<uint32_t> wake;    // the futex; changes whenever something happened
  std::atomic<uint32_t> failed;  // 0: no, 1: the message is being written, 2: yes
  uint32_t failed_code;
  char failed_message[3072];
};
static_assert(sizeof(Header) <= 4096);

enum Presence : uint32_t { kAbsent, kArriving, kAttached, kLeft };

struct alignas(64) RankState {
  std::atomic<uint32_t> presence;
  int32_t pid;
  uint64_t start_time;
  int32_t device;
  std::atomic<uint32_t> running;  // the Kind of what the rank is doing now
  std::atomic<uint64_t> round;    // the last barrier it has reached
  Signature signatures[2];
  // Sub-communicators that this rank has made and others are to join.
  struct {
    std::atomic<uint64_t> key;  // 0: free
    RootInfo root;
  } invitations[8];
};

struct alignas(64) Channel {
  std::atomic<uint64_t> written;  // chunks
  std::atomic<uint64_t> read;
  struct {
    uint64_t count;  // of the whole message
    uint32_t dtype;
  } message[2];
};

namespace {

// The start time of a process, in clock ticks since boot; 0 if it does not exist or has ended (a zombie has). Together
// with the pid it names a process for good, pids being used again.
uint64_t process_start_time(int pid) {
  char path[32], line[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t length = read(fd, line, sizeof(line) - 1);
  close(fd);
  if (length <= 0) return 0;
  line[length] = '\0';
  const char* rest = std::strrchr(line, ')');  // the name before it may hold anything
  if (rest == nullptr || rest[1] != ' ' || rest[2] == 'Z' || rest[2] == 'X') return 0;
  unsigned long long start = 0;
  const char* format = "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
  return std::sscanf(rest + 2, format, &start) == 1 ? start : 0;
}

bool alive(int pid, uint64_t start_time) { return process_start_time(pid) == start_time; }

uint64_t random_token() {
  uint64_t token = 0;
  while (token == 0) {
    if (getrandom(&token, sizeof(token), 0) != sizeof(token)) {
      throw Error(HCCL_E_SYSCALL, std::string("getrandom: ") + std::strerror(errno));
    }
  }
  return token;
}

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Offsets in the segment.
struct Layout {
  explicit Layout(uint64_t n) {
    states = 4096;  // one page for the header
    counts = states + n * sizeof(RankState);
    channels = round_up(counts + n * 2 * 2 * n * sizeof(uint64_t), 64);
    outboxes = round_up(channels + n * n * sizeof(Channel), 4096);
    data = outboxes + n * 2 * Comm::kOutboxBytes;
    size = data + n * n * 2 * kChunkBytes;
  }
  uint64_t states, counts, channels, outboxes, data, size;
};

// The descriptors of the segments made here, kept until all ranks have opened them.
std::mutex root_mutex;
std::map<uint64_t, int>& root_fds() {
  static auto* fds = new std::map<uint64_t, int>();  // never destroyed: works may end after static destructors
  return *fds;
}

void close_root(uint64_t token) {
  std::lock_guard<std::mutex> lock(root_mutex);
  auto found = root_fds().find(token);
  if (found != root_fds().end()) {
    close(found->second);
    root_fds().erase(found);
  }
}

std::chrono::seconds seconds_from_environment(const char* name, long standard, long least) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::chrono::seconds(standard);
  char* end = nullptr;
  errno = 0;
  long value = std::strtol(text, &end, 10);
  if (errno != 0 || *end != '\0' || value < least || value > INT_MAX) {
    throw Error(HCCL_E_PARA, std::string(name) + "='" + text + "' is not a number of seconds >= " +
                                 std::to_string(least));
  }
  return std::chrono::seconds(value);
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen, std::chrono::nanoseconds limit) {
  timespec ts{limit.count() / 1000000000, limit.count() % 1000000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &ts, nullptr, 0);
}

}  // namespace

const char* function_name(Kind kind) {
  switch (kind) {
    case Kind::kNone:
      return "nothing";
    case Kind::kAllReduce:
      return "HcclAllReduce";
    case Kind::kReduce:
      return "HcclReduce";
    case Kind::kBroadcast:
      return "HcclBroadcast";
    case Kind::kAllGather:
      return "HcclAllGather";
    case Kind::kAllGatherV:
      return "HcclAllGatherV";
    case Kind::kReduceScatter:
      return "HcclReduceScatter";
    case Kind::kReduceScatterV:
      return "HcclReduceScatterV";
    case Kind::kScatter:
      return "HcclScatter";
    case Kind::kAllToAll:
      return "HcclAlltoAll";
    case Kind::kAllToAllV:
      return "HcclAlltoAllV";
    case Kind::kAllToAllVC:
      return "HcclAlltoAllVC";
    case Kind::kBarrier:
      return "HcclBarrier";
    case Kind::kPointToPoint:
      return "HcclSend/HcclRecv";
  }
  return "an unknown collective";
}

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && dtype == other.dtype && reduce_op == other.reduce_op && root == other.root &&
         count == other.count;
}

std::string Signature::describe() const {
  std::string text = function_name(kind);
  if (kind == Kind::kBarrier || kind == Kind::kPointToPoint) return text;
  text += "(";
  if (kind != Kind::kAllGatherV && kind != Kind::kReduceScatterV && kind != Kind::kAllToAllV &&
      kind != Kind::kAllToAllVC) {
    text += "count=" + std::to_string(count) + ", ";
  }
  text += dtype_name(dtype);
  if (reduce_op != kNoReduceOp) text += ", " + reduce_op_name(reduce_op);
  if (root != kNoRoot) text += ", root=" + std::to_string(root);
  return text + ")";
}

RootInfo make_root_info() {
  RootInfo root{};
  std::memcpy(root.magic, kMagic, sizeof(kMagic));
  root.token = random_token();
  root.pid = getpid();
  root.start_time = process_start_time(root.pid);
  root.fd = memfd_create("virtual_npu_hccl", MFD_CLOEXEC);
  if (root.fd < 0 || ftruncate(root.fd, sizeof(Header)) != 0) {
    throw Error(HCCL_E_SYSCALL, std::string("HcclGetRootInfo: cannot create shared memory: ") + std::strerror(errno));
  }
  uint64_t token = root.token;  // the first bytes of the header
  if (pwrite(root.fd, &token, sizeof(token), offsetof(Header, token)) != sizeof(token)) {
    throw Error(HCCL_E_SYSCALL, std::string("HcclGetRootInfo: cannot write shared memory: ") + std::strerror(errno));
  }
  std::lock_guard<std::mutex> lock(root_mutex);
  root_fds()[root.token] = root.fd;
  return root;
}

Options options_from_environment() { return {"", seconds_from_environment("HCCL_EXEC_TIMEOUT", 1836, 0)}; }

std::shared_ptr<Comm> Comm::attach(const RootInfo& root, uint32_t rank_count, uint32_t rank, int device,
                                   const Options& options) {
  if (rank_count == 0 || rank_count > kMaxRanks || rank >= rank_count) {
    throw Error(HCCL_E_PARA, "rank " + std::to_string(rank) + " of " + std::to_string(rank_count) +
                                 ": need rank < number of ranks <= " + std::to_string(kMaxRanks));
  }
  if (std::memcmp(root.magic, kMagic, sizeof(kMagic)) != 0) {
    throw Error(HCCL_E_PARA, "the root info was not made by HcclGetRootInfo of the virtual NPU");
  }
  std::shared_ptr<Comm> comm(new Comm());
  comm->root_ = root;
  comm->options_ = options;
  comm->rank_ = rank;
  comm->rank_count_ = rank_count;
  comm->device_ = device;
  if (comm->options_.name.empty()) {
    char name[48];
    std::snprintf(name, sizeof(name), "virtual_npu_%016llx", static_cast<unsigned long long>(root.token));
    comm->options_.name = name;
  }

  std::string path = "/proc/" + std::to_string(root.pid) + "/fd/" + std::to_string(root.fd);
  int fd = alive(root.pid, root.start_time) ? open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) {
    throw Error(HCCL_E_NOT_FOUND, "the process that made the root info (pid " + std::to_string(root.pid) +
                                      ") has ended, or is not of this host and user");
  }
  try {
    comm->map(fd);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);

  RankState& own = comm->state(rank);
  uint32_t expected = kAbsent;
  if (!own.presence.compare_exchange_strong(expected, kArriving)) {
    comm->fail(HCCL_E_PARA, "two processes take part as rank " + std::to_string(rank) + ": pids " +
                                std::to_string(own.pid) + " and " + std::to_string(getpid()));
  }
  own.pid = getpid();
  own.start_time = process_start_time(own.pid);
  own.device = physical_device(device);
  own.presence = kAttached;
  comm->attached_ = true;
  comm->wake();
  return comm;
}

void Comm::map(int fd) {
  auto system_error = [&](const char* what) {
    return Error(HCCL_E_SYSCALL, std::string(what) + ": " + std::strerror(errno));
  };
  auto open_header = [&](size_t size) {
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw system_error("cannot map shared memory");
    base_ = static_cast<char*>(memory);
    size_ = size;
    return reinterpret_cast<Header*>(base_);
  };
  struct stat status;
  if (fstat(fd, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(Header))) {
    throw Error(HCCL_E_NOT_FOUND, "the root info is out of date");
  }
  Header* header = open_header(sizeof(Header));
  if (header->token != root_.token) throw Error(HCCL_E_NOT_FOUND, "the root info is out of date");
  uint32_t expected = 0;
  if (!header->rank_count.compare_exchange_strong(expected, rank_count_) && expected != rank_count_) {
    fail(HCCL_E_PARA, "the ranks differ in the number of ranks: " + std::to_string(expected) + " and " +
                          std::to_string(rank_count_));
  }
  munmap(base_, size_);
  base_ = nullptr;
  // All ranks agree on the size by now, so nobody can shrink the file under the others.
  Layout layout(rank_count_);
  if (ftruncate(fd, static_cast<off_t>(layout.size)) != 0) throw system_error("cannot grow shared memory");
  open_header(layout.size);
}

void Comm::wait_for_ranks() {
  auto limit = seconds_from_environment("HCCL_CONNECT_TIMEOUT", 120, 1);
  auto absent = [&](uint32_t rank) { return state(rank).presence < kAttached; };
  auto all_here = [&] {
    for (uint32_t r = 0; r < rank_count_; ++r) {
      if (absent(r)) return false;
    }
    return true;
  };
  try {
    wait("HCCL_CONNECT_TIMEOUT", limit, all_here, absent);
    for (uint32_t a = 0; a < rank_count_; ++a) {
      for (uint32_t b = 0; b < a; ++b) {
        if (state(a).device == state(b).device) {
          fail(HCCL_E_PARA, "ranks " + std::to_string(b) + " and " + std::to_string(a) + " are both on device " +
                                std::to_string(state(a).device) +
                                "; each rank needs its own (torch.npu.set_device(local_rank))");
        }
      }
    }
  } catch (...) {
    close_root(root_.token);
    throw;
  }
  close_root(root_.token);
}

std::shared_ptr<Comm> Comm::create_sub(const std::vector<uint32_t>& ranks, uint64_t id, uint32_t sub_rank,
                                       const Options& options) {
  if (sub_rank >= ranks.size() || ranks[sub_rank] != rank_) {
    throw Error(HCCL_E_PARA, "rank " + std::to_string(sub_rank) + " of the sub-communicator is not " + describe());
  }
  for (uint32_t r : ranks) {
    if (r >= rank_count_) throw Error(HCCL_E_PARA, std::to_string(r) + " is not a rank of " + describe());
  }
  auto mix = [](uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15u + (hash >> 29); };
  uint64_t key = mix(1, id);
  for (uint32_t r : ranks) key = mix(key, r);
  {
    std::lock_guard<std::mutex> lock(sub_mutex_);
    key = mix(key, ++sub_generations_[key]) | 1;
  }
  auto& invitations = state(ranks[0]).invitations;
  auto find = [&](uint64_t wanted) {
    return std::find_if(std::begin(invitations), std::end(invitations),
                        [&](const auto& invitation) { return invitation.key == wanted; });
  };
  if (sub_rank != 0) {
    auto missing = [&] { return find(key) == std::end(invitations); };
    auto limit = seconds_from_environment("HCCL_CONNECT_TIMEOUT", 120, 1);
    wait(
        "HCCL_CONNECT_TIMEOUT", limit, [&] { return !missing(); },
        [&](uint32_t r) { return r == ranks[0] && missing(); });
    auto comm = attach(find(key)->root, static_cast<uint32_t>(ranks.size()), sub_rank, device_, options);
    comm->wait_for_ranks();
    return comm;
  }
  std::unique_lock<std::mutex> lock(sub_mutex_);
  auto* invitation = find(0);
  if (invitation == std::end(invitations)) {
    throw Error(HCCL_E_UNAVAIL, "too many sub-communicators are being made at once");
  }
  invitation->root = make_root_info();
  invitation->key = key;
  lock.unlock();
  wake();
  try {
    auto comm = attach(invitation->root, static_cast<uint32_t>(ranks.size()), sub_rank, device_, options);
    comm->wait_for_ranks();
    invitation->key = 0;
    return comm;
  } catch (...) {
    invitation->key = 0;
    throw;
  }
}

Comm::~Comm() {
  leave();
  if (base_ != nullptr) munmap(base_, size_);
}

RankState& Comm::state(uint32_t rank) const {
  return reinterpret_cast<RankState*>(base_ + Layout(rank_count_).states)[rank];
}

Channel& Comm::channel(uint32_t from, uint32_t to) const {
  return reinterpret_cast<Channel*>(base_ + Layout(rank_count_).channels)[from * rank_count_ + to];
}

char* Comm::outbox(uint32_t rank, uint64_t round) const {
  return base_ + Layout(rank_count_).outboxes + (rank * 2 + (round & 1)) * kOutboxBytes;
}

char* Comm::channel_data(uint32_t from, uint32_t to, uint64_t chunk) const {
  uint64_t pair = static_cast<uint64_t>(from) * rank_count_ + to;
  return base_ + Layout(rank_count_).data + (pair * 2 + (chunk & 1)) * kChunkBytes;
}

uint64_t* Comm::counts(uint32_t rank, uint64_t round) const {
  return reinterpret_cast<uint64_t*>(base_ + Layout(rank_count_).counts) + (rank * 2 + (round & 1)) * 2 * rank_count_;
}

std::string Comm::describe() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(rank_count_) + " in communicator " + options_.name;
}

void Comm::wake() const {
  auto* header = reinterpret_cast<Header*>(base_);
  header->wake.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&header->wake), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

HcclResult Comm::failure(std::string* message) const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  *message = failure_message_;
  return failure_;
}

// The first failure is told to all ranks; what fails later on is only its consequence.
void Comm::fail(HcclResult code, const std::string& message) {
  auto* header = reinterpret_cast<Header*>(base_);
  uint32_t expected = 0;
  if (header->failed.compare_exchange_strong(expected, 1)) {
    header->failed_code = code;
    std::snprintf(header->failed_message, sizeof(header->failed_message), "%s", message.c_str());
    header->failed.store(2);
    wake();
  }
  throw Error(code, message);
}

void Comm::throw_if_failed() const {
  auto* header = reinterpret_cast<Header*>(base_);
  if (header->failed != 0) {
    // Written within microseconds, unless its writer was killed just then.
    for (int i = 0; i < 100 && header->failed != 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (header->failed != 2) throw Error(HCCL_E_REMOTE, "another rank failed");
    throw Error(static_cast<HcclResult>(header->failed_code), header->failed_message);
  }
  if (left_) throw Error(HCCL_E_UNAVAIL, "the communicator was destroyed meanwhile");
}

// Throws if `peer`, for which this rank waits, will never come.
void Comm::check_peer(uint32_t peer, const std::function<bool(uint32_t)>& awaited) {
  const RankState& other = state(peer);
  uint32_t presence = other.presence;
  std::string who = "rank " + std::to_string(peer);
  if (presence == kAbsent || presence == kArriving) {
    if (!alive(root_.pid, root_.start_time) && awaited(peer)) {
      fail(HCCL_E_REMOTE, who + " has not arrived, and the process that made the root info (pid " +
                              std::to_string(root_.pid) + ") has died");
    }
    return;
  }
  who += " (pid " + std::to_string(other.pid) + ")";
  // It may have done its part and only then gone away: look again.
  if (!alive(other.pid, other.start_time) && awaited(peer)) fail(HCCL_E_REMOTE, who + " has died");
  if (presence == kLeft && awaited(peer)) fail(HCCL_E_REMOTE, who + " has destroyed its communicator");
}

void Comm::wait(const char* limit_name, std::chrono::seconds limit, const std::function<bool()>& ready,
                const std::function<bool(uint32_t)>& awaited) {
  auto* header = reinterpret_cast<Header*>(base_);
  auto start = Clock::now();
  auto next_check = start + kTick;
  for (int spins = 0;; ++spins) {
    uint32_t seen = header->wake;
    if (ready()) return;
    throw_if_failed();
    if (spins < kSpins) {
      std::this_thread::yield();
      continue;
    }
    futex_wait(&header->wake, seen, kTick);
    auto now = Clock::now();
    if (now < next_check) continue;
    next_check = now + kTick;
    for (uint32_t peer = 0; peer < rank_count_; ++peer) {
      if (peer != rank_ && awaited(peer)) check_peer(peer, awaited);
    }
    if (limit.count() != 0 && now - start >= limit) {
      std::string missing;
      for (uint32_t peer = 0; peer < rank_count_; ++peer) {
        if (peer == rank_ || !awaited(peer)) continue;
        const RankState& other = state(peer);
        missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(peer);
        if (other.presence < kAttached) {
          missing += " (never arrived)";
        } else {
          missing += " (pid " + std::to_string(other.pid) + ", running " +
                     function_name(static_cast<Kind>(other.running.load())) + ")";
        }
      }
      if (ready()) return;
      fail(HCCL_E_TIMEOUT, "rank " + std::to_string(rank_) + " waited " + std::to_string(limit.count()) + " s (" +
                               limit_name + ") for " + missing);
    }
  }
}

void Comm::run(const Signature& signature, const std::function<void()>& body) {
  std::lock_guard<std::mutex> lock(running_);
  std::atomic<uint32_t>& running = state(rank_).running;
  try {
    throw_if_failed();
    running = static_cast<uint32_t>(signature.kind);
    body();
    running = static_cast<uint32_t>(Kind::kNone);
  } catch (const Error& error) {
    running = static_cast<uint32_t>(Kind::kNone);
    Error full(error.code, signature.describe() + " on " + describe() + " failed: " + error.what());
    std::lock_guard<std::mutex> failure_lock(failure_mutex_);
    if (failure_ == HCCL_SUCCESS) {
      failure_ = full.code;
      failure_message_ = full.what();
    }
    throw full;
  }
}

void Comm::drop(const Signature& signature) {
  try {
    fail(HCCL_E_REMOTE, "rank " + std::to_string(rank_) + " did not run " + signature.describe() +
                            " because of an earlier error on its device");
  } catch (const Error&) {
    // Only the other ranks need to know: this one has that earlier error.
  }
}

void Comm::leave() {
  // A forked child (a DataLoader worker, say) has a copy of this object, but is not the rank.
  if (!attached_ || left_.exchange(true) || state(rank_).pid != getpid()) return;
  state(rank_).presence = kLeft;
  wake();
}

void Comm::barrier() {
  uint64_t round = round_;
  state(rank_).round = round;
  wake();
  auto awaited = [&](uint32_t rank) { return state(rank).round < round; };
  auto ready = [&] {
    for (uint32_t r = 0; r < rank_count_; ++r) {
      if (awaited(r)) return false;
    }
    return true;
  };
  wait("HCCL_EXEC_TIMEOUT", options_.exec_timeout, ready, awaited);
}

void Comm::agree(const Signature& signature, const std::vector<uint64_t>& own_counts) {
  ++round_;
  state(rank_).signatures[round_ & 1] = signature;
  std::copy(own_counts.begin(), own_counts.end(), counts(rank_, round_));
  barrier();
  // Every rank compares with rank 0, so that all of them come to the same conclusion.
  const Signature first = state(0).signatures[round_ & 1];
  for (uint32_t r = 1; r < rank_count_; ++r) {
    const Signature other = state(r).signatures[round_ & 1];
    if (!(first == other)) {
      fail(HCCL_E_PARA, "the ranks run different collectives: rank 0 " + first.describe() + ", rank " +
                            std::to_string(r) + " " + other.describe());
    }
  }
}

const uint64_t* Comm::peer_counts(uint32_t rank) const { return counts(rank, round_); }

void Comm::rounds(uint64_t count, const std::function<void(uint64_t, char*)>& fill,
                  const std::function<void(uint64_t, const std::vector<const char*>&)>& drain) {
  std::vector<const char*> boxes(rank_count_);
  for (uint64_t i = 0; i < count; ++i) {
    ++round_;
    fill(i, outbox(rank_, round_));
    barrier();
    for (uint32_t r = 0; r < rank_count_; ++r) boxes[r] = outbox(r, round_);
    drain(i, boxes);
  }
}

namespace {

// A message on its way. The sender is done when the receiver has taken the last chunk: HcclSend is a rendezvous, it
// does not return early because a buffer was free.
struct Transit {
  Message message;
  uint64_t bytes;
  uint64_t chunks;     // at least one, also for an empty message
  uint64_t moved = 0;  // chunks
  uint64_t end = 0;    // of a send: the channel's `read` once the last chunk is taken
  bool done = false;
};

std::string describe_message(const Message& message, uint32_t rank) {
  return "rank " + std::to_string(rank) + (message.sends ? " sends " : " receives ") + std::to_string(message.count) +
         " " + dtype_name(message.dtype) + (message.sends ? " to rank " : " from rank ") +
         std::to_string(message.peer);
}

}  // namespace

void Comm::transfer(const std::vector<Message>& messages) {
  std::vector<Transit> transits;
  std::vector<const Message*> to_self, from_self;
  for (const Message& message : messages) {
    if (message.peer == rank_) {
      (message.sends ? to_self : from_self).push_back(&message);
      continue;
    }
    uint64_t bytes = message.count * element_size(message.dtype);
    transits.push_back({message, bytes, std::max<uint64_t>(1, (bytes + kChunkBytes - 1) / kChunkBytes)});
  }
  if (to_self.size() != from_self.size()) {
    fail(HCCL_E_PARA, "rank " + std::to_string(rank_) + " has " + std::to_string(to_self.size()) + " sends to and " +
                          std::to_string(from_self.size()) + " receives from itself");
  }
  for (size_t i = 0; i < to_self.size(); ++i) {
    const Message &out = *to_self[i], &in = *from_self[i];
    if (out.count != in.count || out.dtype != in.dtype) {
      fail(HCCL_E_PARA, describe_message(out, rank_) + ", but " + describe_message(in, rank_));
    }
    std::memmove(in.buffer, out.buffer, out.count * element_size(out.dtype));
  }

  // Moves what can be moved now. Messages of one direction of a pair go one after the other.
  auto move_chunk = [&](Transit& transit) {
    const Message& message = transit.message;
    char* buffer = static_cast<char*>(message.buffer);
    uint64_t offset = transit.moved * kChunkBytes;
    uint64_t bytes = std::min(kChunkBytes, transit.bytes - std::min(offset, transit.bytes));
    if (message.sends) {
      Channel& line = channel(rank_, message.peer);
      uint64_t at = line.written;
      if (at - line.read >= 2) return false;
      line.message[at & 1] = {message.count, message.dtype};
      if (bytes != 0) std::memcpy(channel_data(rank_, message.peer, at), buffer + offset, bytes);
      line.written = at + 1;
      transit.end = at + 1;
    } else {
      Channel& line = channel(message.peer, rank_);
      uint64_t at = line.read;
      if (line.written == at) return false;
      auto sent = line.message[at & 1];
      if (sent.count != message.count || sent.dtype != message.dtype) {
        Message other{true, nullptr, sent.count, sent.dtype, rank_};
        fail(HCCL_E_PARA, describe_message(other, message.peer) + ", but " + describe_message(message, rank_));
      }
      if (bytes != 0) std::memcpy(buffer + offset, channel_data(message.peer, rank_, at), bytes);
      line.read = at + 1;
    }
    ++transit.moved;
    wake();
    return true;
  };
  auto progress = [&] {
    bool moved = false;
    std::vector<bool> sending(rank_count_), receiving(rank_count_);  // peers with an earlier unfinished message
    for (Transit& transit : transits) {
      if (transit.done) continue;
      auto busy = (transit.message.sends ? sending : receiving)[transit.message.peer];
      while (!busy && transit.moved < transit.chunks && move_chunk(transit)) moved = true;
      bool taken = !transit.message.sends || channel(rank_, transit.message.peer).read >= transit.end;
      if (transit.moved == transit.chunks && taken) {
        transit.done = moved = true;
      } else if (transit.moved < transit.chunks) {
        busy = true;
      }
    }
    return moved;
  };
  auto finished = [&] {
    return std::all_of(transits.begin(), transits.end(), [](const Transit& transit) { return transit.done; });
  };
  auto awaited = [&](uint32_t rank) {
    for (const Transit& transit : transits) {
      if (transit.done || transit.message.peer != rank) continue;
      if (transit.message.sends) {
        if (transit.moved < transit.chunks || channel(rank_, rank).read < transit.end) return true;
      } else if (channel(rank, rank_).written == channel(rank, rank_).read) {
        return true;
      }
    }
    return false;
  };
  while (!finished()) {
    if (progress()) continue;
    wait(
        "HCCL_EXEC_TIMEOUT", options_.exec_timeout, [&] { return progress(); },
        [&](uint32_t rank) {
          // A peer at a barrier that this rank has not reached is inside a later collective, which needs this rank:
          // it will never get to this message.
          bool ahead = state(rank).round > round_;
          if (!awaited(rank)) return false;
          if (ahead) {
            fail(HCCL_E_PARA, "rank " + std::to_string(rank) + " runs " +
                                  state(rank).signatures[(round_ + 1) & 1].describe() + " while rank " +
                                  std::to_string(rank_) + " waits for it in HcclSend/HcclRecv");
          }
          return true;
        });
  }
}

}  // namespace vnpu::hccl
