# SPDX-License-Identifier: Apache-2.0
"""One rank of the tests of the collectives; started by test_hccl.py, which reads the results it writes.

Every collective runs on NPU tensors through "hccl" and on equal CPU tensors through "gloo". Reductions of floating
point numbers are compared bit by bit with the sum in the order of the ranks, rounded after each of them.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = FLOATS + [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
ODD_SIZE = 1_000_003  # more than one chunk, and no multiple of anything

rank = world = 0
gloo: dist.ProcessGroup


def data(of_rank: int, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """The data of a rank; every rank can make everybody's."""
    generator = torch.Generator().manual_seed(1000 * salt + of_rank)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 50, shape, generator=generator).to(dtype)


def everybody(*shape: int, **kwargs) -> list[torch.Tensor]:
    return [data(r, *shape, **kwargs) for r in range(world)]


def reduced(tensors: list[torch.Tensor], op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
    combine = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.MIN: torch.minimum,
    }[op]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    return total


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.device.type == "npu", actual.device
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def close_to_gloo(actual: torch.Tensor, reference: torch.Tensor) -> None:
    """gloo adds in another order."""
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float32: 1e-5}.get(actual.dtype, 0)
    torch.testing.assert_close(actual.cpu(), reference, rtol=tolerance, atol=tolerance)


def all_reduce() -> None:
    for dtype in DTYPES:
        everyone = everybody(5, 7, dtype=dtype)
        mine, reference = everyone[rank].npu(), everyone[rank].clone()
        dist.all_reduce(mine)
        same(mine, reduced(everyone))
        dist.all_reduce(reference, group=gloo)
        close_to_gloo(mine, reference)


def all_reduce_ops() -> None:
    for dtype in [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]:
        for op in [dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]:
            if op == dist.ReduceOp.PRODUCT and dtype == torch.bfloat16:
                continue  # not on an Atlas A2
            everyone = everybody(33, dtype=dtype)
            mine, reference = everyone[rank].npu(), everyone[rank].clone()
            dist.all_reduce(mine, op=op)
            same(mine, reduced(everyone, op))
            dist.all_reduce(reference, op=op, group=gloo)
            close_to_gloo(mine, reference)


def all_reduce_average() -> None:
    for dtype in FLOATS:
        everyone = everybody(33, dtype=dtype)
        mine = everyone[rank].npu()
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        same(mine, reduced(everyone) / world)


