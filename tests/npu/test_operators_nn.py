# SPDX-License-Identifier: Apache-2.0
"""The neural network operators of an NPU against PyTorch on the CPU: values and gradients, dtypes, strides, shapes."""

import unittest
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_npu
from parameterized import parameterized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Random:
    """An input: a floating point leaf of the dtype under test, and what is seen of it (a view)."""

    def __init__(self, *shape: int, view: Callable = lambda x: x, grad: bool = True, low: float | None = None):
        self.shape, self.view, self.grad, self.low = shape, view, grad, low

    def make(self, dtype: torch.dtype) -> torch.Tensor:
        value = torch.randn(self.shape) if self.low is None else torch.rand(self.shape) * 0.9 + self.low
        return value.to(dtype)


def transposed(*shape: int) -> Random:
    return Random(*shape[:-2], shape[-1], shape[-2], view=lambda x: x.transpose(-1, -2))


def sliced(*shape: int) -> Random:
    return Random(*shape[:-1], shape[-1] * 2 + 1, view=lambda x: x[..., 1::2])


def expanded(*shape: int) -> Random:
    return Random(1, *shape[1:], view=lambda x: x.expand(shape))


def flatten(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for item in output for tensor in flatten(item)]


def run(function: Callable, inputs: list, leaves: list, cotangents: list) -> list[torch.Tensor]:
    """The outputs and the gradients of the leaves, on the CPU in float32 where they have a half precision."""
    views = [spec.view(leaf) if isinstance(spec, Random) else leaf for spec, leaf in zip(inputs, leaves, strict=True)]
    outputs = flatten(function(*views))
    results = [output.detach() for output in outputs]
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        differentiable = [output for output in outputs if output.requires_grad]
        if not cotangents:
            cotangents.extend(torch.randn(output.shape).to(output.dtype) for output in differentiable)
        torch.autograd.backward(
            differentiable,
            [c.to(device=o.device, dtype=o.dtype) for c, o in zip(cotangents, differentiable, strict=True)],
        )
        results += [leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return results


class OperatorTest(unittest.TestCase):
    def check(self, function: Callable, inputs: list, dtype: torch.dtype, tolerance: float | None = None) -> None:
        torch.manual_seed(0)
        values = [spec.make(dtype) if isinstance(spec, Random) else spec for spec in inputs]

        def leaves(device: str, precision: torch.dtype) -> list:
            result = []
            for spec, value in zip(inputs, values, strict=True):
                if isinstance(spec, Random):
                    result.append(value.to(device, precision).requires_grad_(spec.grad))
                else:
                    result.append(value.to(device) if isinstance(value, torch.Tensor) else value)
            return result

        # The cotangents are rounded to the dtype under test, so that both sides get the same.
        rounded = []
        npu = run(function, inputs, leaves("npu", dtype), rounded)
        cpu = run(function, inputs, leaves("cpu", torch.float32), rounded)
        self.assertEqual(len(npu), len(cpu))
        tolerance = tolerance or TOLERANCE[dtype]
        for i, (actual, expected) in enumerate(zip(npu, cpu, strict=True)):
            self.assertEqual(actual.device.type, "npu")
            if actual.is_floating_point():
                expected = expected.to(torch.float32)
                scale = max(1.0, expected.abs().nan_to_num(posinf=0).max().item() if expected.numel() else 1.0)
                torch.testing.assert_close(
                    actual.cpu().to(torch.float32),
                    expected,
                    rtol=tolerance,
                    atol=tolerance * scale,
                    equal_nan=True,
                    msg=lambda text, i=i: f"output or gradient {i}: {text}",
                )
            else:
                torch.testing.assert_close(actual.cpu(), expected)


def label(function, number: int, param) -> str:
    return f"{function.__name__}_{number}_{param.args[0]}"


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    function = torch_npu.npu_gelu if x.device.type == "npu" else F.gelu
    return function(x, approximate=approximate)


ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    # torch_npu's F.gelu takes one kernel for both approximations; npu_gelu has both.
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "gelu_none": lambda x: gelu(x, "none"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: F.softplus(x, beta=2, threshold=1),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "logsigmoid": F.logsigmoid,
    "glu": lambda x: F.glu(x, dim=-1),
}


class ActivationTest(OperatorTest):
    @parameterized.expand([(name, f) for name, f in ACTIVATIONS.items()], name_func=label)
    def test_values_and_gradients(self, _: str, function: Callable) -> None:
        for dtype in FLOATS:
            for spec in (Random(4, 6), Random(8), transposed(2, 3, 4), sliced(3, 4), Random(0, 4)):
                with self.subTest(dtype=dtype, shape=spec.shape):
                    self.check(function, [spec], dtype)

    @parameterized.expand(
        [
            (name,)
            for name in "relu_ sigmoid_ tanh_ leaky_relu_ elu_ hardtanh_ hardswish_ hardsigmoid_ silu_ mish_".split()
        ],
        name_func=label,
    )
    def test_in_place(self, name: str) -> None:
        operator = getattr(torch.Tensor, name, None) or getattr(torch._C._nn, name)
        for view in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]):
            x = torch.randn(4, 6)
            y = x.to("npu")
            operator(view(x))
            operator(view(y))
            torch.testing.assert_close(y.cpu(), x)


