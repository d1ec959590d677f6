// SPDX-License-Identifier: Apache-2.0
// The C interface of HCCL. Every function checks its arguments at once and queues the work on the stream; what goes
// wrong in the work becomes the error of the stream's device and of the communicator (HcclGetCommAsyncError).
//
// Results are the same in every run: reductions take the ranks' data in the order of the ranks.
//
// hccl.h itself is not included: its versions differ in the constness of some parameters.
#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "hccl_comm.h"
#include "hccl_reduce.h"
#include "vnpu.h"

namespace vnpu::hccl {
namespace {

using Counts = std::vector<uint64_t>;

std::mutex registry_mutex;
std::unordered_map<HcclComm, std::shared_ptr<Comm>>& registry() {
  static auto* comms = new std::unordered_map<HcclComm, std::shared_ptr<Comm>>();  // outlives static destructors
  return *comms;
}

HcclComm publish(std::shared_ptr<Comm> comm) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  HcclComm handle = comm.get();
  registry()[handle] = std::move(comm);
  return handle;
}

std::shared_ptr<Comm> find(HcclComm handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto found = registry().find(handle);
  if (found == registry().end()) throw Error(HCCL_E_PARA, "not a communicator, or one that was destroyed");
  return found->second;
}

template <class Body>
HcclResult guarded(const char* function, Body body) {
  try {
    body();
    return HCCL_SUCCESS;
  } catch (const Error& error) {
    fail(error.code, std::string(function) + ": " + error.what());
    return error.code;
  } catch (const std::exception& error) {
    fail(HCCL_E_INTERNAL, std::string(function) + ": " + error.what());
    return HCCL_E_INTERNAL;
  }
}

void require(const void* pointer, const char* what) {
  if (pointer == nullptr) throw Error(HCCL_E_PTR, std::string(what) + " is a null pointer");
}

uint64_t checked_size(uint32_t dtype) {
  uint64_t size = element_size(dtype);
  if (size == 0) throw Error(HCCL_E_PARA, dtype_name(dtype) + " is not a data type of HCCL");
  return size;
}

ReduceFunction checked_reduction(uint32_t dtype, uint32_t op) {
  checked_size(dtype);
  ReduceFunction function = reduce_function(dtype, op);
  if (function == nullptr) {
    throw Error(HCCL_E_NOT_SUPPORT, reduce_op_name(op) + " of " + dtype_name(dtype) +
                                        " is not supported: HCCL reduces int8, int16, int32, int64, float16, float32 "
                                        "and bfloat16 by sum, prod, max and min, except int16 and bfloat16 by prod");
  }
  return function;
}

void check_rank(const Comm& comm, uint32_t rank, const char* what) {
  if (rank >= comm.rank_count()) {
    throw Error(HCCL_E_PARA, std::string(what) + " " + std::to_string(rank) + " is not one of the " +
                                 std::to_string(comm.rank_count()) + " ranks of communicator " + comm.name());
  }
}

void check_buffer(const void* buffer, uint64_t bytes, const char* what) {
  if (bytes == 0) return;
  require(buffer, what);
  if (!is_device_memory(buffer) || !is_device_memory(static_cast<const char*>(buffer) + bytes - 1)) {
    throw Error(HCCL_E_PARA, std::string(what) + " is not " + std::to_string(bytes) + " bytes of device memory");
  }
}

void trace(const Comm& comm, const char* name, uint64_t count, uint32_t dtype, const std::string& more = "") {
  if (!tracing()) return;
  record("\"kind\":\"collective\",\"name\":\"" + std::string(name) + "\",\"count\":" + std::to_string(count) +
         ",\"dtype\":\"" + dtype_name(dtype) + "\",\"bytes\":" + std::to_string(count * element_size(dtype)) +
         ",\"group_rank\":" + std::to_string(comm.rank()) + ",\"world_size\":" + std::to_string(comm.rank_count()) +
         ",\"communicator\":" + json_string(comm.name()) + more);
}

// A collective waiting on its stream. If an earlier error keeps it from running, the other ranks are told.
struct Work {
  Work(std::shared_ptr<Comm> comm, const Signature& signature, std::function<void(Comm&)> body)
      : comm(std::move(comm)), signature(signature), body(std::move(body)) {}
  Work(const Work&) = delete;
  ~Work() {
    if (!started) comm->drop(signature);
  }