def all_reduce_16_bit_rounding() -> None:
    """Every pattern of 16 bits plus another: subnormal numbers, ties, overflow, infinities and NaN."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in [torch.bfloat16, torch.float16]:
        everyone = [patterns.view(dtype)] + [patterns[torch.randperm(2**16)].view(dtype) for _ in range(world - 1)]
        dist.broadcast_object_list(everyone, src=0, group=gloo)
        for op in [dist.ReduceOp.SUM, dist.ReduceOp.MAX]:
            mine = everyone[rank].npu()
            dist.all_reduce(mine, op=op)
            same(mine, reduced(everyone, op))


def all_reduce_large() -> None:
    everyone = everybody(ODD_SIZE)
    mine = everyone[rank].npu()
    dist.all_reduce(mine)
    same(mine, reduced(everyone))


def all_reduce_is_repeatable() -> None:
    mine = data(rank, 4096, dtype=torch.bfloat16).npu()
    results = []
    for _ in range(5):
        tensor = mine.clone()
        dist.all_reduce(tensor)
        results.append(tensor.cpu())
    assert all(torch.equal(result, results[0]) for result in results)


def unsupported_reductions() -> None:
    """They fail on the calling rank and nowhere else; the communicator stays usable."""
    for dtype, op in [(torch.float64, dist.ReduceOp.SUM), (torch.int32, dist.ReduceOp.BXOR)]:
        try:
            dist.all_reduce(data(rank, 4).to(dtype).npu(), op=op)
            torch.npu.synchronize()
        except RuntimeError:
            continue
        raise AssertionError(f"{op} of {dtype} was accepted")
    all_reduce_is_repeatable()


def async_op() -> None:
    everyone = [everybody(257, salt=i) for i in range(6)]
    tensors = [everyone[i][rank].npu() for i in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    doubled = [tensor + tensor for tensor in tensors]
    for i in range(6):
        same(doubled[i], 2 * reduced(everyone[i]))


def broadcast() -> None:
    for source in range(world):
        for dtype in [*DTYPES, torch.float64]:
            mine = data(rank, 3, 5, dtype=dtype, salt=source).npu()
            dist.broadcast(mine, src=source)
            same(mine, data(source, 3, 5, dtype=dtype, salt=source))
    mine = data(rank, ODD_SIZE).npu()
    dist.broadcast(mine, src=world - 1)
    same(mine, data(world - 1, ODD_SIZE))


def reduce() -> None:
    for destination in range(world):
        everyone = everybody(1000, salt=destination)
        mine = everyone[rank].npu()
        dist.reduce(mine, dst=destination)
        same(mine, reduced(everyone) if rank == destination else everyone[rank])


def all_gather_into_tensor() -> None:
    for dtype in DTYPES:
        everyone = everybody(3, 4, dtype=dtype)
        result = torch.empty(world * 3, 4, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(result, everyone[rank].npu())
        same(result, torch.cat(everyone))
    everyone = everybody(ODD_SIZE)
    result = torch.empty(world * ODD_SIZE, device="npu")
    own = result.narrow(0, rank * ODD_SIZE, ODD_SIZE)  # in place, as FSDP2 does it
    own.copy_(everyone[rank])
    dist.all_gather_into_tensor(result, own)
    same(result, torch.cat(everyone))


def all_gather() -> None:
    for dtype in DTYPES:
        everyone = everybody(3, 4, dtype=dtype)
        results = [torch.empty(3, 4, dtype=dtype, device="npu") for _ in range(world)]
        dist.all_gather(results, everyone[rank].npu())
        for result, expected in zip(results, everyone, strict=True):
            same(result, expected)


def all_gather_uneven() -> None:
    everyone = [data(r, r + 1, 3) for r in range(world)]
    results = [torch.empty(r + 1, 3, device="npu") for r in range(world)]
    dist.all_gather(results, everyone[rank].npu())
    for result, expected in zip(results, everyone, strict=True):
        same(result, expected)


def reduce_scatter_tensor() -> None:
    for dtype in [*FLOATS, torch.int64, torch.int32]:
        everyone = everybody(world * 3, 4, dtype=dtype)
        result = torch.empty(3, 4, dtype=dtype, device="npu")
        dist.reduce_scatter_tensor(result, everyone[rank].npu())
        same(result, reduced(everyone).chunk(world)[rank])
    everyone = everybody(world * ODD_SIZE)
    result = torch.empty(ODD_SIZE, device="npu")
    dist.reduce_scatter_tensor(result, everyone[rank].npu())
    same(result, reduced(everyone).chunk(world)[rank])
    dist.reduce_scatter_tensor(result, everyone[rank].npu(), op=dist.ReduceOp.AVG)
    same(result, reduced(everyone).chunk(world)[rank] / world)


def reduce_scatter() -> None:
    everyone = everybody(world, 3, 4)
    result = torch.empty(3, 4, device="npu")
    dist.reduce_scatter(result, list(everyone[rank].npu()))
    same(result, reduced(everyone)[rank])


def reduce_scatter_uneven() -> None:
    everyone = [[data(r, target + 1, 3, salt=target) for target in range(world)] for r in range(world)]
    result = torch.empty(rank + 1, 3, device="npu")
    dist.reduce_scatter(result, [tensor.npu() for tensor in everyone[rank]])
    same(result, reduced([tensors[rank] for tensors in everyone]))


def scatter() -> None:
    for source in range(world):
        parts = everybody(2, 3, salt=source)
        result = torch.empty(2, 3, device="npu")
        dist.scatter(result, [part.npu() for part in parts] if rank == source else None, src=source)
        same(result, parts[rank])


def gather() -> None:
    """torch_npu makes it an all-gather."""
    for destination in range(world):
        everyone = everybody(2, 3, salt=destination)
        results = [torch.empty(2, 3, device="npu") for _ in range(world)] if rank == destination else None
        dist.gather(everyone[rank].npu(), results, dst=destination)
        for result, expected in zip(results or [], everyone, strict=rank == destination):
            same(result, expected)


def all_to_all_single() -> None:
    for dtype in DTYPES:
        everyone = everybody(world * 2, 3, dtype=dtype)
        result = torch.empty(world * 2, 3, dtype=dtype, device="npu")
        dist.all_to_all_single(result, everyone[rank].npu())
        same(result, torch.cat([tensor.chunk(world)[rank] for tensor in everyone]))


def all_to_all_single_uneven() -> None:
    for scale in [1, 100_000]:
        splits = [[(sender + 2 * receiver) % 4 * scale for receiver in range(world)] for sender in range(world)]
        everyone = [data(r, sum(splits[r]), 3, dtype=torch.bfloat16) for r in range(world)]
        received = [row[rank] for row in splits]
        result = torch.empty(sum(received), 3, dtype=torch.bfloat16, device="npu")
        dist.all_to_all_single(result, everyone[rank].npu(), received, splits[rank])
        expected = torch.cat([everyone[r].split(splits[r])[rank] for r in range(world)])
        same(result, expected)
        reference = torch.empty_like(expected)
        dist.all_to_all_single(reference, everyone[rank], received, splits[rank], group=gloo)
        same(result, reference)


def all_to_all() -> None:
    sent = [data(rank, receiver + 1, salt=receiver).npu() for receiver in range(world)]
    received = [torch.empty(rank + 1, device="npu") for _ in range(world)]
    dist.all_to_all(received, sent)
    for sender in range(world):
        same(received[sender], data(sender, rank + 1, salt=rank))


def send_and_receive() -> None:
    for size in [1, 0, ODD_SIZE]:
        if rank == 0:
            for peer in range(1, world):
                dist.send(data(peer, size, salt=7).npu(), dst=peer)
                reply = torch.empty(size, device="npu")
                dist.recv(reply, src=peer)
                same(reply, 2 * data(peer, size, salt=7))
        else:
            tensor = torch.empty(size, device="npu")
            dist.recv(tensor, src=0)
            dist.send(tensor + tensor, dst=0)


def isend_and_irecv() -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    outgoing, incoming = data(rank, 100).npu(), torch.empty(100, device="npu")
    order = [lambda: dist.isend(outgoing, after), lambda: dist.irecv(incoming, before)]
    for work in [start() for start in (order if rank % 2 == 0 else order[::-1])]:
        work.wait()
    same(incoming, data(before, 100))


def batch_isend_irecv() -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    for size in [5, ODD_SIZE]:
        outgoing, incoming = data(rank, size).npu(), torch.empty(size, device="npu")
        second, received = data(rank, 3, dtype=torch.int64).npu(), torch.empty(3, dtype=torch.int64, device="npu")
        operations = [
            dist.P2POp(dist.isend, outgoing, after),
            dist.P2POp(dist.isend, second, after),
            dist.P2POp(dist.irecv, incoming, before),
            dist.P2POp(dist.irecv, received, before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(incoming, data(before, size))
        same(received, data(before, 3, dtype=torch.int64))


def barrier() -> None:
    with tempfile.TemporaryDirectory() as own:
        folders: list[str | None] = [None]
        if rank == 0:
            folders = [own]
        dist.broadcast_object_list(folders, src=0, group=gloo)
        time.sleep(0.05 * rank)
        open(os.path.join(str(folders[0]), str(rank)), "w").close()
        dist.barrier()
        assert len(os.listdir(str(folders[0]))) == world
        dist.barrier(group=gloo)


def objects() -> None:
    collected: list[dict | None] = [None] * world
    dist.all_gather_object(collected, {"rank": rank, "text": "x" * (10 + 1000 * rank)})
    assert [entry["rank"] for entry in collected if entry] == list(range(world))
    assert [len(entry["text"]) for entry in collected if entry] == [10 + 1000 * r for r in range(world)]
    shared: list[object] = ["hello", {"a": [1, 2]}] if rank == world - 1 else [None, None]
    dist.broadcast_object_list(shared, src=world - 1)
    assert shared == ["hello", {"a": [1, 2]}]


def sub_groups() -> None:
    """Overlapping groups, used in turn, each with a stream of its own."""
    pairs = [(a, b) for a in range(world) for b in range(a + 1, world)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    for repetition in range(3):
        works = []
        for pair, group in groups.items():
            if rank in pair:
                tensor = data(rank, 1000, salt=repetition).npu()
                works.append((pair, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
        whole = data(rank, 1000, salt=repetition).npu()
        dist.all_reduce(whole)
        for pair, tensor, work in works:
            work.wait()
            same(tensor, reduced([data(r, 1000, salt=repetition) for r in pair]))
        same(whole, reduced(everybody(1000, salt=repetition)))
    for pair, group in groups.items():
        if rank in pair:
            gathered = torch.empty(2 * 3, device="npu")
            dist.all_gather_into_tensor(gathered, data(rank, 3).npu(), group=group)
            same(gathered, torch.cat([data(r, 3) for r in pair]))


def groups_on_their_own_streams() -> None:
    """Two communicators of the same ranks, used in a different order by different ranks."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    streams = [torch.npu.Stream() for _ in range(2)]
    tensors = [data(rank, 5000, salt=i).npu() for i in range(2)]
    for tensor, group in zip(tensors, groups, strict=True):  # makes the communicators, which is a rendezvous
        dist.all_reduce(tensor, group=group)
    torch.npu.synchronize()
    tensors = [data(rank, 5000, salt=i).npu() for i in range(2)]
    torch.npu.synchronize()
    for i in [0, 1] if rank % 2 == 0 else [1, 0]:
        with torch.npu.stream(streams[i]):
            for _ in range(10):
                dist.all_reduce(tensors[i], group=groups[i])
    torch.npu.synchronize()
    for i in range(2):
        total = reduced(everybody(5000, salt=i))
        for _ in range(9):
            total = reduced([total] * world)
        same(tensors[i], total)


