# SPDX-License-Identifier: Apache-2.0
"""The ways people train and generate with a transformers MoE model, with the patch in place.

Run on the strict reference on a CPU and, in tests/npu, on an NPU. What is expected comes from the same model with
eager experts on the CPU, which nothing here changes.
"""

import contextlib
import copy
import importlib
import unittest
from dataclasses import dataclass
from unittest import mock

import torch
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from npu_moe.grouped_mm import _npu_grouped_matmul

grouped_mm_module = importlib.import_module("npu_moe.grouped_mm")

# transformers 5.0 and 5.1 call PyTorch's operator: with what autocast leaves, uncast, which it refuses, and under
# torch.compile, where PyTorch's shape function for it takes bfloat16 only and the graph holds it, not the NPU's.
needs_transformers_5_2 = unittest.skipUnless(hasattr(moe, "_grouped_mm"), "transformers 5.2.0 is the first that can")

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 8, 2, 64, 32, 96
# A grouped matmul's group_type: over the rows, or, for the gradient of a weight, over what is summed.
ROWS, CONTRACTION = 0, 2
# Of one layer: two forward, and backward the gradients of the input and of the weight of both.
FORWARD, BACKWARD = [ROWS] * 2, [ROWS, CONTRACTION] * 2
# Both sides round at every operator, and not at the same places (eager experts even accumulate the experts' outputs in
# the low precision): a bound for the difference of a whole gradient, relative to its norm. The largest seen on the
# strict reference and on the virtual NPU are 1.7 * 2**-8 and 0.7 * 2**-8.
BOUND = {torch.bfloat16: 2**-6, torch.float16: 2**-7}


def config(experts: str = "grouped_mm") -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        attn_implementation="eager",
        experts_implementation=experts,
    )


