# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix multiplication of Mixture-of-Experts layers on an Ascend NPU, with its gradients.

Shapes: S rows (token copies sorted by expert), K input features, N output features, E experts.
`torch_npu.npu_grouped_matmul` has no gradient formula, so it is called for the forward and for both gradients here.
What it accepts and what it leaves undefined is taken from the documentation and the host code of aclnnGroupedMatmulV5
(ops-transformer, gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp), called CANN below.
"""

import functools
import logging
from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

_DEVICE_TYPE = "npu"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# CANN's limits for a group list on the device and for the innermost dimension of an operand.
_MAX_EXPERTS = 1024
_MAX_INNER_SIZE = 65535

# Where PyTorch's own kernel for `aten::_grouped_mm` is found: the CPU has the one that serves every device.
_PYTORCH_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# CANN's group_type: which dimension the groups divide.
_ROWS = 0
_CONTRACTION = 2


def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiplies each expert's rows of `input` with that expert's weight matrix, on an NPU, without a host sync.

    Row block i of the result is `input[offs[i - 1] : offs[i]] @ weight[i]` (with `offs[-1]` read as 0 for i = 0).

    Args:
        input: (S, K), sorted by expert; float32, bfloat16 or float16. It is cast to the dtype of `weight`, as
            transformers does: autocast leaves float32 activations beside bfloat16 weights.
        weight: (E, K, N); float32, bfloat16 or float16. A contiguous tensor and the `transpose(-2, -1)` of one are
            both used as they are; any other layout is copied by CANN in every call.
        offs: (E,), int32 or int64, on the same device: the non-decreasing ends of the experts' row blocks, the last
            at most S. The values are not checked, which would need a host sync.

    Returns:
        (S, N) in the dtype of `weight`. Rows from `offs[-1]` on (expert parallelism has them) are unspecified, and so
        are these rows of the gradient of `input`; what they hold never reaches the gradient of `weight`. The gradient
        of `weight` has the memory layout of `weight` and is zero for experts without rows. A gradient that is not
        needed (frozen experts) is not computed. There is no double backward.

    Raises:
        ValueError: ranks, sizes, devices or the dtype of `offs` are wrong, or it is nothing that CANN takes: a dtype
            other than the three, more than 1024 experts, more than 65535 features.
    """
    _check_arguments(input, weight, offs)
    reason = unsupported_reason(input, weight)
    if reason is not None:
        raise ValueError(f"grouped_mm: {reason}")
    # CANN takes cumulative ends as they are, but only in int64.
    return _GroupedMM.apply(input.to(weight.dtype), weight, offs.to(torch.int64).contiguous())


def unsupported_reason(input: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why `input` and `weight` cannot go to the NPU kernel; `None` where they can, or are wrong in themselves."""
    if _DEVICE_TYPE not in (input.device.type, weight.device.type):
        return f"input and weight must be on an NPU, got {input.device} and {weight.device}"
    if weight.dtype not in _DTYPES or input.dtype not in _DTYPES:
        return f"dtype must be one of float32, bfloat16, float16; got input {input.dtype}, weight {weight.dtype}"
    return _limit_reason(weight.size(0), weight.shape[1:]) if weight.dim() else None


def _limit_reason(num_experts: int, features: Sequence[int]) -> str | None:
    if not 1 <= num_experts <= _MAX_EXPERTS:
        return f"the number of experts must be between 1 and {_MAX_EXPERTS}, got {num_experts}"
    if not all(1 <= size <= _MAX_INNER_SIZE for size in features):
        return f"input and output features must be between 1 and {_MAX_INNER_SIZE}, got {tuple(features)}"
    return None


def aten_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The kernel of `aten::_grouped_mm`, that is of `torch.nn.functional.grouped_mm`, for tensors on an NPU.

    PyTorch's autograd formula stands on it; both gradients are calls of the same operator. `offs` (E,), int32, holds
    the ends of the groups in the dimension S:

        (S, K) x (E, K, N) -> (S, N)
        (M, S) x (S, N) -> (E, M, N), zero for a group of size 0
        (E, M, K) x (K, S) -> (M, S)

    All else goes to PyTorch's own kernel: two batches, which need no groups, what CANN does not take, and what is
    wrong, for which it raises.
    """
    if not _aten_supported(mat_a, mat_b, offs, bias, out_dtype):
        return torch.ops.aten._grouped_mm.default.redispatch(_PYTORCH_KERNEL, mat_a, mat_b, offs, bias, out_dtype)
    ends = offs.to(torch.int64).contiguous()
    if mat_b.dim() == 3:
        return _npu_grouped_matmul(_packed(mat_a), mat_b, ends, _ROWS)
    if mat_a.dim() == 2:
        return _weight_grad(mat_a.t(), mat_b, ends)
    # The columns of mat_b are the rows of its transpose.
    return _npu_grouped_matmul(_packed(mat_b.t()), mat_a.transpose(-2, -1), ends, _ROWS).t()


def _aten_supported(mat_a, mat_b, offs, bias, out_dtype) -> bool:
    if offs is None or (mat_a.dim(), mat_b.dim()) not in ((2, 3), (2, 2), (3, 2)):
        return False
    if mat_a.dim() == mat_b.dim():
        groups, features = offs.numel(), (mat_a.size(0), mat_b.size(1))
    else:
        groups, *features = mat_a.shape if mat_a.dim() == 3 else mat_b.shape
    return (
        bias is None
        and out_dtype in (None, mat_a.dtype)
        and mat_a.dtype == mat_b.dtype
        and mat_a.dtype in _DTYPES
        and offs.dtype == torch.int32
        and mat_a.device == mat_b.device == offs.device
        and offs.shape == (groups,)
        and mat_a.size(-1) == mat_b.size(-2)
        and _limit_reason(groups, features) is None
    )


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        # Only what the needed gradients use is kept: under FSDP2 the unsharded weight, in LoRA the activations.
        needs_input_grad, needs_weight_grad, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight_grad else None, weight if needs_input_grad else None, ends)
        ctx.weight_is_transposed = _is_packed_transpose(weight)
        if not (ctx.weight_is_transposed or weight.is_contiguous() or torch.compiler.is_compiling()):
            _warn_weight_is_copied(tuple(weight.shape), weight.stride())
        return _npu_grouped_matmul(_packed(input), weight, ends, _ROWS)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        input, weight, ends = ctx.saved_tensors
        grad_output = _packed(grad_output)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = _npu_grouped_matmul(grad_output, weight.transpose(-2, -1), ends, _ROWS)
        if ctx.needs_input_grad[1]:
            # In the layout of the parameter behind `weight`, so that accumulating or reducing it copies nothing.
            if ctx.weight_is_transposed:
                grad_weight = _weight_grad(grad_output, input, ends).transpose(-2, -1)
            else:
                grad_weight = _weight_grad(input, grad_output, ends)
        return grad_input, grad_weight, None


