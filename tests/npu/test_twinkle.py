# SPDX-License-Identifier: Apache-2.0
"""Twinkle (twinkle-kit) puts our function in place of its own. `nox -s twinkle` installs it: its pins are not ours."""

import importlib.util

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import moe

import npu_moe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("twinkle") is None, reason="twinkle-kit is not installed")


def loss_and_gradients(model):
    ids = torch.arange(40).reshape(2, 20).to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    return loss.item(), torch.autograd.grad(loss, [p for n, p in model.named_parameters() if "experts" in n])


def test_kernelize_with_our_function(monkeypatch):
    from twinkle.kernel import kernelize

    monkeypatch.setattr(moe, "_grouped_mm", moe._grouped_mm)  # put back what kernelize replaces
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    model = Qwen3MoeForCausalLM(config).to("npu")
    expected_loss, expected = loss_and_gradients(model)
    kernelize(model, {"transformers.integrations.moe._grouped_mm": npu_moe.grouped_mm})
    assert moe._grouped_mm is npu_moe.grouped_mm
    loss, gradients = loss_and_gradients(model)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
