# SPDX-License-Identifier: Apache-2.0
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from example_runs import EXAMPLES, Run

sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def text_directory() -> str:
    """Real text, and little of it: a package of the standard library."""
    return str(Path(sysconfig.get_path("stdlib")) / "json")


@pytest.fixture
def start(tmp_path, cpu_env):
    """Starts a command on a machine without an NPU, and ends what is left of it after the test."""
    runs = []

    def start(*command, **variables) -> Run:
        path = os.pathsep.join([str(Path(sys.executable).parent), cpu_env["PATH"]])
        env = cpu_env | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
        runs.append(Run(list(command), tmp_path, env))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.pids():
            os.kill(pid, 9)
        run.process.wait()


@pytest.fixture
def torchrun(start):
    def torchrun(script, *arguments) -> Run:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        return start(*command, script, *arguments)

    return torchrun