  std::shared_ptr<Comm> comm;
  Signature signature;
  std::function<void(Comm&)> body;
  bool started = false;
};

void launch(const std::shared_ptr<Comm>& comm, aclrtStream stream, const Signature& signature,
            std::function<void(Comm&)> body) {
  std::string message;
  HcclResult failure = comm->failure(&message);
  if (failure != HCCL_SUCCESS) throw Error(failure, "the communicator is unusable since " + message);
  int device = device_of(stream);
  if (device != comm->device()) {
    throw Error(HCCL_E_PARA, "the stream is on device " + std::to_string(device) + ", but " + comm->describe() +
                                 " is on device " + std::to_string(comm->device()));
  }
  auto work = std::make_shared<Work>(comm, signature, std::move(body));
  enqueue(stream, function_name(signature.kind), [work] {
    work->started = true;
    work->comm->run(work->signature, [&] { work->body(*work->comm); });
  });
}

Counts read_counts(const void* counts, uint64_t n, const char* what) {
  require(counts, what);
  const auto* values = static_cast<const uint64_t*>(counts);
  return Counts(values, values + n);
}

// The bytes which part `round` of `total` holds, the parts being `part` bytes long.
uint64_t part_bytes(uint64_t total, uint64_t part, uint64_t round) {
  uint64_t offset = part * round;
  return offset >= total ? 0 : std::min(part, total - offset);
}

uint64_t parts(uint64_t total, uint64_t part) { return (total + part - 1) / part; }

void copy(void* to, const void* from, uint64_t bytes) {
  if (bytes != 0) std::memmove(to, from, bytes);
}

char* at(void* buffer, uint64_t offset) { return static_cast<char*>(buffer) + offset; }
const char* at(const void* buffer, uint64_t offset) { return static_cast<const char*>(buffer) + offset; }

// An outbox divided among the ranks that read it; a multiple of every element size.
uint64_t share(const Comm& comm) { return Comm::kOutboxBytes / comm.rank_count() / 64 * 64; }

void reduce_boxes(ReduceFunction reduction, void* result, const std::vector<const char*>& boxes, uint64_t offset,
                  uint64_t bytes, uint64_t size) {
  copy(result, boxes[0] + offset, bytes);
  for (size_t rank = 1; rank < boxes.size(); ++rank) reduction(result, boxes[rank] + offset, bytes / size);
}

// For the collectives in which all ranks pass the same counts.
void agree_on_counts(Comm& comm, const Signature& signature, const Counts& own) {
  comm.agree(signature, own);
  for (uint32_t rank = 1; rank < comm.rank_count(); ++rank) {
    for (uint32_t i = 0; i < comm.rank_count(); ++i) {
      uint64_t first = comm.peer_counts(0)[i], other = comm.peer_counts(rank)[i];
      if (first != other) {
        comm.fail(HCCL_E_PARA, "the ranks differ in the count for rank " + std::to_string(i) + ": rank 0 says " +
                                   std::to_string(first) + ", rank " + std::to_string(rank) + " says " +
                                   std::to_string(other));
      }
    }
  }
}

void all_reduce(const void* send, void* receive, uint64_t count, uint32_t dtype, uint32_t op, HcclComm handle,
                aclrtStream stream) {
  auto comm = find(handle);
  uint64_t size = checked_size(dtype), total = count * size;
  ReduceFunction reduction = checked_reduction(dtype, op);
  check_buffer(send, total, "sendBuf");
  check_buffer(receive, total, "recvBuf");
  trace(*comm, "HcclAllReduce", count, dtype, ",\"op\":\"" + reduce_op_name(op) + "\"");
  Signature signature{Kind::kAllReduce, dtype, op, kNoRoot, count};
  launch(comm, stream, signature, [=](Comm& comm) {
    comm.agree(signature);
    uint64_t part = Comm::kOutboxBytes;
    comm.rounds(
        parts(total, part),
        [&](uint64_t round, char* box) { copy(box, at(send, round * part), part_bytes(total, part, round)); },
        [&](uint64_t round, const std::vector<const char*>& boxes) {
          reduce_boxes(reduction, at(receive, round * part), boxes, 0, part_bytes(total, part, round), size);
        });
  });
}

void reduce(const void* send, void* receive, uint64_t count, uint32_t dtype, uint32_t op, uint32_t root,
            HcclComm handle, aclrtStream stream) {
  auto comm = find(handle);
  uint64_t size = checked_size(dtype), total = count * size;
  ReduceFunction reduction = checked_reduction(dtype, op);
  check_rank(*comm, root, "root");
  check_buffer(send, total, "sendBuf");
  if (comm->rank() == root) check_buffer(receive, total, "recvBuf");
  trace(*comm, "HcclReduce", count, dtype,
        ",\"op\":\"" + reduce_op_name(op) + "\",\"root\":" + std::to_string(root));
  Signature signature{Kind::kReduce, dtype, op, root, count};
  launch(comm, stream, signature, [=](Comm& comm) {
    comm.agree(signature);
    uint64_t part = Comm::kOutboxBytes;
    comm.rounds(
        parts(total, part),
        [&](uint64_t round, char* box) { copy(box, at(send, round * part), part_bytes(total, part, round)); },
        [&](uint64_t round, const std::vector<const char*>& boxes) {
          if (comm.rank() != root) return;
          reduce_boxes(reduction, at(receive, round * part), boxes, 0, part_bytes(total, part, round), size);
        });
  });
}

void broadcast(void* buffer, uint64_t count, uint32_t dtype, uint32_t root, HcclComm handle, aclrtStream stream) {
  auto comm = find(handle);
  uint64_t total = count * checked_size(dtype);
  check_rank(*comm, root, "root");
  check_buffer(buffer, total, "buf");
  trace(*comm, "HcclBroadcast", count, dtype, ",\"root\":" + std::to_string(root));
  Signature signature{Kind::kBroadcast, dtype, kNoReduceOp, root, count};
  launch(comm, stream, signature, [=](Comm& comm) {
    comm.agree(signature);
    uint64_t part = Comm::kOutboxBytes;
    comm.rounds(
        parts(total, part),
        [&](uint64_t round, char* box) {
          if (comm.rank() == root) copy(box, at(buffer, round * part), part_bytes(total, part, round));
        },
        [&](uint64_t round, const std::vector<const char*>& boxes) {
          if (comm.rank() != root) copy(at(buffer, round * part), boxes[root], part_bytes(total, part, round));
        });
  });
}

// All ranks send `counts[rank]` elements to everybody; they are stored at `displacements[rank]`.
void all_gather(Kind kind, const void* send, uint64_t send_count, void* receive, Counts counts, Counts displacements,
                uint32_t dtype, const std::shared_ptr<Comm>& comm, aclrtStream stream) {
  uint64_t size = checked_size(dtype);
  uint32_t own = comm->rank();
  if (counts[own] != send_count) {
    throw Error(HCCL_E_PARA, "sendCount is " + std::to_string(send_count) + ", but recvCounts[" + std::to_string(own) +
                                 "], for this rank, is " + std::to_string(counts[own]));
  }
  check_buffer(send, send_count * size, "sendBuf");
  for (uint32_t rank = 0; rank < comm->rank_count(); ++rank) {
    check_buffer(at(receive, displacements[rank] * size), counts[rank] * size, "recvBuf");
  }
  trace(*comm, function_name(kind), send_count, dtype);
  Signature signature{kind, dtype, kNoReduceOp, kNoRoot, kind == Kind::kAllGather ? send_count : 0};
  launch(comm, stream, signature, [=](Comm& comm) {
    if (kind == Kind::kAllGather) {
      comm.agree(signature);
    } else {
      agree_on_counts(comm, signature, counts);
    }
    uint64_t part = Comm::kOutboxBytes, most = *std::max_element(counts.begin(), counts.end()) * size;
    comm.rounds(
        parts(most, part),
        [&](uint64_t round, char* box) {
          copy(box, at(send, round * part), part_bytes(send_count * size, part, round));
        },
        [&](uint64_t round, const std::vector<const char*>& boxes) {
          for (uint32_t rank = 0; rank < comm.rank_count(); ++rank) {
            copy(at(receive, displacements[rank] * size + round * part), boxes[rank],
                 part_bytes(counts[rank] * size, part, round));
          }
        });
  });
}

// Rank r receives the reduction of the `counts[r]` elements at `displacements[r]`.
void reduce_scatter(Kind kind, const void* send, Counts counts, Counts displacements, void* receive,
                    uint64_t receive_count, uint32_t dtype, uint32_t op, const std::shared_ptr<Comm>& comm,
                    aclrtStream stream) {
  uint64_t size = checked_size(dtype);
  uint32_t own = comm->rank();
  ReduceFunction reduction = checked_reduction(dtype, op);
  if (counts[own] != receive_count) {
    throw Error(HCCL_E_PARA, "recvCount is " + std::to_string(receive_count) + ", but sendCounts[" +
                                 std::to_string(own) + "], for this rank, is " + std::to_string(counts[own]));
  }
  for (uint32_t rank = 0; rank < comm->rank_count(); ++rank) {
    check_buffer(at(send, displacements[rank] * size), counts[rank] * size, "sendBuf");
  }
  check_buffer(receive, receive_count * size, "recvBuf");
  trace(*comm, function_name(kind), receive_count, dtype, ",\"op\":\"" + reduce_op_name(op) + "\"");
  Signature signature{kind, dtype, op, kNoRoot, kind == Kind::kReduceScatter ? receive_count : 0};
  launch(comm, stream, signature, [=](Comm& comm) {
    if (kind == Kind::kReduceScatter) {
      comm.agree(signature);
    } else {
      agree_on_counts(comm, signature, counts);
    }
    uint64_t part = share(comm), most = *std::max_element(counts.begin(), counts.end()) * size;
    comm.rounds(
        parts(most, part),
        [&](uint64_t round, char* box) {
          for (uint32_t rank = 0; rank < comm.rank_count(); ++rank) {
            copy(box + rank * part, at(send, displacements[rank] * size + round * part),
                 part_bytes(counts[rank] * size, part, round));
          }
        },
        [&](uint64_t round, const std::vector<const char*>& boxes) {
          reduce_boxes(reduction, at(receive, round * part), boxes, comm.rank() * part,
                       part_bytes(receive_count * size, part, round), size);
        });
  });
}

void scatter(const void* send, void* receive, uint64_t count, uint32_t dtype, uint32_t root, HcclComm handle,
             aclrtStream stream) {
  auto comm = find(handle);
  uint64_t total = count * checked_size(dtype);
  check_rank(*comm, root, "root");
  if (comm->rank() == root) check_buffer(send, total * comm->rank_count(), "sendBuf");
  check_buffer(receive, total, "recvBuf");
  trace(*comm, "HcclScatter", count, dtype, ",\"root\":" + std::to_string(root));
  Signature signature{Kind::kScatter, dtype, kNoReduceOp, root, count};
  launch(comm, stream, signature, [=](Comm& comm) {
    comm.agree(signature);
    uint64_t part = share(comm);
    comm.rounds(
        parts(total, part),
        [&](uint64_t round, char* box) {
          if (comm.rank() != root) return;
          for (uint32_t rank = 0; rank < comm.rank_count(); ++rank) {
            copy(box + rank * part, at(send, rank * total + round * part), part_bytes(total, part, round));
          }
        },
        [&](uint64_t round, const std::vector<const char*>& boxes) {
          copy(at(receive, round * part), boxes[root] + comm.rank() * part, part_bytes(total, part, round));
        });
  });
}

struct Blocks {
  Counts counts, displacements;  // elements, by rank
};

void all_to_all(Kind kind, const void* send, const Blocks& out, uint32_t send_type, void* receive, const Blocks& in,
                uint32_t receive_type, const std::shared_ptr<Comm>& comm, aclrtStream stream) {
  uint64_t size = checked_size(send_type);
  if (send_type != receive_type) {
    throw Error(HCCL_E_PARA, "sendType and recvType differ: " + dtype_name(send_type) + " and " +
                                 dtype_name(receive_type));
  }
  uint64_t sum = 0;
  for (uint32_t rank = 0; rank < comm->rank_count(); ++rank) {
    sum += out.counts[rank];
    check_buffer(at(send, out.displacements[rank] * size), out.counts[rank] * size, "sendBuf");
    check_buffer(at(receive, in.displacements[rank] * size), in.counts[rank] * size, "recvBuf");
  }
  trace(*comm, function_name(kind), sum, send_type);
  Signature signature{kind, send_type, kNoReduceOp, kNoRoot, kind == Kind::kAllToAll ? out.counts[0] : 0};
  launch(comm, stream, signature, [=](Comm& comm) {
    uint32_t n = comm.rank_count();
    Counts both = out.counts;
    both.insert(both.end(), in.counts.begin(), in.counts.end());
    comm.agree(signature, both);
    uint64_t most = 0;
    for (uint32_t from = 0; from < n; ++from) {
      for (uint32_t to = 0; to < n; ++to) {
        uint64_t sent = comm.peer_counts(from)[to], expected = comm.peer_counts(to)[n + from];
        if (sent != expected) {
          comm.fail(HCCL_E_PARA, "rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                                     " elements to rank " + std::to_string(to) + ", which expects " +
                                     std::to_string(expected));
        }
        most = std::max(most, sent * size);
      }
    }
    uint64_t part = share(comm);
    comm.rounds(
        parts(most, part),
        [&](uint64_t round, char* box) {
          for (uint32_t rank = 0; rank < n; ++rank) {
            copy(box + rank * part, at(send, out.displacements[rank] * size + round * part),
                 part_bytes(out.counts[rank] * size, part, round));
          }
        },
        [&](uint64_t round, const std::vector<const char*>& boxes) {
          for (uint32_t rank = 0; rank < n; ++rank) {
            copy(at(receive, in.displacements[rank] * size + round * part), boxes[rank] + comm.rank() * part,
                 part_bytes(in.counts[rank] * size, part, round));
          }
        });
  });
}

Blocks equal_blocks(uint64_t count, uint32_t n) {
  Blocks blocks;
  for (uint32_t rank = 0; rank < n; ++rank) {
    blocks.counts.push_back(count);
    blocks.displacements.push_back(rank * count);
  }
  return blocks;
}

// Sends and receives between HcclGroupStart and HcclGroupEnd, which must make progress together. Collectives in a
// group need no such care and are queued at once.
struct Group {
  int depth = 0;
  struct Batch {
    std::shared_ptr<Comm> comm;
    aclrtStream stream;
    std::vector<Message> messages;
  };
  std::vector<Batch> batches;  // one for each communicator and stream
};
thread_local Group group;

void launch_messages(const std::shared_ptr<Comm>& comm, aclrtStream stream, std::vector<Message> messages) {
  Signature signature;
  signature.kind = Kind::kPointToPoint;
  launch(comm, stream, signature, [messages = std::move(messages)](Comm& comm) { comm.transfer(messages); });
}

void point_to_point(const std::shared_ptr<Comm>& comm, aclrtStream stream, const std::vector<Message>& messages) {
  for (const Message& message : messages) {
    uint64_t bytes = message.count * checked_size(message.dtype);
    check_rank(*comm, message.peer, message.sends ? "destination" : "source");
    check_buffer(message.buffer, bytes, message.sends ? "the send buffer" : "the receive buffer");
    trace(*comm, message.sends ? "HcclSend" : "HcclRecv", message.count, message.dtype,
          ",\"peer\":" + std::to_string(message.peer));
  }
  if (group.depth == 0) {
    launch_messages(comm, stream, messages);
    return;
  }
  auto batch = std::find_if(group.batches.begin(), group.batches.end(), [&](const Group::Batch& batch) {
    return batch.comm == comm && batch.stream == stream;
  });
  if (batch == group.batches.end()) batch = group.batches.insert(batch, {comm, stream, {}});
  batch->messages.insert(batch->messages.end(), messages.begin(), messages.end());
}

// The timeout in the configuration, which older headers lack.
template <class Config>
auto exec_timeout(const Config& config, int) -> decltype(&config.hcclExecTimeOut) {
  return &config.hcclExecTimeOut;
}
template <class Config>
const int32_t* exec_timeout(const Config&, long) {
  return nullptr;
}

// `config` may come from another version of the header: its first member is its size.
Options comm_options(const HcclCommConfig* config) {
  Options options = options_from_environment();
  if (config == nullptr) return options;
  struct Info {
    size_t size;
    uint32_t magic;
    uint32_t version;
  } info;
  std::memcpy(&info, config, sizeof(info));
  if (info.magic != HCCL_COMM_CONFIG_MAGIC_WORD) {
    throw Error(HCCL_E_PARA, "the HcclCommConfig was not initialised by HcclCommConfigInit");
  }
  auto holds = [&](const void* member, size_t size) {
    return static_cast<const char*>(member) + size <= reinterpret_cast<const char*>(config) + info.size;
  };
  if (holds(config->hcclCommName, sizeof(config->hcclCommName))) {
    options.name.assign(config->hcclCommName, strnlen(config->hcclCommName, sizeof(config->hcclCommName) - 1));
  }
  const int32_t* timeout = exec_timeout(*config, 0);
  if (timeout != nullptr && holds(timeout, sizeof(*timeout)) && *timeout >= 0) {
    options.exec_timeout = std::chrono::seconds(*timeout);
  }
  return options;
}

std::shared_ptr<Comm> join(uint32_t n, const HcclRootInfo* root_info, uint32_t rank, const HcclCommConfig* config) {
  require(root_info, "rootInfo");
  RootInfo root;
  static_assert(sizeof(root) <= sizeof(root_info->internal));
  std::memcpy(&root, root_info->internal, sizeof(root));
  auto comm = Comm::attach(root, n, rank, current_device(), comm_options(config));
  comm->wait_for_ranks();
  return comm;
}

const char* error_text(HcclResult code) {
  static const char* const texts[] = {"success",
                                      "invalid parameter",
                                      "null pointer",
                                      "memory error",
                                      "internal error",
                                      "not supported",
                                      "not found",
                                      "resource unavailable",
                                      "system call failed",
                                      "timeout",
                                      "cannot open file",
                                      "TCP connection failed",
                                      "RoCE connection failed",
                                      "TCP transfer failed",
                                      "RoCE transfer failed",
                                      "runtime error",
                                      "driver error",
                                      "profiling error",
                                      "CCE error",
                                      "network error",
                                      "try again",
                                      "a remote rank failed",
                                      "communicator suspended",
                                      "retry failed",
                                      "out of memory"};
  size_t index = static_cast<size_t>(code);
  return index < sizeof(texts) / sizeof(texts[0]) ? texts[index] : "unknown HCCL error";
}

std::atomic<int32_t> deterministic{1};

}  // namespace
}  // namespace vnpu::hccl

