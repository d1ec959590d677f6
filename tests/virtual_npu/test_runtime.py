# SPDX-License-Identifier: Apache-2.0
"""The runtime of the virtual NPU, through torch_npu: memory, streams, events, errors, devices, the end of a process.

Each test runs code in a process that has virtual NPUs; asserts in that code fail the test with their traceback.
"""

import json

import pytest

# torch_npu's ways to launch beside the usual one (TASK_QUEUE_ENABLE=1), which the other tests here take.
TASK_QUEUES = [{"TASK_QUEUE_ENABLE": 0}, {"TASK_QUEUE_ENABLE": 2}]
LAUNCHES = [*TASK_QUEUES, {"ASCEND_LAUNCH_BLOCKING": 1}]


def named(settings: list[dict]) -> list:
    return [pytest.param(each, id=",".join(f"{k}={v}" for k, v in each.items())) for each in settings]


# A stream that is busy for long enough that nothing on another one can be meant to wait for it.
BUSY = """
side = torch.npu.Stream()
big = torch.full((1024, 1024), 2.0**-10, device="npu")
target = torch.zeros(1024, 1024, device="npu")
host = torch.full((1024, 1024), -1.0).pin_memory()
torch.npu.synchronize()
with torch.npu.stream(side):
    x = big
    for _ in range(12):
        x = x @ big
    target.copy_(x + 1)
    done = torch.npu.Event(enable_timing=True)
    done.record()
"""


@pytest.mark.parametrize("settings", named(TASK_QUEUES))
def test_streams_do_not_wait_for_each_other_unless_told(on_virtual_npu, settings):
    on_virtual_npu(
        BUSY
        + """
assert not done.query() and not side.query()
host.copy_(target, non_blocking=True)  # on the default stream: nobody said that it comes after the other
torch.npu.current_stream().synchronize()
assert (host == 0).all(), "a missing synchronisation did not show"
torch.npu.current_stream().wait_event(done)
host.copy_(target, non_blocking=True)
torch.npu.current_stream().synchronize()
assert (host != 0).all() and done.query()
""",
        **settings,
    )


@pytest.mark.parametrize("settings", named(LAUNCHES))
def test_what_is_ordered_is_right_in_every_launch_mode(on_virtual_npu, settings):
    on_virtual_npu(
        """
start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
x = torch.arange(64.0).reshape(8, 8)
y = x.to("npu")
start.record()
side = torch.npu.Stream()
side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    z = y @ y
torch.npu.current_stream().wait_stream(side)
z = z + y
end.record()
assert torch.equal(z.cpu(), x @ x + x)
torch.npu.synchronize()
assert start.elapsed_time(end) > 0
""",
        **settings,
    )


def test_copies_from_pinned_memory_are_asynchronous_and_from_pageable_memory_are_not(on_virtual_npu):
    on_virtual_npu(
        BUSY
        + """
source = torch.ones(1024, 1024).pin_memory()
with torch.npu.stream(side):
    late = source.to("npu", non_blocking=True)
    source.fill_(5)  # too early: the copy is behind the work of the stream
    side.synchronize()
assert (late == 5).all()
source = torch.ones(1024, 1024)
now = source.to("npu", non_blocking=True)
source.fill_(5)
assert (now == 1).all()
"""
    )


def test_fresh_memory_is_poisoned(on_virtual_npu):
    on_virtual_npu(
        """
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
    x = torch.empty(3_000_000, dtype=dtype, device="npu").cpu()
    assert x.isnan().all() if x.is_floating_point() else (x == -1).all()
    torch.npu.empty_cache()
"""
    )


def test_without_the_cache_reused_memory_is_poisoned_too(on_virtual_npu):
    on_virtual_npu(
        """
for _ in range(4):
    x = torch.empty(1000, device="npu")
    assert x.cpu().isnan().all()
    x.fill_(1)
    del x
""",
        PYTORCH_NO_NPU_MEMORY_CACHING=1,
    )


@pytest.mark.parametrize("settings", [{}, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}])
def test_memory_is_accounted_for_and_can_run_out(on_virtual_npu, settings):
    on_virtual_npu(
        """
free, total = torch.npu.mem_get_info()
assert total == 256 << 20
x = torch.ones(16 << 20, dtype=torch.uint8, device="npu")
assert torch.npu.mem_get_info()[0] <= free - (16 << 20)
assert torch.npu.memory_allocated() >= 16 << 20
try:
    torch.empty(300 << 20, dtype=torch.uint8, device="npu")
    raise SystemExit("300 MB fitted into 256")
except torch.OutOfMemoryError as error:
    assert "out of memory" in str(error)
assert (x == 1).all()
del x
torch.npu.empty_cache()
y = torch.ones(200 << 20, dtype=torch.uint8, device="npu")  # what was freed can be had again
assert y[-1].item() == 1
properties = torch.npu.get_device_properties(0)
assert properties.total_memory == total
assert (properties.name, properties.cube_core_num, properties.vector_core_num) == ("Ascend910B2", 24, 48)
""",
        VIRTUAL_NPU_MEMORY_MB=256,
        **settings,
    )


