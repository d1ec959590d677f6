# SPDX-License-Identifier: Apache-2.0
"""The collectives of the virtual NPU: through torch.distributed (hccl_worker.py) and through C (hccl_c_worker.py)."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
RUN = HERE.parent.parent / "utils" / "virtual_npu" / "run.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")

E_PARA, E_NOT_SUPPORT, E_NOT_FOUND, E_TIMEOUT, E_REMOTE = 1, 5, 6, 9, 21


def c_case(case: str, ranks: int = 2, **environment: str) -> dict[int, dict[str, Any]]:
    """What each rank answered; a rank that was killed is missing."""
    command = [sys.executable, RUN, "--devices", str(max(2, ranks)), "--", sys.executable]
    command += [HERE / "hccl_c_worker.py", case, str(ranks)]
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {answer["rank"]: answer for answer in answers}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_c_interface(ranks: int) -> None:
    answers = c_case("works", ranks)
    total, product = ranks * (ranks + 1) // 2, [1, 2, 6][ranks - 1]
    for rank in range(ranks):
        assert answers[rank].get("result") == [[total] * 4, [product] * 4, ranks, rank], answers[rank]


def test_counts_by_rank() -> None:
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


def test_two_devices_of_one_process() -> None:
    assert c_case("one_process", 1)[0].get("result") == [[3] * 3, [3] * 3]


@pytest.mark.parametrize("case", ["killed", "killed_midway"])
def test_a_killed_rank_is_named_at_once(case: str) -> None:
    answers = c_case(case, 3)
    assert sorted(answers) == [0, 2]
    for answer in answers.values():
        assert "rank 1 (pid" in answer["error"] and "has died" in answer["error"]
        assert answer["seconds"] < 3


def test_a_rank_that_never_arrives() -> None:
    answer = c_case("absent", HCCL_CONNECT_TIMEOUT="1")[0]
    assert answer["code"] == E_TIMEOUT
    assert "HCCL_CONNECT_TIMEOUT" in answer["error"] and "rank 1 (never arrived)" in answer["error"]
    assert 1 <= answer["seconds"] < 3


def test_the_maker_of_the_root_info_dies() -> None:
    answer = c_case("root_dies")[1]
    assert "the process that made the root info" in answer["error"]
    assert answer["seconds"] < 3


def test_a_late_rank_is_waited_for_until_the_timeout() -> None:
    answers = c_case("late", HCCL_EXEC_TIMEOUT="1")
    assert "HCCL_EXEC_TIMEOUT" in answers[0]["error"] and "rank 1 (pid" in answers[0]["error"]
    assert 1 <= answers[0]["seconds"] < 2.4
    assert "waited 1 s" in answers[1]["error"]  # rank 1 is told why when it comes
    assert c_case("late", HCCL_EXEC_TIMEOUT="30")[0]["result"] == [3] * 4


def test_a_rank_that_leaves() -> None:
    assert "rank 1 (pid" in (error := c_case("leaves")[0]["error"]) and "has destroyed its communicator" in error


def test_two_ranks_on_one_device() -> None:
    for answer in c_case("same_device").values():
        assert answer["code"] == E_PARA
        assert "ranks 0 and 1 are both on device 0" in answer["error"] and "set_device" in answer["error"]


@pytest.mark.parametrize(
    ("case", "descriptions"),
    [
        ("other_count", ["HcclAllReduce(count=4, float32, sum)", "HcclAllReduce(count=5, float32, sum)"]),
        ("other_dtype", ["HcclAllReduce(count=4, float32, sum)", "HcclAllReduce(count=4, int32, sum)"]),
        ("other_op", ["HcclAllReduce(count=4, float32, sum)", "HcclAllReduce(count=4, float32, prod)"]),
        ("other_collective", ["HcclAllReduce(count=4, float32, sum)", "HcclBroadcast(count=4, float32, root=0)"]),
        ("other_splits", ["rank 0 sends 1 elements to rank 1, which expects 1", "rank 1 sends 1 elements to rank 1"]),
        ("other_message", ["rank 0 sends 5 float32 to rank 1", "rank 1 receives 6 int32 from rank 0"]),
        ("send_meets_collective", ["rank 0 runs HcclAllReduce(count=4, float32, sum) while rank 1 waits"]),
        ("other_number_of_ranks", ["the ranks differ in the number of ranks", "2", "3"]),
    ],
)
def test_ranks_that_disagree_all_fail(case: str, descriptions: list[str]) -> None:
    answers = c_case(case, HCCL_CONNECT_TIMEOUT="20")
    assert sorted(answers) == [0, 1]
    for answer in answers.values():
        for description in descriptions:
            assert description in answer["error"]
        assert answer["seconds"] < 3


def test_the_communicator_tells_of_its_failure() -> None:
    for answer in c_case("async_error").values():
        result = answer["result"]
        assert (result["before"], result["after"]) == (0, E_PARA)
        assert "the ranks run different collectives" in result["message"]
        assert "the ranks run different collectives" in result["again"]


def test_wrong_arguments_are_refused_at_once() -> None:
    for answer in c_case("refused").values():
        host, double, product, unknown, peer = answer["result"]["messages"]
        assert host.startswith(f"{E_PARA} ") and "sendBuf is not 4 bytes of device memory" in host
        assert double.startswith(f"{E_NOT_SUPPORT} ") and "sum of float64 is not supported" in double
        assert product.startswith(f"{E_NOT_SUPPORT} ") and "prod of bfloat16 is not supported" in product
        assert unknown.startswith(f"{E_PARA} ") and "data type 99" in unknown
        assert peer.startswith(f"{E_PARA} ") and "destination 2 is not a rank" in peer
        assert answer["result"]["sum"] == [3] * 4


def start(ranks: int, what: str, folder: Path, **environment: str) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, RUN, "--devices", ranks]
    if "TRACE" in environment:
        command += ["--trace", environment["TRACE"]]
    command += ["--", sys.executable, HERE / "hccl_worker.py", what, folder]
    processes = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own |= {"OMP_NUM_THREADS": 1, **environment}
        processes.append(
            subprocess.Popen(
                [str(part) for part in command],
                env={**os.environ, **{key: str(value) for key, value in own.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def finish(processes: list[subprocess.Popen], timeout: float) -> list[tuple[int, str, str]]:
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


# Two ranks leave without destroying the process group; three use torch_npu's other ways to gather and to make groups.
SETTINGS = {2: {"DESTROY": "0"}, 3: {"ROOTINFO_SUBCOMM_ENABLE": "1", "TORCH_NPU_USE_COMPATIBLE_IMPL": "1"}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By number of ranks: case -> rank -> result; every case runs in the same processes."""
    answers: dict[int, dict[str, Any]] = {}
    for ranks, environment in SETTINGS.items():
        folder = tmp_path_factory.mktemp(f"hccl{ranks}")
        outputs = finish(start(ranks, "all", folder, TRACE=str(folder / "trace.jsonl"), **environment), timeout=120)
        by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        answers[ranks] = {"outputs": outputs, "by_rank": by_rank, "trace": folder / "trace.jsonl"}
    return answers