def tiny_model(dtype: torch.dtype = torch.float32) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config()).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routing scores far apart: a rounding error must not choose another expert.
            parameter.copy_(torch.randn_like(parameter) * (1.0 if "mlp.gate." in name else 0.1))
    return model.to(dtype)


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def with_eager_experts(model: torch.nn.Module) -> torch.nn.Module:
    """A copy on the CPU that never calls the patched function."""
    model = copy.deepcopy(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_experts_implementation("eager")
    return model


@dataclass
class KernelCall:
    group_type: int
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    rows: int


@contextlib.contextmanager
def kernel_calls():
    calls = []

    def record(x, weight, ends, group_type):
        calls.append(KernelCall(group_type, x.dtype, weight.dtype, x.size(0)))
        return _npu_grouped_matmul(x, weight, ends, group_type)

    with mock.patch.object(grouped_mm_module, "_npu_grouped_matmul", record):
        yield calls


class LargestAllocation(TorchDispatchMode):
    """The most elements that an operator's result has, unless it is a view of a tensor that was there before."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, tensor.numel())
        return result


class TrainingCases(unittest.TestCase):
    """A subclass names the device and puts the patch in place around each case."""

    __test__ = False
    device: str

    def step(self, model, device, batches=(1,), autocast=None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """The loss of each batch, and the gradients accumulated over all of them."""
        losses = []
        for seed in batches:
            inputs = {name: tensor.to(device) for name, tensor in batch(seed).items()}
            with torch.autocast(device, autocast) if autocast else contextlib.nullcontext():
                loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.detach().float().cpu())
        return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def check(self, model, dtype=torch.float32, **arguments) -> tuple[torch.nn.Module, list[KernelCall]]:
        """Compares with eager experts on the CPU. Returns the model with its gradients, and the kernel's calls."""
        with kernel_calls() as calls:
            expected_losses, expected = self.step(with_eager_experts(model), "cpu", **arguments)
            self.assertEqual(calls, [])
            model = model.to(self.device)
            losses, gradients = self.step(model, self.device, **arguments)
        self.assertEqual(gradients.keys(), expected.keys())
        self.assertEqual(gradients.keys(), {name for name, p in model.named_parameters() if p.requires_grad})
        if dtype == torch.float32:
            torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
        else:
            torch.testing.assert_close(losses, expected_losses, rtol=BOUND[dtype] / 4, atol=0)
        for name, gradient in gradients.items():
            actual, reference = gradient.float().cpu(), expected[name].float()
            self.assertGreater(reference.norm().item(), 0, name)
            if dtype == torch.float32:
                tolerance = 2e-6 * reference.abs().max().item()
                torch.testing.assert_close(
                    actual, reference, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )
            else:
                error = ((actual - reference).norm() / reference.norm()).item()
                self.assertLess(error, BOUND[dtype], name)
        return model, calls

    @parameterized.expand([(str(dtype)[6:], dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)])
    def test_pure(self, _, dtype):
        _, calls = self.check(tiny_model(dtype), dtype)
        self.assertEqual(sorted(call.group_type for call in calls), sorted((FORWARD + BACKWARD) * LAYERS))
        self.assertEqual({call.x_dtype for call in calls} | {call.weight_dtype for call in calls}, {dtype})

    @needs_transformers_5_2
    def test_autocast_with_bfloat16_experts(self):
        """All but the experts is kept in float32, so that they get float32 activations."""
        model = tiny_model()
        for layer in model.model.layers:
            layer.mlp.experts.to(torch.bfloat16)
        seen = []
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        _, calls = self.check(model, torch.bfloat16, autocast=torch.bfloat16)
        self.assertEqual(set(seen), {torch.float32})
        self.assertEqual({call.x_dtype for call in calls}, {torch.bfloat16})
        self.assertEqual(len(calls), LAYERS * 6)

    def test_autocast_with_float32_weights(self):
        """The operator is not in autocast's lists: the experts compute in the dtype of their weights."""
        _, calls = self.check(tiny_model(), torch.bfloat16, autocast=torch.bfloat16)
        self.assertEqual({call.x_dtype for call in calls}, {torch.float32})

    @parameterized.expand([("reentrant", True), ("not_reentrant", False)])
    def test_activation_checkpointing(self, _, reentrant):
        model = tiny_model()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        _, calls = self.check(model)
        self.assertEqual(sorted(call.group_type for call in calls), sorted((FORWARD * 2 + BACKWARD) * LAYERS))

    def test_gradient_accumulation(self):
        _, calls = self.check(tiny_model(), batches=(1, 2, 3))
        self.assertEqual(len(calls), 3 * LAYERS * 6)

    def lora(self, model, **arguments):
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **arguments))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, and then the gradient of lora_A is zero too
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    @parameterized.expand([("plain", None), ("checkpointed", {"use_reentrant": True})])
    def test_lora_on_attention(self, _, checkpointing):
        model = self.lora(tiny_model(), target_modules=["q_proj", "v_proj"])
        if checkpointing:
            model.gradient_checkpointing_enable(checkpointing)
            model.enable_input_require_grads()
        model, calls = self.check(model)
        self.assertEqual([call.group_type for call in calls], [ROWS] * LAYERS * (6 if checkpointing else 4))
        self.assertTrue(
            all(parameter.grad is None for name, parameter in model.named_parameters() if "experts" in name)
        )
        # Nothing as large as an expert's gradient is ever allocated.
        with LargestAllocation(model) as allocation:
            self.step(model, self.device)
        self.assertLess(allocation.elements, EXPERTS * HIDDEN * INTERMEDIATE)

    def test_what_the_limit_on_allocations_is_worth(self):
        """The same measure sees the gradient where the experts are trained."""
        model = tiny_model().to(self.device)
        with LargestAllocation(model) as allocation:
            self.step(model, self.device)
        self.assertEqual(allocation.elements, EXPERTS * HIDDEN * 2 * INTERMEDIATE)

    @parameterized.expand([(str(dtype)[6:], dtype) for dtype in (torch.float32, torch.bfloat16)])
    def test_lora_on_experts(self, _, dtype):
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = self.lora(tiny_model(dtype), target_modules=["q_proj"], target_parameters=parameters)
        _, calls = self.check(model, dtype)
        self.assertEqual(sum(call.group_type == CONTRACTION for call in calls), LAYERS * 2)

    @parameterized.expand([(str(dtype)[6:], dtype) for dtype in (torch.float32, torch.bfloat16)])
    @needs_transformers_5_2
    def test_compiled_once_for_all_numbers_of_tokens(self, _, dtype):
        self.addCleanup(torch._dynamo.reset)
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = Qwen3MoeSparseMoeBlock(config())
        for name, parameter in block.named_parameters():
            torch.nn.init.normal_(parameter, std=1.0 if name.startswith("gate.") else 0.1)
        block = block.to(dtype)
        reference = copy.deepcopy(block)
        reference.experts.config = config("eager")
        block = block.to(self.device)
        backend = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
        for tokens in (12, 5, 17, 3):  # with the last, experts are left without any token
            block.zero_grad()
            reference.zero_grad()
            hidden = torch.randn(1, tokens, HIDDEN).to(dtype)
            grad_output = torch.randn(1, tokens, HIDDEN).to(dtype)
            inputs = [hidden.to(device, copy=True).requires_grad_() for device in ("cpu", self.device)]
            expected, actual = reference(inputs[0]), compiled(inputs[1])
            expected.backward(grad_output)
            actual.backward(grad_output.to(self.device))
            pairs = {"output": (actual, expected), "input": (inputs[1].grad, inputs[0].grad)}
            for (name, parameter), other in zip(block.named_parameters(), reference.parameters(), strict=True):
                pairs[name] = (parameter.grad, other.grad)
            for name, (ours, theirs) in pairs.items():
                error = (ours.float().cpu() - theirs.float()).norm() / theirs.float().norm()
                self.assertLess(error.item(), 1e-5 if dtype == torch.float32 else BOUND[dtype], f"{name}, {tokens}")
        self.assertEqual(backend.frame_count, 1)
        graph = backend.graphs[0]
        self.assertTrue(any("autograd_function" in str(node.target) for node in graph.graph.nodes), graph.graph)

    @parameterized.expand([(f"prompt_of_{length}", length) for length in (1, 2, 7)])
    def test_generate(self, _, length):
        model = tiny_model().eval()
        prompt = batch()["input_ids"][:, :length]
        arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        expected = with_eager_experts(model).generate(prompt, **arguments)
        model = model.to(self.device)
        with kernel_calls() as calls:
            actual = model.generate(prompt.to(self.device), **arguments)
        self.assertEqual(actual.tolist(), expected.tolist())
        self.assertEqual(expected.size(1), length + 8)
        # For the steps after the first, off the CPU, transformers itself changes to batched_mm experts.
        steps = 8 if self.device == "cpu" else 1
        self.assertEqual([call.group_type for call in calls], FORWARD * LAYERS * steps)
        self.assertEqual(calls[0].rows, 2 * length * TOP_K)

    @torch.no_grad()
    def test_one_token_at_a_time(self):
        """A loop over a KV cache; S is top_k, and most experts have no row."""
        reference = with_eager_experts(tiny_model().eval())
        model = tiny_model().eval().to(self.device)
        ids = batch()["input_ids"][:1]
        caches = [None, None]
        with kernel_calls() as calls:
            for position in range(ids.size(1)):
                token = ids[:, position : position + 1]
                expected = reference(input_ids=token, past_key_values=caches[0], use_cache=True)
                actual = model(input_ids=token.to(self.device), past_key_values=caches[1], use_cache=True)
                caches = [expected.past_key_values, actual.past_key_values]
                torch.testing.assert_close(actual.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-5)
        self.assertEqual([call.rows for call in calls], [TOP_K] * LAYERS * 2 * ids.size(1))
