# SPDX-License-Identifier: Apache-2.0
"""What is found where torch_npu is absent, broken, without a device, and working; a package by that name plays it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_moe import is_npu_available, npu_unavailable_reason

GATE = Path(__file__).parents[2] / "utils" / "npu.py"


def torch_npu(is_available: str, device_count: str) -> str:
    return (
        "class npu:\n"
        f"    is_available = staticmethod(lambda: {is_available})\n"
        f"    device_count = staticmethod(lambda: {device_count})\n"
        "    get_device_name = staticmethod(lambda index: 'Ascend910B2')\n"
    )


MISSING_CANN = "raise ImportError('libhccl.so: cannot open shared object file')"
# What `import torch_npu` runs; what is said of it.
UNUSABLE = [
    (MISSING_CANN, "cannot be imported (ImportError: libhccl.so: cannot open shared object file): source CANN's"),
    ("raise OSError('libascendcl.so: not found\\nmore')", "cannot be imported (OSError: libascendcl.so: not found): "),
    ("raise RuntimeError", "cannot be imported (RuntimeError): source CANN's set_env.sh"),
    (torch_npu("1 / 0", "2"), "cannot start the NPU runtime (ZeroDivisionError: division by zero)"),
    (torch_npu("False", "0"), "no NPU is visible: see `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"),
    (torch_npu("True", "0"), "no NPU is visible"),
]
WORKING = torch_npu("True", "2")


@pytest.fixture
def install(tmp_path, monkeypatch):
    def install(code: str) -> dict[str, str]:
        """Makes `import torch_npu` run `code`, here and in the environment that it returns."""
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

    npu_unavailable_reason.cache_clear()
    yield install
    sys.modules.pop("torch_npu", None)
    npu_unavailable_reason.cache_clear()


@pytest.mark.parametrize(("code", "reason"), UNUSABLE)
def test_installed_but_unusable(install, code, reason):
    install(code)
    assert is_npu_available() is False
    assert reason in npu_unavailable_reason()
    assert "\n" not in npu_unavailable_reason()


def test_working(install):
    install(WORKING)
    assert is_npu_available() is True
    assert npu_unavailable_reason() is None


def test_absent(install, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert is_npu_available() is False
    assert npu_unavailable_reason() == "torch_npu is not installed"


def test_beside_a_cuda_build_of_torch_it_is_not_loaded(install, monkeypatch):
    install("import os; os.abort()")  # as torch_npu does
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "is a CUDA build, torch_npu needs the CPU build of PyTorch" in npu_unavailable_reason()


def run_gate(env: dict[str, str], *arguments: str) -> tuple[int, str]:
    result = subprocess.run([sys.executable, GATE, *arguments], env=env, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1  # one line, no traceback
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("code", "status", "line"),
    [
        (WORKING, 0, "NPU: Ascend910B2 devices=2\n"),
        (torch_npu("True", "0"), 1, "no NPU is visible"),
        (
            MISSING_CANN,
            2,
            "source CANN's set_env.sh, or uninstall torch_npu where there is no NPU, or set VIRTUAL_NPU=1 to",
        ),
    ],
)
def test_gate(install, code, status, line):
    env = install(code)
    assert run_gate(env, "--require")[0] == status
    returncode, output = run_gate(env)
    assert returncode == 0
    assert line in output


def test_gate_without_torch_npu(cpu_env):
    assert run_gate(cpu_env, "--require") == (1, "no NPU: torch_npu is not installed devices=0\n")
