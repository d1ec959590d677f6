// SPDX-License-Identifier: Apache-2.0
// Device memory is memory of this process. It holds 0xFF bytes when it is allocated and again when it is freed: NaN for
// every floating point type, -1 for integers.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime.h"

namespace vnpu {
namespace {

constexpr int kPoison = 0xFF;
constexpr size_t kAlignment = 512;
constexpr size_t kPage = 2 << 20;  // what the real device maps; aclrtMallocPhysical takes multiples of it

struct Range {
  size_t bytes;
  int device;
  bool host;
};

struct Physical {
  int device;
  size_t bytes;
  int file;
  bool mapped;
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Range> ranges;            // what may be used
  std::map<uintptr_t, size_t> reserved;         // addresses without memory
  std::map<uintptr_t, Physical*> mappings;      // by where it is mapped
  std::map<int, size_t> used;
};

Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// What a device has: VIRTUAL_NPU_MEMORY_MB, or its share of half the memory of the host (at most 64 GB, which the chip
// has), so that a program that needs too much gets an error and not the host's out-of-memory killer.
size_t total_bytes() {
  static const size_t total = [] {
    const char* text = std::getenv("VIRTUAL_NPU_MEMORY_MB");
    size_t megabytes = text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
    if (megabytes > 0) return megabytes << 20;
    size_t host = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    size_t share = host / 2 / static_cast<size_t>(std::max(1, device_count()));
    return std::min(share, size_t{64} << 30) / kPage * kPage;
  }();
  return total;
}

// The range that `pointer` lies in. The lock is held by the caller.
std::pair<const uintptr_t, Range>* find(const void* pointer) {
  auto& ranges = memory().ranges;
  auto after = ranges.upper_bound(address(pointer));
  if (after == ranges.begin()) return nullptr;
  auto& entry = *std::prev(after);
  return address(pointer) < entry.first + entry.second.bytes ? &entry : nullptr;
}

void take(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  size_t& used = memory().used[device];
  if (used + bytes > total_bytes()) {
    throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "out of memory on device " + std::to_string(device) + ": " + std::to_string(bytes) +
                    " bytes were asked for, " + std::to_string(used) + " of " + std::to_string(total_bytes()) +
                    " are in use (VIRTUAL_NPU_MEMORY_MB sets the total)");
  }
  used += bytes;
}

void give_back(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().used[device] -= bytes;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void* allocate(size_t bytes) {
  if (bytes == 0) throw Error(ACL_ERROR_INVALID_PARAM, "aclrtMalloc: 0 bytes were asked for");
  int device = check_current_device();
  bytes = round_up(bytes, kAlignment);
  take(device, bytes);
  void* pointer = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pointer == MAP_FAILED) {
    give_back(device, bytes);
    throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no " + std::to_string(bytes) + " bytes for device " +
                                                    std::to_string(device));
  }
  std::memset(pointer, kPoison, bytes);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().ranges[address(pointer)] = {bytes, device, false};
  return pointer;
}

Range remove(void* pointer, bool host, const char* what) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().ranges.find(address(pointer));
  if (found == memory().ranges.end() || found->second.host != host || memory().mappings.count(address(pointer)) != 0) {
    throw Error(ACL_ERROR_RT_PARAM_INVALID, std::string(what) + ": not the address of an allocation");
  }
  Range range = found->second;
  memory().ranges.erase(found);
  return range;
}

}  // namespace

bool is_device_memory(const void* pointer) { return place_of(pointer) == Place::kDevice; }

Place place_of(const void* pointer) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto* found = find(pointer);
  if (found == nullptr) return Place::kPageable;
  return found->second.host ? Place::kPinned : Place::kDevice;
}

// Memory mapped side by side (expandable segments) counts as one.
void check_bytes(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto* found = find(pointer);
  if (found == nullptr || found->second.host) return;  // pageable and pinned memory is the caller's affair
  uintptr_t end = address(pointer) + bytes;
  while (found != nullptr && found->first + found->second.bytes < end) {
    found = find(reinterpret_cast<const void*>(found->first + found->second.bytes));
  }
  if (found == nullptr) {
    throw Error(ACL_ERROR_RT_PARAM_INVALID,
                "the device memory ends before the " + std::to_string(bytes) + " bytes that are to be copied");
  }
}

}  // namespace vnpu

using vnpu::Error;
using vnpu::guarded;

extern "C" {

aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  return guarded([&] { *pointer = vnpu::allocate(bytes); });
}

aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  return guarded([&] { *pointer = vnpu::allocate(bytes); });
}

// Work that still uses the memory is waited for.
aclError aclrtFree(void* pointer) {
  return guarded([&] {
    vnpu::Range range = vnpu::remove(pointer, false, "aclrtFree");
    try {
      vnpu::wait_device(range.device);
    } catch (const Error&) {  // the next synchronisation tells
    }
    ::munmap(pointer, range.bytes);
    vnpu::give_back(range.device, range.bytes);
  });
}

aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return guarded([&] {
    if (bytes == 0) throw Error(ACL_ERROR_INVALID_PARAM, "aclrtMallocHost: 0 bytes were asked for");
    bytes = vnpu::round_up(bytes, vnpu::kAlignment);
    if (::posix_memalign(pointer, 4096, bytes) != 0) {
      throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no " + std::to_string(bytes) + " bytes");
    }
    std::memset(*pointer, vnpu::kPoison, bytes);
    std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
    vnpu::memory().ranges[vnpu::address(*pointer)] = {bytes, -1, true};
  });
}

aclError aclrtMallocHostWithCfg(void** pointer, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(pointer, bytes);
}

aclError aclrtFreeHost(void* pointer) {
  return guarded([&] {
    vnpu::remove(pointer, true, "aclrtFreeHost");
    std::free(pointer);
  });
}

