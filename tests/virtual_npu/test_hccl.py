# SPDX-License-Identifier: Apache-2.0
"""The collectives of the virtual NPU: through torch.distributed (hccl_worker.py) and through C (hccl_c_worker.py)."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORKER = HERE / "hccl_worker.py"


E_PARA, E_NOT_SUPPORT, E_NOT_FOUND, E_TIMEOUT, E_REMOTE = 1, 5, 6, 9, 21


@pytest.fixture(scope="module")
def c_case(virtual_npu: Callable) -> Callable[..., dict[int, dict[str, Any]]]:
    """A function (case, ranks=2, **environment) -> what each rank answered; a rank that was killed is missing."""

    def run(case: str, ranks: int = 2, **environment: str) -> dict[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, HERE / "hccl_c_worker.py", case, str(ranks)],
            env={**virtual_npu(max(2, ranks)), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return {answer["rank"]: answer for answer in answers}

    return run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_c_interface(c_case: Callable, ranks: int) -> None:
    answers = c_case("works", ranks)
    total, product = ranks * (ranks + 1) // 2, [1, 2, 6][ranks - 1]
    for rank in range(ranks):
        assert answers[rank].get("result") == [[total] * 4, [product] * 4, ranks, rank], answers[rank]


def test_counts_by_rank(c_case: Callable) -> None:
    n = 3
    answers = c_case("with_counts", n)
    matrix = [[(sender + receiver) % 3 for receiver in range(n)] for sender in range(n)]
    for rank in range(n):
        gathered, part, received = answers[rank]["result"]
        assert gathered == [10 * r + i for r in range(n) for i in range(r + 1)]
        start = rank * (rank + 1) // 2
        assert part == [300 + 3 * (start + i) for i in range(rank + 1)]
        expected = []
        for sender in range(n):
            before = sum(matrix[sender][:rank])
            expected += [100 * sender + before + i for i in range(matrix[sender][rank])]
        assert received == expected


def test_sends_and_receives_of_a_group_run_together(c_case: Callable) -> None:
    n = 3
    for rank, answer in c_case("grouped", n).items():
        before = (rank - 1) % n
        assert answer["result"] == [[before] * 4, [10 + before] * 2, [rank] * 3, [6] * 4]


def test_batched_sends_and_receives(c_case: Callable) -> None:
    for rank, answer in c_case("batched", 3).items():
        before = (rank - 1) % 3
        assert answer["result"] == [[before] * 4, [10 + before] * 2]


def test_two_devices_of_one_process(c_case: Callable) -> None:
    assert c_case("one_process", 1)[0].get("result") == [[3] * 3, [3] * 3]


@pytest.mark.parametrize("case", ["killed", "killed_midway"])
def test_a_killed_rank_is_named_at_once(c_case: Callable, case: str) -> None:
    answers = c_case(case, 3)
    assert sorted(answers) == [0, 2]
    for answer in answers.values():
        assert "rank 1 (pid" in answer["error"] and "has died" in answer["error"]
        assert answer["seconds"] < 5


def test_a_rank_that_never_arrives(c_case: Callable) -> None:
    answer = c_case("absent", HCCL_CONNECT_TIMEOUT="1")[0]
    assert answer["code"] == E_TIMEOUT
    assert "HCCL_CONNECT_TIMEOUT" in answer["error"] and "rank 1 (never arrived)" in answer["error"]
    assert 1 <= answer["seconds"] < 5


def test_the_maker_of_the_root_info_dies(c_case: Callable) -> None:
    answer = c_case("root_dies")[1]
    assert "the process that made the root info" in answer["error"]
    assert answer["seconds"] < 5


def test_a_late_rank_is_waited_for_until_the_timeout(c_case: Callable) -> None:
    answers = c_case("late", HCCL_EXEC_TIMEOUT="1")
    assert "HCCL_EXEC_TIMEOUT" in answers[0]["error"] and "rank 1 (pid" in answers[0]["error"]
    assert answers[0]["seconds"] >= 1
    assert "waited 1 s" in answers[1]["error"]  # rank 1 is told why when it comes
    assert c_case("late", HCCL_EXEC_TIMEOUT="30")[0]["result"] == [3] * 4


def test_a_rank_that_leaves(c_case: Callable) -> None:
    assert "rank 1 (pid" in (error := c_case("leaves")[0]["error"]) and "has destroyed its communicator" in error


def test_two_ranks_on_one_device(c_case: Callable) -> None:
    for answer in c_case("same_device").values():
        assert answer["code"] == E_PARA
        assert "ranks 0 and 1 are both on device 0" in answer["error"] and "set_device" in answer["error"]


def test_ranks_that_see_one_device_each(c_case: Callable) -> None:
    assert [answer.get("result") for answer in c_case("one_visible_device").values()] == [[3] * 4] * 2


@pytest.mark.parametrize(
    ("case", "descriptions"),
    [
        ("other_count", ["HcclAllReduce(count=4, float32, sum)", "HcclAllReduce(count=5, float32, sum)"]),
        ("other_dtype", ["HcclAllReduce(count=4, float32, sum)", "HcclAllReduce(count=4, int32, sum)"]),
        ("other_op", ["HcclAllReduce(count=4, float32, sum)", "HcclAllReduce(count=4, float32, prod)"]),
        ("other_collective", ["HcclAllReduce(count=4, float32, sum)", "HcclBroadcast(count=4, float32, root=0)"]),
        ("other_splits", ["rank 1 sends 1 elements to rank 1, which expects 2"]),
        ("other_message", ["rank 0 sends 5 float32 to rank 1", "rank 1 receives 6 int32 from rank 0"]),
        ("send_meets_collective", ["rank 0 runs HcclAllReduce(count=4, float32, sum) while rank 1 waits"]),
        ("other_number_of_ranks", ["the ranks differ in the number of ranks", "2", "3"]),
    ],
)
def test_ranks_that_disagree_all_fail(c_case: Callable, case: str, descriptions: list[str]) -> None:
    answers = c_case(case, HCCL_CONNECT_TIMEOUT="20")
    assert sorted(answers) == [0, 1]
    for answer in answers.values():
        for description in descriptions:
            assert description in answer["error"]
        assert answer["seconds"] < 5


def test_a_rank_whose_device_is_in_error_does_not_keep_the_others_waiting(c_case: Callable) -> None:
    answers = c_case("device_in_error")
    assert "rank 1 has 1 sends to and 0 receives from itself" in answers[1]["error"]
    assert "rank 1 did not run HcclAllReduce(count=4, float32, sum)" in answers[0]["error"]


def test_the_communicator_tells_of_its_failure(c_case: Callable) -> None:
    for answer in c_case("async_error").values():
        result = answer["result"]
        assert (result["before"], result["after"]) == (0, E_PARA)
        assert "the ranks run different collectives" in result["message"]
        assert "the ranks run different collectives" in result["again"]


def test_wrong_arguments_are_refused_at_once(c_case: Callable) -> None:
    for answer in c_case("refused").values():
        host, double, product, unknown, peer = answer["result"]["messages"]
        assert host.startswith(f"{E_PARA} ") and "sendBuf is not 4 bytes of device memory" in host
        assert double.startswith(f"{E_NOT_SUPPORT} ") and "sum of float64 is not supported" in double
        assert product.startswith(f"{E_NOT_SUPPORT} ") and "prod of bfloat16 is not supported" in product
        assert unknown.startswith(f"{E_PARA} ") and "data type 99" in unknown
        assert peer.startswith(f"{E_PARA} ") and "destination 2 is not one of the 2 ranks" in peer
        assert answer["result"]["sum"] == [3] * 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list[Any], environment: dict[str, str], **more: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [str(part) for part in [sys.executable, *command]],
        env={**environment, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in more.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(processes: list[subprocess.Popen], timeout: float) -> list[tuple[int, str, str]]:
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


# Two ranks leave without destroying the process group; three make sub-groups with HcclCreateSubCommConfig.
SETTINGS = {2: {"DESTROY": "0"}, 3: {"ROOTINFO_SUBCOMM_ENABLE": "1"}}


@pytest.fixture(scope="module")
def results(virtual_npu: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By number of ranks: what each of them answered; all cases run in the same processes."""
    folders = {ranks: tmp_path_factory.mktemp(f"hccl{ranks}") for ranks in SETTINGS}
    started = []
    for ranks, folder in folders.items():
        command = ["-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", free_port()]
        command += ["--nproc-per-node", ranks, WORKER, "all", folder]
        started.append(start(command, virtual_npu(ranks, folder / "trace"), HCCL_EXEC_TIMEOUT=60, **SETTINGS[ranks]))
    answers: dict[int, dict[str, Any]] = {}
    for (ranks, folder), (code, output, errors) in zip(folders.items(), finish(started, timeout=300), strict=True):
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        by_rank = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        answers[ranks] = {"code": code, "log": output + errors, "by_rank": by_rank, "trace": folder / "trace"}
    return answers