SOFTMAX = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "softmax_float32": lambda x, d: torch.softmax(x, d, dtype=torch.float32),
    "log_softmax_float32": lambda x, d: torch.log_softmax(x, d, dtype=torch.float32),
}


class SoftmaxTest(OperatorTest):
    @parameterized.expand([(name, f) for name, f in SOFTMAX.items()], name_func=label)
    def test_dims(self, _: str, function: Callable) -> None:
        for dtype in FLOATS:
            for spec, dim in (
                (Random(4, 6), -1),
                (Random(4, 6), 0),
                (transposed(2, 3, 5), 1),
                (sliced(3, 4), -1),
                (Random(5), 0),
                (Random(0, 3), 1),
                (expanded(3, 4), -1),
            ):
                with self.subTest(dtype=dtype, shape=spec.shape, dim=dim):
                    self.check(lambda x, dim=dim: function(x, dim), [spec], dtype)

    def test_masked_rows(self) -> None:
        x = torch.tensor([[0.0, float("-inf"), 1.0], [float("-inf")] * 3])
        torch.testing.assert_close(x.to("npu").softmax(-1).cpu(), x.softmax(-1), equal_nan=True)


class LossTest(OperatorTest):
    @parameterized.expand(
        [
            (f"{reduction}_{'weighted' if weighted else 'plain'}", reduction, weighted)
            for reduction in ("none", "mean", "sum")
            for weighted in (False, True)
        ],
        name_func=label,
    )
    def test_cross_entropy_and_nll(self, _: str, reduction: str, weighted: bool) -> None:
        target = torch.tensor([1, 0, -100, 4, 2, 3])
        for dtype in FLOATS:
            weight = [Random(5, grad=False, low=0.1)] if weighted else []
            for name, function in (("cross_entropy", F.cross_entropy), ("nll", F.nll_loss)):
                with self.subTest(name=name, dtype=dtype):
                    self.check(
                        lambda x, t, w=None, f=function: f(x, t, weight=w, reduction=reduction, ignore_index=-100),
                        [Random(6, 5), target, *weight],
                        dtype,
                    )

    def test_cross_entropy_of_a_sequence(self) -> None:
        target = torch.randint(0, 7, (2, 5))
        for dtype in FLOATS:
            self.check(F.cross_entropy, [Random(2, 7, 5), target], dtype)
            self.check(
                lambda x, t: F.cross_entropy(x.view(-1, 7).float(), t.view(-1)), [Random(2, 5, 7), target], dtype
            )

    def test_label_smoothing(self) -> None:
        self.check(
            lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), [Random(6, 5), torch.arange(6) % 5], torch.float32
        )

    def test_all_targets_ignored(self) -> None:
        for reduction in ("none", "sum"):
            self.check(
                lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
                [Random(3, 5), torch.full((3,), -100)],
                torch.float32,
            )

    @parameterized.expand([(r, r) for r in ("none", "mean", "sum")], name_func=label)
    def test_other_losses(self, _: str, reduction: str) -> None:
        def binary(x, y, f):
            return f(torch.sigmoid(x) if f is F.binary_cross_entropy else x, y.sigmoid(), reduction=reduction)

        losses = {
            "mse": lambda x, y: F.mse_loss(x, y, reduction=reduction),
            "l1": lambda x, y: F.l1_loss(x, y, reduction=reduction),
            "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5),
            "bce": lambda x, y: binary(x, y.detach(), F.binary_cross_entropy),
            "bce_with_logits": lambda x, y: binary(x, y.detach(), F.binary_cross_entropy_with_logits),
            "kl_div": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1).detach(), reduction=reduction),
            "kl_div_log": lambda x, y: F.kl_div(
                x.log_softmax(-1), y.log_softmax(-1).detach(), reduction=reduction, log_target=True
            ),
        }
        for name, function in losses.items():
            for dtype in FLOATS:
                with self.subTest(name=name, dtype=dtype):
                    # y is used where the loss is differentiable in it.
                    spec = Random(4, 6, grad=name in ("mse", "l1", "smooth_l1"))
                    self.check(function, [Random(4, 6), spec], dtype, tolerance=3 * TOLERANCE[dtype])


