# SPDX-License-Identifier: Apache-2.0
"""The cases for `npu_moe.grouped_mm`, run on the strict reference on a CPU and, in tests/npu, on an NPU.

The expected numbers come from a plain loop over the experts in float64.
"""

import itertools
import unittest

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameterized import parameterized

from npu_moe import grouped_mm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = {
    "balanced": [4, 4, 4, 4],
    "one_token": [0, 1, 0, 0],
    "first_empty": [0, 3, 5, 2],
    "middle_empty": [3, 0, 0, 5],
    "last_empty": [3, 5, 2, 0],
    "one_expert_takes_all": [0, 16, 0, 0],
    "single_expert": [7],
    "no_tokens": [0, 0, 0],
}
# From a parameter to the (E, K, N) weight.
VIEWS = {
    "transposed": lambda parameter: parameter.transpose(-2, -1),
    "contiguous": lambda parameter: parameter,
    "chunk": lambda parameter: parameter.chunk(2, dim=2)[1],
    "transposed_chunk": lambda parameter: parameter.chunk(2, dim=1)[1].transpose(-2, -1),
}
LAYOUTS = tuple(VIEWS)


def ends_of(counts: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=dtype)


def make_weight(experts: int, k: int, n: int, layout: str, dtype: torch.dtype, device: str, generator=None):
    """A leaf parameter, and the (E, K, N) view of it that transformers hands to the function."""
    shape = {
        "transposed": (experts, n, k),
        "contiguous": (experts, k, n),
        "chunk": (experts, k, 2 * n),
        "transposed_chunk": (experts, 2 * n, k),
    }[layout]
    parameter = torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()
    return parameter, VIEWS[layout](parameter)


def loop(input, weight, counts, grad_output):
    """Forward, gradient of the input and gradient of the weight, one expert at a time in float64 on the CPU."""
    input, weight, grad_output = (t.detach().cpu().double() for t in (input, weight, grad_output))
    out = torch.zeros(input.size(0), weight.size(2), dtype=torch.float64)
    grad_input, grad_weight = torch.zeros_like(input), torch.zeros_like(weight)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        out[rows] = input[rows] @ weight[expert]
        grad_input[rows] = grad_output[rows] @ weight[expert].T
        grad_weight[expert] = input[rows].T @ grad_output[rows]
        start += count
    return out, grad_input, grad_weight


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    # One rounding to `dtype` and an accumulation in float32 are allowed, no more.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(actual.detach().cpu().double(), expected, rtol=rtol, atol=2e-5)


