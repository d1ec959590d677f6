# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one MoE layer's experts, for test_traces.py: traced between two synchronisations.

python moe_layer.py {patched,unpatched} {trained,frozen}
"""

import sys

import torch
import transformers
from transformers.integrations import moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import npu_moe

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 16, 4, 64, 32, 24


def main(patch: str, experts: str) -> None:
    original = getattr(moe, "_grouped_mm", None)
    if patch != "unpatched":
        assert npu_moe.apply_npu_patch()
    if patch == "operator":
        moe._grouped_mm = original
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        experts_implementation="grouped_mm",
    )
    layer = Qwen3MoeSparseMoeBlock(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    layer = layer.to("npu", torch.bfloat16)
    layer.experts.requires_grad_(experts == "trained")
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16).to("npu").requires_grad_()
    grad_output = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16).to("npu")
    torch.npu.synchronize()
    layer(hidden).backward(grad_output)
    torch.npu.synchronize()
    gradients = [hidden.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    print(" ".join(f"{gradient.float().norm().item():.6e}" for gradient in gradients))


if __name__ == "__main__":
    main(*sys.argv[1:])