def cases() -> list[str]:
    source = WORKER.read_text().split("CASES = [")[1].split("]")[0]
    return [name for name in source.replace(",", " ").split()]


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("ranks", SETTINGS)
def test_torch_distributed(results: dict[int, dict[str, Any]], ranks: int, case: str) -> None:
    for rank, answers in enumerate(results[ranks]["by_rank"]):
        assert case in answers, f"rank {rank} did not get to it:\n{results[ranks]['log']}"
        assert "error" not in answers[case], f"rank {rank}: {answers[case]['error']}"


@pytest.mark.parametrize("ranks", SETTINGS)
def test_processes_end_cleanly(results: dict[int, dict[str, Any]], ranks: int) -> None:
    assert results[ranks]["code"] == 0, results[ranks]["log"]


def test_collectives_are_traced(results: dict[int, dict[str, Any]]) -> None:
    records = [json.loads(line) for line in Path(results[2]["trace"]).read_text().splitlines()]
    collectives = [record for record in records if record["kind"] == "collective"]
    assert {record["rank"] for record in collectives} == {0, 1}
    large = [record for record in collectives if record["name"] == "HcclAllReduce" and record["count"] == 1_000_003]
    assert len(large) == 2
    assert {record["bytes"] for record in large} == {4_000_012}
    assert {record["dtype"] for record in large} == {"float32"}
    assert {record["world_size"] for record in large} == {2}


