# SPDX-License-Identifier: Apache-2.0
import torch
from parameterized import parameterized

import npu_moe
from aten_grouped_mm_cases import AtenGroupedMMCases
from grouped_mm_cases import assert_near, ends_of, loop, make_weight


def setUpModule():
    assert npu_moe.apply_npu_patch()


def tearDownModule():
    npu_moe.revert_npu_patch()


class AtenGroupedMMOnAnNPUTest(AtenGroupedMMCases):
    __test__ = True
    device = "npu"

    def call(self, *args, **kwargs):
        return torch._grouped_mm(*args, **kwargs)

    @parameterized.expand([("transposed",), ("contiguous",)])
    def test_gradients_by_pytorchs_formula(self, layout):
        counts = [3, 0, 5, 2]
        input = torch.randn(10, 16, device="npu", requires_grad=True)
        parameter, weight = make_weight(4, 16, 24, layout, torch.float32, "npu")
        grad_output = torch.randn(10, 24, device="npu")
        out = torch._grouped_mm(input, weight, offs=ends_of(counts).to("npu"))
        grad_input, grad_weight = torch.autograd.grad(out, (input, weight), grad_output)
        expected = loop(input, weight, counts, grad_output)
        for actual, wanted in zip((out, grad_input, grad_weight), expected, strict=True):
            assert_near(actual, wanted, torch.float32)


del AtenGroupedMMCases
