# SPDX-License-Identifier: Apache-2.0
"""The collectives through their C interface, without torch: `hccl_c_worker.py CASE RANKS` runs a case in RANKS forked
processes, each of which prints one JSON line: its rank and what the case returned.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

INT8, INT32, FLOAT16, FLOAT32, INT64, FLOAT64, BFLOAT16 = 0, 2, 3, 4, 5, 10, 11
SUM, PROD = 0, 1
FORMATS = {INT8: ctypes.c_int8, INT32: ctypes.c_int32, FLOAT32: ctypes.c_float, INT64: ctypes.c_int64}
ROOT_INFO_BYTES = 4108
DEVICE_TO_HOST, HOST_TO_DEVICE = 2, 1
FIRST = 0  # the rank that makes the root info


class Failure(Exception):
    """A call that did not return 0."""


class Rank:
    """One rank's device, stream and communicator."""

    def __init__(self, rank: int, ranks: int, root_infos: list[tuple[int, int]]) -> None:
        self.rank, self.ranks, self.pipes = rank, ranks, root_infos
        self.acl = ctypes.CDLL("libascendcl.so")
        self.hccl = ctypes.CDLL("libhccl.so")
        self.acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.call(self.acl.aclInit, None)
        self.comm, self.stream = ctypes.c_void_p(), ctypes.c_void_p()

    def call(self, function: Any, *arguments: Any) -> None:
        code = function(*arguments)
        if code != 0:
            raise Failure(code, (self.acl.aclGetRecentErrMsg() or b"").decode())

    def use_device(self, device: int) -> None:
        self.call(self.acl.aclrtSetDevice, device)
        self.call(self.acl.aclrtCreateStream, ctypes.byref(self.stream))

    def root_info(self) -> ctypes.Array:
        if self.rank != FIRST:
            return ctypes.create_string_buffer(os.read(self.pipes[self.rank][0], ROOT_INFO_BYTES), ROOT_INFO_BYTES)
        info = ctypes.create_string_buffer(ROOT_INFO_BYTES)
        self.call(self.hccl.HcclGetRootInfo, info)
        for other in range(1, self.ranks):
            os.write(self.pipes[other][1], info.raw)
        return info

    def join(self, ranks: int = 0) -> None:
        info = self.root_info()
        self.call(self.hccl.HcclCommInitRootInfo, ranks or self.ranks, info, self.rank, ctypes.byref(self.comm))

    def start(self) -> None:
        self.use_device(self.rank)
        self.join()

    def to_device(self, values: list, dtype: int = FLOAT32) -> ctypes.c_void_p:
        data = (FORMATS[dtype] * max(1, len(values)))(*values)
        memory = ctypes.c_void_p()
        self.call(self.acl.aclrtMalloc, ctypes.byref(memory), ctypes.c_size_t(ctypes.sizeof(data)), 0)
        size = ctypes.c_size_t(ctypes.sizeof(data))
        self.call(self.acl.aclrtMemcpy, memory, size, data, size, HOST_TO_DEVICE)
        return memory

    def to_host(self, memory: ctypes.c_void_p, count: int, dtype: int = FLOAT32) -> list:
        data = (FORMATS[dtype] * count)()
        size = ctypes.c_size_t(ctypes.sizeof(data))
        self.call(self.acl.aclrtMemcpy, data, size, memory, size, DEVICE_TO_HOST)
        return list(data)

    def synchronize(self) -> None:
        self.call(self.acl.aclrtSynchronizeStream, self.stream)

    def all_reduce(self, count: int = 4, dtype: int = FLOAT32, op: int = SUM) -> list:
        send = self.to_device([self.rank + 1] * count, dtype)
        receive = self.to_device([0] * count, dtype)
        self.call(self.hccl.HcclAllReduce, send, receive, ctypes.c_uint64(count), dtype, op, self.comm, self.stream)
        self.synchronize()
        return self.to_host(receive, count, dtype)


def u64(values: list[int]) -> ctypes.Array:
    return (ctypes.c_uint64 * len(values))(*values)