using namespace vnpu::hccl;  // NOLINT: everything below is an entry point

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* rootInfo) {
  return guarded("HcclGetRootInfo", [&] {
    require(rootInfo, "rootInfo");
    RootInfo root = make_root_info();
    std::memset(rootInfo->internal, 0, sizeof(rootInfo->internal));
    std::memcpy(rootInfo->internal, &root, sizeof(root));
  });
}

HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  return guarded("HcclCommInitRootInfoConfig", [&] {
    require(comm, "comm");
    require(config, "config");
    *comm = publish(join(nRanks, rootInfo, rank, config));
  });
}

HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank, HcclComm* comm) {
  return guarded("HcclCommInitRootInfo", [&] {
    require(comm, "comm");
    *comm = publish(join(nRanks, rootInfo, rank, nullptr));
  });
}

HcclResult HcclCommInitAll(uint32_t ndev, int32_t* devices, HcclComm* comms) {
  return guarded("HcclCommInitAll", [&] {
    require(devices, "devices");
    require(comms, "comms");
    RootInfo root = make_root_info();
    std::vector<std::shared_ptr<Comm>> ranks;
    for (uint32_t rank = 0; rank < ndev; ++rank) {
      ranks.push_back(Comm::attach(root, ndev, rank, devices[rank], options_from_environment()));
    }
    for (auto& comm : ranks) comm->wait_for_ranks();
    for (uint32_t rank = 0; rank < ndev; ++rank) comms[rank] = publish(ranks[rank]);
  });
}

