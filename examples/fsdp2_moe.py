# SPDX-License-Identifier: Apache-2.0
"""Trains a Mixture-of-Experts causal language model of transformers under FSDP2, on NPUs, CUDA devices or CPUs.

    bash examples/run_fsdp2_moe_npu.sh                                # the usual way: checks, then starts torchrun
    torchrun --standalone --nproc-per-node 2 examples/fsdp2_moe.py    # without the launcher
    python examples/fsdp2_moe.py                                      # one process

Each step prints one line on rank 0: `step=2 loss=5.1234 grad_norm=1.234567 step_time=0.1234`.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen3MoeConfig

import npu_moe

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
END_OF_TEXT = 256  # the token after the 256 bytes

# Models that need no download. They start from random weights and read text as bytes.
PRESETS = {
    "tiny": dict(
        vocab_size=264,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "qwen3-30b-a3b": dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
    ),
}
PRESET_LEARNING_RATES = {"tiny": 3e-3, "qwen3-30b-a3b": 3e-4}


class UserError(Exception):
    """Something to tell the user in one line, without a traceback."""


# Arguments


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message} (see --help)")


def at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,10}", text) or not minimum <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return parse


def positive_float(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="fsdp2_moe.py", description=__doc__.splitlines()[0], allow_abbrev=False, add_help=True
    )
    add = parser.add_argument
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, a local directory or a hub id (default: tiny)")
    add("--num-layers", type=at_least(1), metavar="N", help="keep only the first N decoder layers")
    add("--experts-implementation", choices=["grouped_mm", "batched_mm", "eager"], help="default: transformers' own")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the computation; weights are float32")
    add("--activation-checkpointing", action="store_true", help="recompute activations, to save memory")
    add("--lora", choices=["attention", "experts", "all"], help="train adapters of these layers, all else is frozen")
    add("--lora-rank", type=at_least(1), default=8, metavar="N")
    add("--data", type=Path, metavar="PATH", help="a text file, a directory of text files or a .jsonl file with a "
        "`text` field (default: the Python standard library's source files)")  # fmt: skip
    add("--seq-len", type=at_least(2), default=256, metavar="N", help="tokens a sequence (default: 256)")
    add("--steps", type=at_least(1), default=20, metavar="N", help="the last step (default: 20)")
    add("--batch-size", type=at_least(1), default=4, metavar="N", help="sequences a rank and forward (default: 4)")
    add("--grad-accum", type=at_least(1), default=1, metavar="N", help="forwards a step (default: 1)")
    add("--lr", type=positive_float, metavar="X", help="default: 3e-3 (tiny), 3e-4 (qwen3-30b-a3b), else 1e-5; "
        "1e-4 with --lora")  # fmt: skip
    add("--max-grad-norm", type=positive_float, default=1.0, metavar="X", help="clip the gradient (default: 1)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of new weights and of the order of the data")
    add("--log-file", type=Path, metavar="FILE", help="append the line of each step to FILE as well")
    add("--save", type=Path, metavar="DIR", help="write checkpoints into DIR, the last one after the last step")
    add("--save-every", type=at_least(1), default=100, metavar="N", help="steps between checkpoints (default: 100)")
    add("--keep", type=at_least(1), default=2, metavar="N", help="newest checkpoints that are kept (default: 2)")
    add("--resume", type=Path, nargs="?", const=True, metavar="DIR", help="continue from the newest complete "
        "checkpoint in DIR (default: that of --save)")  # fmt: skip
    add("--device", choices=list(BACKENDS), help="default: npu if there is one, else cuda, else cpu")
    add("--check", action="store_true", help="check the arguments, the model and the data, and do not train")
    args = parser.parse_args(argv)
    if args.resume is True:
        args.resume = args.save
        if args.save is None:
            raise UserError("--resume needs a directory, or --save for it to resume from")
    if args.lr is None:
        args.lr = 1e-4 if args.lora else PRESET_LEARNING_RATES.get(args.model, 1e-5)
    return args


# The world: devices and ranks


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process stands. torchrun sets the variables; without it, this is a world of one."""

    rank: int
    local_rank: int
    size: int
    local_size: int

    @classmethod
    def from_environment(cls) -> "World":
        names = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1)
        return cls(*(int(os.environ.get(name, default)) for name, default in names.items()))


