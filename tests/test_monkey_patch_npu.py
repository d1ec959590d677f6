# SPDX-License-Identifier: Apache-2.0
import contextlib
import importlib
import logging
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
import transformers
from transformers.integrations import moe

import npu_moe
from grouped_mm_cases import ends_of
from strict_npu import strict_npu

if not hasattr(moe, "_grouped_mm"):
    reason = f"transformers {transformers.__version__} has no _grouped_mm (5.2.0 has): see test_operator_patch.py"
    pytest.skip(reason, allow_module_level=True)

patch_module = importlib.import_module("npu_moe.monkey_patch_npu")
ORIGINAL = moe._grouped_mm
LINE = "[PATCH] transformers.integrations.moe._grouped_mm -> _grouped_mm_npu"
OPERATOR_LINE = "[PATCH] aten::_grouped_mm on NPUs -> aten_grouped_mm"


def tiny_model(experts_implementation="grouped_mm", dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        experts_implementation=experts_implementation,
    )
    return transformers.Qwen3MoeForCausalLM(config).to(dtype)


def loss_and_gradients(model):
    ids = torch.arange(40).reshape(2, 20) % 64
    loss = model(input_ids=ids, labels=ids).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.detach(), {name: g for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}


def assert_same(actual, expected, **tolerance):
    torch.testing.assert_close(actual[0], expected[0], **tolerance)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def test_applied_twice_and_reverted(an_npu, caplog):
    caplog.set_level(logging.INFO, "npu_moe")
    assert npu_moe.apply_npu_patch() is True
    assert moe._grouped_mm is patch_module._grouped_mm_npu
    assert npu_moe.apply_npu_patch() is True
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    # The first is visible where logging was not set up.
    assert lines == [("WARNING", LINE), ("INFO", OPERATOR_LINE)]
    npu_moe.revert_npu_patch()
    assert moe._grouped_mm is ORIGINAL
    npu_moe.revert_npu_patch()
    assert moe._grouped_mm is ORIGINAL
    assert npu_moe.apply_npu_patch() is True
    assert moe._grouped_mm is patch_module._grouped_mm_npu


def test_modules_that_hold_the_function_by_name(an_npu, monkeypatch):
    before, elsewhere, later = types.ModuleType("before"), types.ModuleType("elsewhere"), types.ModuleType("later")
    before._grouped_mm = ORIGINAL
    elsewhere._grouped_mm = lambda input, weight, offs: None
    kept = elsewhere._grouped_mm
    for module in (before, elsewhere, later):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    npu_moe.apply_npu_patch()
    later._grouped_mm = moe._grouped_mm  # imported while the patch is in place
    assert before._grouped_mm is patch_module._grouped_mm_npu
    npu_moe.revert_npu_patch()
    assert (before._grouped_mm, later._grouped_mm, elsewhere._grouped_mm) == (ORIGINAL, ORIGINAL, kept)


def test_transformers_own_modules_are_patched_by_name(an_npu):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "_grouped_mm"):
        pytest.skip(f"transformers {transformers.__version__} does not hold the function by name")
    npu_moe.apply_npu_patch()
    assert fp8._grouped_mm is patch_module._grouped_mm_npu
    npu_moe.revert_npu_patch()
    assert fp8._grouped_mm is ORIGINAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_that_is_built_already_gives_the_same_loss_and_gradients(an_npu, dtype):
    model = tiny_model(dtype=dtype)
    expected = loss_and_gradients(model)
    npu_moe.apply_npu_patch()
    # Each of two layers: two grouped matmuls forward, two and two backward.
    actual = loss_and_gradients(model)
    assert len(an_npu.calls) == 2 * 6
    assert not any(call.copies_weight for call in an_npu.calls)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    assert_same(actual, expected, **tolerance)
    npu_moe.revert_npu_patch()
    assert_same(loss_and_gradients(model), expected, rtol=0, atol=0)
    assert len(an_npu.calls) == 2 * 6


def test_eager_experts_never_call_it(an_npu):
    npu_moe.apply_npu_patch()
    loss_and_gradients(tiny_model("eager"))
    assert an_npu.calls == []


