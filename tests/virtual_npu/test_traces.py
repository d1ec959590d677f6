# SPDX-License-Identifier: Apache-2.0
"""What one MoE layer launches, copies and waits for on the virtual NPU, forward and backward.

The limit with the patch: 6 grouped matmuls (4 with frozen experts), 2 casts of the E offsets, no copy of a weight or
of an activation, no host synchronisation. Without it: 6 E matmuls and 6 host synchronisations.
"""

import json
import subprocess
import sys
from collections import Counter
from math import prod

import moe_layer
import pytest
from transformers.integrations import moe

# With transformers 5.0 and 5.1 the patched layer is that of test_operator: six casts of the offsets, not two.
needs_the_function = pytest.mark.skipif(not hasattr(moe, "_grouped_mm"), reason="transformers 5.2.0 is the first")

E = moe_layer.NUM_EXPERTS
ROWS = moe_layer.TOKENS * moe_layer.TOP_K


@pytest.fixture(scope="module")
def traced(virtual_npu, tmp_path_factory):
    """Runs moe_layer.py; returns what was recorded between its two synchronisations, and what it printed."""
    results = {}

    def traced(*arguments: str):
        if arguments not in results:
            trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
            output = subprocess.run(
                [sys.executable, moe_layer.__file__, *arguments],
                env=virtual_npu(devices=1, trace=trace),
                capture_output=True,
                text=True,
            )
            assert output.returncode == 0, output.stderr
            records = [json.loads(line) for line in trace.read_text().splitlines()]
            starts = [i for i, record in enumerate(records) if "SynchronizeDevice" in record.get("what", "")]
            results[arguments] = records[starts[0] + 1 : starts[1]], output.stdout.splitlines()[-1]
        return results[arguments]

    return traced


def operators(records) -> Counter:
    return Counter(record["name"] for record in records if record["kind"] == "op")


def host_synchronisations(records) -> list[dict]:
    """Each is a wait of the host, or a copy to it, which implies one."""
    return [r for r in records if r["kind"] == "sync" or (r["kind"] == "copy" and r["direction"] != "d2d")]


def copies_to_the_host(records) -> list[dict]:
    return [r for r in records if r["kind"] == "copy" and r["direction"] == "d2h"]


def copies_of_elements(records) -> list[int]:
    """The sizes, in elements, of what copy operators wrote."""
    copies = [r for r in records if r["kind"] == "op" and r["name"] in ("aclnnInplaceCopy", "aclnnCast")]
    return sorted(prod(output["shape"]) for record in copies for output in record["outputs"])


@needs_the_function
@pytest.mark.parametrize(("experts", "grouped"), [("trained", 6), ("frozen", 4)])
def test_patched(traced, experts, grouped):
    records, _ = traced("patched", experts)
    launched = operators(records)
    assert launched["aclnnGroupedMatmulV5"] == grouped
    assert host_synchronisations(records) == []
    assert [r for r in records if r["kind"] in ("copy", "internal_copy")] == []
    assert copies_of_elements(records).count(E) == 2, launched


@needs_the_function
@pytest.mark.parametrize(("experts", "grouped"), [("trained", 6), ("frozen", 4)])
def test_operator(traced, experts, grouped):
    """PyTorch's autograd formula on our kernel: each call casts the offsets for itself, the host waits for none."""
    records, gradients = traced("operator", experts)
    assert operators(records)["aclnnGroupedMatmulV5"] == grouped
    assert host_synchronisations(records) == []
    assert [r for r in records if r["kind"] in ("copy", "internal_copy")] == []
    patched, with_operator = (copies_of_elements(r) for r in (traced("patched", experts)[0], records))
    assert Counter(with_operator) - Counter(patched) == Counter({E: grouped - 2})
    assert gradients == traced("patched", experts)[1]


@pytest.mark.parametrize("experts", ["trained", "frozen"])
def test_unpatched(traced, experts):
    records, _ = traced("unpatched", experts)
    launched = operators(records)
    assert launched["aclnnGroupedMatmulV5"] == 0
    calls = 6 if experts == "trained" else 4
    matmuls = sum(count for name, count in launched.items() if name in ("aclnnMm", "aclnnMatmul"))
    # The router's own are forward and two gradients.
    assert matmuls == calls * E + 3
    # Each call reads the E offsets back, in int32.
    assert [record["bytes"] for record in copies_to_the_host(records)] == [4 * E] * calls


@needs_the_function
def test_the_patch_copies_no_more_than_the_layer_does_anyway(traced):
    """Besides the two casts of the offsets, every copy is there without the patch too."""
    patched, unpatched = (Counter(copies_of_elements(traced(way, "trained")[0])) for way in ("patched", "unpatched"))
    assert patched - unpatched == Counter({E: 2})


@pytest.mark.parametrize("experts", ["trained", "frozen"])
def test_gradients_are_the_same(traced, experts):
    assert traced("patched", experts)[1] == traced("unpatched", experts)[1]