HcclResult HcclCreateSubCommConfig(HcclComm* comm, uint32_t rankNum, uint32_t* rankIds, uint64_t subCommId,
                                   uint32_t subCommRankId, HcclCommConfig* config, HcclComm* subComm) {
  return guarded("HcclCreateSubCommConfig", [&] {
    require(comm, "comm");
    require(rankIds, "rankIds");
    require(config, "config");
    require(subComm, "subComm");
    std::vector<uint32_t> ranks(rankIds, rankIds + rankNum);
    *subComm = publish(find(*comm)->create_sub(ranks, subCommId, subCommRankId, comm_options(config)));
  });
}

HcclResult HcclCommDestroy(HcclComm comm) {
  return guarded("HcclCommDestroy", [&] {
    find(comm)->leave();
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry().erase(comm);
  });
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* rankSize) {
  return guarded("HcclGetRankSize", [&] {
    require(rankSize, "rankSize");
    *rankSize = find(comm)->rank_count();
  });
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  return guarded("HcclGetRankId", [&] {
    require(rank, "rank");
    *rank = find(comm)->rank();
  });
}

HcclResult HcclGetCommName(HcclComm comm, char* commName) {
  return guarded("HcclGetCommName", [&] {
    require(commName, "commName");
    std::string name = find(comm)->name();
    std::memcpy(commName, name.c_str(), std::min<size_t>(name.size() + 1, COMM_NAME_MAX_LENGTH));
  });
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* asyncError) {
  return guarded("HcclGetCommAsyncError", [&] {
    require(asyncError, "asyncError");
    std::string message;
    *asyncError = find(comm)->failure(&message);
    // The caller asks for the recent error message next.
    if (*asyncError != HCCL_SUCCESS) vnpu::fail(*asyncError, message);
  });
}

