# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own samples (its OpInfo database) on the NPU, real or virtual, against the CPU: results and gradients.

What is left out is named below with the reason. Run with -rA, each test says how many samples it compared.
"""

from __future__ import annotations

import itertools
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401
from torch.utils._pytree import tree_leaves, tree_map

try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:  # PyTorch's test helpers import it; the samples need nothing of it
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

pytestmark = pytest.mark.slow
SAMPLES = 4  # a dtype
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]

# Not what the virtual NPU is for: convolutions, pooling, decompositions and so on.
OUT_OF_SCOPE = (
    "fft sparse stft istft signal masked jiterator torch.ops linalg special lu cholesky svd qr ormqr geqrf pca "
    "pinverse nn.functional.conv nn.functional.max_pool nn.functional.avg_pool nn.functional.adaptive "
    "nn.functional.interpolate nn.functional.upsample nn.functional.fractional nn.functional.max_unpool to_sparse"
).split()
EXCLUDED = {
    "random numbers differ between devices": "bernoulli exponential multinomial normal rand_like randint randint_like "
    "randn randn_like uniform native_dropout_backward nn.functional.dropout nn.functional.dropout2d "
    "nn.functional.dropout3d nn.functional.alpha_dropout nn.functional.feature_alpha_dropout nn.functional.rrelu "
    "nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention",
    "unwritten memory": "empty empty_like empty_permuted empty_strided new_empty new_empty_strided",
    "the order of equal values is not defined": "sort argsort",
    "no such operator in the virtual NPU": "_native_batch_norm_legit native_batch_norm cdist cross grid_sampler_2d "
    "grid_sampler_3d max_pool2d_with_indices_backward nn.functional.batch_norm nn.functional.celu "
    "nn.functional.channel_shuffle nn.functional.ctc_loss nn.functional.embedding nn.functional.embedding_bag "
    "nn.functional.grid_sample nn.functional.hardshrink nn.functional.instance_norm "
    "nn.functional.local_response_norm nn.functional.multilabel_margin_loss nn.functional.pad.reflect "
    "nn.functional.pad.replicate nn.functional.pad.replicate_negative nn.functional.pdist nn.functional.prelu "
    "nn.functional.soft_margin_loss nn.functional.softshrink nn.functional.unfold norm.nuc triangular_solve renorm",
    "torch_npu refuses a memory format": "bfloat16 bool byte cdouble cfloat chalf char float half int long short to",
    "torch_npu computes float64 as float32": "double float_power",
    "torch_npu rounds or approximates elsewhere": "nn.functional.gelu native_layer_norm log_softmax softmax "
    "nn.functional.softmin nn.functional.binary_cross_entropy_with_logits nn.functional.linear_cross_entropy "
    "nn.functional.cross_entropy nn.functional.layer_norm _unsafe_masked_index_put_accumulate",
    "torch_npu wants indices or sections in another form": "tensor_split gather index_put",
    "CANN has it for fewer dtypes": "histc",
    "the sample is a view that a copy to the NPU does not keep": "as_strided.partial_views view_as_real imag",
    "torch_npu fails in the gradient of an empty product": "__rmatmul__ matmul",
}
REASONS = {name: reason for reason, names in EXCLUDED.items() for name in names.split()}


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def wanted(op: Any) -> bool:
    name = full_name(op)
    if not any(dtype in op.dtypes for dtype in DTYPES):
        return False
    return name not in REASONS and op.name not in REASONS and not name.startswith(tuple(OUT_OF_SCOPE))


OPS = {full_name(op): op for op in op_db if wanted(op) or full_name(op) == "linalg.vector_norm"}


def place(value: Any, device: str) -> Any:
    """The same arguments on a device, as leaves of autograd."""

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(device).clone().requires_grad_(leaf.requires_grad)

    value = tree_map(placed, value)
    if "device" in value[2]:
        value[2]["device"] = device
    return value


def call(op: Any, sample: Any, device: str, gradients: bool) -> list[Any]:
    input, args, kwargs = place((sample.input, sample.args, dict(sample.kwargs)), device)
    leaves = [leaf for leaf in tree_leaves((input, args, kwargs)) if isinstance(leaf, torch.Tensor)]
    result = op(input, *args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    differentiable = [output for output in outputs if output.requires_grad]
    if gradients and differentiable:
        sum(output.abs().sum() for output in differentiable).backward()
    everything = outputs + [leaf.grad for leaf in leaves]
    return [value if value is None else value.detach().cpu() for value in everything]


def samples(op: Any, dtype: torch.dtype, gradients: bool) -> Iterator[Any]:
    yield from itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), SAMPLES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_operator(name: str) -> None:
    op, compared = OPS[name], 0
    for dtype in DTYPES:
        if dtype not in op.dtypes:
            continue
        gradients = op.supports_autograd and dtype == torch.float32
        for sample in samples(op, dtype, gradients):
            try:
                expected = call(op, sample, "cpu", gradients)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue  # a sample that PyTorch's CPU refuses
            torch.testing.assert_close(call(op, sample, "npu", gradients), expected, equal_nan=True)
            compared += 1
    assert compared, "no sample was compared"
    print(f"{name}: {compared} samples")