def cases() -> list[str]:
    source = (HERE / "hccl_worker.py").read_text().split("CASES = [")[1].split("]")[0]
    return [name for name in source.replace(",", " ").split()]


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("ranks", SETTINGS)
def test_torch_distributed(results: dict[int, dict[str, Any]], ranks: int, case: str) -> None:
    for rank, answers in enumerate(results[ranks]["by_rank"]):
        assert case in answers, results[ranks]["outputs"][rank]
        assert "error" not in answers[case], f"rank {rank}: {answers[case]['error']}"


@pytest.mark.parametrize("ranks", SETTINGS)
def test_processes_end_cleanly(results: dict[int, dict[str, Any]], ranks: int) -> None:
    for code, _, errors in results[ranks]["outputs"]:
        assert code == 0, errors


def test_collectives_are_traced(results: dict[int, dict[str, Any]]) -> None:
    records = [json.loads(line) for line in Path(results[2]["trace"]).read_text().splitlines()]
    collectives = [record for record in records if record["kind"] == "collective"]
    assert {record["rank"] for record in collectives} == {0, 1}
    large = [record for record in collectives if record["name"] == "HcclAllReduce" and record["count"] == 1_000_003]
    assert len(large) == 2
    assert {record["bytes"] for record in large} == {4_000_012}
    assert {record["dtype"] for record in large} == {"float32"}
    assert {record["world_size"] for record in large} == {2}


def test_python_gets_an_exception_when_a_rank_is_killed(tmp_path: Path) -> None:
    (code, output, errors), (killed, _, _) = finish(
        start(2, "die", tmp_path, TORCH_HCCL_ASYNC_ERROR_HANDLING="0"), timeout=60
    )
    assert killed != 0 and code == 3, errors
    answer = json.loads(output)
    assert "rank 1 (pid" in answer["error"] and "has died" in answer["error"]
    assert answer["seconds"] < 5


def test_the_watchdog_ends_a_process_whose_peer_was_killed(tmp_path: Path) -> None:
    """torch_npu's default: whatever Python does, the process does not outlive the collective for long."""
    (code, _, errors), (killed, _, _) = finish(start(2, "die", tmp_path), timeout=60)
    assert killed != 0 and code != 0, errors


def test_python_gets_an_exception_when_ranks_disagree(tmp_path: Path) -> None:
    for code, output, errors in finish(
        start(2, "disagree", tmp_path, TORCH_HCCL_ASYNC_ERROR_HANDLING="0"), timeout=60
    ):
        assert code == 3, errors
        error = json.loads(output)["error"]
        assert "HcclAllReduce(count=10, float32, sum)" in error and "HcclAllReduce(count=11, float32, sum)" in error
