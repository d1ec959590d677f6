# SPDX-License-Identifier: Apache-2.0
"""The training example. What needs no second process runs in this one, as a world of one rank."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import fsdp2_moe as example
import huggingface_hub
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from example_runs import EXAMPLES, losses
from hypothesis import given
from hypothesis import strategies as st

ALONE = example.World(rank=0, local_rank=0, size=1, local_size=1)
SMALL = ["--device", "cpu", "--dtype", "float32", "--seq-len", "32", "--batch-size", "2"]


@pytest.fixture
def train(text_directory, capfd):
    """Runs the example in this process and returns what it printed; a world of one rank."""

    def train(*arguments: object) -> str:
        # The last of two values counts.
        args = example.parse_arguments([*SMALL, "--data", text_directory, *map(str, arguments)])
        capfd.readouterr()
        try:
            example.run(args, ALONE)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return capfd.readouterr().out

    return train


@pytest.fixture(autouse=True)
def one_thread():
    """Like a rank of the example's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_close(actual: dict, expected: dict, rel: float) -> None:
    assert list(actual) == list(expected)
    for step, values in expected.items():
        assert [float(v) for v in actual[step]] == pytest.approx([float(v) for v in values], rel=rel), step


@pytest.fixture
def process_group():
    example.start_process_group(torch.device("cpu"), ALONE)
    yield
    dist.destroy_process_group()


def built(*arguments):
    """(model, arguments) as the example builds it."""
    args = example.parse_arguments([*SMALL, *arguments])
    config = example.load_config(args.model, args.num_layers)
    model = example.skeleton(config, args)
    if args.lora:
        example.add_lora(model, args.lora, args.lora_rank)
    return example.build_model(model, config, args, torch.device("cpu")), args


# The data


def texts(path):
    documents = example.Documents(path)
    return list(documents), documents


def test_a_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("häuser\n")
    assert texts(tmp_path / "a.txt")[0] == ["häuser\n"]


def test_a_directory_is_read_in_the_order_of_its_names_without_what_is_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "b" / "z.py").write_text("z")
    (tmp_path / "b" / "a.md").write_text("a")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"abc\0def")
    (tmp_path / "latin1").write_bytes("é".encode("latin-1"))
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\u2028"}\n')
    found, documents = texts(tmp_path)
    assert found == ["a", "z", "one", "two\u2028"]
    assert documents.skipped == 2


@pytest.mark.parametrize("line", ['{"content": "x"}', "[1]", "{", '{"text": 3}', "null"])
def test_a_line_that_is_no_text_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line)
    with pytest.raises(example.UserError, match=r"a\.jsonl:2: expected a JSON object"):
        texts(tmp_path / "a.jsonl")


def test_the_default_is_the_standard_library():
    documents = example.Documents(None)
    first = next(iter(documents))
    assert documents.path == Path(sysconfig.get_path("stdlib"))
    assert first == documents._files[0].read_text()
    assert not any("site-packages" in str(file) for file in documents._files)
    assert any(file.name == "argparse.py" for file in documents._files)


def test_documents_become_bytes_that_end_with_a_token_of_their_own():
    tokens = example.read_tokens(["ab", "é"], example.encode_bytes, example.END_OF_TEXT, 264)
    assert tokens.tolist() == [97, 98, 256, 0xC3, 0xA9, 256]
    assert tokens.dtype == np.uint16
    assert example.read_tokens(["x"], lambda text: [151000], None, 151936).tolist() == [151000]


def test_reading_stops_when_there_is_enough():
    def endless():
        while True:
            yield "abc"

    assert len(example.read_tokens(endless(), example.encode_bytes, 256, 264, enough=9)) == 12


def test_an_epoch_predicts_each_token_once():
    tokens = np.arange(101, dtype=np.uint16)
    sequences = example.Sequences(tokens, seq_len=10, seed=0)
    assert sequences.per_epoch == 10
    epochs = [[sequences[10 * epoch + i].tolist() for i in range(10)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(sum((row[1:] for row in epoch), [])) == list(range(1, 101))
        assert all(row == list(range(row[0], row[0] + 11)) for row in epoch)
    assert epochs[0] != epochs[1]
    again = example.Sequences(tokens, seq_len=10, seed=0)
    assert [again[i].tolist() for i in range(20)] == sum(epochs, [])
    other = example.Sequences(tokens, seq_len=10, seed=1)
    assert [other[i].tolist() for i in range(10)] != epochs[0]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 50))
