# SPDX-License-Identifier: Apache-2.0
"""The example on 1 and 2 virtual NPUs: FSDP2 over HCCL. Equality is the claim: patched and unpatched runs print the
same loss and grad_norm at every step, to the last digit."""

import json
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAUNCHER = Path(__file__).parents[2] / "examples" / "run_fsdp2_moe_npu.sh"
STEPS = 4
LAYERS = 2
ARGUMENTS = ["--steps", str(STEPS), "--seq-len", "64", "--batch-size", "2", "--num-layers", str(LAYERS)]
STEP = re.compile(r"^step=(\d+) loss=(\S+) grad_norm=(\S+) step_time=", re.MULTILINE)


@pytest.fixture(scope="module")
def train(virtual_npu, cpu_env):
    """Runs the example; returns (loss, grad_norm) of each step, as printed, and the whole output."""
    results = {}

    def train(devices: int, dtype: str, patch: str = "1", trace: Path | None = None, device: str = "virtual"):
        key = (devices, dtype, patch, device)
        if key not in results:
            env = cpu_env | {"NPROC_PER_NODE": str(devices)}
            if device == "virtual":
                env = virtual_npu(devices, trace) | {"VIRTUAL_NPU": "1", "VIRTUAL_NPU_DEVICES": str(devices)}
            env |= {"PYTHON": sys.executable, "NPU_MOE_PATCH": patch}
            data = Path(sysconfig.get_path("stdlib")) / "json"
            run = subprocess.run(
                ["bash", LAUNCHER, "--model", "tiny", "--data", data, "--dtype", dtype, *ARGUMENTS],
                env=env,
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, run.stderr[-4000:]
            steps = [match.groups()[1:] for match in STEP.finditer(run.stdout)]
            assert len(steps) == STEPS, run.stdout
            results[key] = steps, run.stdout + run.stderr
        return results[key]

    return train


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_the_patch_changes_no_digit(train, devices, dtype):
    patched, output = train(devices, dtype)
    assert "[PATCH] transformers.integrations.moe._grouped_mm -> _grouped_mm_npu" in output
    assert f"device=npu backend=hccl world_size={devices}" in output
    assert "experts=grouped_mm patch=on" in output
    unpatched, output = train(devices, dtype, patch="0")
    assert "experts=grouped_mm patch=off: NPU_MOE_PATCH=0" in output
    assert patched == unpatched
    assert float(patched[-1][0]) < float(patched[0][0])


@pytest.mark.parametrize(("devices", "dtype", "tolerance"), [(1, "float32", 1e-4), (2, "bfloat16", 2e-2)])
def test_as_near_to_the_cpu_as_the_dtype_allows(train, devices, dtype, tolerance):
    cpu, output = train(devices, dtype, device="cpu")
    assert "backend=gloo" in output
    for on_npu, on_cpu in zip(train(devices, dtype)[0], cpu, strict=True):
        assert [float(value) for value in on_npu] == pytest.approx([float(value) for value in on_cpu], rel=tolerance)


def test_launches_of_a_whole_step(train, tmp_path):
    """6 grouped matmuls per MoE layer with the patch; without it 6 E matmuls and 6 copies of the offsets."""
    traces = {patch: tmp_path / f"{patch}.jsonl" for patch in "10"}
    matmuls, copies = {}, {}
    for patch, trace in traces.items():
        train(1, "bfloat16", patch=patch, trace=trace)
        records = [json.loads(line) for line in trace.read_text().splitlines()]
        counts = Counter(record["name"] for record in records if record["kind"] == "op")
        assert counts["aclnnGroupedMatmulV5"] == (STEPS * LAYERS * 6 if patch == "1" else 0)
        matmuls[patch] = counts["aclnnMm"] + counts["aclnnMatmul"]
        copies[patch] = sum(record["kind"] == "copy" and record["direction"] == "d2h" for record in records)
    experts = 8
    assert matmuls["0"] - matmuls["1"] == STEPS * LAYERS * 6 * experts
    assert copies["0"] - copies["1"] == STEPS * LAYERS * 6
