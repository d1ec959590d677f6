# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own samples of its operators (OpInfo): on an NPU as on the CPU, outputs and gradients."""

import sys
import types
import unittest

import torch
import torch_npu  # noqa: F401
from parameterized import parameterized
from torch.utils._pytree import tree_leaves, tree_map

try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:  # PyTorch's test helpers import it; the samples need nothing of it
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo.core import OpInfo  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 1e-2, torch.float64: 1e-4}

NAMES = (
    """
__getitem__ argwhere gather index_add index_copy index_fill index_put index_select log_softmax masked_fill
masked_scatter masked_select nonzero put repeat_interleave scatter scatter_add sigmoid softmax take take_along_dim tanh
where
""".split()
    + [
        f"nn.functional.{name}"
        for name in """
binary_cross_entropy cosine_similarity cross_entropy dropout elu embedding glu group_norm hardsigmoid hardswish
hardtanh huber_loss kl_div l1_loss layer_norm leaky_relu linear logsigmoid mish mse_loss nll_loss normalize one_hot
relu relu6 rms_norm scaled_dot_product_attention silu smooth_l1_loss softmin softplus softsign tanhshrink threshold
""".split()
    ]
)


def excluded(op: OpInfo, sample) -> bool:
    """Samples of which an NPU says, or does, something else by its nature."""
    if sample.kwargs.get("dropout_p") or (op.name == "nn.functional.dropout" and sample.kwargs.get("p", 0.5) != 0):
        return sample.kwargs.get("training", True)  # other random numbers
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.uint8 for x in sample.args)  # no index on an NPU


def run(op: OpInfo, sample, device: str, gradients: bool) -> list[torch.Tensor]:
    def move(x):
        return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    value, args, kwargs = tree_map(move, (sample.input, sample.args, sample.kwargs))
    outputs = [x for x in tree_leaves(op.op(value, *args, **kwargs)) if isinstance(x, torch.Tensor)]
    results = [x.detach().cpu() for x in outputs]
    differentiable = [x for x in outputs if x.requires_grad]
    if gradients and differentiable:
        leaves = [x for x in tree_leaves((value, args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        cotangents = [
            torch.arange(1, x.numel() + 1).float().sin().reshape(x.shape).to(device, x.dtype) for x in differentiable
        ]
        grads = torch.autograd.grad(differentiable, leaves, cotangents, allow_unused=True)
        results += [torch.zeros(()) if x is None else x.cpu() for x in grads]
    return results


def label(function, number: int, param) -> str:
    return f"{function.__name__}_{param.args[0]}"


class OpInfoTest(unittest.TestCase):
    @parameterized.expand(
        [(op.formatted_name, op) for op in op_db if op.name in NAMES and "complex" not in op.variant_test_name],
        name_func=label,
    )
    def test_samples(self, _: str, op: OpInfo) -> None:
        compared = 0
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=gradients)):
                if excluded(op, sample):
                    continue
                expected = run(op, sample, "cpu", gradients)
                with self.subTest(dtype=dtype, sample=number):
                    actual = run(op, sample, "npu", gradients)
                    self.assertEqual(len(actual), len(expected))
                    for a, b in zip(actual, expected, strict=True):
                        tolerance = TOLERANCE[a.dtype] if a.is_floating_point() else 0
                        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
                compared += 1
        self.assertGreater(compared, 0)


if __name__ == "__main__":
    unittest.main()