// Host memory that somebody else allocated becomes pinned.
aclError aclrtHostRegisterV2(void* pointer, uint64_t bytes, uint32_t) {
  return guarded([&] {
    if (pointer == nullptr || bytes == 0) throw Error(ACL_ERROR_INVALID_PARAM, "aclrtHostRegister: no memory");
    if (vnpu::place_of(pointer) != vnpu::Place::kPageable) {
      throw Error(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegister: the memory is registered, or of a device");
    }
    std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
    vnpu::memory().ranges[vnpu::address(pointer)] = {bytes, -1, true};
  });
}

aclError aclrtHostRegister(void* pointer, uint64_t bytes, aclrtHostRegisterType, void** device_pointer) {
  aclError result = aclrtHostRegisterV2(pointer, bytes, 0);
  if (result == ACL_SUCCESS && device_pointer != nullptr) *device_pointer = pointer;
  return result;
}

aclError aclrtHostUnregister(void* pointer) {
  return guarded([&] { vnpu::remove(pointer, true, "aclrtHostUnregister"); });
}

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
  *attributes = {};
  auto* found = vnpu::find(pointer);
  if (found == nullptr) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  } else if (found->second.host) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  } else {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = static_cast<uint32_t>(found->second.device);
  }
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  return guarded([&] {
    int device = vnpu::check_current_device();
    std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
    *total = vnpu::total_bytes();
    *free_bytes = *total - vnpu::memory().used[device];
  });
}

// Addresses and memory apart (expandable segments).
aclError aclrtReserveMemAddress(void** pointer, size_t bytes, size_t, void*, uint64_t) {
  return guarded([&] {
    bytes = vnpu::round_up(bytes, vnpu::kPage);
    void* reserved = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) {
      throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no address range of " + std::to_string(bytes) + " bytes is left");
    }
    std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
    vnpu::memory().reserved[vnpu::address(reserved)] = bytes;
    *pointer = reserved;
  });
}

aclError aclrtReleaseMemAddress(void* pointer) {
  return guarded([&] {
    std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
    auto found = vnpu::memory().reserved.find(vnpu::address(pointer));
    if (found == vnpu::memory().reserved.end()) {
      throw Error(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress: not a reserved address");
    }
    auto mapped = vnpu::memory().mappings.lower_bound(found->first);
    if (mapped != vnpu::memory().mappings.end() && mapped->first < found->first + found->second) {
      throw Error(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress: memory is still mapped there");
    }
    ::munmap(pointer, found->second);
    vnpu::memory().reserved.erase(found);
  });
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* property, uint64_t) {
  return guarded([&] {
    if (bytes == 0 || bytes % vnpu::kPage != 0) {
      throw Error(ACL_ERROR_INVALID_PARAM, "aclrtMallocPhysical: " + std::to_string(bytes) +
                                               " bytes are no multiple of " + std::to_string(vnpu::kPage));
    }
    int device = static_cast<int>(property->location.id);
    vnpu::check_device(device);
    vnpu::take(device, bytes);
    int file = ::memfd_create("virtual_npu", MFD_CLOEXEC);
    void* view = MAP_FAILED;
    if (file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0) {
      view = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (view == MAP_FAILED) {
      if (file >= 0) ::close(file);
      vnpu::give_back(device, bytes);
      throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no " + std::to_string(bytes) + " bytes for device " +
                                                      std::to_string(device));
    }
    std::memset(view, vnpu::kPoison, bytes);
    ::munmap(view, bytes);
    *handle = new vnpu::Physical{device, bytes, file, false};
  });
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  return guarded([&] {
    auto* physical = static_cast<vnpu::Physical*>(handle);
    if (physical->mapped) throw Error(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreePhysical: the memory is still mapped");
    ::close(physical->file);
    vnpu::give_back(physical->device, physical->bytes);
    delete physical;
  });
}

aclError aclrtMapMem(void* pointer, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  return guarded([&] {
    auto* physical = static_cast<vnpu::Physical*>(handle);
    std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
    auto after = vnpu::memory().reserved.upper_bound(vnpu::address(pointer));
    bool inside = after != vnpu::memory().reserved.begin() &&
                  vnpu::address(pointer) + bytes <= std::prev(after)->first + std::prev(after)->second;
    if (!inside || offset != 0 || bytes != physical->bytes || physical->mapped || vnpu::find(pointer) != nullptr) {
      throw Error(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: not whole unmapped memory on reserved free addresses");
    }
    if (::mmap(pointer, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED) {
      throw Error(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMapMem: the host could not map the memory");
    }
    physical->mapped = true;
    vnpu::memory().mappings[vnpu::address(pointer)] = physical;
    vnpu::memory().ranges[vnpu::address(pointer)] = {bytes, physical->device, false};
  });
}

aclError aclrtUnmapMem(void* pointer) {
  return guarded([&] {
    int device;
    {
      std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
      auto found = vnpu::memory().mappings.find(vnpu::address(pointer));
      if (found == vnpu::memory().mappings.end()) {
        throw Error(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: nothing is mapped at this address");
      }
      device = found->second->device;
    }
    try {
      vnpu::wait_device(device);
    } catch (const Error&) {  // the next synchronisation tells
    }
    std::lock_guard<std::mutex> lock(vnpu::memory().mutex);
    auto found = vnpu::memory().mappings.find(vnpu::address(pointer));
    size_t bytes = found->second->bytes;
    std::memset(pointer, vnpu::kPoison, bytes);
    ::mmap(pointer, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    found->second->mapped = false;
    vnpu::memory().mappings.erase(found);
    vnpu::memory().ranges.erase(vnpu::address(pointer));
  });
}

}  // extern "C"