const char* HcclGetErrorString(HcclResult code) { return error_text(code); }

// All fields of the configuration are taken; those that only tune a transport have no effect here.
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue configValue) {
  return guarded("HcclSetConfig", [&] {
    if (config != HCCL_DETERMINISTIC) throw Error(HCCL_E_NOT_SUPPORT, "only HCCL_DETERMINISTIC can be set");
    deterministic = configValue.value;  // results are deterministic anyway
  });
}

HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* configValue) {
  return guarded("HcclGetConfig", [&] {
    require(configValue, "configValue");
    if (config != HCCL_DETERMINISTIC) throw Error(HCCL_E_NOT_SUPPORT, "only HCCL_DETERMINISTIC can be read");
    configValue->value = deterministic;
  });
}

HcclResult HcclAllReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                         HcclComm comm, aclrtStream stream) {
  return guarded("HcclAllReduce", [&] { all_reduce(sendBuf, recvBuf, count, dataType, op, comm, stream); });
}

HcclResult HcclReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                      uint32_t root, HcclComm comm, aclrtStream stream) {
  return guarded("HcclReduce", [&] { reduce(sendBuf, recvBuf, count, dataType, op, root, comm, stream); });
}

HcclResult HcclBroadcast(void* buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  return guarded("HcclBroadcast", [&] { broadcast(buf, count, dataType, root, comm, stream); });
}

