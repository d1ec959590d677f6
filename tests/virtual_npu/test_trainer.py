# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers, and TRL's, on 2 virtual NPUs under accelerate's FSDP2 plugin.

Compared with the same run without the patch, and with one process on the CPU with eager experts and the same batches.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("trainer_worker.py")
RANKS = 2
# 4 steps of 2 micro-batches through 2 layers; two forward, two again for the checkpoint, four backward.
KERNEL_CALLS = 4 * 2 * 2 * 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(virtual_npu, cpu_env, tmp_path_factory):
    """kind -> what the runs of it on the virtual NPUs logged, and what the CPU logged."""
    results = {}

    def run(command: list, env: dict[str, str], *arguments: str) -> dict:
        directory = tmp_path_factory.mktemp("trainer")
        env = env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory)}
        command = [*command, WORKER, directory / "result.json", *arguments]
        process = subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=280)
        assert process.returncode == 0, process.stderr[-6000:]
        return json.loads((directory / "result.json").read_text())

    def trained(kind: str):
        if kind not in results:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            runs = ["float32-1", "float32-0", "bfloat16-1", "bfloat16-0"]
            results[kind] = (
                run(launcher, virtual_npu(devices=RANKS), kind, "grouped_mm", *runs),
                run([sys.executable], cpu_env, kind, "eager", "float32-0", "bfloat16-0"),
            )
        return results[kind]

    return trained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_trainer(trained, kind, dtype):
    if kind == "SFTTrainer" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    npu, cpu = trained(kind)
    patched, calls = npu[f"{dtype}-1"]
    unpatched, calls_without = npu[f"{dtype}-0"]
    assert (calls, calls_without) == (KERNEL_CALLS, 0)
    assert len(patched) == 4
    assert patched[-1][0] < patched[0][0] - 0.1
    for step, unpatched_step, cpu_step in zip(patched, unpatched, cpu[f"{dtype}-0"][0], strict=True):
        assert step == pytest.approx(unpatched_step, rel=1e-6 if dtype == "float32" else 1e-3)
        assert step == pytest.approx(cpu_step, rel=1e-5 if dtype == "float32" else 2e-2)
