# SPDX-License-Identifier: Apache-2.0
"""One rank of test_trainer.py: trains with transformers' Trainer, or TRL's SFTTrainer, which logs each step.

torchrun trainer_worker.py RESULT {Trainer,SFTTrainer} EXPERTS RUN...

A RUN is {float32,bfloat16}-{1,0}, where 1 or 0 is NPU_MOE_PATCH; each trains from the same weights. With several
processes it does so under accelerate's FSDP2 plugin. Rank 0 writes to RESULT, for each run, the (loss, gradient norm)
of each step and the number of the kernel's calls.
"""

import importlib
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import npu_moe

grouped_mm_module = importlib.import_module("npu_moe.grouped_mm")

STEPS, GLOBAL_BATCH, ACCUMULATE, LENGTH, VOCABULARY = 4, 4, 2, 16, 96
WORDS = [f"w{index}" for index in range(VOCABULARY - 2)]


def model_of(experts: str) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            pad_token_id=0,
            eos_token_id=1,
            # It is not linear in the tokens: how the batch is divided among the ranks would change the loss.
            router_aux_loss_coef=0.0,
            experts_implementation=experts,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routing scores far apart: a rounding error must not choose another expert.
            parameter.copy_(torch.randn_like(parameter) * (1.0 if "mlp.gate." in name else 0.1))
    return model


def sequences() -> list[list[int]]:
    count = ACCUMULATE * GLOBAL_BATCH  # all of them in every step
    return torch.randint(2, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()


def arguments(directory: str, dtype: str) -> dict:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"],
            "activation_checkpointing": True,
        },
    }
    return {
        "output_dir": directory,
        "max_steps": STEPS,
        "per_device_train_batch_size": GLOBAL_BATCH // world_size,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        # With the usual 1e-8 the first step is the sign of the gradient, even of one that is rounding error.
        "adam_epsilon": 1e-4,
        "max_grad_norm": 1.0,
        "bf16": dtype == "bfloat16",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not npu_moe.is_npu_available(),
        **(sharded if world_size > 1 else {}),
    }


def trainer_of(kind: str, model, directory: str, dtype: str) -> Trainer:
    if kind == "Trainer":
        data = [{"input_ids": ids, "labels": ids} for ids in sequences()]
        return Trainer(model, TrainingArguments(**arguments(directory, dtype)), train_dataset=data)
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    rows = []
    for index, ids in enumerate(sequences()):
        words = [WORDS[token - 2] for token in ids]
        # Of different lengths, and with prompts that are not learnt.
        rows.append({"prompt": " ".join(words[:4]), "completion": " " + " ".join(words[4 : 7 + index])})
    config = SFTConfig(**arguments(directory, dtype), max_length=LENGTH, gradient_checkpointing=False)
    return SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def main(result: str, kind: str, experts: str, *runs: str) -> None:
    calls = []
    kernel = grouped_mm_module._npu_grouped_matmul
    grouped_mm_module._npu_grouped_matmul = lambda *args: calls.append(args[-1]) or kernel(*args)
    results = {}
    for run in runs:
        dtype, os.environ["NPU_MOE_PATCH"] = run.split("-")
        assert npu_moe.apply_npu_patch() == run.endswith("1")
        with tempfile.TemporaryDirectory() as directory:
            trainer = trainer_of(kind, model_of(experts), directory, dtype)
            trainer.train()
        steps = [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]
        results[run] = steps, len(calls)
        calls.clear()
        npu_moe.revert_npu_patch()
    if int(os.environ.get("RANK", "0")) == 0:
        with open(result, "w") as file:
            json.dump(results, file)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