def choose_device(asked_for: str | None, world: World) -> torch.device:
    kind = asked_for or ("npu" if npu_moe.is_npu_available() else "cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu" and not npu_moe.is_npu_available():
        raise UserError(f"--device npu: {npu_moe.npu_unavailable_reason()}")
    count = getattr(torch, kind).device_count()
    if world.local_size > count:
        raise UserError(
            f"the world size does not fit: {world.local_size} processes on this node, but {count} {kind} devices "
            "are visible; each process needs one of its own (NPROC_PER_NODE, or torchrun --nproc-per-node)"
        )
    return torch.device(kind, world.local_rank)


def start_process_group(device: torch.device, world: World) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    if world.size > 1:
        dist.init_process_group(BACKENDS[device.type])
    else:  # needs no address and no port
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)


def synchronize(device: torch.device) -> None:
    getattr(torch, device.type).synchronize()


# The data: one flat array of tokens, of which each rank takes its share of every batch


class Documents:
    """The texts at `path`, in an order that depends on nothing but the names; counts the files it skips."""

    def __init__(self, path: Path | None):
        self.path = path or Path(sysconfig.get_path("stdlib"))
        self.files = self.skipped = 0
        if not self.path.exists():
            raise UserError(f"--data {self.path}: no such file or directory")
        if path is None:
            others = {"site-packages", "dist-packages"}
            self._files = sorted(p for p in self.path.rglob("*.py") if not others & set(p.parts))
        elif self.path.is_dir():
            files = (p for p in self.path.rglob("*") if p.is_file())
            self._files = sorted(p for p in files if not any(s[0] == "." for s in p.relative_to(self.path).parts))
        else:
            self._files = [self.path]

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            self.files += 1
            try:
                text = file.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                text = "\0"
            except OSError as error:
                raise UserError(f"--data {self.path}: cannot read {file}: {error.strerror}") from None
            if "\0" in text:  # binary, or not UTF-8
                self.skipped += 1
            elif file.suffix == ".jsonl":
                yield from filter(str.strip, json_texts(file, text))
            elif text.strip():
                yield text


def json_texts(file: Path, lines: str) -> Iterator[str]:
    # Not splitlines(): JSON strings may hold line separators of Unicode.
    for number, line in enumerate(lines.split("\n"), start=1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
            except (ValueError, TypeError, KeyError):
                text = None
            if not isinstance(text, str):
                raise UserError(f"{file}:{number}: expected a JSON object with a string in the field `text`")
            yield text


def encode_bytes(text: str) -> list[int] | bytes:
    return text.encode("utf-8")


def read_tokens(
    documents: Iterable[str],
    encode: Callable[[str], Iterable[int]],
    end_of_text: int | None,
    vocab_size: int,
    enough: int | None = None,
) -> np.ndarray:
    """The tokens of all documents, each followed by `end_of_text`; stops early once there are `enough`."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    end = np.array([] if end_of_text is None else [end_of_text], dtype)
    pieces, length = [], 0
    for text in documents:
        ids = encode(text)
        ids = np.frombuffer(ids, np.uint8).astype(dtype) if isinstance(ids, bytes) else np.asarray(ids, dtype)
        pieces += [ids, end]
        length += len(ids) + len(end)
        if enough is not None and length >= enough:
            break
    return np.concatenate(pieces) if pieces else end[:0]


class Sequences:
    """An endless stream of packed sequences, shuffled anew in each epoch, and a function of the position alone.

    So the position is all that a checkpoint has to hold, and the stream is the same for any number of ranks.
    Sequences overlap by one token: each of the `seq_len` targets of a sequence is predicted once in an epoch.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.per_epoch = (len(tokens) - 1) // seq_len
        self._order: tuple[int, np.ndarray] = (-1, np.array([]))

    def __getitem__(self, position: int) -> np.ndarray:
        epoch, index = divmod(position, self.per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.per_epoch)
        start = int(self._order[1][index]) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]

    def micro_batches(
        self, position: int, batch_size: int, grad_accum: int, rank: int, world_size: int
    ) -> list[torch.Tensor]:
        """This rank's (batch_size, seq_len + 1) tensors of the step that starts at `position`."""
        starts = (position + (i * world_size + rank) * batch_size for i in range(grad_accum))
        rows = ([self[start + j] for j in range(batch_size)] for start in starts)
        return [torch.from_numpy(np.stack(row).astype(np.int64)) for row in rows]