class NormTest(OperatorTest):
    def test_layer_norm(self) -> None:
        for dtype in FLOATS:
            for x, parameters in (
                (Random(3, 5, 8), [Random(8), Random(8)]),
                (transposed(3, 5, 8), [Random(8), Random(8)]),
                (Random(3, 5, 8), []),
                (Random(4, 8), [Random(8)]),
            ):
                with self.subTest(dtype=dtype, shape=x.shape, parameters=len(parameters)):
                    self.check(lambda x, *p: F.layer_norm(x, (8,), *p), [x, *parameters], dtype)
            self.check(
                lambda x, w, b: F.layer_norm(x, (4, 6), w, b), [Random(3, 4, 6), Random(4, 6), Random(4, 6)], dtype
            )

    def test_group_norm(self) -> None:
        for dtype in FLOATS:
            self.check(lambda x, w, b: F.group_norm(x, 2, w, b), [Random(3, 4, 5), Random(4), Random(4)], dtype)

    def test_rms_norm(self) -> None:
        for dtype in FLOATS:
            self.check(lambda x, w: F.rms_norm(x, (8,), w, 1e-6), [Random(3, 5, 8), Random(8)], dtype)


class DropoutTest(unittest.TestCase):
    def test_dropout(self) -> None:
        for dtype in FLOATS:
            torch.manual_seed(3)
            x = torch.ones(1000, 7, dtype=dtype, device="npu", requires_grad=True)
            y = F.dropout(x, 0.25)
            y.sum().backward()
            kept = (y != 0).float().mean().item()
            self.assertAlmostEqual(kept, 0.75, delta=0.03)
            torch.testing.assert_close(x.grad, y.detach())  # the same mask, and 1 / 0.75
            torch.testing.assert_close(y.max().item(), 1 / 0.75, rtol=TOLERANCE[dtype], atol=0)

    def test_extremes(self) -> None:
        x = torch.ones(10, device="npu")
        self.assertTrue(torch.equal(F.dropout(x, 0.0), x))
        self.assertTrue(torch.equal(F.dropout(x, 1.0), torch.zeros_like(x)))

    def test_the_seed_decides(self) -> None:
        def draw(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return F.dropout(torch.ones(100, device="npu"), 0.5).cpu()

        self.assertTrue(torch.equal(draw(1), draw(1)))
        self.assertFalse(torch.equal(draw(1), draw(2)))


class EmbeddingTest(OperatorTest):
    def test_values_and_gradients(self) -> None:
        index = torch.tensor([[1, 3, 1], [0, 5, 3]])
        for dtype in FLOATS:
            self.check(lambda w, i: F.embedding(i, w), [Random(6, 8), index], dtype)
            self.check(lambda w, i: F.embedding(i, w), [Random(6, 8), index.int()], dtype)
            self.check(lambda w, i: F.embedding(i, w, padding_idx=3), [Random(6, 8), index], dtype)
            self.check(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), [Random(6, 8), index], dtype)
            self.check(lambda w, i: F.embedding(i.t(), w), [transposed(6, 8), index], dtype)