def _weight_grad(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(S, P), (S, Q) -> (E, P, Q): `left.T @ right` over each expert's rows; zero for an expert without rows."""
    left, right = _packed(left), _packed(right)
    if left.size(0) == 0:
        # Without any row, CANN up to at least 8.5 returns success and leaves the result unwritten.
        return left.new_zeros(ends.size(0), left.size(1), right.size(1))
    return _npu_grouped_matmul(left.t(), right, ends, _CONTRACTION)


def _npu_grouped_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, group_type: int) -> torch.Tensor:
    # torch_npu.npu_grouped_matmul. split_item=3: one output tensor; to size several, torch_npu reads the list back.
    return torch.ops.npu.npu_grouped_matmul.default(
        [x], [weight], group_list=ends, group_list_type=0, group_type=group_type, split_item=3
    )[0]


def _packed(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` (rows, columns) with strides (columns, 1), copied only where it is not laid out so already.

    CANN tells a transposed operand by its strides. PyTorch ignores the stride of a dimension of size 1: one row with
    the strides (1, 1) is contiguous to it and transposed to CANN. Hence not `contiguous()` alone.
    """
    strides = (matrix.size(1), 1)
    return matrix if matrix.stride() == strides else matrix.contiguous().as_strided(matrix.size(), strides)


def _is_packed_transpose(weight: torch.Tensor) -> bool:
    """Whether `weight` is the `transpose(-2, -1)` of a contiguous (E, N, K) tensor, as CANN decides it."""
    _, k, n = weight.shape
    return weight.stride() == (k * n, 1, k)


@functools.cache
def _warn_weight_is_copied(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    logger.warning(
        "grouped_mm: a weight of shape %s with strides %s is neither contiguous nor the transpose of a contiguous "
        "tensor: CANN copies it in every call",
        shape,
        strides,
    )


def _check_arguments(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> None:
    shapes = f"got input {tuple(input.shape)}, weight {tuple(weight.shape)}, offs {tuple(offs.shape)}"
    if (input.dim(), weight.dim(), offs.dim()) != (2, 3, 1):
        raise ValueError(f"grouped_mm: input must be (S, K), weight (E, K, N) and offs (E,); {shapes}")
    if input.size(1) != weight.size(1):
        raise ValueError(f"grouped_mm: input has {input.size(1)} features, weight takes {weight.size(1)}; {shapes}")
    if offs.size(0) != weight.size(0):
        raise ValueError(f"grouped_mm: offs has {offs.size(0)} experts, weight has {weight.size(0)}; {shapes}")
    if offs.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"grouped_mm: offs must be int32 or int64, got {offs.dtype}")
    if not input.device == weight.device == offs.device:
        raise ValueError(
            "grouped_mm: input, weight and offs must be on the same device; "
            f"got {input.device}, {weight.device}, {offs.device}"
        )
