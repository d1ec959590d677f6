# SPDX-License-Identifier: Apache-2.0
"""A strict `torch_npu.npu_grouped_matmul` for CPU tensors.

It refuses what torch_npu and CANN refuse and fills with NaN what they leave unwritten, so that a test on a CPU fails
where the real one would raise or read uninitialised memory. It is written from the documentation and the host code of
aclnnGroupedMatmulV5, for the form the package uses: one x, one weight, one output, without quantisation.
"""

import contextlib
import functools
import importlib
from dataclasses import dataclass
from unittest import mock

import torch


@dataclass
class Call:
    """What one call of `npu_grouped_matmul` was given."""

    group_type: int
    x_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    group_list: torch.Tensor
    weight_data_ptr: int
    copies_weight: bool


def looks_transposed(tensor: torch.Tensor) -> bool:
    """CANN's IsTransposeLastTwoDims, without the exception it makes for a last two dimensions of (1, 1)."""
    *batch, rows, columns = range(tensor.dim())
    if not (tensor.stride(rows) == 1 and tensor.stride(columns) == tensor.size(rows)):
        return False
    expected = tensor.size(rows) * tensor.size(columns)
    for dim in reversed(batch):
        if tensor.stride(dim) != expected:
            return False
        expected *= tensor.size(dim)
    return True


class StrictNPU:
    """The operator; keeps the calls made to it."""

    def __init__(self):
        self.calls: list[Call] = []

    def npu_grouped_matmul(
        self, x, weight, *, bias=None, group_list=None, split_item=0, group_type=None, group_list_type=0, **others
    ):
        if others:
            raise RuntimeError(f"not expected here: {others}")
        if group_type not in (0, 2):
            raise RuntimeError(f"group_type must be 0 or 2, got {group_type}")
        if split_item not in (2, 3):
            raise RuntimeError(f"split_item {split_item} with a group list on the device costs a host sync per group")
        if bias is not None or len(x) != 1 or len(weight) != 1:
            raise RuntimeError("one x, one weight and no bias are expected")
        x, weight = x[0], weight[0]
        if not isinstance(group_list, torch.Tensor) or group_list.dtype != torch.int64 or group_list.dim() != 1:
            raise RuntimeError("Only int64 is supported for groupList.")
        if not 1 <= group_list.numel() <= 1024:
            raise RuntimeError(f"groupList must have 1 to 1024 entries, got {group_list.numel()}")
        if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise RuntimeError(f"x {x.dtype} and weight {weight.dtype} must be one of float32, bfloat16, float16")
        x_is_transposed = looks_transposed(x) if group_type == 2 else looks_transposed(x) and x.shape != (1, 1)
        weight_is_transposed = looks_transposed(weight) and (group_type == 0 or weight.shape != (1, 1))
        self.calls.append(
            Call(
                group_type,
                tuple(x.shape),
                tuple(weight.shape),
                group_list,
                weight.data_ptr(),
                copies_weight=not (weight_is_transposed or weight.is_contiguous()),
            )
        )
        ends = _ends(group_list, group_list_type)
        if group_type == 0:
            return [_split_rows(x, weight, ends, x_is_transposed)]
        return [_split_contraction(x, weight, ends, x_is_transposed, weight_is_transposed)]


def _ends(group_list: torch.Tensor, group_list_type: int) -> list[int]:
    if group_list_type not in (0, 1):
        raise RuntimeError(f"group_list_type must be 0 or 1, got {group_list_type}")
    ends = (group_list.cumsum(0) if group_list_type == 1 else group_list).tolist()
    if any(end < start for start, end in zip([0, *ends], ends, strict=False)):
        raise RuntimeError(f"the ends of the groups decrease: {ends}; an NPU reads out of bounds there")
    return ends


def _split_rows(x: torch.Tensor, weight: torch.Tensor, ends: list[int], x_is_transposed: bool) -> torch.Tensor:
    if x_is_transposed:
        raise RuntimeError("When groupType is 0, x can not be transposed.")
    if x.dim() != 2 or weight.dim() != 3 or x.size(1) != weight.size(1) or len(ends) != weight.size(0):
        raise RuntimeError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and {len(ends)} groups do not fit")
    if ends[-1] > x.size(0):
        raise RuntimeError(f"the groups end at row {ends[-1]} of {x.size(0)}; an NPU reads out of bounds there")
    out = x.new_full((x.size(0), weight.size(2)), float("nan"))
    for start, end, matrix in zip([0, *ends], ends, weight, strict=False):
        out[start:end] = (x[start:end].double() @ matrix.double()).to(x.dtype)
    return out


def _split_contraction(
    x: torch.Tensor, weight: torch.Tensor, ends: list[int], x_is_transposed: bool, weight_is_transposed: bool
) -> torch.Tensor:
    if not x_is_transposed:
        raise RuntimeError("When groupType is 2 and x is not separated, tensor in x should be transposed.")
    if weight_is_transposed:
        raise RuntimeError("x and weight can not be transposed at the same time.")
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(0):
        raise RuntimeError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if ends[-1] > x.size(1):
        raise RuntimeError(f"the groups end at row {ends[-1]} of {x.size(1)}; an NPU reads out of bounds there")
    out = x.new_full((len(ends), x.size(0), weight.size(1)), float("nan"))
    if x.size(1) == 0:
        return out  # CANN up to 8.5 returns success without a kernel here: the result stays unwritten.
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        out[index] = (x[:, start:end].double() @ weight[start:end].double()).to(x.dtype)
    return out


# As torch_npu 2.13.0 declares it.
_SCHEMA = (
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]"
)
_active: list[StrictNPU] = []


@functools.cache
def _register() -> torch.library.Library:
    # torch_npu itself is hidden in this process (conftest.py), so its namespace is free.
    library = torch.library.Library("npu", "DEF")
    library.define(_SCHEMA)
    library.impl("npu_grouped_matmul", lambda *args, **kwargs: _active[-1].npu_grouped_matmul(*args, **kwargs), "CPU")
    library.impl("npu_grouped_matmul", _meta, "Meta")
    return library


def _meta(x, weight, *, group_list=None, group_type=None, **others):
    """The shapes, for torch.compile; torch_npu has the same."""
    x, weight = x[0], weight[0]
    batch = [] if group_type == 0 else [group_list.size(0)]
    return [x.new_empty([*batch, x.size(0), weight.size(-1)])]


@contextlib.contextmanager
def strict_npu():
    """While it lasts, `npu_moe` takes CPU tensors for tensors on an NPU and finds the strict operator; yields it."""
    _register()
    _active.append(StrictNPU())
    try:
        with mock.patch.object(importlib.import_module("npu_moe.grouped_mm"), "_DEVICE_TYPE", "cpu"):
            yield _active[-1]
    finally:
        _active.pop()
