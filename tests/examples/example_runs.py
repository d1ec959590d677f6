# SPDX-License-Identifier: Apache-2.0
"""Runs of the example in processes of their own, and what they print."""

import re
import subprocess
import time
import uuid
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

STEP = re.compile(r"step=(\d+) loss=(\d+\.\d{4}) grad_norm=(\d+\.\d{6}) step_time=\d+\.\d{4}")


def losses(output: str) -> dict[int, tuple[str, str]]:
    """step -> (loss, grad_norm), as printed."""
    return {int(m[1]): (m[2], m[3]) for m in map(STEP.fullmatch, output.splitlines()) if m}


class Run:
    """A command and everything it starts, in a directory of its own; both outputs go to files."""

    def __init__(self, command: list, directory: Path, env: dict[str, str]):
        self.mark = f"NPU_MOE_TEST_RUN={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self._out, self._err = directory / f"{value}.out", directory / f"{value}.err"
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=directory,
            env=env | {name: value},
            stdin=subprocess.DEVNULL,
            stdout=self._out.open("w"),
            stderr=self._err.open("w"),
        )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def wait(self, timeout: float = 120) -> int:
        return self.process.wait(timeout)

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while step not in losses(self.stdout):
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, f"no step {step}: {self.stdout}{self.stderr}"
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """All processes of this run that live, also those whose parent is gone."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def assert_nothing_is_left(self, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while pids := self.pids():
            assert time.monotonic() < deadline, f"still there: {pids}"
            time.sleep(0.1)
