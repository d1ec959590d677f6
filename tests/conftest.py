# SPDX-License-Identifier: Apache-2.0
"""Where the tests run.

All but those in tests/npu (npu_process.py runs these) must see a machine without an NPU. Where torch_npu is installed
without CANN, as on the machines that have the virtual NPU, that takes some doing: `import torch` loads torch_npu by
itself and fails, and transformers cannot import a model class. So torch_npu is hidden, here and from the processes
that tests start.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest

import npu_process

HIDE_TORCH_NPU = str(Path(__file__).parent / "hide_torch_npu")

if npu_process.ON_NPU not in os.environ:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    sys.modules["torch_npu"] = None  # find_spec and import both take this for "not installed"


def pytest_configure(config: pytest.Config) -> None:
    if npu_process.PIPES in os.environ:
        config.pluginmanager.register(npu_process.Child(config, os.environ.pop(npu_process.PIPES)))


@pytest.fixture(scope="session")
def cpu_env() -> dict[str, str]:
    """The environment for a process that is to find no torch_npu."""
    path = [HIDE_TORCH_NPU, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture
def an_npu():
    """An NPU as far as the patch can tell: CPU tensors count as its tensors, the kernel is the strict reference."""
    # Imported here: in the environment of this process, which is set above.
    import npu_moe
    from strict_npu import strict_npu

    with strict_npu() as npu, mock.patch("npu_moe.monkey_patch_npu.npu_unavailable_reason", lambda: None):
        yield npu
        npu_moe.revert_npu_patch()


@pytest.fixture(scope="session")
def virtual_npu():
    """A function (devices, trace=None) -> the environment for a process that is to have virtual NPUs."""

    def environment(devices: int, trace: Path | None = None) -> dict[str, str]:
        env = npu_process.virtual_npu_environment(devices, trace)
        if isinstance(env, str):
            pytest.skip(env)
        return env

    return environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Fast tests first: a mistake shows in seconds.
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
