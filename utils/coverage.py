# SPDX-License-Identifier: Apache-2.0
"""Writes docs/coverage.md: every Mixture-of-Experts model of the installed transformers, eager against patched.

    python utils/coverage.py                    # all models, about a minute on one core
    python utils/coverage.py --output FILE

The comparison is that of tests/models. Exits with 1, and says in the table, where a model has a problem.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In place of utils/, where this file would be found by whoever imports the package `coverage`.
sys.path[0:1] = [str(ROOT / "tests")]
# It runs on CPU, also where torch_npu is installed (tests/conftest.py says why both are needed).
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None

import torch  # noqa: E402
import transformers  # noqa: E402
from tqdm import tqdm  # noqa: E402

from models import sweep  # noqa: E402

HEAD = """\
# Models covered

Written by `python utils/coverage.py` with transformers {transformers} and torch {torch}. **It ran on CPU**: the
NPU's kernel was the strict reference in `tests/strict_npu.py`, which refuses what torch_npu and CANN refuse and leaves
NaN where they leave memory unwritten. So it says that the patch takes over these models and computes the same; it says
nothing about a real NPU.

{count} experts classes have the decorator `use_experts_implementation`, which gives a model the grouped path. For
each, the first model class beside it that can be built was made tiny from its configuration ({experts} experts, top
{top_k} where the model lets it be chosen, {tokens} tokens) and ran forward and backward with eager experts and with
the patch in place. Models that are composed of these (a vision model around such a text model) reach the same classes.

- **Default**: transformers' choice of the experts implementation. A model with `eager` uses the kernel only where
  `experts_implementation="grouped_mm"` is asked for.
- **Weights**: how the kernel sees them in the forward: the transposed view of a contiguous parameter, or contiguous.
  Neither is copied.
- **Calls**: kernel calls in a forward and backward pass / experts modules that ran / that the model has. Six a module.
  The other two of ernie4_5_vl_moe are for images.
- **Loss**, **gradient**: the relative difference between patched and eager; for the gradient, the largest over all
  parameters, and in brackets the largest between eager and float64. In bfloat16 both are large where a parameter of a
  few numbers (a scale, a decay) collects rounding from everywhere. They agree to the last bit where a sum of one or
  two terms has no order (zaya has top 1, phimoe top 2).
- **Bound**: the error of the patched run, against eager experts in float64, as a share of what it may be: {factor32}
  times eager's own error plus {units32} units of rounding in float32, {factor16} times plus {units16} in bfloat16
  (`tests/models/sweep.py` has it exactly). The largest share is given; above 100 % is a failure.

The routing is that of the float64 run throughout. In each run a kernel wrong by 1 % (float32) or 25 % (bfloat16) in
every second column was noticed.

| model | experts | built | default | weights | biases | gate | calls | float32: loss | gradient | bound | \
bfloat16: loss | gradient | bound |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""

NOT_COVERED = """
## Not covered

These define experts without the decorator, so that there is no grouped path to take over.

| model | why |
|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the table of covered models.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "coverage.md", help="default: docs/coverage.md")
    arguments = parser.parse_args()
    logging.getLogger("npu_moe").setLevel(logging.ERROR)  # a line for each time the patch is put in place
    transformers.logging.set_verbosity_error()

    rows, failed = [], []
    for name, experts in tqdm(sweep.experts_classes().items(), unit="model"):
        try:
            comparison = sweep.compare(experts)
        except sweep.NotBuildable as error:
            rows.append(f"| {experts.directory} | `{experts.name}` | not buildable: {error} |" + " |" * 11)
            continue
        rows.append(row(comparison))
        if comparison.problems:
            failed.append(f"{name}: " + "; ".join(comparison.problems))
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(document(rows, failed), encoding="utf-8")
    print(f"{arguments.output}: {len(rows)} experts classes, {len(failed)} with problems")
    print(*failed, sep="\n", end="")
    return 1 if failed else 0


def row(comparison: sweep.Comparison) -> str:
    experts = comparison.experts
    gate = "yes" if experts.flag("has_gate", True) else "no"
    if experts.flag("has_post_expert_norm"):
        gate += ", and a norm after"
    cells = [
        experts.directory,
        f"`{experts.name}`",
        f"`{comparison.model_class}`",
        comparison.default_implementation,
        ", ".join(comparison.layouts),
        "yes" if experts.flag("has_bias") else "no",
        gate,
        f"{comparison.kernel_calls} / {comparison.experts_runs} / {comparison.experts_modules}",
    ]
    for precision in comparison.precisions.values():
        cells += [
            f"{precision.loss_difference():.0e}",
            f"{precision.gradient_difference():.0e} ({precision.eager_gradient_error():.0e})",
            f"{precision.worst_ratio():.0%}",
        ]
    return "| " + " | ".join(cells) + " |"


def document(rows: list[str], failed: list[str]) -> str:
    head = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__,
        count=len(rows),
        experts=sweep.NUM_EXPERTS,
        top_k=sweep.TOP_K,
        tokens=sweep.BATCH * sweep.LENGTH,
        factor32=sweep.FACTOR[torch.float32],
        units32=sweep.UNITS[torch.float32],
        factor16=sweep.FACTOR[torch.bfloat16],
        units16=sweep.UNITS[torch.bfloat16],
    )
    problems = "".join(f"\n**Problem**: {line}\n" for line in failed)
    left_out = [f"| {name} | {reason} |" for name, reason in sweep.own_loops().items()]
    return head + "\n".join(rows) + "\n" + problems + NOT_COVERED + "\n".join(left_out) + "\n"


if __name__ == "__main__":
    sys.exit(main())