# The model


def load_config(model: str, num_layers: int | None) -> PretrainedConfig:
    if model in PRESETS:
        config = Qwen3MoeConfig(**PRESETS[model], use_cache=False)
    elif Path(model).is_dir() or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {model}: its configuration cannot be loaded: {one_line(error)}") from None
        if Path(model).is_dir() and not any(file.suffix in (".safetensors", ".bin") for file in Path(model).iterdir()):
            raise UserError(f"--model {model}: no weights (*.safetensors) in this directory")
    else:
        raise UserError(
            f"--model {model}: neither a preset ({', '.join(PRESETS)}), nor a directory that exists, nor a hub id "
            "(owner/name)"
        )
    text_config = config.get_text_config()
    if num_layers is not None:
        depth = text_config.num_hidden_layers
        if num_layers > depth:
            raise UserError(f"--num-layers {num_layers}: {model} has {depth} layers")
        for name, value in list(vars(text_config).items()):
            if isinstance(value, list) and len(value) == depth:  # one entry a layer, such as layer_types
                setattr(text_config, name, value[:num_layers])
        text_config.num_hidden_layers = num_layers
    return config


def skeleton(config: PretrainedConfig, args: argparse.Namespace) -> nn.Module:
    """The model without any storage: what it consists of can be looked at before anything is loaded."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **experts_option(args))
    except ValueError as error:
        raise UserError(f"--model {args.model}: {one_line(error)}") from None


def experts_option(args: argparse.Namespace) -> dict[str, str]:
    chosen = args.experts_implementation
    return {} if chosen is None else {"experts_implementation": chosen}


def experts_implementation(model: nn.Module) -> str:
    return getattr(model.config.get_text_config(), "_experts_implementation", None) or "eager"


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
    }


def check_model(model: nn.Module, args: argparse.Namespace, grouped_mm_is_ours: bool) -> None:
    experts = experts_modules(model)
    if not experts:
        raise UserError(f"--model {args.model}: {type(model).__name__} is a model without experts, not a MoE model")
    if args.activation_checkpointing and not model.supports_gradient_checkpointing:
        raise UserError(f"--activation-checkpointing: {type(model).__name__} does not support it")
    if experts_implementation(model) != "grouped_mm" or grouped_mm_is_ours:
        return
    # PyTorch's own grouped matmul wants rows of a multiple of 16 bytes and says so only at the first forward.
    multiple = 16 // getattr(torch, args.dtype).itemsize
    for name, module in experts.items():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and any(size % multiple for size in parameter.shape[1:]):
                raise UserError(
                    f"--model {args.model}: {name}.{parameter_name} has the shape {tuple(parameter.shape)}; with "
                    f"--dtype {args.dtype} PyTorch's grouped matmul needs hidden_size and moe_intermediate_size to be "
                    f"multiples of {multiple}: change them in the config, or use --experts-implementation eager"
                )


def add_lora(model: nn.Module, layers: str, rank: int) -> None:
    """Puts adapters into the model, in place, and freezes all else."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise UserError(f"--lora {layers} needs peft, which is not installed: run `pip install peft`") from None
    linears, parameters = [], []
    if layers in ("attention", "all"):
        linears = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and re.search(r"attn|attention", name)
        ]
        if not linears:
            raise UserError(f"--lora {layers}: {type(model).__name__} has no linear layers in its attention")
    if layers in ("experts", "all"):
        parameters = [
            f"{name}.{parameter_name}"
            for name, module in experts_modules(model).items()
            for parameter_name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3
        ]
        if not parameters:
            raise UserError(f"--lora {layers}: the experts of {type(model).__name__} are no stacked parameters")
    # PEFT has no dropout for adapters of parameters.
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=linears, target_parameters=parameters
    )
    inject_adapter_in_model(lora, model)


def initialize(modules: Iterable[nn.Module], model: nn.Module) -> None:
    """Gives modules of a skeleton new weights, on the CPU: so a seed means the same ones on every kind of device."""
    modules = list(modules)
    for module in modules:
        module.to_empty(device="cpu", recurse=False)
    for module in modules:
        model._init_weights(module)
    for module in modules:
        if hasattr(module, "reset_lora_parameters"):
            for adapter in module.lora_A:
                module.reset_lora_parameters(adapter, init_lora_weights=True)