def test_ranks_and_micro_batches_share_the_sequences_of_a_step(world_size, batch_size, grad_accum, position):
    sequences = example.Sequences(np.arange(100, dtype=np.uint16), seq_len=7, seed=3)
    shares = [
        sequences.micro_batches(position, batch_size, grad_accum, rank, world_size) for rank in range(world_size)
    ]
    assert all(len(share) == grad_accum and share[0].shape == (batch_size, 8) for share in shares)
    rows = sorted(row.tolist() for share in shares for batch in share for row in batch)
    per_step = world_size * batch_size * grad_accum
    assert rows == sorted(sequences[position + i].tolist() for i in range(per_step))


# Bad input

NO_TEXT = "no text in it"
BAD_ARGUMENTS = [
    (["--data", "missing"], "--data missing: no such file or directory"),
    (["--data", "empty"], NO_TEXT),
    (["--data", "empty.txt"], NO_TEXT),
    (["--data", "binary"], r"no text in it \(1 files are not UTF-8 text\)"),
    (["--data", "small.txt"], r"8 tokens are fewer than one batch, 129 = 1 ranks x --batch-size 4 x .* --seq-len 32"),
    (["--data", "bad.jsonl"], r"bad\.jsonl:1: expected a JSON object"),
    (["--model", "huge"], r"neither a preset \(tiny, qwen3-30b-a3b\), nor a directory"),
    (["--model", "./missing"], "neither a preset"),
    (["--model", "some-owner/some-model"], "its configuration cannot be loaded"),
    (["--model", "empty"], "its configuration cannot be loaded|no weights"),
    (["--model", "dense"], "LlamaForCausalLM is a model without experts"),
    (["--model", "no_weights"], r"no weights \(\*\.safetensors\) in this directory"),
    (["--model", "narrow"], r"down_proj has the shape \(4, 32, 20\); .* multiples of 8: change them in the config"),
    (["--model", "narrow", "--dtype", "float32"], "its tokenizer cannot be loaded"),
    (["--model", "encoder"], "Unrecognized configuration class"),
    (["--num-layers", "3"], "--num-layers 3: tiny has 2 layers"),
    (["--seq-len", "1"], "argument --seq-len: must be a whole number of at least 2, got '1'"),
    (["--steps", "-5"], "argument --steps: must be a whole number of at least 1, got '-5'"),
    (["--batch-size", "two"], "argument --batch-size"),
    (["--lr", "0"], "argument --lr: must be a number greater than 0"),
    (["--lr", "nan"], "argument --lr"),
    (["--seed", "99999999999"], "argument --seed"),
    (["--dtype", "float16"], "argument --dtype: invalid choice"),
    (["--lora", "mlp"], "argument --lora: invalid choice"),
    (["--stepz", "1"], "unrecognized arguments: --stepz"),
    (["--resume"], "--resume needs a directory"),
    (["--resume", "missing"], "--resume missing: there is no complete checkpoint"),
    (["--save", "full"], r"--save full already holds checkpoints: add --resume"),
    (["--save", "small.txt"], "cannot write to small.txt"),
    (["--log-file", "empty"], "cannot write to empty: Is a directory"),
    (["--device", "npu"], "--device npu: torch_npu is not installed"),
]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A working directory that holds what BAD_ARGUMENTS names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's Ctrl-C stays
    for name in ("empty", "dense", "no_weights", "narrow", "encoder"):
        Path(name).mkdir()
    Path("empty.txt").write_text("\n\n")
    Path("binary").write_bytes(b"\xff\xfe\0")
    Path("small.txt").write_text("7 bytes")
    Path("bad.jsonl").write_text("{}")
    sizes = dict(vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    moe = dict(num_experts=4, num_experts_per_tok=2, head_dim=16)
    transformers.LlamaConfig(**sizes, intermediate_size=64).save_pretrained("dense")
    transformers.BertConfig().save_pretrained("encoder")
    transformers.ViTConfig().save_pretrained("encoder")
    transformers.Qwen3MoeConfig(**sizes, **moe, moe_intermediate_size=16).save_pretrained("no_weights")
    transformers.Qwen3MoeConfig(**sizes, **moe, moe_intermediate_size=20).save_pretrained("narrow")
    for name in ("dense", "narrow", "encoder"):
        Path(name, "model.safetensors").touch()
    checkpoint = Path("full", "step-00000001")
    checkpoint.mkdir(parents=True)
    state = dict(identity={}, step=1, position=1, files={})
    (checkpoint / "state.json").write_text(json.dumps(state))


def error_line(arguments, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["fsdp2_moe.py", "--device", "cpu", "--seq-len", "32", *arguments])
    with pytest.raises(SystemExit) as exit:
        example.main()
    assert exit.value.code == 2
    assert not dist.is_initialized()
    lines = [line for line in capsys.readouterr().err.splitlines() if "[PATCH]" not in line]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[" ".join(a) for a, _ in BAD_ARGUMENTS])
