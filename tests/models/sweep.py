# SPDX-License-Identifier: Apache-2.0
"""Every Mixture-of-Experts model of the installed transformers, tiny: eager experts against the patched grouped path.

Nothing here names a model that works. The experts classes are found in the source of transformers, by the decorator
that gives a class the grouped path; the models that hold them are built from their own default configurations, shrunk
by the names of the attributes. What a name does not tell is in `OVERRIDES`.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch.overrides import TorchFunctionMode

import npu_moe
from strict_npu import StrictNPU, looks_transposed, strict_npu

DECORATOR = "use_experts_implementation"
MODELS = Path(transformers.__file__).parent / "models"

NUM_EXPERTS = 8
TOP_K = 4  # With two terms a sum has no order: the two paths would agree to the last bit, whatever they did.
BATCH, LENGTH = 2, 24
VOCABULARY = 128
MAX_PARAMETERS = 3_000_000


class NotBuildable(Exception):
    """No model class around an experts class could be built tiny and run; says why."""


# ---------------------------------------------------------------------------------------------------------- finding


@dataclass(frozen=True)
class ExpertsClass:
    """A class with the decorator: `directory` and `module` say where, `flags` are the decorator's arguments."""

    directory: str
    module: str
    name: str
    flags: tuple[tuple[str, bool], ...]

    def flag(self, name: str, default: bool = False) -> bool:
        return dict(self.flags).get(name, default)

    def load(self) -> type[torch.nn.Module]:
        return getattr(importlib.import_module(self.module), self.name)


@functools.cache
def experts_classes() -> dict[str, ExpertsClass]:
    """All experts classes of the installed transformers, by the name of their model; with the class if it has two."""
    found: dict[str, list[ExpertsClass]] = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if DECORATOR not in source:
            continue
        for node in ast.parse(source).body:
            for decorator in getattr(node, "decorator_list", []):
                call = decorator if isinstance(decorator, ast.Call) else None
                target = call.func if call else decorator
                if getattr(target, "id", getattr(target, "attr", None)) == DECORATOR:
                    flags = tuple((key.arg, ast.literal_eval(key.value)) for key in call.keywords) if call else ()
                    directory = path.parent.name
                    module = f"transformers.models.{directory}.{path.stem}"
                    found.setdefault(directory, []).append(ExpertsClass(directory, module, node.name, flags))
    return {
        directory if len(classes) == 1 else f"{directory}-{experts.name}": experts
        for directory, classes in found.items()
        for experts in classes
    }


# ---------------------------------------------------------------------------------------------------------- building

# Name of a configuration's attribute -> its tiny value, given the default. The first that matches is taken.
_SHRINK: list[tuple[str, Callable[[int], int]]] = [
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_nextn_predict_layers", lambda v: 0),
    (r"num_hidden_layers|num_layers|n_layers|depth|encoder_layers", lambda v: 2),
    (r"n_group|num_expert_group|topk_group|(.*_)?num_key_value_heads|(.*_)?num_key_heads", lambda v: min(v, 2)),
    (r"mamba_(n|num)_heads", lambda v: 8),
    (r"(.*_)?num(_attention|_value)?_heads|encoder_attention_heads|index_n_heads", lambda v: 4),
    (r"o_groups", lambda v: 2),
    (r".*vocab_size(_per_layer_input|_base)?", lambda v: VOCABULARY),
    (r".*_token_(id|index)|codec_.*_id", lambda v: min(v, VOCABULARY - 1)),
    (r"hidden_size_per_layer_input|router_hidden_size|mamba_d_state|ssm_state_size|.*_rank", lambda v: 16),
    (r".*hidden_size|d_model", lambda v: 64),
    (r".*intermediate_size|encoder_ffn_dim", lambda v: 32),
]
# The same, also where the default is None.
_EXPERTS: list[tuple[str, Callable[[int], int]]] = [
    (r"(n|num|moe_num)(_local|_routed)?_experts", lambda v: NUM_EXPERTS),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", lambda v: TOP_K),
    (r"moe_intermediate_size", lambda v: 32),
]
_HEAD_DIM: list[tuple[str, Callable[[int], int]]] = [(r"(.*_)?head_dim|mamba_d_head", lambda v: 16)]

