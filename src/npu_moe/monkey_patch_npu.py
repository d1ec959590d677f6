# SPDX-License-Identifier: Apache-2.0
"""Where transformers and PyTorch are told to use the grouped matrix multiplication for NPUs, and told to stop."""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist

from npu_moe.grouped_mm import aten_grouped_mm, grouped_mm, unsupported_reason
from npu_moe.utils.npu import npu_unavailable_reason

logger = logging.getLogger(__name__)

# What `_grouped_mm_npu` stands in for: set by the first `apply_npu_patch`.
_original: Callable[..., torch.Tensor] | None = None
# Holds the kernel of `aten::_grouped_mm` while the patch is in place.
_library: torch.library.Library | None = None


def apply_npu_patch() -> bool:
    """Makes everything that multiplies by experts on an NPU do so with torch_npu's grouped matmul kernel.

    `transformers.integrations.moe._grouped_mm` is replaced, also where another module holds it by that name. Models
    that are built already use it too, since transformers looks the function up in every call. It is only called by
    the experts implementation "grouped_mm", which is transformers' default. The kernel is also registered for
    PyTorch's own operator, `torch.nn.functional.grouped_mm`, on NPUs: transformers 5.0 and 5.1, and code that is not
    transformers', call it directly.

    Applying it again changes nothing. Rank 0 logs what was replaced, or in one line why nothing was.

    Returns:
        Whether the patch is in place. `False` without a usable NPU, and with `NPU_MOE_PATCH=0` in the environment.

    Raises:
        RuntimeError: there is an NPU, but nothing in this transformers and this PyTorch that can be patched.
        ValueError: `NPU_MOE_PATCH` is neither 0 nor 1.
    """
    global _original
    reason = _switched_off_reason() or npu_unavailable_reason()
    if reason is not None:
        _log(f"[PATCH] transformers.integrations.moe._grouped_mm is left as it is: {reason}")
        return False
    moe = _transformers_moe()
    if moe is not None and moe._grouped_mm is not _grouped_mm_npu:
        _original = moe._grouped_mm
        _replace(_original, _grouped_mm_npu)
        _log("[PATCH] transformers.integrations.moe._grouped_mm -> _grouped_mm_npu")
    if _library is None:
        # Where transformers calls the operator, this is the line that says the patch is on.
        _log(_register_operator(), logging.INFO if moe is not None else logging.WARNING)
    return True


def revert_npu_patch() -> None:
    """Puts back what `apply_npu_patch` replaced. Without a patch in place it does nothing."""
    global _library
    if _original is not None:
        _replace(_grouped_mm_npu, _original)
    if _library is not None:
        _library._destroy()
        _library = None


def _grouped_mm_npu(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """`npu_moe.grouped_mm` for what it takes, the replaced function for everything else, decided in each call.

    Same arguments as transformers' `_grouped_mm`, whose `offs` is optional in 5.2.
    """
    reason = unsupported_reason(input, weight)
    if reason is None and offs is not None:
        return grouped_mm(input, weight, offs)
    if "npu" in (input.device.type, weight.device.type) and not torch.compiler.is_compiling():
        _warn_not_used(reason or "offs is None")
    return _original(input, weight, offs)


@functools.cache
def _warn_not_used(reason: str) -> None:
    logger.warning("the NPU's grouped matmul is not used where %s", reason)


def _switched_off_reason() -> str | None:
    value = os.environ.get("NPU_MOE_PATCH", "1")
    if value not in ("0", "1"):
        raise ValueError(f"NPU_MOE_PATCH must be 0 (off) or 1 (on), got {value!r}")
    return "switched off by NPU_MOE_PATCH=0" if value == "0" else None


def _transformers_moe() -> ModuleType | None:
    """The module to patch; `None` where there is none, but experts go through PyTorch's operator."""
    import transformers

    try:
        moe = importlib.import_module("transformers.integrations.moe")
    except ModuleNotFoundError:  # transformers 4.x
        moe = None
    if hasattr(moe, "_grouped_mm"):
        return moe
    # transformers 5.0 and 5.1 call torch._grouped_mm directly. It came with PyTorch 2.8, for NPUs with 2.9.
    if moe is None or not hasattr(torch, "_grouped_mm"):
        raise RuntimeError(
            f"transformers {transformers.__version__} with PyTorch {torch.__version__} has no "
            "transformers.integrations.moe._grouped_mm to replace: install transformers 5.2.0 or newer, "
            "or set NPU_MOE_PATCH=0 to train without the patch"
        )
    return None


def _register_operator() -> str:
    """Registers the kernel for PyTorch's operator where it can be; says what was done."""
    global _library
    if not hasattr(torch.ops.aten, "_grouped_mm"):  # before PyTorch 2.8
        return f"[PATCH] PyTorch {torch.__version__} has no operator aten::_grouped_mm"
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "PrivateUse1"):
        return "[PATCH] aten::_grouped_mm is left as it is: torch_npu has a kernel of its own"
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_grouped_mm", aten_grouped_mm, "PrivateUse1")
    return "[PATCH] aten::_grouped_mm on NPUs -> aten_grouped_mm"


def _replace(old: Callable, new: Callable) -> None:
    # `from ... import _grouped_mm` made copies of the name (transformers.integrations.finegrained_fp8, since 5.22).
    # vars(), not getattr: the lazy modules of transformers import what they are asked for.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("_grouped_mm") is old:
            module._grouped_mm = new


def _log(message: str, level: int = logging.WARNING) -> None:
    # A warning by default, because nothing below that is visible where logging was not set up, and whoever times a run
    # must see which one it was.
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        logger.log(level, message)