def test_bad_input_is_one_clear_line(arguments, message, inputs, monkeypatch, capsys):
    line = error_line(arguments, monkeypatch, capsys)
    assert line.startswith("error: ")
    assert re.search(message, line), line


def test_a_world_that_does_not_fit_the_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = example.World(rank=5, local_rank=1, size=8, local_size=4)
    with pytest.raises(example.UserError, match="4 processes on this node, but 2 cuda devices are visible"):
        example.choose_device("cuda", world)


def test_a_check_starts_no_training(train, tmp_path):
    assert train("--check", "--save", tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


# Model and step


def test_new_weights_do_not_depend_on_how_they_are_made(process_group):
    model, _ = built()
    reference = transformers.AutoModelForCausalLM.from_config(model.config)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        values = parameter.detach().full_tensor()
        assert values.shape == expected[name].shape
        assert values.std().item() == pytest.approx(expected[name].detach().std().item(), rel=0.2, abs=1e-12), name
        assert values.mean().item() == pytest.approx(expected[name].detach().mean().item(), abs=2e-3), name
    for (name, buffer), (_, other) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_loss_and_gradient_are_those_of_the_mean_over_all_tokens(grad_accum, process_group):
    model, args = built("--experts-implementation", "grouped_mm")
    reference = transformers.AutoModelForCausalLM.from_config(model.config, experts_implementation="eager")
    reference.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()}, strict=False)
    # Micro-batches of different sizes: the mean is over tokens, not over micro-batches.
    batches = [torch.randint(0, 257, (1 + 2 * i, 33)) for i in range(grad_accum)]
    losses = [
        F.cross_entropy(reference(input_ids=b[:, :-1]).logits.flatten(0, 1), b[:, 1:].flatten(), reduction="none")
        for b in batches
    ]
    expected = torch.cat(losses).mean()
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    loss, grad_norm = example.train_step(model, optimizer, batches, 1e9, torch.device("cpu"))
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert grad_norm == pytest.approx(norm.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        actual = before[name] - parameter.full_tensor()
        torch.testing.assert_close(actual, gradients[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_gradient_is_clipped(process_group):
    model, args = built()
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, norm = example.train_step(model, optimizer, [torch.randint(0, 257, (2, 33))], 0.5, torch.device("cpu"))
    moved = torch.stack([(before[name] - p.full_tensor()).norm() for name, p in model.named_parameters()]).norm()
    assert norm > 1
    assert moved.item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(("layers", "trained"), [("attention", "attn"), ("experts", "experts"), ("all", "")])
def test_lora_trains_adapters_and_nothing_else(layers, trained, process_group):
    model, _ = built("--lora", layers)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    example.train_step(model, optimizer, [torch.randint(0, 257, (2, 33))], 1.0, torch.device("cpu"))
    changed = set()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        if not torch.equal(before[name], parameter.full_tensor()):
            changed.add(name)
    # B starts at zero, so that A has no gradient in the first step.
    assert changed == {name for name in before if "lora_B" in name}
    assert changed and all(trained in name for name in changed)


# Whole runs


def test_a_run_prints_and_logs_what_it_does(train, tmp_path):
    log = tmp_path / "new" / "log.txt"
    output = train("--steps", 8, "--log-file", log, "--batch-size", 4, "--dtype", "bfloat16")
    lines = output.splitlines()
    assert lines[0] == "device=cpu backend=gloo world_size=1 dtype=bfloat16"
    assert lines[1] == "model=tiny (Qwen3MoeForCausalLM) parameters=561,920 trainable=561,920"
    assert lines[2] == "experts=grouped_mm patch=off: torch_npu is not installed"
    steps = losses(output)
    assert list(steps) == list(range(1, 9))
    assert 5 < float(steps[1][0]) < 6 and float(steps[8][0]) < float(steps[1][0]) - 1
    assert lines[-1].startswith("mean_step_time=") and lines[-1].endswith("(without the first step)")
    assert losses(log.read_text()) == steps


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts_that_never_call_the_patched_function_are_named(implementation, train):
    output = train("--steps", 1, "--experts-implementation", implementation)
    line = f"patch=without effect: {implementation} experts never call transformers' _grouped_mm"
    assert line in output


def test_ways_to_the_same_numbers(train):
    expected = losses(train("--steps", 3))
    assert losses(train("--steps", 3)) == expected
    assert losses(train("--steps", 3, "--activation-checkpointing")) == expected
    accumulated = losses(train("--steps", 3, "--batch-size", 1, "--grad-accum", 2))
    eager = losses(train("--steps", 3, "--experts-implementation", "eager"))
    for steps in (accumulated, eager):
        assert_close(steps, expected, rel=1e-4)
    assert losses(train("--steps", 1, "--seed", 1))[1] != expected[1]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """A pretrained model as users have one: weights, tied to the output layer, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    vocabulary = {"<eos>": 0, "<unk>": 1, "def": 2, "import": 3, "self": 4, "(": 5, ")": 6, ":": 7}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)
    config = transformers.MixtralConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        tie_word_embeddings=True,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(path)
    return path


def test_a_model_from_a_directory_with_its_tokenizer(model_directory, train):
    output = train("--model", model_directory, "--steps", 3, "--lr", 1e-2)
    assert "(MixtralForCausalLM)" in output
    steps = losses(output)
    assert float(steps[3][0]) < float(steps[1][0]) < 4
    # The first layer of three is that of the whole model.
    assert len(losses(train("--model", model_directory, "--steps", 1, "--num-layers", 1, "--lora", "all"))) == 1


# Checkpoints


@pytest.mark.parametrize("lora", [[], ["--lora", "all"]], ids=["full", "lora"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(lora, train, tmp_path):
    expected = losses(train("--steps", 5, *lora))
    saved = train("--steps", 3, "--save", tmp_path / "c", "--save-every", 2, "--keep", 1, *lora)
    assert losses(saved) == {step: expected[step] for step in (1, 2, 3)}
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000003"]
    output = train("--steps", 5, "--resume", tmp_path / "c", *lora)
    assert f"resumed from {tmp_path}/c/step-00000003: step 3 of 5" in output
    assert losses(output) == {step: expected[step] for step in (4, 5)}


def test_an_incomplete_checkpoint_is_never_taken(train, tmp_path):
    expected = losses(train("--steps", 8))
    run = ["--steps", 6, "--save", tmp_path, "--save-every", 1, "--keep", 6]
    train(*run)
    checkpoints = [tmp_path / f"step-{step:08d}" for step in range(1, 7)]
    (checkpoints[5]).rename(f"{checkpoints[5]}.tmp")
    (checkpoints[4] / "state.json").write_text('{"step": 5, "pos')
    os.truncate(checkpoints[3] / "__0_0.distcp", 1000)
    (checkpoints[2] / ".metadata").unlink()
    output = train("--steps", 8, "--save", tmp_path, "--save-every", 2, "--keep", 1, "--resume")
    for path, reason in zip(
        reversed(checkpoints[2:]),
        [".tmp was not finished", " is incomplete (", " is incomplete (wrong size: __0_0", " is incomplete ("],
        strict=True,
    ):
        assert f"ignored: {path}{reason}" in output
    assert f"resumed from {checkpoints[1]}: step 2 of 8" in output
    assert losses(output) == {step: expected[step] for step in range(3, 9)}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]
    for path in tmp_path.iterdir():
        (path / "state.json").unlink()
    with pytest.raises(example.UserError, match=r"there is no complete checkpoint; .*step-00000008 is incomplete"):
        train("--resume", tmp_path)


def test_a_checkpoint_of_another_run_is_refused(train, tmp_path):
    train("--steps", 2, "--save", tmp_path)
    for arguments, message in [
        (["--seq-len", 16], "seq_len 32, not 16"),
        (["--seed", 4], "seed 0, not 4"),
        (["--num-layers", 1], "parameters 561920, not "),
        (["--lora", "all"], "lora None, not all 8"),
        (["--data", Path(__file__)], "data .*, not "),
    ]:
        with pytest.raises(example.UserError, match=f"does not fit this run: it was made with {message}"):
            train("--resume", tmp_path, *arguments)
    # Known before anything starts, but for the data, of which a check reads no more than it needs.
    with pytest.raises(example.UserError, match="seed 0, not 4"):
        train("--resume", tmp_path, "--seed", 4, "--check")


# Two ranks


@pytest.fixture(scope="module")
def reference(tmp_path_factory, cpu_env, text_directory):
    """The losses of two ranks that nobody disturbs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [EXAMPLES / "fsdp2_moe.py", *SMALL, "--data", text_directory, "--steps", "12"]
    env = cpu_env | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "world_size=2" in result.stdout
    return losses(result.stdout)


@pytest.mark.slow
def test_two_ranks_compute_what_one_rank_computes(reference, train):
    alone = losses(train("--batch-size", 4, "--steps", 12))
    assert float(reference[12][0]) < float(reference[1][0]) - 1
    assert_close(alone, reference, rel=2e-3)


@pytest.mark.slow
def test_killed_at_any_moment_a_run_resumes(reference, torchrun, train, text_directory, tmp_path):
    arguments = [*SMALL, "--data", text_directory, "--save", "c", "--save-every", 1, "--steps", 12]
    run = torchrun(EXAMPLES / "fsdp2_moe.py", *arguments)
    run.wait_for_step(4)
    for pid in run.pids():
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    run.assert_nothing_is_left()
    killed = losses(run.stdout)
    assert 12 not in killed
    assert killed == {step: reference[step] for step in killed}
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    # The newest checkpoint is damaged on top of that.
    newest = max(path for path in (tmp_path / "c").iterdir() if path.suffix != ".tmp")
    os.truncate(newest / "__1_0.distcp", 10)
    resumed = torchrun(EXAMPLES / "fsdp2_moe.py", *arguments, "--resume")
    assert resumed.wait() == 0, resumed.stderr
    first = int(newest.name.removeprefix("step-"))
    assert f"ignored: {Path('c', newest.name)} is incomplete" in resumed.stdout
    assert losses(resumed.stdout) == {step: reference[step] for step in range(first, 13)}
    resumed.assert_nothing_is_left()
    # One rank goes on where two stopped, on the same data.
    alone = losses(train("--resume", tmp_path / "copy", "--batch-size", 4, "--steps", 12))
    assert list(alone) == list(range(first + 1, 13))
    assert_close(alone, {step: reference[step] for step in alone}, rel=2e-3)


@pytest.mark.slow
def test_the_traceback_of_the_rank_that_failed_is_what_is_seen(torchrun, text_directory, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(EXAMPLES)!r})
        import fsdp2_moe
        import torch.distributed as dist

        original, calls = fsdp2_moe.train_step, []

        def train_step(*args):
            calls.append(1)
            if len(calls) == 3 and dist.get_rank() == 1:
                raise ArithmeticError("broken on purpose")
            return original(*args)

        fsdp2_moe.train_step = train_step
        fsdp2_moe.main()
        """)
    )
    run = torchrun(script, *SMALL, "--data", text_directory, "--steps", 100000)
    assert run.wait(60) != 0
    run.assert_nothing_is_left()
    assert list(losses(run.stdout)) == [1, 2]
    root_cause = run.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert "rank      : 1" in root_cause
    assert 'raise ArithmeticError("broken on purpose")' in root_cause


@pytest.mark.slow
def test_bad_input_ends_all_ranks(torchrun, tmp_path):
    (tmp_path / "small.txt").write_text("too small for two ranks")
    run = torchrun(EXAMPLES / "fsdp2_moe.py", *SMALL, "--data", "small.txt")
    assert run.wait(60) != 0
    run.assert_nothing_is_left()
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "24 tokens are fewer than one batch, 129 = 2 ranks x" in errors[0]
