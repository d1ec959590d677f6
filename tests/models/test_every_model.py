# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.integrations import moe

from models import sweep

if not hasattr(moe, "_grouped_mm"):
    reason = f"transformers {transformers.__version__} has no _grouped_mm to patch (5.2.0 has)"
    pytest.skip(reason, allow_module_level=True)

# Model -> why its experts cannot be built tiny and run, with the versions if not all. One that can be built fails.
NOT_BUILDABLE: dict[str, str] = {}

# One of each kind: transposed views, contiguous weights, biases, no gate, grouped top-k.
FAST = {"aria", "deepseek_v3", "gpt_oss", "mixtral", "nemotron_h", "qwen3_moe"}
COVERAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


def marked(name):
    return pytest.param(name, marks=() if name in FAST else pytest.mark.slow)


@pytest.mark.parametrize("name", [marked(name) for name in sweep.experts_classes()])
def test_eager_and_patched_agree(name):
    experts = sweep.experts_classes()[name]
    if name in NOT_BUILDABLE:
        with pytest.raises(sweep.NotBuildable):
            sweep.build(experts)
        pytest.xfail(NOT_BUILDABLE[name])
    comparison = sweep.compare(experts)
    assert comparison.problems == []
    assert comparison.experts_runs > 0
    assert comparison.layouts == ["contiguous" if experts.flag("is_transposed") else "transposed view"]


def test_all_kinds_are_there():
    classes = sweep.experts_classes().values()
    assert len(classes) >= 28  # transformers 5.2.0
    assert {experts.flag("is_transposed") for experts in classes} == {False, True}
    assert {experts.flag("has_bias") for experts in classes} == {False, True}
    assert NOT_BUILDABLE.keys() <= sweep.experts_classes().keys()


def test_what_is_listed_and_can_be_built_fails(monkeypatch):
    monkeypatch.setitem(NOT_BUILDABLE, "mixtral", "not true")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_eager_and_patched_agree("mixtral")


def test_what_cannot_be_built_says_why(monkeypatch):
    experts = sweep.experts_classes()["qwen3_moe"]
    monkeypatch.setattr(sweep, "MAX_PARAMETERS", 1000)
    with pytest.raises(sweep.NotBuildable, match=r"Qwen3MoeForCausalLM: NotBuildable: \d+ parameters left"):
        sweep.build(experts)


def test_a_patch_that_is_not_called_is_a_problem(monkeypatch):
    # As if the experts had a loop of their own, whatever implementation is set.
    monkeypatch.setattr(transformers.PreTrainedModel, "set_experts_implementation", eager_whatever_is_asked)
    problems = sweep.compare(sweep.experts_classes()["mixtral"]).problems
    assert "torch.float32: 2 runs of experts made 0 kernel calls, not 6 each" in problems
    assert "torch.float32: a kernel that is wrong by a factor of 1.01 is not noticed" in problems


def eager_whatever_is_asked(self, experts_implementation):
    for config in (self.config, *(module.config for module in self.modules() if hasattr(module, "config"))):
        config._experts_implementation = "eager"


@pytest.mark.parametrize("dtype, factor", sweep.CONTROL.items(), ids=str)
def test_a_wrong_kernel_is_a_problem(monkeypatch, dtype, factor):
    right = sweep.Kernel.__init__
    monkeypatch.setattr(sweep.Kernel, "__init__", lambda self, npu, wrong_by: right(self, npu, factor))
    problems = sweep.compare(sweep.experts_classes()["gpt_oss"]).problems
    assert any(problem.startswith(f"{dtype}: ") and "from float64, may be" in problem for problem in problems)


@pytest.mark.parametrize("of", [torch.topk, torch.max], ids=["topk", "max"])
def test_routes_are_taken_again(of):
    arguments = (2, -1) if of is torch.topk else (-1,)
    routes = sweep.Routes()
    with routes:
        first = of(torch.tensor([[1.0, 2.0, 3.0]]), *arguments)
    scores = torch.tensor([[30.0, 10.0, 20.0]], requires_grad=True)
    for _ in range(2):
        with routes:
            again = of(scores, *arguments)
        assert again.indices.equal(first.indices)
        assert again.values.equal(scores.gather(-1, first.indices.reshape(1, -1)).reshape(first.values.shape))
    again.values.sum().backward()
    assert scores.grad.nonzero()[:, 1].sort().values.equal(first.indices.flatten().sort().values)


def test_models_with_a_loop_of_their_own():
    if transformers.__version__ == "5.24.0":
        assert set(sweep.own_loops()) == set(sweep.OWN_LOOPS)
    assert not set(sweep.own_loops()) & {experts.directory for experts in sweep.experts_classes().values()}


def test_the_table_is_of_this_version():
    text = COVERAGE.read_text(encoding="utf-8")
    (version,) = re.findall(r"transformers (\d\S*\d)", text)
    if version != transformers.__version__:
        pytest.skip(f"docs/coverage.md is of transformers {version}")
    covered, left_out = text.split("## Not covered")
    assert re.findall(r"^\| (\w+) \| `(\w+)` ", covered, re.MULTILINE) == [
        (experts.directory, experts.name) for experts in sweep.experts_classes().values()
    ]
    assert re.findall(r"^\| (\w+) \|", left_out, re.MULTILINE)[1:] == list(sweep.own_loops())