def index_put(x, i, v, accumulate):
    return x.clone().index_put((i,), v, accumulate=accumulate)


def assigned(x, key, value):
    x = x.clone()
    x[key] = value
    return x


INDEXING = {
    "index": (lambda x, i: x[i], [Random(6, 4), torch.tensor([3, 0, 3])]),
    "index_two": (lambda x, i, j: x[i, j], [Random(6, 4), torch.tensor([3, 0, 3]), torch.tensor([1, 1, 1])]),
    "index_second": (lambda x, i: x[:, i], [Random(6, 4), torch.tensor([[3, 0], [1, 3]])]),
    "index_mask": (lambda x, m: x[m], [Random(4, 3), torch.tensor([True, False, True, True])]),
    "index_strided": (lambda x, i: x[i], [transposed(6, 4), torch.tensor([3, 0, 3])]),
    "index_select": (lambda x, i: x.index_select(1, i), [Random(3, 6), torch.tensor([5, 0, 5])]),
    "index_select_int32": (lambda x, i: x.index_select(0, i), [transposed(6, 3), torch.tensor([5, 0]).int()]),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), [Random(5, 3), torch.tensor([1, 1, 4]), Random(3, 3)]),
    "index_add_alpha": (
        lambda x, i, s: x.index_add(1, i, s, alpha=2),
        [Random(2, 5), torch.tensor([1, 1]), Random(2, 2)],
    ),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), [Random(5, 3), torch.tensor([1, 4]), Random(2, 3)]),
    "index_fill": (lambda x, i: x.index_fill(0, i, 7.0), [Random(5, 3), torch.tensor([1, 4])]),
    "index_put": (
        lambda x, i, v: index_put(x, i, v, False),
        [Random(5, 3), torch.tensor([1, 4]), Random(2, 3)],
    ),
    "index_put_accumulate": (
        lambda x, i, v: index_put(x, i, v, True),
        [Random(5, 3), torch.tensor([1, 1, 4]), Random(3, 3)],
    ),
    "index_put_nothing": (
        lambda x, m, v: x.clone().index_put((m,), v, accumulate=True),
        [Random(5, 3), torch.zeros(5).bool(), Random(3)],
    ),
    "index_put_second": (
        lambda x, i, v: assigned(x, (slice(None), i), v),
        [Random(5, 3), torch.tensor([2, 0]), Random(5, 2)],
    ),
    "gather": (lambda x, i: x.gather(1, i), [Random(3, 4), torch.tensor([[0, 0], [3, 1], [2, 2]])]),
    "gather_strided": (lambda x, i: x.gather(0, i), [transposed(3, 4), torch.tensor([[0, 2, 1, 0]])]),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s),
        [Random(3, 4), torch.tensor([[0, 1], [3, 1], [2, 0]]), Random(3, 2)],
    ),
    "scatter_value": (lambda x, i: x.scatter(1, i, 2.5), [Random(3, 4), torch.tensor([[0, 1], [3, 1], [2, 0]])]),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        [Random(3, 4), torch.tensor([[0, 0], [3, 1], [2, 2]]), Random(3, 2)],
    ),
    "masked_fill": (
        lambda x, m: x.masked_fill(m, -3.0),
        [Random(3, 4), torch.tensor([True, False, True, False])],
    ),
    "masked_fill_strided": (lambda x, m: x.masked_fill(m, 0.0), [transposed(3, 4), torch.eye(3, 4).bool()]),
    "masked_select": (lambda x, m: x.masked_select(m), [Random(3, 4), torch.eye(3, 4).bool()]),
    "masked_scatter": (
        lambda x, m, s: x.masked_scatter(m, s),
        [Random(3, 4), torch.eye(3, 4).bool(), Random(3)],
    ),
    "take": (lambda x, i: x.take(i), [Random(3, 4), torch.tensor([11, 0, 0])]),
    "where": (lambda m, x, y: torch.where(m, x, y), [torch.eye(3, 4).bool(), Random(3, 4), Random(1, 4)]),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), [Random(2, 4)]),
    "repeat_interleave_tensor": (
        lambda x, r: x.repeat_interleave(r, 0),
        [Random(3, 2), torch.tensor([2, 0, 3])],
    ),
    "repeat_interleave_size": (
        lambda x, r: x.repeat_interleave(r, 0, output_size=5),
        [Random(3, 2), torch.tensor([2, 0, 3])],
    ),
}


