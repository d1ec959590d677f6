# SPDX-License-Identifier: Apache-2.0
"""Training steps of a small Qwen3-MoE on an NPU, as a user of transformers has them, against the same on the CPU."""

import copy
import unittest

import torch
import torch_npu  # noqa: F401
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LEARNING_RATE = 3e-3
# With the usual 1e-8 the first step is the sign of the gradient, and a gradient that is zero but for rounding moves
# its parameter one way here and the other way there.
EPSILON = 1e-3


def config(
    attention: str = "sdpa", experts: str = "grouped_mm", dropout: float = 0.0, auxiliary_loss: bool = True
) -> Qwen3MoeConfig:
    result = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=auxiliary_loss,
        attention_dropout=dropout,
        attn_implementation=attention,
    )
    result._experts_implementation = experts
    return result


def model_of(dtype: torch.dtype, reference: torch.nn.Module | None = None, **arguments) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config(**arguments)).to(dtype).train()


def batch(padded: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 96, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if padded:
        mask[1, :4] = 0
        labels[1, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(
    model: torch.nn.Module,
    device: str,
    steps: int = 3,
    foreach: bool | None = None,
    fused: bool | None = None,
    padded: bool = False,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms, and the gradients of the first step."""
    model = model.to(device)
    inputs = {name: x.to(device) for name, x in batch(padded).items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON, foreach=foreach, fused=fused)
    losses, norms, grads = [], [], {}
    for step in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        if step == 0:
            grads = {
                name: p.grad.detach().float().cpu().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, grads


def label(function, number: int, param) -> str:
    return f"{function.__name__}_{number}_{param.args[0]}"


class TrainingStepTest(unittest.TestCase):
    def check(self, model: torch.nn.Module, dtype: torch.dtype, reference: torch.nn.Module | None = None, **arguments):
        cpu_arguments = {**arguments, "fused": None} if arguments.get("fused") else arguments
        cpu_losses, cpu_norms, cpu_grads = train(reference or copy.deepcopy(model), "cpu", **cpu_arguments)
        losses, norms, grads = train(model, "npu", **arguments)
        exact = dtype == torch.float32
        torch.testing.assert_close(losses, cpu_losses, rtol=1e-5 if exact else 2e-2, atol=0)
        torch.testing.assert_close(norms, cpu_norms, rtol=1e-4 if exact else 5e-2, atol=0)
        self.assertEqual(grads.keys(), cpu_grads.keys())
        self.assertGreater(len(grads), 0)
        for name, grad in grads.items():
            with self.subTest(name):
                if exact:
                    scale = cpu_grads[name].abs().max().item()
                    torch.testing.assert_close(grad, cpu_grads[name], rtol=1e-4, atol=1e-5 * max(scale, 1e-3))
                else:
                    # Both sides round at every operator, and not at the same places: only the whole can be compared.
                    difference = (grad - cpu_grads[name]).norm() / cpu_grads[name].norm().clamp_min(1e-3)
                    self.assertLess(difference.item(), 0.1)
        self.assertLess(losses[-1], losses[0])

    @parameterized.expand(
        [
            (f"{attention}_{str(dtype)[6:]}_{'foreach' if foreach else 'loop'}", attention, dtype, foreach)
            for attention in ("sdpa", "eager")
            for dtype in (torch.float32, torch.bfloat16)
            for foreach in (True, False)
        ],
        name_func=label,
    )
    def test_steps(self, _: str, attention: str, dtype: torch.dtype, foreach: bool) -> None:
        self.check(model_of(dtype, attention=attention), dtype, foreach=foreach)

    @parameterized.expand([("sdpa", "sdpa"), ("eager", "eager")], name_func=label)
    def test_padding(self, _: str, attention: str) -> None:
        self.check(model_of(torch.float32, attention=attention), torch.float32, padded=True)

    @parameterized.expand([("plain", False), ("padded", True)], name_func=label)
    def test_flash_attention(self, _: str, padded: bool) -> None:
        """transformers' flash_attention_2: npu_fusion_attention, with packed sequences where there is padding."""
        dtype = torch.bfloat16
        self.check(
            model_of(dtype, attention="flash_attention_2"),
            dtype,
            model_of(dtype, attention="sdpa"),
            padded=padded,
        )

    @parameterized.expand(
        [("eager_experts", "eager"), ("batched_mm", "batched_mm")],
        name_func=label,
    )
    def test_other_experts(self, _: str, experts: str) -> None:
        self.check(model_of(torch.float32, experts=experts), torch.float32)

    def test_fused_optimizer(self) -> None:
        self.check(model_of(torch.float32), torch.float32, fused=True)

    @parameterized.expand([("reentrant", True), ("not_reentrant", False)], name_func=label)
    def test_activation_checkpointing(self, _: str, reentrant: bool) -> None:
        model = model_of(torch.float32)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        self.check(model, torch.float32)

    @parameterized.expand([("reentrant", True), ("not_reentrant", False)], name_func=label)
    def test_checkpointing_repeats_the_dropout(self, _: str, reentrant: bool) -> None:
        """With dropout the gradients equal those without checkpointing only if the masks are drawn again alike."""
        grads = []
        for checkpointing in (False, True):
            model = model_of(torch.float32, attention="eager", dropout=0.3, auxiliary_loss=False)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            torch.manual_seed(5)
            grads.append(train(model, "npu", steps=1)[2])
        for name, grad in grads[0].items():
            torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-7)

    def test_lora(self) -> None:
        torch.manual_seed(0)
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model_of(torch.float32), lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # else the gradient of lora_A is zero
                torch.nn.init.normal_(parameter, std=0.02)
        self.check(model, torch.float32)

    def test_lora_on_experts(self) -> None:
        torch.manual_seed(0)
        lora = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model_of(torch.float32), lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        self.check(model, torch.float32)

    def test_autocast(self) -> None:
        model = model_of(torch.float32)
        inputs = batch()
        losses = []
        for device in ("cpu", "npu"):
            copied = copy.deepcopy(model).to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = copied(**{name: x.to(device) for name, x in inputs.items()}).loss
            loss.backward()
            losses.append(loss.item())
            self.assertTrue(all(p.grad is not None and p.grad.isfinite().all() for p in copied.parameters()))
        torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=0)


if __name__ == "__main__":
    unittest.main()