def test_an_error_of_asynchronous_work_is_told_at_the_next_synchronisation_and_stays(on_virtual_npu):
    on_virtual_npu(
        """
x = torch.arange(4, device="npu")
y = x[torch.tensor([9], device="npu")]
for _ in range(2):
    try:
        torch.npu.synchronize()
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "507015" in str(error) and "aclnnIndex: index 9 is out of bounds" in str(error), error
try:
    y.cpu()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "507015" in str(error)
"""
    )


@pytest.mark.parametrize("settings", named(LAUNCHES))
def test_an_operator_without_an_aclnn_function_fails_with_its_name(on_virtual_npu, settings):
    output = on_virtual_npu(
        """
try:
    torch.linalg.svd(torch.ones(4, 4, device="npu"))
    torch.npu.synchronize()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "the operator Svd was launched by name" in str(error), error
""",
        stderr=True,
        **settings,
    )
    assert output.count("virtual NPU: the operator Svd was launched by name") == 1


def test_the_synchronisations_that_torch_npu_detects(on_virtual_npu):
    on_virtual_npu(
        """
x = torch.ones(4, device="npu")
torch.npu.set_sync_debug_mode("error")
try:
    x.sum().item()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "synchronizing" in str(error)
torch.npu.set_sync_debug_mode(0)
assert x.sum().item() == 4
"""
    )


def test_several_devices(on_virtual_npu):
    on_virtual_npu(
        """
assert torch.npu.device_count() == 3
x = torch.arange(3.0, device="npu:2")
y = (x + 1).to("npu:0")
torch.npu.set_device(1)
z = torch.ones(3, device="npu") + y.to("npu:1")
assert (x.device.index, y.device.index, z.device.index) == (2, 0, 1)
assert torch.equal(z.cpu(), torch.arange(3.0) + 2)
try:
    torch.ones(1, device="npu:3")
    raise SystemExit("no error")
except RuntimeError as error:
    assert "107001" in str(error)
""",
        devices=3,
    )


@pytest.mark.parametrize(("visible", "count"), [("2,0", 2), ("0,7,1", 1)])
def test_visible_devices(on_virtual_npu, visible, count):
    code = "print(torch.npu.device_count())"
    output = on_virtual_npu(code, devices=3, ASCEND_RT_VISIBLE_DEVICES=visible)
    assert output.splitlines()[-1] == str(count)


def test_data_loader_workers(on_virtual_npu):
    on_virtual_npu(
        """
x = torch.zeros(4, device="npu")
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4))
for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True):
    x += batch.to("npu", non_blocking=True).sum(0)
assert torch.equal(x.cpu(), torch.arange(64.0).reshape(16, 4).sum(0))
"""
    )


def test_a_forked_child_gets_an_error_and_not_a_hang(on_virtual_npu):
    on_virtual_npu(
        """
import os
x = torch.ones(3, device="npu")
child = os.fork()
if child == 0:
    try:
        x.cpu()
    except RuntimeError:
        os._exit(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert x.sum().item() == 3
"""
    )


def test_spawned_processes(on_virtual_npu, tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(
        """
import torch
def work(rank):
    torch.npu.set_device(rank)
    assert (torch.full((3,), rank, device="npu") + 1).sum().item() == 3 * rank + 3
if __name__ == "__main__":
    torch.ones(1, device="npu")
    torch.multiprocessing.spawn(work, nprocs=2)
"""
    )
    on_virtual_npu(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", devices=2)


@pytest.mark.parametrize("leave", ["", "import os; os._exit(4)"])
def test_a_process_ends_with_work_in_flight(on_virtual_npu, leave):
    on_virtual_npu(BUSY + leave, returncode=4 if leave else 0)


def test_the_trace_has_what_was_done_in_order(virtual_npu, on_virtual_npu, tmp_path):
    trace = tmp_path / "trace"
    on_virtual_npu(
        """
import torch_npu
x = torch.arange(6.0).reshape(2, 3).to("npu").t()
torch.npu.synchronize()
y = x + x
y.sum().item()
""",
        VIRTUAL_NPU_TRACE=trace,
    )
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [record["order"] for record in records] == list(range(len(records)))
    start = next(i for i, record in enumerate(records) if "SynchronizeDevice" in record.get("what", ""))
    kinds = [(r["kind"], r.get("name") or r.get("what") or r["direction"]) for r in records[start + 1 : start + 5]]
    assert kinds == [
        ("op", "aclnnAdd"),
        ("op", "aclnnReduceSum"),
        ("sync", "aclrtSynchronizeStreamWithTimeout"),
        ("copy", "d2h"),
    ]
    add = records[start + 1]
    assert add["inputs"][0] | {"name": ""} == {
        "name": "",
        "shape": [3, 2],
        "strides": [1, 3],
        "dtype": "float32",
        "bytes": 24,
    }
    assert (add["bytes_read"], add["bytes_written"], add["device"]) == (48, 24, 0)
    assert (records[start + 4]["bytes"], records[start + 4]["async"]) == (4, False)
