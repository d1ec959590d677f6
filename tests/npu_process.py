# SPDX-License-Identifier: Apache-2.0
"""Runs the tests in tests/npu in a process of their own that has an NPU, and reports them as if they ran here.

This process must not see an NPU (conftest.py), those tests must. So their files are collected by a second pytest, on
the real NPU where there is one and else on the virtual NPU; it says which tests it found, then is told one after the
other to run, and sends the reports of each back. To debug one, run that second pytest by hand:

    NPU_MOE_TESTS_ON_NPU=1 python utils/virtual_npu/run.py --devices 2 -- python -m pytest tests/npu -k NAME
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ON_NPU = "NPU_MOE_TESTS_ON_NPU"
PIPES = "NPU_MOE_TESTS_PIPES"


def without_torch_npu_hidden() -> dict[str, str]:
    """The environment this session was started in, as far as torch_npu is concerned."""
    return {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}


def virtual_npu_environment(devices: int, trace: Path | None = None) -> dict[str, str] | str:
    """The environment in which a process has virtual NPUs, or in one line why there are none to be had."""
    hidden = sys.modules.pop("torch_npu", None)
    try:
        spec = importlib.util.spec_from_file_location("virtual_npu_run", ROOT / "utils" / "virtual_npu" / "run.py")
        run = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(run)
        reason = run.unavailable_reason()
        return without_torch_npu_hidden() | run.environment(devices, trace) if reason is None else reason
    finally:
        sys.modules["torch_npu"] = hidden


def npu_environment() -> dict[str, str] | str:
    """The environment in which a process has an NPU, real or virtual, or in one line why there is none to be had."""
    env = without_torch_npu_hidden()
    if PathFinder.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    gate = subprocess.run([sys.executable, ROOT / "utils" / "npu.py", "--require"], capture_output=True, env=env)
    return env if gate.returncode == 0 else virtual_npu_environment(devices=2)


class NPUProcess:
    """The second pytest. `unavailable_reason` is set where it could not be started."""

    def __init__(self):
        self.tests: list[dict] = []
        self.unavailable_reason = None
        self.process = None
        env = npu_environment()
        if isinstance(env, str):
            self.unavailable_reason = env
            return
        here, there = os.pipe(), os.pipe()
        self._output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "tests/npu", "-q"],
            cwd=ROOT,
            env=env | {ON_NPU: "1", PIPES: f"{there[0]},{here[1]}"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=(there[0], here[1]),
        )
        os.close(there[0])
        os.close(here[1])
        self._from_child, self._to_child = os.fdopen(here[0]), os.fdopen(there[1], "w")
        self.tests = self._read()

    def _read(self):
        line = self._from_child.readline()
        if line:
            return json.loads(line)
        status = self.process.wait()
        self._output.seek(0)
        tail = self._output.read()[-8000:].decode(errors="replace")
        raise RuntimeError(f"the pytest process on the NPU ended with status {status}:\n{tail}")

    def reports(self, item: pytest.Item, next_item: pytest.Item | None):
        """The reports of one test, as they come in. Fixtures that the next one does not share are torn down."""
        self._to_child.write(json.dumps([item.nodeid, next_item and next_item.nodeid]) + "\n")
        self._to_child.flush()
        while (message := self._read()) != {"finished": item.nodeid}:
            yield item.config.hook.pytest_report_from_serializable(config=item.config, data=message)

    def stop(self):
        if self.process is not None:
            self._to_child.close()
            self._from_child.close()
            try:
                self.process.wait(10)  # with no more to be told, it ends
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_PROCESS = pytest.StashKey[NPUProcess]()


def process_of(config: pytest.Config) -> NPUProcess:
    if _PROCESS not in config.stash:
        process = config.stash[_PROCESS] = NPUProcess()
        config.add_cleanup(process.stop)
    return config.stash[_PROCESS]


class ForwardedItem(pytest.Item):
    """Run by pytest_runtest_protocol in tests/npu/conftest.py, unless the second pytest is no more."""

    error: Exception

    def runtest(self):
        raise self.error


class SkippedItem(pytest.Item):
    def runtest(self):
        pytest.skip(process_of(self.config).unavailable_reason)


class ForwardedCollector(pytest.Collector):
    """A class in a forwarded file."""

    def __init__(self, *, tests, **kwargs):
        super().__init__(**kwargs)
        self.tests = tests  # (the names below this one, the markers)

    def collect(self):
        return forwarded_nodes(self, self.tests)


class ForwardedFile(pytest.File):
    def collect(self):
        process = process_of(self.config)
        if process.unavailable_reason is not None:
            return [SkippedItem.from_parent(self, name="on_an_npu")]
        names = ((test["nodeid"].split("::"), test["markers"]) for test in process.tests)
        return forwarded_nodes(self, [(rest, markers) for (file, *rest), markers in names if file == self.nodeid])


def forwarded_nodes(parent, tests):
    nodes = []
    for name in dict.fromkeys(names[0] for names, _ in tests):
        below = [(names[1:], markers) for names, markers in tests if names[0] == name]
        if below[0][0]:
            nodes.append(ForwardedCollector.from_parent(parent, name=name, tests=below))
        else:
            item = ForwardedItem.from_parent(parent, name=name)
            for marker in below[0][1]:
                item.add_marker(marker)
            nodes.append(item)
    return nodes


class Child:
    """The plugin of the second pytest."""

    def __init__(self, config: pytest.Config, pipes: str):
        read, write = map(int, pipes.split(","))
        self.config = config
        self._from_parent, self._to_parent = os.fdopen(read), os.fdopen(write, "w")

    def _send(self, message):
        self._to_parent.write(json.dumps(message, default=str) + "\n")
        self._to_parent.flush()

    def pytest_collection_finish(self, session):
        tests = []
        for item in session.items:
            markers = {marker.name for marker in item.iter_markers() if not (marker.args or marker.kwargs)}
            tests.append({"nodeid": item.nodeid, "markers": sorted(markers)})
        self._send(tests)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        while line := self._from_parent.readline():
            item, next_item = (items.get(nodeid) for nodeid in json.loads(line))
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        return True

    def pytest_runtest_logreport(self, report):
        self._send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid):
        self._send({"finished": nodeid})