def build_model(model: nn.Module, config: PretrainedConfig, args: argparse.Namespace, device: torch.device):
    """Loads the weights, or makes new ones, and shards the model: float32 master weights, gathered in `--dtype`."""
    new = args.model in PRESETS
    # The same seed on all ranks: each makes all of the weights, then keeps its shard.
    torch.manual_seed(args.seed)
    if not new:
        # Each rank holds the whole model in host memory for a moment.
        model = AutoModelForCausalLM.from_pretrained(
            args.model, config=config, dtype=torch.float32, **experts_option(args)
        )
        if args.lora:
            add_lora(model, args.lora, args.lora_rank)
    if args.activation_checkpointing:
        # The second is its name in older releases of transformers.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    done = set()
    # New weights come layer by layer, so that no rank ever holds more than one whole layer and its own shards, which
    # fully_shard moves to the device. Inner layers first, the rest of the model last.
    for unit in [*reversed(layers), model]:
        if new:
            initialize((module for module in unit.modules() if module not in done), model)
            done.update(unit.modules())
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model.train()


# Checkpoints: DIR/step-00000020/, with state.json beside the files of torch.distributed.checkpoint. A directory has
# the suffix .tmp until everything in it is on the disk.


@dataclasses.dataclass(frozen=True)
class Progress:
    step: int = 0
    position: int = 0  # sequences consumed, by all ranks


def checkpoint_options(args: argparse.Namespace) -> StateDictOptions:
    # With LoRA the frozen weights are those of the model, and not saved again.
    return StateDictOptions(ignore_frozen_params=args.lora is not None, strict=args.lora is None)


def save_checkpoint(
    args: argparse.Namespace,
    identity: dict,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    device: torch.device,
) -> None:
    final = args.save / f"step-{progress.step:08d}"
    temporary = final.with_name(f"{final.name}.tmp")
    if dist.get_rank() == 0:
        # What a killed run left behind. What is newer than this one is incomplete, or it would have been resumed.
        for path in args.save.glob("step-*"):
            if path.suffix == ".tmp" or path.name >= final.name:
                shutil.rmtree(path)
        temporary.mkdir(parents=True)
    dist.barrier(device_ids=None if device.index is None else [device.index])
    weights, moments = get_state_dict(model, optimizer, options=checkpoint_options(args))
    # Returns on rank 0 when the files of all ranks are on the disk.
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        files = {file.name: file.stat().st_size for file in temporary.iterdir()}
        state = {"identity": identity, **dataclasses.asdict(progress), "files": files}
        with open(temporary / "state.json", "w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(temporary)
        temporary.rename(final)
        sync_directory(args.save)
        for old in sorted(args.save.glob("step-" + "[0-9]" * 8))[: -args.keep]:
            shutil.rmtree(old)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(directory: Path) -> tuple[Path | None, dict, list[str]]:
    """The newest complete checkpoint with its state, and what is wrong with those that were passed over."""
    passed_over = []
    for path in sorted(directory.glob("step-*"), reverse=True):
        if path.suffix == ".tmp":
            passed_over.append(f"{path} was not finished")
            continue
        try:
            state = json.loads((path / "state.json").read_text())
            wrong = [name for name, size in state["files"].items() if (path / name).stat().st_size != size]
        except (OSError, ValueError, KeyError, TypeError) as error:
            passed_over.append(f"{path} is incomplete ({one_line(error)})")
            continue
        if not wrong:
            return path, state, passed_over
        passed_over.append(f"{path} is incomplete (wrong size: {', '.join(wrong)})")
    return None, {}, passed_over


def check_checkpoints(args: argparse.Namespace, identity: dict) -> tuple[Path | None, Progress, list[str]]:
    """Finds the checkpoint to resume from, and makes sure that what is in `identity` is what it was made with."""
    if args.save is not None and (args.resume is None or args.save.resolve() != args.resume.resolve()):
        # Checkpoints of two runs in one directory: the newest might be the other run's.
        if find_checkpoint(args.save)[0] is not None:
            raise UserError(f"--save {args.save} already holds checkpoints: add --resume, or choose another directory")
    if args.resume is None:
        return None, Progress(), []
    path, state, passed_over = find_checkpoint(args.resume)
    if path is None:
        raise UserError(f"--resume {args.resume}: {'; '.join(['there is no complete checkpoint', *passed_over])}")
    made_with = state["identity"]
    differences = [
        f"{name} {made_with.get(name)}, not {this}" for name, this in identity.items() if made_with.get(name) != this
    ]
    if differences:
        raise UserError(f"--resume: {path} does not fit this run: it was made with {'; '.join(differences)}")
    return path, Progress(state["step"], state["position"]), passed_over


def load_checkpoint(path: Path, args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    options = checkpoint_options(args)
    weights, moments = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)


# Training


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[torch.Tensor],
    max_grad_norm: float,
    device: torch.device,
) -> tuple[float, float]:
    """One optimizer step; returns the loss, as a mean over all tokens of all ranks, and the norm of its gradient."""
    micro_batches = [batch.to(device) for batch in micro_batches]
    num_tokens = torch.tensor(sum(batch[:, 1:].numel() for batch in micro_batches), device=device)
    dist.all_reduce(num_tokens)
    total_loss = torch.zeros((), device=device)
    for batch in micro_batches:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum") / num_tokens
        # FSDP2 takes the mean of the ranks' gradients, this loss needs their sum. It reduces after each micro-batch:
        # to wait for the last would keep the whole gradient of all experts on each device.
        (loss * dist.get_world_size()).backward()
        total_loss += loss.detach()
    grad_norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total_loss)
    return total_loss.item(), grad_norm.full_tensor().item()


