# SPDX-License-Identifier: Apache-2.0
"""One rank of test_expert_parallel.py: trains with transformers' expert parallelism on virtual NPUs.

torchrun expert_parallel_worker.py RUN...

where each RUN is a JSON object of "model" (a directory), "config" (of transformers' DistributedConfig) and "result":
the file to which rank 0 writes the mean losses, the first step's gradients, and what each rank saw in the kernel.
"""

import importlib
import json
import os
import sys

import torch
import torch.distributed as dist
from ep_model import LEARNING_RATE, STEPS, batch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import npu_moe

grouped_mm_module = importlib.import_module("npu_moe.grouped_mm")


def watch_the_kernel() -> list[dict]:
    """Records, for each call over rows: how many rows there are, how many are an expert's, what the others hold."""
    calls = []
    kernel = grouped_mm_module._npu_grouped_matmul

    def watched(x, weight, ends, group_type):
        result = kernel(x, weight, ends, group_type)
        if group_type == 0:
            used = int(ends[-1])
            left = result[used:]
            calls.append({"rows": x.size(0), "used": used, "poisoned": bool(left.isnan().all())})
        return result

    grouped_mm_module._npu_grouped_matmul = watched
    return calls


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def train(model: str, config: dict, result: str, calls: list[dict]) -> None:
    config = DistributedConfig(**config)
    model = AutoModelForCausalLM.from_pretrained(
        model, distributed_config=config, dtype=torch.float32, experts_implementation="grouped_mm"
    ).train()
    assert {parameter.device.type for parameter in model.parameters()} == {"npu"}
    calls.clear()
    # The ranks that share a batch are neighbours.
    inputs = {name: x.npu() for name, x in batch(dist.get_rank() // config.tp_size).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = model(**inputs).loss
        loss.backward()
        if step == 0:
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    all_calls = [None] * dist.get_world_size()
    dist.all_gather_object(all_calls, calls)
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "gradients": gradients, "calls": all_calls}, result)


def main(*runs: str) -> None:
    # transformers starts the process group where there is none, but does not know which backend NPUs have.
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    assert npu_moe.apply_npu_patch()
    calls = watch_the_kernel()
    for run in runs:
        train(**json.loads(run), calls=calls)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