@pytest.fixture(scope="module")
def failures(virtual_npu: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, str]]]:
    """How the ranks of some runs that must fail ended; the runs go on side by side.

    They are started without torchrun, which would end the ranks that survive.
    """
    folder = tmp_path_factory.mktemp("failures")
    settings: dict[str, dict[str, str]] = {"die": {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}, "linger": {}}
    started = []
    for what, environment in settings.items():
        common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **environment}
        for rank in range(2):
            started.append(start([WORKER, what, folder], virtual_npu(2), RANK=rank, LOCAL_RANK=rank, **common))
    ended = finish(started, timeout=180)
    return {what: ended[2 * i : 2 * i + 2] for i, what in enumerate(settings)}


def test_python_gets_an_exception_when_a_rank_is_killed(failures: dict[str, list[tuple[int, str, str]]]) -> None:
    (code, output, errors), (killed, _, _) = failures["die"]
    assert killed == -signal.SIGKILL and code == 3, errors
    answer = json.loads(output.splitlines()[-1])
    assert "rank 1 (pid" in answer["error"] and "has died" in answer["error"]
    assert answer["seconds"] < 5


def test_the_watchdog_ends_a_process_whose_peer_was_killed(failures: dict[str, list[tuple[int, str, str]]]) -> None:
    """By torch_npu's default, even if Python never looks at the result: without it the process would end with 0."""
    (code, _, errors), (killed, _, _) = failures["linger"]
    assert killed == -signal.SIGKILL and code == -signal.SIGABRT, errors
    assert "rank 1 (pid" in errors and "has died" in errors
