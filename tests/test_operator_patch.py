# SPDX-License-Identifier: Apache-2.0
"""The kernel under PyTorch's own operator, which is all there is to patch with transformers 5.0 and 5.1."""

import logging
import sys

import pytest
import torch
from transformers.integrations import moe

import npu_moe

LINE = "[PATCH] aten::_grouped_mm on NPUs -> aten_grouped_mm"


def operator_kernel_is_registered() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "PrivateUse1")


def test_the_operator_has_the_kernel_until_reverted(an_npu):
    assert not operator_kernel_is_registered()
    npu_moe.apply_npu_patch()
    assert operator_kernel_is_registered()
    npu_moe.revert_npu_patch()
    assert not operator_kernel_is_registered()


def test_a_kernel_of_torch_npu_is_left_in_place(an_npu, caplog):
    caplog.set_level(logging.INFO, "npu_moe")
    theirs = torch.library.Library("aten", "IMPL")
    theirs.impl("_grouped_mm", lambda *args: None, "PrivateUse1")
    try:
        assert npu_moe.apply_npu_patch() is True
        assert "aten::_grouped_mm is left as it is: torch_npu has a kernel of its own" in caplog.text
        npu_moe.revert_npu_patch()
        assert operator_kernel_is_registered()
    finally:
        theirs._destroy()


def test_transformers_5_0_and_5_1_are_served_by_the_operator(an_npu, monkeypatch, caplog):
    monkeypatch.delattr(moe, "_grouped_mm", raising=False)
    assert npu_moe.apply_npu_patch() is True
    assert operator_kernel_is_registered()
    assert [record.getMessage() for record in caplog.records] == [LINE]


@pytest.mark.parametrize("missing", ["transformers 4", "the operator in PyTorch"])
def test_nothing_to_patch(an_npu, monkeypatch, missing):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    if missing == "transformers 4":
        monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    else:
        monkeypatch.delattr(moe, "_grouped_mm", raising=False)
        monkeypatch.delattr(torch, "_grouped_mm")
    with pytest.raises(RuntimeError, match=r"transformers 4\.57\.6 .*has no .*5\.2\.0 or newer.*NPU_MOE_PATCH=0"):
        npu_moe.apply_npu_patch()
