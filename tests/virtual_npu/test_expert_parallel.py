# SPDX-License-Identifier: Apache-2.0
"""transformers' expert parallelism, with and without FSDP2, on virtual NPUs, against one process with eager experts.

Where the ranks share a batch and sum their experts' outputs (`all_reduce`), the rows of other ranks' experts are left
at the end: the sentinels, which no expert takes. Where the ranks exchange rows (`all_to_all`), there are none, but a
rank may get no row at all.
"""

import json
import subprocess
import sys
from pathlib import Path

import ep_model
import pytest
import torch

WORKER = Path(__file__).with_name("expert_parallel_worker.py")
ROWS = 10 * ep_model.TOP_K
LAYOUTS = {
    # transformers takes no empty tp_plan, so that the ranks that share a batch also divide the attention.
    "all_reduce": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    "fsdp2_all_to_all": {"fsdp_size": 2, "ep_size": 2},
    "fsdp2_all_reduce": {"fsdp_size": 2, "tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
}
ROUTINGS = ("spread", "lopsided")

pytestmark = pytest.mark.slow


def processes_of(layout: str) -> int:
    return LAYOUTS[layout].get("fsdp_size", 1) * LAYOUTS[layout].get("tp_size", 1)


@pytest.fixture(scope="module")
def trained(virtual_npu, tmp_path_factory):
    """(layout, routing) -> what the ranks report. One start of the processes serves all layouts of their number."""
    results = {}

    def trained(layout: str, routing: str):
        if (layout, routing) not in results:
            processes = processes_of(layout)
            directory = tmp_path_factory.mktemp("expert_parallel")
            together = [(other, r) for other in LAYOUTS for r in ROUTINGS if processes_of(other) == processes]
            for r in ROUTINGS:
                ep_model.model_of(r == "lopsided").save_pretrained(directory / r)
            runs = [
                {"model": str(directory / r), "config": LAYOUTS[other], "result": f"{directory}/{other}-{r}"}
                for other, r in together
            ]
            # Every tensor begins as NaN: what the kernel leaves unwritten stays so.
            env = virtual_npu(devices=processes) | {"PYTORCH_NO_NPU_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command = [*launcher, WORKER, *map(json.dumps, runs)]
            run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
            assert run.returncode == 0, run.stderr[-6000:]
            results.update((key, torch.load(f"{directory}/{'-'.join(key)}")) for key in together)
        return results[layout, routing]

    return trained


def reference(model, batches: int):
    """The mean over the batches, in one process, on the CPU, with eager experts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=ep_model.LEARNING_RATE)
    losses, gradients = [], {}
    for step in range(ep_model.STEPS):
        loss = sum(model(**ep_model.batch(index)).loss for index in range(batches)) / batches
        loss.backward()
        if step == 0:
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients(trained, layout, routing):
    result = trained(layout, routing)
    model = ep_model.model_of(routing == "lopsided")
    losses, gradients = reference(model, LAYOUTS[layout].get("fsdp_size", 1))
    assert losses[-1] < losses[0]
    torch.testing.assert_close(result["losses"], losses, rtol=1e-5, atol=0)
    assert result["gradients"].keys() == gradients.keys()
    for name, expected in gradients.items():
        tolerance = 2e-6 * expected.abs().max().item()
        torch.testing.assert_close(
            result["gradients"][name], expected, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    if routing == "lopsided":
        for layer in range(ep_model.LAYERS):
            unused = result["gradients"][f"model.layers.{layer}.mlp.experts.gate_up_proj"][ep_model.EXPERTS // 2 :]
            assert unused.count_nonzero() == 0


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_kernel_was_given(trained, layout, routing):
    """So that the comparison above is about sentinels, and about ranks without a token."""
    by_rank = trained(layout, routing)["calls"]
    calls = [call for rank in by_rank for call in rank]
    # In each layer: two forward, two for the gradients of the inputs.
    assert len(calls) == processes_of(layout) * ep_model.STEPS * ep_model.LAYERS * 4
    assert all(call["poisoned"] for call in calls)  # the rows that no expert takes
    if layout.endswith("all_reduce"):
        assert {call["rows"] for call in calls} == {ROWS}
        assert any(0 < call["used"] < ROWS for call in calls) == (routing == "spread")
        if routing == "lopsided":
            for rank, of_rank in enumerate(by_rank):
                assert {call["used"] for call in of_rank} == {ROWS if rank % 2 == 0 else 0}
    else:
        assert all(call["used"] == call["rows"] for call in calls)
        if routing == "lopsided":
            assert {call["rows"] for call in by_rank[0]} == {2 * ROWS}
            # A rank that gets no token is given a row by transformers, so that its collectives stay in step.
            assert {call["rows"] for call in by_rank[1]} == {1}
