// SPDX-License-Identifier: Apache-2.0
// A communicator: the ranks of one host that share a segment of memory.
//
// The segment is a memfd of the process that made the root info; the others open it through /proc/<pid>/fd/<fd>, so it
// has no name in any file system and is gone with the last process that maps it, however that one ends. It holds
//   Header | RankState[n] | counts[n][2][2n] | Channel[n][n] | outbox[n][2] | channel data[n][n][2]
// and pages of it take memory only once they are touched.
//
// Collectives go in rounds. In a round each rank writes into its outbox, all meet at a barrier, and each reads from the
// outboxes of the others. Outboxes are double: who has passed barrier k knows that all have read what was written for
// round k-1, so one barrier a round is enough. Point-to-point messages go through a channel for each ordered pair of
// ranks. Nobody ever holds a lock in the segment, so a rank may die at any point without blocking the others.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "third_party/hccl/inc/hccl/hccl_types.h"

namespace vnpu::hccl {

struct Error : std::runtime_error {
  Error(HcclResult code, const std::string& message) : std::runtime_error(message), code(code) {}
  HcclResult code;
};

enum class Kind : uint32_t {
  kNone,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kReduceScatterV,
  kScatter,
  kAllToAll,
  kAllToAllV,
  kAllToAllVC,
  kBarrier,
  kPointToPoint,
};

const char* function_name(Kind kind);

constexpr uint32_t kNoReduceOp = 255;
constexpr uint32_t kNoRoot = 0xffffffff;

// What all ranks of a collective must agree on.
struct Signature {
  Kind kind = Kind::kNone;
  uint32_t dtype = 0;
  uint32_t reduce_op = kNoReduceOp;
  uint32_t root = kNoRoot;
  uint64_t count = 0;

  bool operator==(const Signature& other) const;
  std::string describe() const;
};

struct Message {
  bool sends;
  void* buffer;
  uint64_t count;
  uint32_t dtype;
  uint32_t peer;
};

// What HcclRootInfo carries.
struct RootInfo {
  char magic[16];
  uint64_t token;
  int32_t pid;
  int32_t fd;
  uint64_t start_time;
};

struct Options {
  std::string name;                  // empty: one is made up
  std::chrono::seconds exec_timeout; // zero: waits for ever
};

RootInfo make_root_info();
Options options_from_environment();

struct Header;
struct RankState;
struct Channel;

class Comm {
 public:
  // Takes rank's place in the segment. The communicator is ready once wait_for_ranks() has returned.
  static std::shared_ptr<Comm> attach(const RootInfo& root, uint32_t rank_count, uint32_t rank, int device,
                                      const Options& options);
  void wait_for_ranks();
  // A ready communicator of some of the ranks of this one, whose processes all call this with the same ranks and id.
  std::shared_ptr<Comm> create_sub(const std::vector<uint32_t>& ranks, uint64_t id, uint32_t sub_rank,
                                   const Options& options);
  ~Comm();

  uint32_t rank() const { return rank_; }
  uint32_t rank_count() const { return rank_count_; }
  int device() const { return device_; }
  const std::string& name() const { return options_.name; }
  std::string describe() const;

  // HCCL_SUCCESS, or why this communicator can't be used any more; the reason goes to *message.
  HcclResult failure(std::string* message) const;

  // Runs `body` as this rank's part of a collective, on the calling thread. Throws Error.
  void run(const Signature& signature, const std::function<void()>& body);
  // For work that will never run: the other ranks must not wait for it.
  void drop(const Signature& signature);
  // The rank has no more use for the communicator; what it still has running here fails.
  void leave();

  // The following are for a `body`.
  // Meets all ranks; throws on every one of them if their signatures differ. `counts` (at most 2n of them) can be read
  // by all ranks with peer_counts() until the first round.
  void agree(const Signature& signature, const std::vector<uint64_t>& counts = {});
  const uint64_t* peer_counts(uint32_t rank) const;
  // fill(round, own outbox), barrier, drain(round, outboxes by rank).
  void rounds(uint64_t count, const std::function<void(uint64_t, char*)>& fill,
              const std::function<void(uint64_t, const std::vector<const char*>&)>& drain);
  void transfer(const std::vector<Message>& messages);
  // Makes this rank and the others fail.
  [[noreturn]] void fail(HcclResult code, const std::string& message);

  static constexpr uint64_t kOutboxBytes = 1 << 20;

 private:
  using Clock = std::chrono::steady_clock;

  Comm() = default;
  void map(int fd);
  void barrier();
  // Blocks until ready(). `awaited(rank)` tells for which ranks we wait, to see whether they still live.
  void wait(const char* limit_name, std::chrono::seconds limit, const std::function<bool()>& ready,
            const std::function<bool(uint32_t)>& awaited);
  void check_peer(uint32_t peer, const std::function<bool(uint32_t)>& awaited);
  void throw_if_failed() const;
  void wake() const;
  RankState& state(uint32_t rank) const;
  Channel& channel(uint32_t from, uint32_t to) const;
  char* outbox(uint32_t rank, uint64_t round) const;
  char* channel_data(uint32_t from, uint32_t to, uint64_t chunk) const;
  uint64_t* counts(uint32_t rank, uint64_t round) const;

  RootInfo root_{};
  Options options_;
  uint32_t rank_ = 0;
  uint32_t rank_count_ = 0;
  int device_ = 0;
  char* base_ = nullptr;
  size_t size_ = 0;
  bool attached_ = false;

  std::mutex sub_mutex_;
  std::map<uint64_t, uint64_t> sub_generations_;  // how often a group of ranks was made into a sub-communicator

  std::mutex running_;  // one collective of a communicator at a time
  uint64_t round_ = 0;
  std::atomic<bool> left_{false};
  mutable std::mutex failure_mutex_;
  HcclResult failure_ = HCCL_SUCCESS;
  std::string failure_message_;
};

}  // namespace vnpu::hccl
