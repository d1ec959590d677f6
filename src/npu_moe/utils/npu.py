# SPDX-License-Identifier: Apache-2.0
"""Is there an NPU that PyTorch can use, and if not, why not."""

import functools
import importlib
import importlib.util
import sys

import torch


@functools.cache
def npu_unavailable_reason() -> str | None:
    """Why PyTorch cannot use an NPU in this process, in one line; `None` where it can.

    torch_npu is imported to find out. That fails in more than one way where CANN is missing or broken (ImportError
    for a shared library that is not found, OSError from ctypes, RuntimeError from the runtime's initialisation), so
    whatever it raises is an answer here, not an error. The answer is kept: neither a driver nor a device appears in a
    process that has looked for it once.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if torch.version.cuda is not None and "torch_npu" not in sys.modules:
        # Not to be tried: torch_npu 2.13 beside it ends the process, which no except clause catches.
        return f"torch {torch.__version__} is a CUDA build, torch_npu needs the CPU build of PyTorch"
    try:
        torch_npu = importlib.import_module("torch_npu")
    except Exception as error:
        return (
            f"torch_npu is installed but cannot be imported ({_one_line(error)}): source CANN's set_env.sh, "
            "or uninstall torch_npu where there is no NPU"
        )
    try:
        if torch_npu.npu.is_available() and torch_npu.npu.device_count() > 0:
            return None
    except Exception as error:
        return f"torch_npu cannot start the NPU runtime ({_one_line(error)}): see `npu-smi info`"
    return "torch_npu works but no NPU is visible: see `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"


def is_npu_available() -> bool:
    """Whether torch_npu can be imported and at least one NPU is visible. Never raises.

    `transformers.utils.is_torch_npu_available` is no substitute: with torch_npu installed and CANN missing it raises.
    """
    return npu_unavailable_reason() is None


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
