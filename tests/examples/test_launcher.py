# SPDX-License-Identifier: Apache-2.0
"""The launch script: with a Python that only writes down how it was called, and for real on CPU."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_runs import EXAMPLES, losses

LAUNCHER = EXAMPLES / "run_fsdp2_moe_npu.sh"
TORCHRUN = "from torch.distributed.run import main; main()"
NPUS = "NPU: Ascend910B2 devices=8"
ADVISED = {
    "TASK_QUEUE_ENABLE": "2",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "CPU_AFFINITY_CONF": "1",
}

RECORDER = """\
#!{python} -S
import json, os, sys
with open({calls!r}, "a") as file:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=file)
if sys.argv[1].endswith("utils/npu.py"):
    print({gate!r})
    sys.exit({status})
if "--check" in sys.argv:
    sys.exit({check_status})
"""


@pytest.fixture
def launch(tmp_path):
    """Runs the launcher with a recording Python; returns (the calls of Python, the completed process)."""

    def launch(*arguments, gate=NPUS, status=0, check_status=0, **variables):
        python, calls = tmp_path / "python", tmp_path / "calls"
        calls.unlink(missing_ok=True)
        python.write_text(
            RECORDER.format(
                python=sys.executable, calls=str(calls), gate=gate, status=status, check_status=check_status
            )
        )
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        env = {"PATH": os.environ["PATH"], "PYTHON": str(python)} | variables
        result = subprocess.run(
            ["bash", LAUNCHER, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else [], result

    return launch


def values(arguments: list[str]) -> dict[str, str]:
    """The last value of each option."""
    return {a: b for a, b in zip(arguments, arguments[1:], strict=False) if a.startswith("--")}


def test_one_process_an_npu(launch):
    (gate, check, run), result = launch("--steps", "3", "--data", "a path")
    assert result.returncode == 0
    assert result.stdout == NPUS + "\n"
    assert gate[0] == [str(EXAMPLES.parent / "utils" / "npu.py"), "--require"]
    script = str(EXAMPLES / "fsdp2_moe.py")
    assert run[0][:6] == ["-c", TORCHRUN, "--standalone", "--nproc-per-node", "8", script]
    assert run[0][-4:] == ["--steps", "3", "--data", "a path"]
    assert values(run[0]).items() >= {"--device": "npu", "--model": "qwen3-30b-a3b", "--num-layers": "4"}.items()
    # The check sees the same arguments, and the world that there will be.
    assert check[0] == [script, *run[0][6:], "--check"]
    assert check[1].items() >= {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items()
    assert "WORLD_SIZE" not in run[1]
    assert run[1].items() >= ADVISED.items()
    assert "HCCL_CONNECT_TIMEOUT" not in run[1]


def test_the_users_variables_are_kept(launch):
    mine = {"TASK_QUEUE_ENABLE": "1", "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64", "CPU_AFFINITY_CONF": "0"}
    calls, _ = launch(**mine, OMP_NUM_THREADS="7")
    assert calls[-1][1].items() >= (mine | {"OMP_NUM_THREADS": "7"}).items()
    # torch_npu refuses to have both names of it.
    calls, _ = launch(PYTORCH_ALLOC_CONF="expandable_segments:False")
    assert "PYTORCH_NPU_ALLOC_CONF" not in calls[-1][1]


def test_a_model_of_the_users_gets_no_defaults(launch):
    for given in (["--model", "dir"], ["--model=dir"]):
        calls, _ = launch(*given)
        assert calls[-1][0][6:] == ["--device", "npu", *given]


def test_several_machines(launch):
    nodes = dict(NNODES="4", NODE_RANK="2", MASTER_ADDR="node0", NPROC_PER_NODE="3")
    calls, _ = launch(**nodes)
    rendezvous = ["--nnodes", "4", "--node-rank", "2", "--master-addr", "node0", "--master-port", "29500"]
    assert calls[-1][0][2:12] == [*rendezvous, "--nproc-per-node", "3"]
    assert calls[1][1].items() >= {"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "3"}.items()
    assert calls[-1][1]["HCCL_CONNECT_TIMEOUT"] == "1200"
    calls, _ = launch(**nodes, MASTER_PORT="4242", HCCL_CONNECT_TIMEOUT="60")
    assert values(calls[-1][0])["--master-port"] == "4242"
    assert calls[-1][1]["HCCL_CONNECT_TIMEOUT"] == "60"
    calls, _ = launch(MASTER_PORT="4242")
    assert calls[-1][0][2:6] == ["--master-addr", "127.0.0.1", "--master-port", "4242"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (dict(NNODES="2"), "NNODES=2 needs NODE_RANK and MASTER_ADDR"),
        (dict(NNODES="2", NODE_RANK="1"), "NNODES=2 needs NODE_RANK and MASTER_ADDR"),
        (dict(NNODES="2", NODE_RANK="2", MASTER_ADDR="a"), "NODE_RANK must be less than NNODES=2, got 2"),
        (dict(NPROC_PER_NODE="two"), "must be a number, got 'two'"),
        (dict(NPROC_PER_NODE="0"), "must be at least 1, got 0 and 1"),
        (dict(VIRTUAL_NPU="yes"), "VIRTUAL_NPU must be 0 or 1, got yes"),
        (dict(PYTHON="no-such-python"), "no such Python: no-such-python"),
    ],
    ids=str,
)
def test_bad_variables(variables, message, launch):
    calls, result = launch(**variables)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert not any(TORCHRUN in arguments for arguments, _ in calls)


def test_without_an_npu_two_processes_on_the_cpu(launch):
    calls, result = launch(gate="no NPU: torch_npu is not installed devices=0", status=1)
    assert result.stdout == "no NPU: torch_npu is not installed devices=0\n"
    assert calls[-1][0][2:5] == ["--standalone", "--nproc-per-node", "2"]
    assert calls[-1][0][6:] == ["--device", "cpu", "--model", "tiny"]
    assert not ADVISED.keys() & calls[-1][1].keys()


def test_a_broken_torch_npu_ends_it(launch):
    calls, result = launch(gate="no NPU: source CANN's set_env.sh devices=0", status=2)
    assert (result.returncode, len(calls)) == (2, 1)
    assert (result.stdout, result.stderr) == ("", "error: no NPU: source CANN's set_env.sh\n")


def test_what_the_check_refuses_is_not_started(launch):
    calls, result = launch(check_status=2)
    assert (result.returncode, len(calls)) == (2, 2)


def test_the_virtual_npu_runs_it_once_more(launch):
    calls, _ = launch("--steps", "3", VIRTUAL_NPU="1", VIRTUAL_NPU_DEVICES="4")
    ((arguments, env),) = calls
    run = str(EXAMPLES.parent / "utils" / "virtual_npu" / "run.py")
    assert arguments == [run, "--devices", "4", "--", "bash", str(LAUNCHER), "--model", "tiny", "--steps", "3"]
    assert env["VIRTUAL_NPU"] == "0"


# For real


@pytest.mark.slow
def test_the_main_job(start, tmp_path, text_directory):
    run = start("bash", LAUNCHER, "--steps", 20, "--log-file", "logs/log.txt", "--data", text_directory)
    assert run.wait(240) == 0, run.stderr
    run.assert_nothing_is_left()
    lines = run.stdout.splitlines()
    assert lines[0] == "no NPU: torch_npu is not installed devices=0"
    assert lines[1] == "device=cpu backend=gloo world_size=2 dtype=bfloat16"
    assert lines[3] == "experts=grouped_mm patch=off: torch_npu is not installed"
    steps = losses(run.stdout)
    assert list(steps) == list(range(1, 21))
    assert float(steps[20][0]) < float(steps[1][0]) - 1.5
    assert re.fullmatch(r"mean_step_time=\d+\.\d{4} tokens_per_second=\d+\.\d \(without the first step\)", lines[-1])
    assert losses((tmp_path / "logs" / "log.txt").read_text()) == steps
    assert run.stderr.count("\n") == 1 and "[PATCH]" in run.stderr


@pytest.mark.slow
def test_bad_input_is_the_only_line(start):
    run = start("bash", LAUNCHER, "--data", "missing")
    assert run.wait() == 2
    assert run.stderr == "error: --data missing: no such file or directory\n"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(sent, start, text_directory):
    run = start("bash", LAUNCHER, "--steps", 100000, "--data", text_directory, "--seq-len", 32)
    run.wait_for_step(2)
    assert len(run.pids()) == 3  # torchrun and two ranks
    before = time.monotonic()
    run.process.send_signal(sent)
    assert run.wait(20) != 0
    run.assert_nothing_is_left(5)
    assert time.monotonic() - before < 20


def test_help(cpu_env):
    env = cpu_env | {"PYTHON": sys.executable, "COLUMNS": "119"}
    result = subprocess.run(["bash", LAUNCHER, "--help"], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "NPROC_PER_NODE" in result.stdout and "--activation-checkpointing" in result.stdout
    assert "set -euo" not in result.stdout


def test_it_is_run_with_errors_on():
    assert "\nset -euo pipefail\n" in Path(LAUNCHER).read_text()