def train(
    args: argparse.Namespace,
    identity: dict,
    sequences: Sequences,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    device: torch.device,
) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    per_step = world_size * args.batch_size * args.grad_accum
    times = []
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(args.log_file, "a")) if args.log_file and rank == 0 else None
        # `None` shows the bar only on a terminal.
        bar = stack.enter_context(
            tqdm(total=args.steps, initial=progress.step, unit="step", disable=None if rank == 0 else True)
        )
        while progress.step < args.steps:
            start = time.perf_counter()
            step = progress.step + 1
            # Seeded by step: models with dropout resume exactly too, and no state of a generator needs saving.
            torch.manual_seed(int(np.random.SeedSequence((args.seed, step, rank)).generate_state(1)[0]))
            micro_batches = sequences.micro_batches(
                progress.position, args.batch_size, args.grad_accum, rank, world_size
            )
            loss, grad_norm = train_step(model, optimizer, micro_batches, args.max_grad_norm, device)
            synchronize(device)
            times.append(time.perf_counter() - start)
            progress = Progress(step, progress.position + per_step)
            if rank == 0:
                line = f"step={step} loss={loss:.4f} grad_norm={grad_norm:.6f} step_time={times[-1]:.4f}"
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
                if log is not None:
                    print(line, file=log, flush=True)
            bar.update()
            if args.save is not None and (step % args.save_every == 0 or step == args.steps):
                save_checkpoint(args, identity, model, optimizer, progress, device)
    if rank == 0 and len(times) > 1:
        mean = sum(times[1:]) / len(times[1:])
        speed = per_step * args.seq_len / mean
        print(f"mean_step_time={mean:.4f} tokens_per_second={speed:.1f} (without the first step)", flush=True)


# Putting it together


def one_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def load_data(args: argparse.Namespace, config: PretrainedConfig, world: World) -> tuple[Documents, Sequences]:
    documents = Documents(args.data)
    vocab_size = config.get_text_config().vocab_size
    if args.model in PRESETS:
        encode, end_of_text = encode_bytes, END_OF_TEXT
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {args.model}: its tokenizer cannot be loaded: {one_line(error)}") from None
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a directory without one
            raise UserError(f"--model {args.model}: its tokenizer cannot be loaded: no tokenizer.json or vocabulary")
        end_of_text = tokenizer.eos_token_id

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    per_step = world.size * args.batch_size * args.grad_accum
    needed = per_step * args.seq_len + 1
    tokens = read_tokens(documents, encode, end_of_text, vocab_size, enough=needed if args.check else None)
    if len(tokens) == 0:
        skipped = f" ({documents.skipped} files are not UTF-8 text)" if documents.skipped else ""
        raise UserError(f"--data {documents.path}: no text in it{skipped}")
    if int(tokens.max()) >= vocab_size:
        raise UserError(f"--model {args.model}: its tokenizer has token {tokens.max()}, the model {vocab_size} tokens")
    if len(tokens) < needed:
        raise UserError(
            f"--data {documents.path}: {len(tokens)} tokens are fewer than one batch, {needed} = {world.size} ranks x "
            f"--batch-size {args.batch_size} x --grad-accum {args.grad_accum} x --seq-len {args.seq_len} + 1"
        )
    return documents, Sequences(tokens, args.seq_len, args.seed)