# What the names do not tell, by `model_type`.
OVERRIDES: dict[str, dict] = {
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},  # has types of its own
    "diffusion_gemma_text": {"num_global_key_value_heads": 2},  # has no default in 5.12
    "dots1": {"n_shared_experts": 1},  # has no default
    "ernie4_5_vl_moe_text": {  # the rotary sections are for heads of 128; text and vision experts
        "hidden_size": 256,
        "num_attention_heads": 2,
        "moe_intermediate_size": [32, 32],
    },
    "glm4v_moe_text": {"hidden_size": 256, "num_attention_heads": 2},  # the same
    "glm5_next_text": {  # only the fourth layer is attention, without which there is no cache
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    },
    "hunyuan_v1_moe": {"head_dim": 16},  # has no default
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},  # has no default
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},  # used, but not declared
    "zaya": {"num_experts_per_tok": 1},  # the only one it takes
}


def tiny_config(config_class: type, tiny_heads: bool = True) -> transformers.PreTrainedConfig:
    """`config_class` with everything small whose name says that it can be. Values that it derives are derived anew.

    Args:
        config_class: a configuration class of transformers.
        tiny_heads: `False` leaves the heads' dimensions at their defaults, for models that divide them in fixed ways.
    """
    kwargs = {
        name: tiny_config(sub, tiny_heads)
        for name, sub in config_class.sub_configs.items()
        if hasattr(sub, "sub_configs")  # not AutoConfig
    }
    parameters = inspect.signature(config_class.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in kwargs}
    for name, default in defaults.items():
        rules = _EXPERTS if default is None else _EXPERTS + _SHRINK + (_HEAD_DIM if tiny_heads else [])
        shrink = next((shrink for pattern, shrink in rules if re.fullmatch(pattern, name)), None)
        if isinstance(default, bool):
            if re.fullmatch(r"(enable|use)_moe.*", name):
                kwargs[name] = True
        elif shrink is None:
            if isinstance(default, list | tuple) and len(default) == defaults.get("num_hidden_layers"):
                kwargs[name] = default[:2]
        elif isinstance(default, int | None):
            kwargs[name] = default if default == 0 else shrink(default)
        elif isinstance(default, list | tuple):
            kwargs[name] = type(default)(shrink(value) for value in default)
    if "mlp_layer_types" in defaults:
        kwargs["mlp_layer_types"] = ["sparse"] * 2
    if "mlp_only_layers" in defaults:
        kwargs["mlp_only_layers"] = []
    if defaults.get("num_key_value_heads", 0) == defaults.get("num_attention_heads", 1):
        kwargs["num_key_value_heads"] = kwargs["num_attention_heads"]
    kwargs.update(OVERRIDES.get(config_class.model_type, {}))
    return config_class(**kwargs)


def model_classes(experts: ExpertsClass) -> list[type[transformers.PreTrainedModel]]:
    """The model classes beside `experts`, those that need nothing but token ids first."""
    module = importlib.import_module(experts.module)
    classes = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, transformers.PreTrainedModel)
        and cls.__module__ == module.__name__
        and inspect.isclass(getattr(cls, "config_class", None))
        and "forward" in vars(cls)
    ]

    def effort(cls):
        order = ["ForCausalLM$", "Text.*Model$", "Model$", ""]
        return (
            bool(cls.config_class.sub_configs),
            next(i for i, pattern in enumerate(order) if re.search(pattern, cls.__name__)),
        )

    return sorted(classes, key=effort)