HcclResult HcclScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, uint32_t root,
                       HcclComm comm, aclrtStream stream) {
  return guarded("HcclScatter", [&] { scatter(sendBuf, recvBuf, recvCount, dataType, root, comm, stream); });
}

HcclResult HcclAllGather(void* sendBuf, void* recvBuf, uint64_t sendCount, HcclDataType dataType, HcclComm comm,
                         aclrtStream stream) {
  return guarded("HcclAllGather", [&] {
    auto found = find(comm);
    Blocks blocks = equal_blocks(sendCount, found->rank_count());
    all_gather(Kind::kAllGather, sendBuf, sendCount, recvBuf, blocks.counts, blocks.displacements, dataType, found,
               stream);
  });
}

HcclResult HcclAllGatherV(void* sendBuf, uint64_t sendCount, void* recvBuf, const void* recvCounts,
                          const void* recvDispls, HcclDataType dataType, HcclComm comm, aclrtStream stream) {
  return guarded("HcclAllGatherV", [&] {
    auto found = find(comm);
    all_gather(Kind::kAllGatherV, sendBuf, sendCount, recvBuf,
               read_counts(recvCounts, found->rank_count(), "recvCounts"),
               read_counts(recvDispls, found->rank_count(), "recvDispls"), dataType, found, stream);
  });
}