def prepare_files(args: argparse.Namespace) -> None:
    try:
        if args.log_file is not None:
            args.log_file.parent.mkdir(parents=True, exist_ok=True)
            args.log_file.open("a").close()
        if args.save is not None:
            args.save.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename}: {error.strerror}") from None


def run(args: argparse.Namespace, world: World) -> None:
    # All that can be wrong with the input is found before the ranks meet: no rank can then wait for one that gave up.
    device = choose_device(args.device, world)
    if world.rank == 0:
        prepare_files(args)
    config = load_config(args.model, args.num_layers)
    try:
        # In a check, which comes before the run itself, it would say twice what it does.
        patched = npu_moe.is_npu_available() if args.check else npu_moe.apply_npu_patch()
    except (RuntimeError, ValueError) as error:
        raise UserError(one_line(error)) from None
    patched = patched and device.type == "npu"
    model = skeleton(config, args)
    check_model(model, args, patched)
    name = type(model).__name__
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if args.lora:
        add_lora(model, args.lora, args.lora_rank)
    documents, sequences = load_data(args, config, world)
    identity = dict(
        model=str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model,
        parameters=num_parameters,
        lora=f"{args.lora} {args.lora_rank}" if args.lora else None,
        seq_len=args.seq_len,
        seed=args.seed,
    )
    if not args.check:  # which does not read all of the data
        identity["data"] = hashlib.blake2b(sequences.tokens, digest_size=8).hexdigest()
    checkpoint, progress, passed_over = check_checkpoints(args, identity)
    if args.check:
        return

    start_process_group(device, world)
    model = build_model(model, config, args, device)
    # foreach: one launch for all parameters. PyTorch does not choose it by itself for sharded parameters.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, foreach=True)
    if checkpoint is not None:
        load_checkpoint(checkpoint, args, model, optimizer)
    if dist.get_rank() == 0:
        experts = experts_implementation(model)
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        print(f"device={device.type} backend={dist.get_backend()} world_size={world.size} dtype={args.dtype}")
        print(f"model={args.model} ({name}) parameters={num_parameters:,} trainable={trainable:,}")
        print(f"experts={experts} patch={patch_status(patched, experts, device)}")
        print(f"data={documents.path} files={documents.files} skipped={documents.skipped} "
              f"tokens={len(sequences.tokens):,} sequences={sequences.per_epoch:,}")  # fmt: skip
        for line in passed_over:
            print(f"ignored: {line}")
        if checkpoint is not None:
            print(f"resumed from {checkpoint}: step {progress.step} of {args.steps}")
        sys.stdout.flush()
    train(args, identity, sequences, model, optimizer, progress, device)
    dist.destroy_process_group()


def patch_status(patched: bool, experts: str, device: torch.device) -> str:
    if experts != "grouped_mm":
        return f"without effect: {experts} experts never call transformers' _grouped_mm"
    if patched:
        return "on"
    if os.environ.get("NPU_MOE_PATCH") == "0":
        return "off: NPU_MOE_PATCH=0"
    return f"off: {npu_moe.npu_unavailable_reason() or f'the device is {device.type}'}"


# The traceback of the rank that failed first ends torchrun's report, and torchrun ends the others.
@record
def main() -> None:
    # Ctrl-C ends a process that waits in a collective too. There is nothing to clean up: a checkpoint is renamed when
    # it is complete.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    world = World.from_environment()
    try:
        run(parse_arguments(), world)
    except UserError as error:
        if world.local_rank != 0:
            # The first process of the node says it, and torchrun then ends this one. If it has nothing to say, go on.
            time.sleep(10)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