@dataclass
class Subject:
    """A tiny model in any dtype, with the same parameters in each, all of them bfloat16 numbers; and its input."""

    experts: ExpertsClass
    model_class: type[transformers.PreTrainedModel]
    feed: str
    tiny_heads: bool
    _models: dict[torch.dtype, transformers.PreTrainedModel] = field(default_factory=dict)

    def model(self, dtype: torch.dtype) -> transformers.PreTrainedModel:
        if dtype not in self._models:
            self._models[dtype] = self._build(dtype)
        return self._models[dtype]

    def _build(self, dtype: torch.dtype) -> transformers.PreTrainedModel:
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as from_pretrained does
        try:
            model = self.model_class(tiny_config(self.model_class.config_class, self.tiny_heads)).eval()
        finally:
            torch.set_default_dtype(default)
        if dtype != torch.float32:
            model.load_state_dict(self.model(torch.float32).state_dict())
            return model
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms, biases and gates start as constants, with which an error could hide; weights start too small.
                if parameter.dim() > 1:
                    parameter.normal_(std=1.0 if "embed" in name else parameter.size(-1) ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                parameter.copy_(parameter.bfloat16())
        return model

    def loss(self, model: transformers.PreTrainedModel) -> torch.Tensor:
        """Of next tokens where the model has a head for them, else of its output against random numbers."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, VOCABULARY // 2, (BATCH, LENGTH), generator=generator)
        if self.feed == "labels":
            return model(input_ids=ids, labels=ids, use_cache=False).loss
        if self.feed == "input_ids":
            outputs = model(input_ids=ids)
        else:
            weight = model.get_input_embeddings().weight
            embeddings = torch.randn(BATCH, LENGTH, weight.size(1), generator=generator).bfloat16().to(weight.dtype)
            outputs = model(inputs_embeds=embeddings.requires_grad_())
        output = next(v for v in outputs.to_tuple() if isinstance(v, torch.Tensor) and v.is_floating_point())
        target = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        return (output.double() - target).square().mean()


def build(experts: ExpertsClass) -> Subject:
    """A model with `experts` in it that runs: the first of its module's classes that can be built tiny."""
    tried = []
    for cls in model_classes(experts):
        usual = "labels" if cls.__name__.endswith("ForCausalLM") else "input_ids"
        for feed, tiny_heads in ((usual, True), (usual, False), ("inputs_embeds", True)):
            subject = Subject(experts, cls, feed, tiny_heads)
            try:
                _check_runs(subject)
                return subject
            except Exception as error:  # Whatever a model finds wrong with its configuration or input.
                line = next(iter(str(error).splitlines()), "")
                tried.append(f"{cls.__name__}: {type(error).__name__}: {line[:200]}")
    raise NotBuildable("; ".join(dict.fromkeys(tried)) or "no model class beside the experts")


def _check_runs(subject: Subject) -> None:
    with torch.device("meta"):
        model = subject.model_class(tiny_config(subject.model_class.config_class, subject.tiny_heads))
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MAX_PARAMETERS:
        raise NotBuildable(f"{size} parameters left in the shrunk model")
    if not any(isinstance(module, subject.experts.load()) for module in model.modules()):
        raise NotBuildable(f"holds no {subject.experts.name}")
    if not run(subject, "eager", torch.float32, Routes()).experts_runs:
        raise NotBuildable(f"{subject.experts.name} is never called")


# ---------------------------------------------------------------------------------------------------------- running


class Routes(TorchFunctionMode):
    """The choices that the first run makes with `topk` and `max`, made again in the runs after it.

    Otherwise two experts that are nearly equal for a token change places with the rounding, and the gradients of two
    right computations have little in common.
    """

    def __init__(self):
        super().__init__()
        self._choices: list[torch.Tensor] = []
        self._replayed: Iterator[torch.Tensor] | None = None

    def __exit__(self, *exception):
        self._replayed = iter(self._choices)
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, torch.return_types.topk | torch.return_types.max):
            return result
        if self._replayed is None:
            self._choices.append(result.indices)
            return result
        indices = next(self._replayed)
        position = 2 if isinstance(result, torch.return_types.topk) else 1
        dim = kwargs.get("dim", args[position] if len(args) > position else -1)
        input = args[0] if args else kwargs["input"]
        if indices.dim() == input.dim():
            values = input.gather(dim, indices)
        else:
            values = input.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        return type(result)((values, indices))