class GroupedMMCases(unittest.TestCase):
    """A subclass names the device."""

    __test__ = False
    device: str

    def check(self, counts, k, n, layout, dtype, extra_rows=0, input_dtype=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows = sum(counts) + extra_rows
        input = torch.randn(rows, k, generator=generator).to(input_dtype or dtype).to(self.device).requires_grad_()
        parameter, weight = make_weight(len(counts), k, n, layout, dtype, self.device, generator)
        grad_output = torch.randn(rows, n, generator=generator).to(dtype).to(self.device)

        out = grouped_mm(input, weight, ends_of(counts).to(self.device))
        self.assertEqual((out.shape, out.dtype), ((rows, n), dtype))
        grad_input, grad_parameter, grad_weight = torch.autograd.grad(
            out, (input, parameter, weight), grad_output, retain_graph=True
        )

        expected = loop(input.to(dtype), weight, counts, grad_output)
        valid = slice(0, sum(counts))  # the rows past the last expert's are unspecified
        assert_near(out[valid], expected[0][valid], dtype)
        assert_near(grad_input[valid], expected[1][valid], dtype)
        assert_near(grad_weight, expected[2], dtype)
        self.assertEqual(grad_input.dtype, input.dtype)
        self.assertEqual(grad_parameter.shape, parameter.shape)
        self.assertTrue(torch.isfinite(grad_parameter).all())
        empty = [expert for expert, count in enumerate(counts) if count == 0]
        self.assertEqual(grad_weight[empty].abs().sum().item(), 0)
        return grad_parameter, grad_weight

    @parameterized.expand(
        [
            (f"{name}_{layout}_{str(dtype)[6:]}", counts, layout, dtype)
            for (name, counts), layout, dtype in itertools.product(COUNTS.items(), LAYOUTS, DTYPES)
        ]
    )
    def test_forward_and_gradients(self, _, counts, layout, dtype):
        self.check(counts, 16, 24, layout, dtype)

    @parameterized.expand(
        [
            (f"{k}_{n}_{rows}_{layout}", k, n, rows, layout)
            for k, n, rows, layout in itertools.product((1, 5), (1, 3), (1, 2), ("transposed", "contiguous"))
        ]
    )
    def test_sizes_of_one(self, _, k, n, rows, layout):
        """A dimension of size 1 makes strides ambiguous; CANN decides by the strides."""
        self.check([rows], k, n, layout, torch.float32)
        self.check([0, rows, 0], k, n, layout, torch.float32)

    @parameterized.expand(
        [(f"{layout}_{extra}", layout, extra) for layout in ("transposed", "contiguous") for extra in (1, 9)]
    )
    def test_rows_past_the_last_expert_never_reach_the_weight_gradient(self, _, layout, extra):
        self.check([3, 0, 5, 2], 16, 24, layout, torch.float32, extra_rows=extra)
        self.check([0, 0], 16, 24, layout, torch.float32, extra_rows=extra)

    def test_nan_in_rows_past_the_last_expert_stays_there(self):
        parameter, weight = make_weight(2, 8, 8, "transposed", torch.float32, self.device)
        input = torch.full((7, 8), float("nan"))
        input[:4] = 1
        out = grouped_mm(input.to(self.device).requires_grad_(), weight, ends_of([1, 3]).to(self.device))
        out.backward(torch.full((7, 8), float("nan")).index_fill(0, torch.arange(4), 1.0).to(self.device))
        self.assertTrue(torch.isfinite(out[:4]).all())
        self.assertTrue(torch.isfinite(parameter.grad).all())

    def test_expanded_gradient(self):
        parameter, weight = make_weight(3, 8, 8, "transposed", torch.float32, self.device)
        input = torch.randn(6, 8).to(self.device).requires_grad_()
        grouped_mm(input, weight, ends_of([2, 0, 4]).to(self.device)).sum().backward()
        _, grad_input, grad_weight = loop(input, weight, [2, 0, 4], torch.ones(6, 8))
        assert_near(input.grad, grad_input, torch.float32)
        assert_near(parameter.grad.transpose(-2, -1), grad_weight, torch.float32)

    @parameterized.expand(
        [
            ("columns_of_a_wider_one", lambda rows, n: torch.randn(rows, 2 * n)[:, n:]),
            ("transposed", lambda rows, n: torch.randn(n, rows).t()),
            ("every_other_row", lambda rows, n: torch.randn(2 * rows, n)[::2]),
        ]
    )
    def test_strided_input_and_gradient(self, _, make):
        counts = [2, 0, 3]
        parameter, weight = make_weight(3, 8, 12, "transposed", torch.float32, self.device)
        input = make(5, 8).to(self.device).requires_grad_()
        grad_output = make(5, 12).to(self.device)
        out = grouped_mm(input, weight, ends_of(counts).to(self.device))
        out.backward(grad_output)
        expected = loop(input, weight, counts, grad_output)
        assert_near(out, expected[0], torch.float32)
        assert_near(input.grad, expected[1], torch.float32)
        assert_near(parameter.grad.transpose(-2, -1), expected[2], torch.float32)

    def test_one_row_with_the_strides_of_a_transposed_matrix(self):
        _, weight = make_weight(2, 8, 8, "transposed", torch.float32, self.device)
        row = torch.randn(8, 1).t()
        self.assertEqual((row.stride(), row.is_contiguous()), ((1, 1), True))
        row = row.to(self.device).as_strided((1, 8), (1, 1)).requires_grad_()
        out = grouped_mm(row, weight, ends_of([0, 1]).to(self.device))
        grad_output = torch.randn(8, 1).to(self.device).as_strided((1, 8), (1, 1))
        grad_input, grad_weight = torch.autograd.grad(out, (row, weight), grad_output)
        expected = loop(row, weight, [0, 1], grad_output)
        for actual, wanted in zip((out, grad_input, grad_weight), expected, strict=True):
            assert_near(actual, wanted, torch.float32)

    def test_gradient_has_the_layout_of_the_parameter(self):
        for layout in ("transposed", "contiguous"):
            grad_parameter, grad_weight = self.check([3, 0, 5], 8, 16, layout, torch.float32)
            self.assertTrue(grad_parameter.is_contiguous(), layout)
            self.assertEqual(grad_weight.is_contiguous(), layout == "contiguous")

    def test_gradients_accumulate(self):
        parameter, weight = make_weight(2, 8, 8, "transposed", torch.float32, self.device)
        input = torch.randn(6, 8).to(self.device)
        for _ in range(2):
            grouped_mm(input, parameter.transpose(-2, -1), ends_of([2, 4]).to(self.device)).sum().backward()
        _, _, grad_weight = loop(input, weight, [2, 4], torch.ones(6, 8))
        assert_near(parameter.grad.transpose(-2, -1), 2 * grad_weight, torch.float32)

    def test_input_is_cast_to_the_dtype_of_the_weight(self):
        """Autocast leaves float32 activations beside bfloat16 weights."""
        for dtype in (torch.bfloat16, torch.float16):
            self.check([3, 0, 5], 16, 24, "transposed", dtype, input_dtype=torch.float32)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            self.check([3, 0, 5], 16, 24, "transposed", torch.bfloat16, input_dtype=torch.float32)

    def test_int64_offs(self):
        _, weight = make_weight(2, 8, 8, "contiguous", torch.float32, self.device)
        input = torch.randn(5, 8).to(self.device)
        out = grouped_mm(input, weight, ends_of([2, 3], torch.int64).to(self.device))
        assert_near(out, loop(input, weight, [2, 3], torch.zeros(5, 8))[0], torch.float32)

    def test_only_one_gradient_is_asked_for(self):
        parameter, weight = make_weight(2, 8, 8, "transposed", torch.float32, self.device)
        input = torch.randn(5, 8).to(self.device).requires_grad_()
        offs = ends_of([2, 3]).to(self.device)
        expected = loop(input, weight, [2, 3], torch.ones(5, 8))
        ones = torch.ones(5, 8).to(self.device)
        (grad_input,) = torch.autograd.grad(grouped_mm(input, weight.detach(), offs), input, ones)
        assert_near(grad_input, expected[1], torch.float32)
        (grad_weight,) = torch.autograd.grad(grouped_mm(input.detach(), weight, offs), weight, ones)
        assert_near(grad_weight, expected[2], torch.float32)

    def test_bias_can_be_added_in_place(self):
        """As transformers does for gpt_oss, which a view or an output kept for the backward would not survive."""
        _, weight = make_weight(2, 8, 8, "contiguous", torch.float32, self.device)
        bias = torch.zeros(5, 8).to(self.device).requires_grad_()
        out = grouped_mm(torch.randn(5, 8).to(self.device), weight, ends_of([2, 3]).to(self.device)).add_(bias)
        out.sum().backward()
        self.assertTrue((bias.grad == 1).all())

    def test_double_backward_raises(self):
        _, weight = make_weight(2, 8, 8, "contiguous", torch.float32, self.device)
        input = torch.randn(5, 8).to(self.device).requires_grad_()
        out = grouped_mm(input, weight, ends_of([2, 3]).to(self.device))
        (grad,) = torch.autograd.grad(out.square().sum(), input, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
            grad.sum().backward()

    @parameterized.expand(
        [
            ("input_rank", (2, 3, 4), (2, 4, 5), (2,), torch.int32, r"input must be \(S, K\).*\(2, 3, 4\)"),
            ("weight_rank", (3, 4), (4, 5), (2,), torch.int32, r"weight \(E, K, N\).*\(4, 5\)"),
            ("offs_rank", (3, 4), (2, 4, 5), (2, 1), torch.int32, r"offs \(E,\).*\(2, 1\)"),
            ("features", (3, 4), (2, 6, 5), (2,), torch.int32, "input has 4 features, weight takes 6"),
            ("experts", (3, 4), (2, 4, 5), (3,), torch.int32, "offs has 3 experts, weight has 2"),
            ("offs_dtype", (3, 4), (2, 4, 5), (2,), torch.float32, "offs must be int32 or int64, got torch.float32"),
            ("no_experts", (3, 4), (0, 4, 5), (0,), torch.int32, "between 1 and 1024, got 0"),
            ("too_many_experts", (3, 1), (1025, 1, 1), (1025,), torch.int32, "between 1 and 1024, got 1025"),
            ("no_features", (3, 0), (2, 0, 5), (2,), torch.int32, r"between 1 and 65535, got \(0, 5\)"),
            ("too_many_features", (1, 1), (1, 1, 65536), (1,), torch.int32, "between 1 and 65535"),
        ]
    )
    def test_wrong_shapes_raise(self, _, input_shape, weight_shape, offs_shape, offs_dtype, message):
        with self.assertRaisesRegex(ValueError, message):
            grouped_mm(
                torch.ones(input_shape).to(self.device),
                torch.ones(weight_shape).to(self.device),
                torch.zeros(offs_shape, dtype=offs_dtype).to(self.device),
            )

    def test_wrong_dtypes_raise(self):
        offs = ends_of([1, 2]).to(self.device)
        half = torch.ones(3, 4).to(self.device)
        for input, weight in (
            (half, torch.ones(2, 4, 4, dtype=torch.int32)),
            (half.to(torch.int32), torch.ones(2, 4, 4)),
        ):
            with self.assertRaisesRegex(ValueError, "one of float32, bfloat16, float16; got .*torch.int32"):
                grouped_mm(input, weight.to(self.device), offs)

    def test_mixed_devices_raise(self):
        for moved in range(3):
            arguments = [torch.ones(3, 4), torch.ones(2, 4, 4), ends_of([1, 2])]
            arguments = [t.to("meta" if i == moved else self.device) for i, t in enumerate(arguments)]
            with self.assertRaisesRegex(ValueError, "must be on the same device; got .*meta"):
                grouped_mm(*arguments)

    @parameterized.expand([(layout,) for layout in LAYOUTS])
    def test_compiled_for_any_number_of_tokens(self, layout):
        torch._dynamo.reset()
        parameter, _ = make_weight(4, 8, 16, layout, torch.float32, self.device)

        def forward(input, offs):
            return grouped_mm(input, VIEWS[layout](parameter), offs).square().sum()

        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for counts in ([2, 0, 3, 5], [4, 4, 0, 4], [0, 1, 9, 7]):
                input = torch.randn(sum(counts), 8).to(self.device).requires_grad_()
                offs = ends_of(counts).to(self.device)
                actual = torch.autograd.grad(compiled(input, offs), (input, parameter))
                expected = torch.autograd.grad(forward(input, offs), (input, parameter))
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        counts=st.lists(st.integers(0, 6), min_size=1, max_size=9),
        k=st.integers(1, 20),
        n=st.integers(1, 20),
        layout=st.sampled_from(LAYOUTS),
        dtype=st.sampled_from(DTYPES),
        extra_rows=st.integers(0, 3),
        seed=st.integers(0, 2**16),
    )
    def test_any_shape_and_any_groups(self, counts, k, n, layout, dtype, extra_rows, seed):
        self.check(counts, k, n, layout, dtype, extra_rows, seed=seed)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(data=st.data())
    def test_anything_else_raises_and_names_what_is_wrong(self, data):
        """Shapes near those that fit, any dtype: an error that says what was given, or the right numbers."""
        rows, k, n, experts = (data.draw(st.integers(0, 4)) for _ in range(4))

        def near(*shape: int) -> tuple[int, ...]:
            change = data.draw(st.sampled_from(["none"] * 12 + ["size", "drop", "add"]))
            if change == "size":
                index = data.draw(st.integers(0, len(shape) - 1))
                return (*shape[:index], data.draw(st.integers(0, 5)), *shape[index + 1 :])
            return {"none": shape, "drop": shape[1:], "add": (2, *shape)}[change]

        input_shape, weight_shape, offs_shape = near(rows, k), near(experts, k, n), near(experts)
        some = st.sampled_from([*DTYPES * 4, torch.float64, torch.int32])
        input_dtype, weight_dtype = data.draw(some), data.draw(some)
        offs_dtype = data.draw(st.sampled_from([*[torch.int32, torch.int64] * 4, torch.int16, torch.float32]))
        input = torch.randint(-8, 8, input_shape).to(input_dtype)
        weight = torch.randint(-8, 8, weight_shape).to(weight_dtype)
        ends = sorted(data.draw(st.integers(0, input_shape[0] if input_shape else 0)) for _ in range(experts))
        offs = torch.tensor(ends).reshape(experts).to(offs_dtype)
        offs = offs if offs_shape == (experts,) else torch.zeros(offs_shape, dtype=offs_dtype)

        fits = (
            (len(input_shape), len(weight_shape), len(offs_shape)) == (2, 3, 1)
            and input_shape[1] == weight_shape[1]
            and offs_shape[0] == weight_shape[0]
            and {input_dtype, weight_dtype} <= set(DTYPES)
            and offs_dtype in (torch.int32, torch.int64)
            and min(weight_shape) > 0
        )
        arguments = (input.to(self.device), weight.to(self.device), offs.to(self.device))
        if fits:
            counts = [end - start for start, end in itertools.pairwise([0, *offs.tolist()])]
            expected, _, _ = loop(input, weight, counts, torch.zeros(input_shape[0], weight_shape[2]))
            out = grouped_mm(*arguments)
            assert_near(out[: sum(counts)], expected[: sum(counts)], weight_dtype)
        else:
            with self.assertRaisesRegex(ValueError, r"^grouped_mm: .*(got|must be).*"):
                grouped_mm(*arguments)
