# SPDX-License-Identifier: Apache-2.0
"""The patch without an edit to the program. Each program runs in a process of its own, which plays an NPU's owner."""

import os
import subprocess
import sys

import pytest

# Enough of a torch_npu for the patch to be applied. `_autoload` is the entry point of the real one.
TORCH_NPU = """
_autoload = lambda: None
class npu:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
"""
CHECK = """
import torch, transformers.integrations.moe
assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "PrivateUse1") is {patched}
"""


@pytest.fixture
def python(tmp_path):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(TORCH_NPU)

    def python(*arguments: str, autoload: str | None = None, **variables: str) -> subprocess.CompletedProcess:
        env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        env |= {"PYTHONPATH": str(tmp_path), **variables}
        if autoload is not None:
            env["NPU_MOE_AUTOLOAD"] = autoload
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=tmp_path)

    return python


@pytest.mark.parametrize(
    "before",
    ["import torch", "", "import transformers, torch, npu_moe"],
)
def test_autoload_whatever_is_imported_first(python, before):
    result = python("-c", before + CHECK.format(patched=True), autoload="1")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("[PATCH]") == 1  # applied once


def test_without_the_variable_nothing_is_imported(python):
    code = (
        "import sys, torch\n"
        "assert 'npu_moe_autoload' in sys.modules\n"  # PyTorch has called it
        "assert not {'npu_moe', 'transformers'} & {*sys.modules}\n"
        "assert not [finder for finder in sys.meta_path if 'npu_moe' in type(finder).__module__]\n"
    )
    result = python("-c", code + CHECK.format(patched=False))
    assert result.returncode == 0, result.stderr
    assert "[PATCH]" not in result.stderr


def test_import_torch_never_fails(python):
    result = python(
        "-c", "import torch, transformers.integrations.moe; print('goes on')", autoload="1", NPU_MOE_PATCH="x"
    )
    assert result.stdout == "goes on\n", result.stderr
    assert "NPU_MOE_PATCH must be 0 (off) or 1 (on), got 'x'" in result.stderr


def test_run_a_script(python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, neighbour\nassert __name__ == '__main__'\nprint(sys.argv)\n" + CHECK.format(patched=True)
    )
    (tmp_path / "neighbour.py").write_text("")
    result = python("-m", "npu_moe", "run", str(script), "--steps", "-m", "3")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{[str(script), '--steps', '-m', '3']}\n"


def test_run_a_module_and_what_it_starts(python, tmp_path):
    (tmp_path / "child.py").write_text(CHECK.format(patched=True) + "print('child patched')")
    (tmp_path / "launcher.py").write_text(
        "import subprocess, sys\nassert 'transformers' not in sys.modules\n"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)\n"
    )
    result = python("-m", "npu_moe", "run", "-m", "launcher", "child.py")
    assert (result.returncode, result.stdout) == (0, "child patched\n"), result.stderr


def test_the_status_of_the_program_is_kept(python, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    assert python("-m", "npu_moe", "run", "fails.py").returncode == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["run", "nowhere.py"], "no such script: nowhere.py"), (["run"], "TARGET"), ([], "COMMAND"), (["fly"], "fly")],
)
def test_wrong_arguments(python, arguments, message):
    result = python("-m", "npu_moe", *arguments)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