@dataclass
class Run:
    """What a forward and backward pass gave, in float64, and how often the experts ran in it."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    experts_runs: int


def run(subject: Subject, implementation: str, dtype: torch.dtype, routes: Routes) -> Run:
    """A forward and backward pass of `subject` with its parameters in `dtype`."""
    model = subject.model(dtype)
    model.set_experts_implementation(implementation)
    runs = []
    handles = [
        module.register_forward_hook(lambda *_: runs.append(1))
        for module in model.modules()
        if isinstance(module, subject.experts.load())
    ]
    try:
        with routes:
            loss = subject.loss(model)
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Run(loss.detach().double(), gradients, len(runs))


# -------------------------------------------------------------------------------------------------------- comparing

# How far the grouped path may be from a float64 run: this many times what eager experts are away from it, plus this
# many units of rounding. What counts of eager is never less than its median over the parameters; for a parameter of
# a few numbers, which can by chance be nearly right in one of the two runs, its largest.
FACTOR = {torch.float32: 4, torch.bfloat16: 3}
UNITS = {torch.float32: 16, torch.bfloat16: 1}
FEW = 64
# A kernel whose every second column is wrong by this factor must be noticed. (Not all of it: some models normalise
# what the experts give.)
CONTROL = {torch.float32: 1.01, torch.bfloat16: 1.25}


@dataclass
class Precision:
    """Relative differences by parameter, and "loss"; float64 stands for the run of eager experts in float64."""

    eager_from_float64: dict[str, float]
    grouped_from_float64: dict[str, float]
    control_from_float64: dict[str, float]
    grouped_from_eager: dict[str, float]
    bounds: dict[str, float]

    def beyond(self, errors: dict[str, float]) -> dict[str, tuple[float, float]]:
        """What is further from float64 than it may be: error and bound."""
        return {n: (error, self.bounds[n]) for n, error in errors.items() if not error <= self.bounds[n]}

    def loss_difference(self) -> float:
        return self.grouped_from_eager["loss"]

    def gradient_difference(self) -> float:
        return max(difference for name, difference in self.grouped_from_eager.items() if name != "loss")

    def eager_gradient_error(self) -> float:
        return max(error for name, error in self.eager_from_float64.items() if name != "loss")

    def worst_ratio(self) -> float:
        """The largest share of its bound that an error has."""
        return max(error / self.bounds[name] for name, error in self.grouped_from_float64.items())


@dataclass
class Comparison:
    """What `compare` found out about one experts class."""

    model_class: str
    experts: ExpertsClass
    default_implementation: str
    experts_modules: int
    experts_runs: int
    kernel_calls: int
    layouts: list[str]
    precisions: dict[torch.dtype, Precision]
    problems: list[str]


def compare(experts: ExpertsClass) -> Comparison:
    """Eager experts against the patched grouped path: loss and all gradients, in float32 and bfloat16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # nothing here is large enough for two
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _compare(experts)
    finally:
        torch.set_num_threads(threads)


def _compare(experts: ExpertsClass) -> Comparison:
    subject = build(experts)
    routes = Routes()
    reference = run(subject, "eager", torch.float64, routes)
    precisions, problems = {}, []
    for name, gradient in reference.gradients.items():
        if _of_experts(name) and not gradient.any():
            problems.append(f"the gradient of {name} is zero: nothing is compared")
    calls = layouts = None
    for dtype in (torch.float32, torch.bfloat16):
        eager = run(subject, "eager", dtype, routes)
        with patched() as kernel:
            grouped = run(subject, "grouped_mm", dtype, routes)
        with patched(CONTROL[dtype]):
            control = run(subject, "grouped_mm", dtype, routes)
        precision = _precision(reference, eager, grouped, control, dtype)
        precisions[dtype] = precision
        for name, (error, bound) in precision.beyond(precision.grouped_from_float64).items():
            problems.append(f"{dtype}: {name} is {error:.1e} from float64, may be {bound:.1e}")
        if not precision.beyond(precision.control_from_float64):
            problems.append(f"{dtype}: a kernel that is wrong by a factor of {CONTROL[dtype]} is not noticed")
        # Two grouped matmuls forward, and two for each of them backward.
        calls, layouts = len(kernel.calls), kernel.layouts(2 * grouped.experts_runs)
        if calls != 6 * grouped.experts_runs:
            problems.append(f"{dtype}: {grouped.experts_runs} runs of experts made {calls} kernel calls, not 6 each")
        if any(call.copies_weight for call in kernel.calls):
            problems.append(f"{dtype}: CANN would copy a weight")
    with torch.device("meta"):
        model = subject.model_class(tiny_config(subject.model_class.config_class, subject.tiny_heads))
    modules = [module for module in model.modules() if isinstance(module, experts.load())]
    return Comparison(
        model_class=subject.model_class.__name__,
        experts=experts,
        default_implementation=modules[0].config._experts_implementation,
        experts_modules=len(modules),
        experts_runs=grouped.experts_runs,
        kernel_calls=calls,
        layouts=layouts,
        precisions=precisions,
        problems=problems,
    )


