# SPDX-License-Identifier: Apache-2.0
"""The cases for the kernel of `aten::_grouped_mm`: on the strict reference on a CPU; in tests/npu, on an NPU."""

import itertools
import unittest

import torch
from parameterized import parameterized

from grouped_mm_cases import DTYPES, assert_near, ends_of

COUNTS = {"mixed": [3, 0, 5, 2], "first_empty": [0, 2], "last_empty": [4, 0], "one": [6], "nothing": [0, 0]}
# The shapes of the two operands, for S, K (or M), N and E; and the einsum of one group.
SHAPES = {
    "2d_3d": (lambda s, m, n, e: (s, m), lambda s, m, n, e: (e, m, n)),
    "2d_2d": (lambda s, m, n, e: (m, s), lambda s, m, n, e: (s, n)),
    "3d_2d": (lambda s, m, n, e: (e, n, m), lambda s, m, n, e: (m, s)),
}


def loop(a: torch.Tensor, b: torch.Tensor, counts: list[int]) -> torch.Tensor:
    a, b = a.cpu().double(), b.cpu().double()
    bounds = list(itertools.accumulate(counts, initial=0))
    groups = [slice(start, end) for start, end in itertools.pairwise(bounds)]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    if a.dim() == 2:
        return torch.cat([a[group] @ b[i] for i, group in enumerate(groups)])
    return torch.cat([a[i] @ b[:, group] for i, group in enumerate(groups)], dim=1)


def make(shape: tuple[int, ...], transposed: bool, dtype: torch.dtype, device: str) -> torch.Tensor:
    if transposed:
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).to(device).transpose(-2, -1)
    return torch.randn(shape).to(dtype).to(device)


class AtenGroupedMMCases(unittest.TestCase):
    """A subclass names the device and what is called."""

    __test__ = False
    device: str

    def call(self, *args, **kwargs):
        raise NotImplementedError

    @parameterized.expand(
        [
            (f"{shapes}_{name}_{a}{b}_{str(dtype)[6:]}", shapes, counts, a, b, dtype)
            for shapes, (name, counts), a, b, dtype in itertools.product(
                SHAPES, COUNTS.items(), (False, True), (False, True), DTYPES
            )
        ]
    )
    def test_shapes(self, _, shapes, counts, a_transposed, b_transposed, dtype):
        shape_a, shape_b = (shape(sum(counts), 16, 24, len(counts)) for shape in SHAPES[shapes])
        a = make(shape_a, a_transposed, dtype, self.device)
        b = make(shape_b, b_transposed, dtype, self.device)
        assert_near(self.call(a, b, offs=ends_of(counts).to(self.device)), loop(a, b, counts), dtype)

    def test_two_batches(self):
        a, b = torch.randn(3, 4, 16).to(self.device), torch.randn(3, 16, 8).to(self.device)
        assert_near(self.call(a, b), a.cpu().double() @ b.cpu().double(), torch.float32)

    @parameterized.expand(
        [
            ("no_offs", (4, 8), (2, 8, 8), None, {}),
            ("offs_for_two_batches", (2, 4, 8), (2, 8, 8), torch.int32, {}),
            ("offs_dtype", (4, 8), (2, 8, 8), torch.int64, {}),
            ("features", (4, 8), (2, 16, 8), torch.int32, {}),
            ("groups", (4, 8), (3, 8, 8), torch.int32, {}),
            ("rank", (8,), (2, 8, 8), torch.int32, {}),
            ("bias", (4, 8), (2, 8, 8), torch.int32, {"bias": torch.zeros(8)}),
            ("out_dtype", (4, 8), (2, 8, 8), torch.int32, {"out_dtype": torch.bfloat16}),
        ]
    )
    def test_what_pytorch_refuses_is_refused_by_pytorch(self, _, shape_a, shape_b, offs_dtype, others):
        a, b = torch.ones(shape_a).to(self.device), torch.ones(shape_b).to(self.device)
        others = {name: v.to(self.device) if torch.is_tensor(v) else v for name, v in others.items()}
        offs = None if offs_dtype is None else ends_of([2, 2], offs_dtype).to(self.device)
        with self.assertRaises(RuntimeError) as raised:
            self.call(a, b, offs=offs, **others)
        with self.assertRaises(RuntimeError) as expected:
            cpu = {name: v.cpu() if torch.is_tensor(v) else v for name, v in others.items()}
            torch._grouped_mm(a.cpu(), b.cpu(), offs=None if offs is None else offs.cpu(), **cpu)
        self.assertEqual(str(raised.exception).split("\n")[0], str(expected.exception).split("\n")[0])

    def test_what_cann_does_not_take_is_computed_by_pytorch(self):
        counts = [1] * 1025
        a, b = torch.randn(1025, 8).to(self.device), torch.randn(1025, 8, 8).to(self.device)
        assert_near(self.call(a, b, offs=ends_of(counts).to(self.device)), loop(a, b, counts), torch.float32)
