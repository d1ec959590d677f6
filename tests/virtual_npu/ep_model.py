# SPDX-License-Identifier: Apache-2.0
"""The model and the data of test_expert_parallel.py, for the ranks and for the run they are compared with."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, TOP_K, LAYERS, HIDDEN = 8, 2, 2, 32
STEPS, LEARNING_RATE = 3, 0.02


def model_of(lopsided: bool) -> Qwen3MoeForCausalLM:
    """With `lopsided`, no token ever chooses one of the upper half of the experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = Qwen3MoeForCausalLM(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if "mlp.gate." in name else 0.1))
        if lopsided:
            for layer in model.model.layers:
                # Of the scores a, -a, b, -b and four zeros, the two largest are |a| and |b|.
                gate = layer.mlp.gate.weight
                gate[1], gate[3], gate[4:] = -gate[0], -gate[2], 0
    return model


def batch(index: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (1, 10), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids}