HcclResult HcclReduceScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
  return guarded("HcclReduceScatter", [&] {
    auto found = find(comm);
    Blocks blocks = equal_blocks(recvCount, found->rank_count());
    reduce_scatter(Kind::kReduceScatter, sendBuf, blocks.counts, blocks.displacements, recvBuf, recvCount, dataType,
                   op, found, stream);
  });
}

HcclResult HcclReduceScatterV(void* sendBuf, const void* sendCounts, const void* sendDispls, void* recvBuf,
                              uint64_t recvCount, HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                              aclrtStream stream) {
  return guarded("HcclReduceScatterV", [&] {
    auto found = find(comm);
    reduce_scatter(Kind::kReduceScatterV, sendBuf, read_counts(sendCounts, found->rank_count(), "sendCounts"),
                   read_counts(sendDispls, found->rank_count(), "sendDispls"), recvBuf, recvCount, dataType, op,
                   found, stream);
  });
}

HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, HcclDataType sendType, const void* recvBuf,
                        uint64_t recvCount, HcclDataType recvType, HcclComm comm, aclrtStream stream) {
  return guarded("HcclAlltoAll", [&] {
    auto found = find(comm);
    all_to_all(Kind::kAllToAll, sendBuf, equal_blocks(sendCount, found->rank_count()), sendType,
               const_cast<void*>(recvBuf), equal_blocks(recvCount, found->rank_count()), recvType, found, stream);
  });
}