def device_mesh() -> None:
    rows = 2 if world % 2 == 0 else 1
    columns = world // rows
    mesh = init_device_mesh("npu", (rows, columns), mesh_dim_names=("replicate", "shard"))
    row, column = divmod(rank, columns)
    tensor = data(rank, 10).npu()
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    same(tensor, reduced([data(row * columns + c, 10) for c in range(columns)]))
    tensor = data(rank, 10).npu()
    dist.all_reduce(tensor, group=mesh.get_group("replicate"))
    same(tensor, reduced([data(r * columns + column, 10) for r in range(rows)]))


def coalesced() -> None:
    tensors = [data(rank, 10 + i, salt=i).npu() for i in range(3)]
    with dist._coalescing_manager(device=tensors[0].device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for i in range(3):
        same(tensors[i], reduced(everybody(10 + i, salt=i)))


def ordered_with_other_work() -> None:
    """A collective waits for what its stream's input comes from, and what comes after waits for it."""
    value = data(rank, 1000).npu()
    expected = data(rank, 1000)
    others = everybody(1000)
    for _ in range(10):
        value = value + value
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        others = [other + other for other in others]
        expected = reduced(others, dist.ReduceOp.MAX)
        others = [expected] * world
    same(value, expected)


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    def make() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))

    sharded = make().npu()
    mesh = init_device_mesh("npu", (world,))
    for layer in [sharded[0], sharded[2], sharded]:
        fully_shard(layer, mesh=mesh)
    plain = make()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (sharded, plain)]
    for step in range(3):
        batch = everybody(8, 6, salt=step)
        sharded(batch[rank].npu()).square().mean().backward()
        plain(torch.cat(batch)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for actual, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.full_tensor().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


CASES = [
    all_reduce, all_reduce_ops, all_reduce_average, all_reduce_16_bit_rounding, all_reduce_large,
    all_reduce_is_repeatable, async_op, broadcast, reduce, all_gather_into_tensor, all_gather, all_gather_uneven,
    reduce_scatter_tensor, reduce_scatter, reduce_scatter_uneven, scatter, gather, all_to_all_single,
    all_to_all_single_uneven, all_to_all, send_and_receive, isend_and_irecv, batch_isend_irecv, barrier, objects,
    sub_groups, groups_on_their_own_streams, device_mesh, coalesced, ordered_with_other_work, fsdp2,
    unsupported_reductions,
]  # fmt: skip


def die() -> None:
    """Rank 1 is killed; rank 0 prints what it gets instead of a sum."""
    tensor = data(rank, 10).npu()
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    if rank == 1:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    try:
        dist.all_reduce(tensor)
        torch.npu.synchronize()
    except RuntimeError as error:
        print(json.dumps({"seconds": time.monotonic() - start, "error": str(error)}), flush=True)
        os._exit(3)  # without the tear-down of a device in error
    raise AssertionError("no error")


def linger() -> None:
    """As `die`, but rank 0 does not look at the result."""
    tensor = data(rank, 10).npu()
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(tensor)
    time.sleep(30)
    os._exit(0)


def main() -> None:
    global rank, world, gloo
    what, results_folder = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    if what in ("die", "linger"):
        globals()[what]()
    results = {}
    for case in CASES:
        if what not in ("all", case.__name__):
            continue
        try:
            start = time.monotonic()
            case()
            torch.npu.synchronize()
            results[case.__name__] = {"seconds": time.monotonic() - start}
        except Exception:
            results[case.__name__] = {"error": traceback.format_exc()}
        with open(os.path.join(results_folder, f"{rank}.json"), "w") as file:
            json.dump(results, file)
        if "error" in results[case.__name__]:
            sys.exit(1)  # the ranks may be at different places now
    if os.environ.get("DESTROY", "1") == "1":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
