# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix multiplication of Mixture-of-Experts layers on an Ascend NPU, with its gradients.

Shapes: S rows (token copies sorted by expert), K input features, N output features, E experts.
`torch_npu.npu_grouped_matmul` has no gradient formula, so it is called for the forward and for both gradients here.
What it accepts and what it leaves undefined is taken from the documentation and the host code of aclnnGroupedMatmulV5
(ops-transformer, gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp); below that is what is called CANN.
"""

import functools
import logging

import torch
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

_DEVICE_TYPE = "npu"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# CANN's limits for a group list on the device and for the innermost dimension of an operand.
_MAX_EXPERTS = 1024
_MAX_INNER_SIZE = 65535

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
    if not all(1 <= num_experts <= _MAX_EXPERTS for num_experts in weight.shape[:1]):
        return f"the number of experts must be between 1 and {_MAX_EXPERTS}, got {weight.size(0)}"
    if not all(1 <= features <= _MAX_INNER_SIZE for features in weight.shape[1:]):
        return f"input and output features must be between 1 and {_MAX_INNER_SIZE}, got weight {tuple(weight.shape)}"
    return None


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        # Only what the needed gradients use is kept: under FSDP2 the unsharded weight, in LoRA the activations.
        needs_input_grad, needs_weight_grad, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight_grad else None, weight if needs_input_grad else None, ends)
        ctx.weight_is_transposed = _is_packed_transpose(weight)
        if not ctx.weight_is_transposed and not weight.is_contiguous():
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