HcclResult HcclAlltoAllV(const void* sendBuf, const void* sendCounts, const void* sdispls, HcclDataType sendType,
                         const void* recvBuf, const void* recvCounts, const void* rdispls, HcclDataType recvType,
                         HcclComm comm, aclrtStream stream) {
  return guarded("HcclAlltoAllV", [&] {
    auto found = find(comm);
    uint32_t n = found->rank_count();
    Blocks out{read_counts(sendCounts, n, "sendCounts"), read_counts(sdispls, n, "sdispls")};
    Blocks in{read_counts(recvCounts, n, "recvCounts"), read_counts(rdispls, n, "rdispls")};
    all_to_all(Kind::kAllToAllV, sendBuf, out, sendType, const_cast<void*>(recvBuf), in, recvType, found, stream);
  });
}

HcclResult HcclAlltoAllVC(const void* sendBuf, const void* sendCountMatrix, HcclDataType sendType,
                          const void* recvBuf, HcclDataType recvType, HcclComm comm, aclrtStream stream) {
  return guarded("HcclAlltoAllVC", [&] {
    auto found = find(comm);
    uint64_t n = found->rank_count(), own = found->rank();
    Counts matrix = read_counts(sendCountMatrix, n * n, "sendCountMatrix");
    Blocks out, in;
    uint64_t sent = 0, received = 0;
    for (uint64_t rank = 0; rank < n; ++rank) {
      out.counts.push_back(matrix[own * n + rank]);
      out.displacements.push_back(sent);
      in.counts.push_back(matrix[rank * n + own]);
      in.displacements.push_back(received);
      sent += out.counts.back();
      received += in.counts.back();
    }
    all_to_all(Kind::kAllToAllVC, sendBuf, out, sendType, const_cast<void*>(recvBuf), in, recvType, found, stream);
  });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return guarded("HcclBarrier", [&] {
    auto found = find(comm);
    trace(*found, "HcclBarrier", 0, kInt8);
    Signature signature;
    signature.kind = Kind::kBarrier;
    launch(found, stream, signature, [signature](Comm& comm) { comm.agree(signature); });
  });
}

HcclResult HcclSend(void* sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, HcclComm comm,
                    aclrtStream stream) {
  return guarded("HcclSend", [&] { point_to_point(find(comm), stream, {{true, sendBuf, count, dataType, destRank}}); });
}

HcclResult HcclRecv(void* recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, HcclComm comm,
                    aclrtStream stream) {
  return guarded("HcclRecv", [&] { point_to_point(find(comm), stream, {{false, recvBuf, count, dataType, srcRank}}); });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream) {
  return guarded("HcclBatchSendRecv", [&] {
    require(sendRecvInfo, "sendRecvInfo");
    std::vector<Message> messages;
    for (uint32_t i = 0; i < itemNum; ++i) {
      const HcclSendRecvItem& item = sendRecvInfo[i];
      if (item.sendRecvType != HCCL_SEND && item.sendRecvType != HCCL_RECV) {
        throw Error(HCCL_E_PARA, "item " + std::to_string(i) + " is neither a send nor a receive");
      }
      messages.push_back({item.sendRecvType == HCCL_SEND, item.buf, item.count,
                          static_cast<uint32_t>(item.dataType), item.remoteRank});
    }
    point_to_point(find(comm), stream, messages);
  });
}

HcclResult HcclGroupStart() {
  ++group.depth;
  return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd() {
  return guarded("HcclGroupEnd", [&] {
    if (group.depth == 0) throw Error(HCCL_E_PARA, "no group was started on this thread");
    if (--group.depth != 0) return;
    auto batches = std::move(group.batches);
    group.batches.clear();
    for (auto& batch : batches) launch_messages(batch.comm, batch.stream, std::move(batch.messages));
  });
}

}  // extern "C"