class IndexTest(OperatorTest):
    @parameterized.expand([(name, *case) for name, case in INDEXING.items()], name_func=label)
    def test_values_and_gradients(self, _: str, function: Callable, inputs: list) -> None:
        for dtype in FLOATS:
            with self.subTest(dtype=dtype):
                self.check(function, inputs, dtype)

    def test_integers(self) -> None:
        x = torch.arange(12).view(3, 4)
        i = torch.tensor([2, 0])
        for function in (
            lambda x, i: x[i],
            lambda x, i: x.index_select(0, i),
            lambda x, i: x.index_fill(0, i, 9),
            lambda x, i: x.index_add(0, i, x[:2]),
            lambda x, i: x.gather(1, i.expand(3, 2)),
            lambda x, i: x.scatter_add(1, i.expand(3, 2), x[:, :2]),
            lambda x, i: torch.zeros_like(x).scatter_(1, i.expand(3, 2), 1),
            lambda x, i: x.nonzero(),
            lambda x, i: (x > 100).nonzero(),
            lambda x, i: torch.nonzero(x, as_tuple=True)[1],
            lambda x, i: F.one_hot(x, 12),
            lambda x, i: F.one_hot(x),
            lambda x, i: x[x > 4],
            lambda x, i: x[:, i.new_empty(0)],
            lambda x, i: i.repeat_interleave(i),
        ):
            torch.testing.assert_close(function(x.to("npu"), i.to("npu")).cpu(), function(x, i))

    def test_in_place(self) -> None:
        i, m, v = torch.tensor([2, 0]), torch.tensor([True, False, True, False]), torch.randn(2, 4)
        for change in (
            lambda x, i, m, v: x.index_fill_(0, i, 2.0),
            lambda x, i, m, v: x.index_copy_(0, i, v),
            lambda x, i, m, v: x.index_add_(0, i, v),
            lambda x, i, m, v: x.__setitem__(i, v),
            lambda x, i, m, v: x.__setitem__(i, 1.5),
            lambda x, i, m, v: x.masked_fill_(m, 3.0),
            lambda x, i, m, v: x.masked_fill_(m, v[0, 0]),
            lambda x, i, m, v: x.__setitem__((slice(None), m), 0.0),
            lambda x, i, m, v: x.scatter_(0, i.view(2, 1).expand(2, 4), v),
            lambda x, i, m, v: x.put_(i, v[0, :2]),
        ):
            for view in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]):
                x = torch.randn(3, 4) if view(torch.empty(3, 4)).shape == (3, 4) else None
                if x is None:
                    shape = (4, 3) if view(torch.empty(4, 3)).shape == (3, 4) else (3, 8)
                    x = torch.randn(shape)
                y = x.to("npu")
                change(view(x), i, m, v)
                change(view(y), i.to("npu"), m.to("npu"), v.to("npu"))
                torch.testing.assert_close(y.cpu(), x)


if __name__ == "__main__":
    unittest.main()
