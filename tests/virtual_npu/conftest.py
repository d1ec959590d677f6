# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def on_virtual_npu(virtual_npu: Callable) -> Callable[..., str]:
    """A function (code, devices=1, **variables) -> what Python code printed in a process that has virtual NPUs.

    The process must end with the status `returncode`; with `stderr=True` what it wrote there is returned as well.
    """

    environment = virtual_npu(1)

    def run(code: str, devices: int = 1, returncode: int = 0, stderr: bool = False, **variables: object) -> str:
        variables = {"VIRTUAL_NPU_DEVICES": devices, **variables}
        env = {**os.environ, **environment, **{name: str(value) for name, value in variables.items()}}
        command = [sys.executable, "-c", f"import torch\n{code}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == returncode, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr if stderr else done.stdout

    return run
