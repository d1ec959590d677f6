# SPDX-License-Identifier: Apache-2.0
"""The operators of the NPU, real or virtual, against PyTorch's CPU: creation, copies, arithmetic, comparisons,
reductions, sorting, matrix multiplication and random numbers; over dtypes, memory layouts and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32]

# A layout is a view of a packed tensor, made on both devices, so that strides and offsets really differ.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "packed": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1) if x.dim() > 1 else x,
    "stepped": lambda x: x[..., ::2] if x.dim() else x,
    "offset": lambda x: x[1:] if x.dim() and len(x) > 1 else x,
    "expanded": lambda x: x.unsqueeze(0).expand(2, *x.shape),
}
SHAPES = [(), (5,), (4, 6), (2, 3, 4), (0, 3), (3, 0)]


def name_of(value: Any) -> str:
    return str(value).replace("torch.", "").replace(" ", "")


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, low: float = -3, high: float = 3
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)


def on_npu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.npu()
    if isinstance(value, (list, tuple)):
        return type(value)(on_npu(item) for item in value)
    return value


def compare(actual: Any, expected: Any, **tolerance: float) -> None:
    """Nested results, exactly where they are not floating point; a NaN where one is expected."""
    if isinstance(expected, torch.Tensor):
        assert actual.device.type == "npu"
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual.cpu(), expected, equal_nan=True, **tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            compare(a, e, **tolerance)
    else:
        assert actual == expected


def check(function: Callable[..., Any], *args: Any, layout: str = "packed", **tolerance: float) -> None:
    view = LAYOUTS[layout]

    def viewed(value: Any) -> Any:
        return view(value) if isinstance(value, torch.Tensor) else value

    expected = function(*[viewed(a) for a in args])
    actual = function(*[viewed(on_npu(a)) for a in args])
    compare(actual, expected, **tolerance)


REAL, POSITIVE, UNIT, ABOVE_ONE = (-3.0, 3.0), (0.1, 3.0), (-0.9, 0.9), (1.1, 3.0)
UNARY: dict[str, tuple[float, float]] = {
    "abs": REAL,
    "acos": UNIT,
    "acosh": ABOVE_ONE,
    "asin": UNIT,
    "asinh": REAL,
    "atan": REAL,
    "atanh": UNIT,
    "ceil": REAL,
    "cos": REAL,
    "cosh": REAL,
    "erf": REAL,
    "erfc": REAL,
    "erfinv": UNIT,
    "exp": REAL,
    "exp2": REAL,
    "expm1": REAL,
    "floor": REAL,
    "frac": REAL,
    "isfinite": REAL,
    "isinf": REAL,
    "isnan": REAL,
    "log": POSITIVE,
    "log10": POSITIVE,
    "log1p": POSITIVE,
    "log2": POSITIVE,
    "logical_not": REAL,
    "neg": REAL,
    "reciprocal": POSITIVE,
    "round": REAL,
    "rsqrt": POSITIVE,
    "sign": REAL,
    "signbit": REAL,
    "sin": REAL,
    "sinc": REAL,
    "sinh": REAL,
    "sqrt": POSITIVE,
    "square": REAL,
    "tan": UNIT,
    "trunc": REAL,
}
WITHOUT_INPLACE = {"isfinite", "isinf", "isnan", "signbit"}


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for layout in LAYOUTS:
            check(getattr(torch, name), sample(shape, dtype, 0, *UNARY[name]), layout=layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", sorted(UNARY.keys() - WITHOUT_INPLACE))
def test_unary_in_place(name: str, dtype: torch.dtype) -> None:
    """Through a view: what lies between the elements of the view must not change."""
    base = sample((4, 6), dtype, 0, *UNARY[name])
    expected, actual = base.clone(), base.npu()
    for tensor in (expected, actual):
        getattr(tensor[1:, ::2], name + "_")()
    compare(actual, expected)


BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
    "sub": torch.sub,
    "rsub": lambda a, b: torch.rsub(a, b, alpha=2),
    "mul": torch.mul,
    "div": torch.div,
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
TENSOR_ONLY: dict[str, Callable[..., torch.Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "where": lambda a, b: torch.where(a > b, a, b),
    "isclose": torch.isclose,
}


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=name_of)
@pytest.mark.parametrize("name", BINARY | TENSOR_ONLY)
def test_binary(name: str, dtype: torch.dtype) -> None:
    function = (BINARY | TENSOR_ONLY)[name]
    for shape in SHAPES:
        for layout in LAYOUTS:
            check(function, sample(shape, dtype, 0), sample(shape, dtype, 1, 1, 4), layout=layout)
    check(function, sample((4, 1, 3), dtype, 0), sample((5, 1), dtype, 1, 1, 4))  # broadcast


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=name_of)
@pytest.mark.parametrize("name", BINARY)
def test_binary_with_scalar(name: str, dtype: torch.dtype) -> None:
    for layout in LAYOUTS:
        check(BINARY[name], sample((4, 6), dtype), 2, layout=layout)
        if dtype.is_floating_point:
            check(BINARY[name], sample((4, 6), dtype), 1.5, layout=layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("other", ["tensor", "scalar"])
@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "floor_divide", "fmod", "remainder", "pow", "eq", "lt", "ge"]
)
def test_binary_in_place(name: str, other: str, dtype: torch.dtype) -> None:
    base, argument = sample((4, 6), dtype, 0, 0.5, 3), sample((3, 3), dtype, 1, 1, 4)
    expected, actual = base.clone(), base.npu()
    for tensor in (expected, actual):
        getattr(tensor[1:, ::2], name + "_")(argument.to(tensor.device) if other == "tensor" else 2)
    compare(actual, expected)


def test_mixed_dtypes() -> None:
    for a, b in [(torch.float32, torch.bfloat16), (torch.int64, torch.float32), (torch.bool, torch.int64)]:
        check(torch.add, sample((4,), a), sample((4,), b, 1))
        check(torch.mul, sample((4,), a), sample((), b, 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_powers(dtype: torch.dtype) -> None:
    x, y = sample((4, 6), dtype, 0, 0.1, 3), sample((4, 6), dtype, 1)
    for layout in LAYOUTS:
        check(torch.pow, x, 2, layout=layout)
        check(torch.pow, x, 0.5, layout=layout)
        check(torch.pow, x, y, layout=layout)
        check(lambda e: torch.pow(2.0, e), y, layout=layout)


@pytest.mark.parametrize("dtype", INTS + [torch.bool], ids=name_of)
def test_bitwise(dtype: torch.dtype) -> None:
    a, b = sample((4, 6), dtype, 0, 0, 7), sample((4, 6), dtype, 1, 0, 3)
    for function in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor):
        check(function, a, b)
        check(function, a, True if dtype == torch.bool else 3)
    check(torch.bitwise_not, a)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_three_operands(dtype: torch.dtype) -> None:
    a, b, c = (sample((4, 6), dtype, seed, 0.5, 3) for seed in range(3))
    for layout in LAYOUTS:
        check(lambda a, b, c: torch.addcmul(a, b, c, value=0.5), a, b, c, layout=layout)
        check(lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), a, b, c, layout=layout)
        check(torch.lerp, a, b, c, layout=layout)
        check(lambda a, b: torch.lerp(a, b, 0.1), a, b, layout=layout)
        check(lambda a: torch.clamp(a, 1, 2), a, layout=layout)
        check(lambda a: torch.clamp(a, min=1.5), a, layout=layout)
        check(lambda a: torch.clamp(a, max=1.5), a, layout=layout)
        check(lambda a, b: torch.clamp(a, min=b), a, b, layout=layout)
    expected, actual = a.clone(), a.npu()
    for x in (expected, actual):
        x.addcmul_(b.to(x.device), c.to(x.device), value=2).addcdiv_(b.to(x.device), c.to(x.device), value=0.1)
        x.lerp_(b.to(x.device), 0.25).clamp_(0.6, 5)
    compare(actual, expected)


def test_nan_and_infinity() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    for function in (torch.isnan, torch.isinf, torch.isfinite, torch.nan_to_num, torch.sign, torch.exp, torch.sqrt):
        check(function, x)
    check(torch.maximum, x, x.flip(0))


@pytest.mark.parametrize("dtype", FLOATS + INTS + [torch.bool], ids=name_of)
def test_creation(dtype: torch.dtype) -> None:
    for device in ("npu",):
        for shape in SHAPES:
            compare(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype))
            compare(torch.ones(shape, dtype=dtype, device=device), torch.ones(shape, dtype=dtype))
            compare(torch.full(shape, 1, dtype=dtype, device=device), torch.full(shape, 1, dtype=dtype))
        compare(torch.eye(3, 4, dtype=dtype, device=device), torch.eye(3, 4, dtype=dtype))
        if dtype != torch.bool:
            compare(torch.arange(7, dtype=dtype, device=device), torch.arange(7, dtype=dtype))
            compare(torch.arange(2, 9, 3, dtype=dtype, device=device), torch.arange(2, 9, 3, dtype=dtype))
            compare(torch.arange(0, dtype=dtype, device=device), torch.arange(0, dtype=dtype))
    if dtype.is_floating_point:
        compare(torch.linspace(0, 1, 5, dtype=dtype, device="npu"), torch.linspace(0, 1, 5, dtype=dtype))


def test_fill_in_place() -> None:
    expected, actual = sample((4, 6), torch.float32), sample((4, 6), torch.float32).npu()
    for x in (expected, actual):
        x[:, 1].zero_()
        x[1].fill_(7)
        x[2:, ::2].fill_(torch.tensor(3.0, device=x.device))
    compare(actual, expected)


@pytest.mark.parametrize("source", FLOATS + INTS + [torch.bool, torch.float64, torch.uint8, torch.int8], ids=name_of)
def test_casts(source: torch.dtype) -> None:
    for target in FLOATS + INTS + [torch.bool]:
        for layout in LAYOUTS:
            check(lambda x, target=target: x.to(target), sample((4, 6), source, 0, 0, 3), layout=layout)


@pytest.mark.parametrize("dtype", FLOATS + INTS + [torch.bool], ids=name_of)
def test_copies(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for layout in LAYOUTS:
            check(lambda x: x.contiguous(), sample(shape, dtype), layout=layout)
            check(lambda x: x.clone(), sample(shape, dtype), layout=layout)
            check(lambda x: torch.zeros_like(x).copy_(x), sample(shape, dtype), layout=layout)
    expected, actual = torch.zeros(4, 6, dtype=dtype), torch.zeros(4, 6, dtype=dtype, device="npu")
    source = sample((6, 4), dtype)
    expected[1:, ::2].copy_(source.t()[1:, ::2])
    actual[1:, ::2].copy_(source.npu().t()[1:, ::2])
    compare(actual, expected)


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=name_of)
def test_shape_changes(dtype: torch.dtype) -> None:
    a, b = sample((2, 3, 4), dtype), sample((2, 3, 4), dtype, 1)
    for layout in LAYOUTS:
        for dim in (0, 1, -1):
            check(lambda a, b, dim=dim: torch.cat([a, b], dim), a, b, layout=layout)
            check(lambda a, b, dim=dim: torch.stack([a, b], dim), a, b, layout=layout)
            check(lambda a, dim=dim: torch.flip(a, [dim]), a, layout=layout)
            check(lambda a, dim=dim: torch.roll(a, 1, dim), a, layout=layout)
            check(lambda a, dim=dim: [p.contiguous() for p in torch.split(a, 1, dim)], a, layout=layout)
            check(lambda a, dim=dim: torch.repeat_interleave(a, 2, dim), a, layout=layout)
        check(lambda a: a.permute(*reversed(range(a.dim()))).reshape(-1), a, layout=layout)
        check(lambda a: torch.tril(a, -1), a, layout=layout)
        check(lambda a: torch.triu(a, 1), a, layout=layout)
        check(lambda a: torch.nn.functional.pad(a, (1, 2, 0, 1), value=3), a, layout=layout)
        check(lambda a: a.repeat(*([2] * a.dim())), a, layout=layout)
    check(lambda a: torch.cat([a, a[:0]]), a)
    counts = torch.tensor([2, 0, 3])
    check(lambda a, n: torch.repeat_interleave(a, n, dim=1, output_size=5), a, counts)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, **k: torch.sum(x, **k),
    "mean": lambda x, **k: torch.mean(x, **k),
    "amax": lambda x, **k: torch.amax(x, **k),
    "amin": lambda x, **k: torch.amin(x, **k),
    "logsumexp": lambda x, **k: torch.logsumexp(x, **({"dim": 0} | k)),
    "norm2": lambda x, **k: torch.linalg.vector_norm(x, 2, **k),
    "norm1": lambda x, **k: torch.linalg.vector_norm(x, 1, **k),
    "norm_inf": lambda x, **k: torch.linalg.vector_norm(x, math.inf, **k),
    "std": lambda x, **k: torch.std(x, **k),
    "var": lambda x, **k: torch.var(x, **k),
    "any": lambda x, **k: torch.any(x > 0, **k),
    "all": lambda x, **k: torch.all(x > 0, **k),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    function = REDUCTIONS[name]
    for layout in LAYOUTS:
        for how in ({}, {"dim": 0}, {"dim": -1, "keepdim": True}, {"dim": (0, 1)}):
            check(lambda x, how=how: function(x, **how), sample((4, 6), dtype), layout=layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_more_reductions(dtype: torch.dtype) -> None:
    x = sample((4, 6), dtype)
    for layout in LAYOUTS:
        for dim in (0, -1):
            check(lambda x, dim=dim: tuple(torch.max(x, dim)), x, layout=layout)
            check(lambda x, dim=dim: tuple(torch.min(x, dim, keepdim=True)), x, layout=layout)
            check(lambda x, dim=dim: torch.argmax(x, dim), x, layout=layout)
            check(lambda x, dim=dim: torch.argmin(x, dim), x, layout=layout)
            check(lambda x, dim=dim: torch.cumsum(x, dim), x, layout=layout)
            check(lambda x, dim=dim: torch.prod(x, dim), x, layout=layout)
        for function in (torch.max, torch.min, torch.argmax, torch.prod, torch.sum):
            check(function, x, layout=layout)
        check(lambda x: torch.sum(x, dtype=torch.float32), x, layout=layout)
    check(torch.sum, sample((0, 3), dtype))
    check(lambda x: torch.sum(x, 0), sample((0, 3), dtype))


@pytest.mark.parametrize("dtype", INTS + [torch.bool], ids=name_of)
def test_reductions_of_integers(dtype: torch.dtype) -> None:
    x = sample((4, 6), dtype, 0, 0, 5)
    check(torch.sum, x)
    check(lambda x: torch.cumsum(x, 0), x)
    check(torch.any, x)
    check(torch.all, x)
    if dtype != torch.bool:
        check(torch.max, x)
        check(lambda x: tuple(torch.max(x, 1)), x)


def test_counting() -> None:
    ids = torch.tensor([0, 2, 2, 5, 1, 2, 7, 7])
    check(lambda x: torch.histc(x.float(), bins=8, min=0, max=7), ids)
    check(lambda x: torch.histc(x.half(), bins=8, min=0, max=7), ids)
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.histc(ids.npu().bfloat16(), bins=8, min=0, max=7)
    check(lambda x: torch.bincount(x, minlength=8), ids)
    npu = torch.histc(ids.int().npu(), bins=8, min=0, max=7)  # what transformers does; the CPU has no such histc
    compare(npu, torch.bincount(ids, minlength=8).int())
    check(lambda x: tuple(torch.unique(x, return_inverse=True, return_counts=True)), ids)
    check(lambda x: torch.searchsorted(x, torch.tensor([1, 3, 6], device=x.device)), torch.tensor([1, 2, 5, 7]))


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=name_of)
def test_sorting(dtype: torch.dtype) -> None:
    """Distinct values, so that indices are defined."""
    x = torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(4, 6).to(dtype)
    for layout in ("packed", "transposed", "stepped", "offset"):
        for dim in (0, -1):
            check(lambda x, dim=dim: tuple(torch.sort(x, dim)), x, layout=layout)
            check(lambda x, dim=dim: tuple(torch.sort(x, dim, descending=True)), x, layout=layout)
            check(lambda x, dim=dim: torch.argsort(x, dim), x, layout=layout)
            check(lambda x, dim=dim: tuple(torch.topk(x, 2, dim)), x, layout=layout)
            check(lambda x, dim=dim: tuple(torch.topk(x, 2, dim, largest=False)), x, layout=layout)
    check(lambda x: tuple(torch.sort(x, stable=True)), torch.tensor([3, 1, 2, 1, 3, 1]).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", ["packed", "transposed_left", "transposed_right", "stepped"])
def test_matmul(layout: str, dtype: torch.dtype) -> None:
    def matrices(device: str, *batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = sample((*batch, 5, 8), dtype), sample((*batch, 8, 4), dtype, 1)
        a, b = a.to(device), b.to(device)
        if layout == "transposed_left":
            a = a.mT.contiguous().mT
        elif layout == "transposed_right":
            b = b.mT.contiguous().mT
        elif layout == "stepped":
            a, b = a[..., ::2], b[..., ::2, :]
        return a, b

    def both(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *batch: int) -> None:
        expected = function(*matrices("cpu", *batch))
        compare(function(*matrices("npu", *batch)), expected)

    both(torch.mm)
    both(torch.matmul)
    both(torch.bmm, 3)
    both(torch.matmul, 2, 3)
    both(lambda a, b: torch.matmul(a.unsqueeze(0).expand(2, 5, -1), b))
    both(lambda a, b: torch.mv(a, b[:, 0]))
    both(lambda a, b: torch.dot(a[0], b[:, 0]))
    both(lambda a, b: torch.addmm(torch.ones(4, dtype=dtype, device=a.device), a, b, beta=0.5, alpha=2))
    both(lambda a, b: torch.baddbmm(torch.ones(1, 5, 4, dtype=dtype, device=a.device), a, b, beta=0.5), 3)
    both(lambda a, b: torch.addbmm(torch.ones(5, 4, dtype=dtype, device=a.device), a, b), 3)
    both(lambda a, b: torch.nn.functional.linear(a, b.mT))
    both(lambda a, b: torch.nn.functional.linear(a, b.mT, torch.ones(4, dtype=dtype, device=a.device)))
    both(lambda a, b: torch.einsum("ik,kj->ij", a, b))


def test_matmul_of_nothing() -> None:
    for m, k, n in [(0, 3, 2), (3, 0, 2), (3, 2, 0)]:
        check(torch.mm, sample((m, k), torch.float32), sample((k, n), torch.float32))
        check(torch.bmm, sample((2, m, k), torch.float32), sample((2, k, n), torch.float32))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_matmul_gradients(dtype: torch.dtype) -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        a = sample((2, 5, 8), dtype).to(device).requires_grad_()
        b = sample((8, 4), dtype, 1).to(device).requires_grad_()
        bias = sample((4,), dtype, 2).to(device).requires_grad_()
        torch.nn.functional.linear(a, b.t(), bias).square().sum().backward()
        return [a.grad, b.grad, bias.grad]

    compare(gradients("npu"), gradients("cpu"))


def test_random_numbers_are_a_function_of_the_seed() -> None:
    draws: list[Callable[[], torch.Tensor]] = [
        lambda: torch.randn(50, device="npu"),
        lambda: torch.rand(50, device="npu"),
        lambda: torch.randint(0, 1000, (50,), device="npu"),
        lambda: torch.randperm(50, device="npu"),
        lambda: torch.bernoulli(torch.full((50,), 0.5, device="npu")),
        lambda: torch.nn.functional.dropout(torch.ones(500, device="npu"), 0.5),
        lambda: torch.multinomial(torch.ones(10, device="npu"), 50, replacement=True),
        lambda: torch.empty(50, device="npu").exponential_(),
    ]
    for draw in draws:
        torch.npu.manual_seed(1)
        first, second = draw(), draw()
        torch.npu.manual_seed(1)
        again = draw()
        torch.npu.manual_seed(2)
        other = draw()
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert not torch.equal(first, other)


def test_distributions() -> None:
    torch.npu.manual_seed(0)
    normal = torch.empty(20000, device="npu").normal_(2, 3).cpu()
    assert abs(normal.mean() - 2) < 0.1 and abs(normal.std() - 3) < 0.1
    uniform = torch.empty(20000, device="npu").uniform_(-1, 3).cpu()
    assert -1 <= uniform.min() < -0.99 and 2.99 < uniform.max() <= 3 and abs(uniform.mean() - 1) < 0.05
    whole = torch.randint(3, 7, (2000,), device="npu").cpu()
    assert set(whole.tolist()) == {3, 4, 5, 6}
    assert sorted(torch.randperm(100, device="npu").tolist()) == list(range(100))
    assert 0.28 < torch.empty(20000, device="npu").bernoulli_(0.3).mean().item() < 0.32


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_dropout(dtype: torch.dtype) -> None:
    x = torch.ones(10000, dtype=dtype, device="npu", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    y.backward(torch.ones_like(y))
    kept = y.detach().cpu() != 0
    assert 0.73 < kept.float().mean() < 0.77
    torch.testing.assert_close(y.detach().cpu()[kept], torch.full((int(kept.sum()),), 1 / 0.75, dtype=dtype))
    torch.testing.assert_close(x.grad.cpu(), y.detach().cpu())


def test_an_operator_that_is_refused_says_so() -> None:
    a, b = torch.ones(2, 3, device="npu"), torch.ones(2, 3, device="npu", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="(?s)aclnnM.*float32.*float16"):
        torch.mm(a, b.t())
    torch.npu.synchronize()  # nothing reached the device
    compare(a + 1, torch.full((2, 3), 2.0))
