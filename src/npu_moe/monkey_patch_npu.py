# SPDX-License-Identifier: Apache-2.0
"""Where transformers is told to use the grouped matrix multiplication for NPUs, and told to stop."""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist

from npu_moe.grouped_mm import grouped_mm, unsupported_reason
from npu_moe.utils.npu import npu_unavailable_reason

logger = logging.getLogger(__name__)

# What `_grouped_mm_npu` stands in for: set by the first `apply_npu_patch`.
_original: Callable[..., torch.Tensor] | None = None


def apply_npu_patch() -> bool:
    """Makes transformers compute Mixture-of-Experts layers on an NPU with `npu_moe.grouped_mm`.

    `transformers.integrations.moe._grouped_mm` is replaced, also where another module holds it by that name; nothing
    else is touched. Models that are built already use it too, since transformers looks the function up in every call.
    It is only called by the experts implementation "grouped_mm", which is transformers' default.

    Applying it again changes nothing. Rank 0 logs one line: what was replaced, or why nothing was.

    Returns:
        Whether the patch is in place. `False` without a usable NPU, and with `NPU_MOE_PATCH=0` in the environment.

    Raises:
        RuntimeError: there is an NPU, but this transformers has no `_grouped_mm` (it came with 5.2.0).
        ValueError: `NPU_MOE_PATCH` is neither 0 nor 1.
    """
    global _original
    reason = _switched_off_reason() or npu_unavailable_reason()
    if reason is not None:
        _log(f"[PATCH] transformers.integrations.moe._grouped_mm is left as it is: {reason}")
        return False
    moe = _transformers_moe()
    if moe._grouped_mm is not _grouped_mm_npu:
        _original = moe._grouped_mm
        _replace(_original, _grouped_mm_npu)
        _log("[PATCH] transformers.integrations.moe._grouped_mm -> _grouped_mm_npu")
    return True


def revert_npu_patch() -> None:
    """Puts back the function that `apply_npu_patch` replaced. Without a patch in place it does nothing."""
    if _original is not None:
        _replace(_grouped_mm_npu, _original)


def _grouped_mm_npu(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """`npu_moe.grouped_mm` for what it takes, the replaced function for everything else, decided in each call.

    Same arguments as transformers' `_grouped_mm`, whose `offs` is optional in 5.2.
    """
    reason = unsupported_reason(input, weight)
    if reason is None and offs is not None:
        return grouped_mm(input, weight, offs)
    if "npu" in (input.device.type, weight.device.type):
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


def _transformers_moe() -> ModuleType:
    import transformers

    try:
        moe = importlib.import_module("transformers.integrations.moe")
    except ModuleNotFoundError:  # 4.x
        moe = None
    if not hasattr(moe, "_grouped_mm"):  # 5.0 and 5.1 call torch._grouped_mm directly
        raise RuntimeError(
            f"transformers {transformers.__version__} has no transformers.integrations.moe._grouped_mm to replace: "
            "install transformers 5.2.0 or newer, or set NPU_MOE_PATCH=0 to train without the patch"
        )
    return moe


def _replace(old: Callable, new: Callable) -> None:
    # `from ... import _grouped_mm` made copies of the name (transformers.integrations.finegrained_fp8, since 5.22).
    # vars(), not getattr: the lazy modules of transformers import what they are asked for.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("_grouped_mm") is old:
            module._grouped_mm = new


def _log(message: str) -> None:
    # A warning, because nothing below that is visible where logging was not set up, and whoever times a run must see
    # which one it was.
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        logger.warning(message)