def works(r: Rank) -> Any:
    r.start()
    result = [r.all_reduce(), r.all_reduce(dtype=INT64, op=PROD)]
    r.call(r.hccl.HcclBarrier, r.comm, r.stream)
    r.synchronize()
    size, own = ctypes.c_uint32(), ctypes.c_uint32()
    r.call(r.hccl.HcclGetRankSize, r.comm, ctypes.byref(size))
    r.call(r.hccl.HcclGetRankId, r.comm, ctypes.byref(own))
    r.call(r.hccl.HcclCommDestroy, r.comm)
    return [*result, size.value, own.value]


def with_counts(r: Rank) -> Any:
    """HcclAllGatherV, HcclReduceScatterV and HcclAlltoAllVC; rank i has i + 1 elements of each rank, rank j gets j."""
    r.start()
    n, me = r.ranks, r.rank
    counts, total = [i + 1 for i in range(n)], n * (n + 1) // 2
    displacements = [i * (i + 1) // 2 for i in range(n)]
    gathered = r.to_device([-1] * total)
    own = r.to_device([10 * me + i for i in range(me + 1)])
    r.call(
        r.hccl.HcclAllGatherV, own, ctypes.c_uint64(me + 1), gathered, u64(counts), u64(displacements), FLOAT32,
        r.comm, r.stream,
    )  # fmt: skip
    spread = r.to_device([100 * me + i for i in range(total)], INT32)
    part = r.to_device([-1] * (me + 1), INT32)
    r.call(
        r.hccl.HcclReduceScatterV, spread, u64(counts), u64(displacements), part, ctypes.c_uint64(me + 1), INT32, SUM,
        r.comm, r.stream,
    )  # fmt: skip
    matrix = u64([(sender + receiver) % 3 for sender in range(n) for receiver in range(n)])
    out = sum(matrix[me * n : (me + 1) * n])
    into = sum(matrix[sender * n + me] for sender in range(n))
    sent, received = r.to_device([100 * me + i for i in range(out)]), r.to_device([-1] * into)
    r.call(r.hccl.HcclAlltoAllVC, sent, matrix, FLOAT32, received, FLOAT32, r.comm, r.stream)
    r.synchronize()
    return [r.to_host(gathered, total), r.to_host(part, me + 1, INT32), r.to_host(received, into)]


def grouped(r: Rank) -> Any:
    """A ring, which would block without a group; two messages to the same rank, one to oneself, and a collective."""
    r.start()
    after, before = (r.rank + 1) % r.ranks, (r.rank - 1) % r.ranks
    first, second, third = r.to_device([0] * 4), r.to_device([0] * 2), r.to_device([0] * 3)
    messages = [
        (r.hccl.HcclSend, r.to_device([r.rank] * 4), 4, after),
        (r.hccl.HcclSend, r.to_device([10 + r.rank] * 2), 2, after),
        (r.hccl.HcclSend, r.to_device([r.rank] * 3), 3, r.rank),
        (r.hccl.HcclRecv, first, 4, before),
        (r.hccl.HcclRecv, second, 2, before),
        (r.hccl.HcclRecv, third, 3, r.rank),
    ]
    total, ones = r.to_device([0] * 4), r.to_device([r.rank + 1] * 4)
    r.call(r.hccl.HcclGroupStart)
    r.call(r.hccl.HcclGroupStart)
    for function, buffer, count, peer in messages:
        r.call(function, buffer, ctypes.c_uint64(count), FLOAT32, peer, r.comm, r.stream)
    r.call(r.hccl.HcclGroupEnd)
    r.call(r.hccl.HcclAllReduce, ones, total, ctypes.c_uint64(4), FLOAT32, SUM, r.comm, r.stream)
    r.call(r.hccl.HcclGroupEnd)
    r.synchronize()
    return [r.to_host(first, 4), r.to_host(second, 2), r.to_host(third, 3), r.to_host(total, 4)]


class SendRecvItem(ctypes.Structure):
    _fields_ = [
        ("receives", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("peer", ctypes.c_uint32),
    ]


def batched(r: Rank) -> Any:
    r.start()
    after, before = (r.rank + 1) % r.ranks, (r.rank - 1) % r.ranks
    first, second = r.to_device([0] * 4), r.to_device([0] * 2)
    items = (SendRecvItem * 4)(
        (0, r.to_device([r.rank] * 4), 4, FLOAT32, after),
        (1, first, 4, FLOAT32, before),
        (0, r.to_device([10 + r.rank] * 2), 2, FLOAT32, after),
        (1, second, 2, FLOAT32, before),
    )
    r.call(r.hccl.HcclBatchSendRecv, items, 4, r.comm, r.stream)
    r.synchronize()
    return [r.to_host(first, 4), r.to_host(second, 2)]


def killed(r: Rank) -> Any:
    r.start()
    if r.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return r.all_reduce()


def killed_midway(r: Rank) -> Any:
    """Rank 1 dies while data is moving."""
    r.start()
    send, receive = r.to_device([1] * 400_000), r.to_device([1] * 400_000)
    for i in range(20):
        if r.rank == 1 and i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        r.call(r.hccl.HcclAllReduce, send, receive, ctypes.c_uint64(400_000), FLOAT32, SUM, r.comm, r.stream)
    r.synchronize()


def absent(r: Rank) -> Any:
    r.use_device(r.rank)
    if r.rank == 1:
        return "stays away"
    r.join()


def root_dies(r: Rank) -> Any:
    r.use_device(r.rank)
    if r.rank == FIRST:
        r.root_info()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    r.join()


def late(r: Rank) -> Any:
    r.start()
    if r.rank == 1:
        time.sleep(2)
    return r.all_reduce()


def leaves(r: Rank) -> Any:
    r.start()
    if r.rank == 1:
        r.call(r.hccl.HcclCommDestroy, r.comm)
        time.sleep(1)
        return "left"
    return r.all_reduce()


def same_device(r: Rank) -> Any:
    r.use_device(0)
    r.join()


def one_visible_device(r: Rank) -> Any:
    """Each rank calls the only device it sees number 0."""
    r.use_device(0)
    r.join()
    return r.all_reduce()


def other_number_of_ranks(r: Rank) -> Any:
    r.use_device(r.rank)
    r.join(r.ranks + r.rank)


def other_count(r: Rank) -> Any:
    r.start()
    return r.all_reduce(count=4 + r.rank)


def other_dtype(r: Rank) -> Any:
    r.start()
    return r.all_reduce(dtype=FLOAT32 if r.rank == 0 else INT32)


def other_op(r: Rank) -> Any:
    r.start()
    return r.all_reduce(op=SUM if r.rank == 0 else PROD)


def other_collective(r: Rank) -> Any:
    r.start()
    if r.rank == 0:
        return r.all_reduce()
    buffer = r.to_device([1] * 4)
    r.call(r.hccl.HcclBroadcast, buffer, ctypes.c_uint64(4), FLOAT32, 0, r.comm, r.stream)
    r.synchronize()


def other_splits(r: Rank) -> Any:
    r.start()
    counts = u64([1] * r.ranks)
    received = u64([1, 1 + r.rank])
    buffers = [r.to_device([0] * 8), r.to_device([0] * 8)]
    displacements = u64([0, 1])
    r.call(
        r.hccl.HcclAlltoAllV, buffers[0], counts, displacements, FLOAT32, buffers[1], received, displacements, FLOAT32,
        r.comm, r.stream,
    )  # fmt: skip
    r.synchronize()


def other_message(r: Rank) -> Any:
    r.start()
    buffer = r.to_device([0] * 8)
    function = r.hccl.HcclSend if r.rank == 0 else r.hccl.HcclRecv
    r.call(
        function, buffer, ctypes.c_uint64(5 + r.rank), FLOAT32 if r.rank == 0 else INT32, 1 - r.rank, r.comm, r.stream
    )
    r.synchronize()


def send_meets_collective(r: Rank) -> Any:
    r.start()
    if r.rank == 0:
        return r.all_reduce()
    r.call(r.hccl.HcclSend, r.to_device([0] * 4), ctypes.c_uint64(4), FLOAT32, 0, r.comm, r.stream)
    r.synchronize()


def device_in_error(r: Rank) -> Any:
    """Rank 1 fails on a communicator of its own accord; what it had queued behind on another one will never run."""
    r.start()
    first, r.comm = r.comm, ctypes.c_void_p()
    r.join()
    buffer = r.to_device([0] * 4)
    if r.rank == 1:
        r.call(r.hccl.HcclSend, buffer, ctypes.c_uint64(4), FLOAT32, 1, first, r.stream)
    r.call(r.hccl.HcclAllReduce, buffer, buffer, ctypes.c_uint64(4), FLOAT32, SUM, r.comm, r.stream)
    try:
        r.synchronize()
    finally:
        time.sleep(1)  # lives on, so that it isn't its death that the other one sees


def async_error(r: Rank) -> Any:
    r.start()
    codes = [r.hccl.HcclGetCommAsyncError]
    before, after = ctypes.c_int(-1), ctypes.c_int(-1)
    r.call(codes[0], r.comm, ctypes.byref(before))
    try:
        r.all_reduce(count=4 + r.rank)
    except Failure:
        pass
    r.call(codes[0], r.comm, ctypes.byref(after))
    message = r.acl.aclGetRecentErrMsg().decode()
    try:
        r.all_reduce()
        again = ""
    except Failure as failure:
        again = failure.args[1]
    return {"before": before.value, "after": after.value, "message": message, "again": again}


def refused(r: Rank) -> Any:
    """What is wrong with the arguments is said at once, and harms nobody."""
    r.start()
    host = (ctypes.c_float * 4)()
    device = r.to_device([0] * 4)
    messages = []
    for send, dtype, op in [(host, FLOAT32, SUM), (device, FLOAT64, SUM), (device, BFLOAT16, PROD), (device, 99, SUM)]:
        try:
            r.call(r.hccl.HcclAllReduce, send, device, ctypes.c_uint64(1), dtype, op, r.comm, r.stream)
            messages.append("accepted")
        except Failure as failure:
            messages.append(f"{failure.args[0]} {failure.args[1]}")
    try:
        r.call(r.hccl.HcclSend, device, ctypes.c_uint64(1), FLOAT32, r.ranks, r.comm, r.stream)
    except Failure as failure:
        messages.append(f"{failure.args[0]} {failure.args[1]}")
    return {"messages": messages, "sum": r.all_reduce()}


def one_process(r: Rank) -> Any:
    """Two devices of one process, as HcclCommInitAll makes them."""
    devices = (ctypes.c_int32 * 2)(0, 1)
    comms = (ctypes.c_void_p * 2)()
    r.use_device(0)
    r.call(r.hccl.HcclCommInitAll, 2, devices, comms)
    streams, results = [], []
    for device in range(2):
        r.use_device(device)
        streams.append(ctypes.c_void_p(r.stream.value))
        send, receive = r.to_device([device + 1] * 3), r.to_device([0] * 3)
        results.append(receive)
        r.call(
            r.hccl.HcclAllReduce, send, receive, ctypes.c_uint64(3), FLOAT32, SUM, ctypes.c_void_p(comms[device]),
            streams[device],
        )  # fmt: skip
    for stream in streams:
        r.call(r.acl.aclrtSynchronizeStream, stream)
    return [r.to_host(result, 3) for result in results]


def main() -> None:
    case: Callable[[Rank], Any] = globals()[sys.argv[1]]
    ranks = int(sys.argv[2])
    pipes = [os.pipe() for _ in range(ranks)]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid != 0:
            children.append(pid)
            continue
        answer: dict[str, Any] = {"rank": rank, "pid": os.getpid()}
        if case is one_visible_device:
            os.environ["ASCEND_RT_VISIBLE_DEVICES"] = str(rank)
        start = time.monotonic()
        try:
            answer["result"] = case(Rank(rank, ranks, pipes))
        except Failure as failure:
            answer["code"], answer["error"] = failure.args
        answer["seconds"] = time.monotonic() - start
        os.write(1, (json.dumps(answer) + "\n").encode())
        os._exit(0)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