class Kernel:
    """Stands before the strict reference: keeps the layouts of the weights; for a control, returns what is wrong."""

    def __init__(self, npu: StrictNPU, wrong_by: float):
        self.calls = npu.calls
        self._layouts: list[str] = []
        self._wrong_by, self._kernel = wrong_by, npu.npu_grouped_matmul

    def __call__(self, x, weight, **kwargs):
        self._layouts.append("transposed view" if looks_transposed(weight[0]) else "contiguous")
        results = self._kernel(x, weight, **kwargs)
        if self._wrong_by != 1:
            results[0][..., ::2] *= self._wrong_by
        return results

    def layouts(self, forward_calls: int) -> list[str]:
        """In the forward, whose calls come first; the backward sees the opposite."""
        return sorted(set(self._layouts[:forward_calls]))


@contextlib.contextmanager
def patched(wrong_by: float = 1) -> Iterator[Kernel]:
    """The patch in place, with CPU tensors taken for tensors on an NPU."""
    patch_module = importlib.import_module("npu_moe.monkey_patch_npu")
    with strict_npu() as npu, mock.patch.object(patch_module, "npu_unavailable_reason", lambda: None):
        npu.npu_grouped_matmul = kernel = Kernel(npu, wrong_by)
        if not npu_moe.apply_npu_patch():
            raise RuntimeError("apply_npu_patch() did nothing; is NPU_MOE_PATCH=0 set?")
        try:
            yield kernel
        finally:
            npu_moe.revert_npu_patch()


def _precision(reference: Run, eager: Run, grouped: Run, control: Run, dtype: torch.dtype) -> Precision:
    scales = {name: gradient.norm() for name, gradient in reference.gradients.items()}
    floor = 1e-3 * max(scales.values())
    for name, scale in scales.items():
        # What is zero but for rounding (the bias of keys, a gate that hashing overrules) has no relative error.
        if not _of_experts(name):
            scales[name] = torch.maximum(scale, floor)
    scales["loss"] = reference.loss.abs()

    def differences(run: Run, other: Run) -> dict[str, float]:
        if run.gradients.keys() != other.gradients.keys():
            raise AssertionError(f"not the same gradients: {sorted(run.gradients.keys() ^ other.gradients.keys())}")
        found = {n: ((run.gradients[n] - other.gradients[n]).norm() / scales[n]).item() for n in run.gradients}
        return {"loss": ((run.loss - other.loss).abs() / scales["loss"]).item(), **found}

    eager_from_float64 = differences(eager, reference)
    largest, median = max(eager_from_float64.values()), statistics.median(eager_from_float64.values())
    few = {name for name, gradient in reference.gradients.items() if gradient.numel() < FEW}
    counts = {n: largest if n in few else max(error, median) for n, error in eager_from_float64.items()}
    return Precision(
        eager_from_float64=eager_from_float64,
        grouped_from_float64=differences(grouped, reference),
        control_from_float64=differences(control, reference),
        grouped_from_eager=differences(grouped, eager),
        bounds={n: FACTOR[dtype] * error + UNITS[dtype] * torch.finfo(dtype).eps for n, error in counts.items()},
    )


def _of_experts(parameter: str) -> bool:
    return "experts." in parameter and "shared" not in parameter


# -------------------------------------------------------------------------------------------------- what is left out

# What is known of models whose experts have no decorator.
OWN_LOOPS = {
    "dbrx": "a loop over experts, whose weights are flat 2-D tensors",
    "doge": "experts are rows of an embedding, looked up: there is no matrix multiplication by group",
    "jetmoe": "a loop over `JetMoeParallelExperts`, in the attention too",
    "llama4": "one dense `bmm` in which every expert sees every token",
    "longcat_flash": "a loop over experts, some of which are the identity",
    "nllb_moe": "a loop over a `ModuleDict`",
    "step3p7": "a loop over experts with a clamp of its own",
    "switch_transformers": "a loop over a `ModuleDict`",
    "vitpose_backbone": "a loop over a `ModuleList`",
}


@functools.cache
def own_loops() -> dict[str, str]:
    """Model -> why it is not covered: it defines experts, and none of them has the decorator.

    Found by the names of classes, after the name of the model, which may hold "Moe" itself, is taken off.
    """
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        directory = path.parent.name
        source = path.read_text(encoding="utf-8")
        if DECORATOR in source or "expert" not in source.lower():
            continue
        prefix = directory.replace("_", "")
        classes = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        names = [re.sub(f"^{prefix}", "", name, flags=re.IGNORECASE) for name in classes]
        if any(re.search("Experts?(?![a-z])|MoE|Moe(?![a-z])", name) for name in names):
            found[directory] = OWN_LOOPS.get(directory, "its experts do not have the decorator in this version")
    return found