def test_frozen_experts_make_no_weight_gradient(an_npu):
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    ids = torch.arange(20).reshape(1, 20)
    npu_moe.apply_npu_patch()
    model(input_ids=ids, labels=ids).loss.backward()
    assert [call.group_type for call in an_npu.calls] == [0] * 8


def test_switched_off(an_npu, monkeypatch, caplog):
    monkeypatch.setenv("NPU_MOE_PATCH", "0")
    assert npu_moe.apply_npu_patch() is False
    assert moe._grouped_mm is ORIGINAL
    assert "switched off by NPU_MOE_PATCH=0" in caplog.text
    monkeypatch.setenv("NPU_MOE_PATCH", "false")
    with pytest.raises(ValueError, match=r"must be 0 \(off\) or 1 \(on\), got 'false'"):
        npu_moe.apply_npu_patch()


def test_one_line_on_rank_zero_only(an_npu, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "3")
    assert npu_moe.apply_npu_patch() is True
    assert caplog.text == ""


def test_without_an_npu_nothing_changes(monkeypatch, caplog):
    monkeypatch.setattr(patch_module, "npu_unavailable_reason", lambda: "torch_npu is not installed")
    model = tiny_model()
    expected = loss_and_gradients(model)
    assert npu_moe.apply_npu_patch() is False
    (record,) = caplog.records
    assert record.getMessage().endswith("is left as it is: torch_npu is not installed")
    assert moe._grouped_mm is ORIGINAL
    assert_same(loss_and_gradients(model), expected, rtol=0, atol=0)
    npu_moe.revert_npu_patch()
    assert moe._grouped_mm is ORIGINAL


def test_what_is_not_on_an_npu_goes_to_the_original(an_npu, caplog):
    npu_moe.apply_npu_patch()
    input, weight, offs = torch.randn(5, 8), torch.randn(2, 8, 8), ends_of([2, 3])
    with mock.patch.object(importlib.import_module("npu_moe.grouped_mm"), "_DEVICE_TYPE", "npu"):
        caplog.clear()
        out = moe._grouped_mm(input, weight, offs=offs)
    assert an_npu.calls == []
    assert caplog.text == ""  # a CPU tensor is nothing to talk about
    torch.testing.assert_close(out, ORIGINAL(input, weight, offs), rtol=0, atol=0)


def test_what_the_kernel_does_not_take_goes_to_the_original():
    with contextlib.ExitStack() as stack:
        npu = stack.enter_context(strict_npu())
        calls = []
        stack.enter_context(mock.patch.object(patch_module, "_original", lambda *args: calls.append(args)))
        input, weight, offs = torch.ones(5, 8), torch.ones(2, 8, 8, dtype=torch.float64), ends_of([2, 3])
        patch_module._grouped_mm_npu(input, weight, offs=offs)
        patch_module._grouped_mm_npu(torch.ones(2, 5, 8), torch.ones(2, 8, 8))  # 5.2 lets offs be absent
    assert npu.calls == []
    assert [args[2] for args in calls] == [offs, None]


def test_wrong_arguments_raise(an_npu):
    npu_moe.apply_npu_patch()
    with pytest.raises(ValueError, match="offs has 3 experts, weight has 2"):
        moe._grouped_mm(torch.ones(5, 8), torch.ones(2, 8, 8), offs=ends_of([2, 1, 2]))
    with pytest.raises(ValueError, match=r"weight \(E, K, N\)"):
        moe._grouped_mm(torch.ones(5, 8), torch.ones(8), offs=ends_of([2, 3]))


def test_import_changes_nothing_and_needs_no_torch_npu(cpu_env):
    code = (
        "import sys, npu_moe\n"
        "assert sys.modules.get('torch_npu') is None and 'transformers' not in sys.modules\n"
        "from transformers.integrations import moe\n"
        "assert moe._grouped_mm.__module__ == 'transformers.integrations.moe'\n"
        "import logging\n"
        "print(npu_moe.is_npu_available(), npu_moe.npu_unavailable_reason(), npu_moe.apply_npu_patch())\n"
        "assert moe._grouped_mm.__module__ == 'transformers.integrations.moe'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=cpu_env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0] == "False torch_npu is not installed False"
    # Visible without any set-up of logging.
    assert "[PATCH] transformers.integrations.moe._grouped_mm is left as it is" in result.stderr
