# SPDX-License-Identifier: Apache-2.0
"""Fast Mixture-of-Experts training with Hugging Face transformers on Ascend NPUs."""

from npu_moe.grouped_mm import grouped_mm
from npu_moe.monkey_patch_npu import apply_npu_patch, revert_npu_patch
from npu_moe.utils.npu import is_npu_available, npu_unavailable_reason

__all__ = ["apply_npu_patch", "grouped_mm", "is_npu_available", "npu_unavailable_reason", "revert_npu_patch"]
