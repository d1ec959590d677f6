# SPDX-License-Identifier: Apache-2.0
import gc
import weakref

import pytest
import torch

from grouped_mm_cases import GroupedMMCases, ends_of, make_weight
from npu_moe import grouped_mm
from strict_npu import strict_npu


class GroupedMMOnTheStrictReferenceTest(GroupedMMCases):
    __test__ = True
    device = "cpu"

    def run(self, result=None):
        with strict_npu() as self.npu:
            return super().run(result)

    def calls_of(self, input_grad: bool, weight_grad: bool, layout: str = "transposed"):
        parameter, weight = make_weight(4, 8, 16, layout, torch.bfloat16, "cpu")
        if not weight_grad:
            weight = weight.detach()
        input = torch.randn(10, 8, dtype=torch.bfloat16, requires_grad=input_grad)
        out = grouped_mm(input, weight, ends_of([3, 0, 5, 2]))
        if out.requires_grad:
            out.sum().backward()
        return weight, self.npu.calls

    def test_three_kernels_forward_and_backward(self):
        for layout in ("transposed", "contiguous"):
            self.npu.calls.clear()
            weight, calls = self.calls_of(True, True, layout)
            self.assertEqual([call.group_type for call in calls], [0, 0, 2], layout)
            # The parameter's own memory is read, in the forward and for the gradient of the input.
            self.assertEqual([call.weight_data_ptr for call in calls[:2]], [weight.data_ptr()] * 2)
            self.assertFalse(any(call.copies_weight for call in calls))
            # One cast of the offsets serves all three.
            self.assertEqual(len({call.group_list.data_ptr() for call in calls}), 1)

    def test_no_gradient_that_nobody_asked_for(self):
        for input_grad, weight_grad, kernels in ((True, False, [0, 0]), (False, True, [0, 2]), (False, False, [0])):
            self.npu.calls.clear()
            _, calls = self.calls_of(input_grad, weight_grad)
            self.assertEqual([call.group_type for call in calls], kernels)

    def test_offs_of_the_right_dtype_are_not_copied(self):
        _, weight = make_weight(2, 8, 8, "contiguous", torch.float32, "cpu")
        offs = ends_of([2, 3], torch.int64)
        grouped_mm(torch.randn(5, 8), weight, offs)
        self.assertEqual(self.npu.calls[0].group_list.data_ptr(), offs.data_ptr())

    def test_frozen_weight_keeps_no_activation(self):
        weight = torch.randn(2, 8, 8)
        input = torch.randn(5, 8, requires_grad=True) * 1
        alive = weakref.ref(input)
        out = grouped_mm(input, weight, ends_of([2, 3]))
        del input
        gc.collect()
        self.assertIsNone(alive())
        self.assertTrue(out.requires_grad)

    def test_weight_that_cann_copies_is_logged_once(self):
        for layout in ("chunk", "transposed_chunk"):
            _, weight = make_weight(3, 8, 40, layout, torch.float32, "cpu")
            with self.assertLogs("npu_moe.grouped_mm", "WARNING") as log:
                grouped_mm(torch.randn(5, 8), weight, ends_of([2, 0, 3]))
            self.assertIn("(3, 8, 40) with strides", log.output[0])
            self.assertTrue(self.npu.calls[-1].copies_weight)
            with self.assertNoLogs("npu_moe.grouped_mm"):
                grouped_mm(torch.randn(5, 8), weight, ends_of([2, 0, 3]))


def test_tensors_that_are_not_on_an_npu_raise():
    with pytest.raises(ValueError, match="must be on an NPU, got cpu and cpu"):
        grouped_mm(torch.ones(2, 4), torch.ones(1, 4, 4), ends_of([2]))
