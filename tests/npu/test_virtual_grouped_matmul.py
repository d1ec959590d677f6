# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul of the virtual NPU: its results, what it refuses, what it leaves unwritten, what it copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E, K, N = 4, 8, 6
GROUPS = {
    "even": [2, 2, 2, 2],
    "uneven": [5, 1, 0, 2],
    "one": [0, 8, 0, 0],
    "last": [0, 0, 0, 8],
    "short": [1, 2, 0, 1],  # rows are left over
    "none": [0, 0, 0, 0],
}
ROWS = 8


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(dtype: torch.dtype, transposed: bool, device: str = "npu") -> torch.Tensor:
    weight = random(E, K, N, dtype=dtype, seed=1).to(device)
    return weight.mT.contiguous().mT if transposed else weight


def ends(counts: list[int], kind: int = 0) -> torch.Tensor:
    counts_tensor = torch.tensor(counts)
    return (counts_tensor if kind == 1 else counts_tensor.cumsum(0)).npu()


def gmm(x: Any, weight: Any, **kwargs: Any) -> Any:
    x, weight = ([v] if isinstance(v, torch.Tensor) else v for v in (x, weight))
    kwargs = {"split_item": 3, "group_type": 0} | kwargs
    results = torch_npu.npu_grouped_matmul(x, weight, **kwargs)
    return results[0] if kwargs["split_item"] >= 2 else results


def loop(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = x[: sum(counts)].split(counts)
    return torch.cat([(p.double() @ w.double()).to(x.dtype) for p, w in zip(parts, weight, strict=True)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [0, 1], ids=["ends", "counts"])
@pytest.mark.parametrize("groups", GROUPS)
def test_rows(groups: str, kind: int, transposed: bool, dtype: torch.dtype) -> None:
    counts = GROUPS[groups]
    x = random(ROWS, K, dtype=dtype)
    y = gmm(x.npu(), weights(dtype, transposed), group_list=ends(counts, kind), group_list_type=kind).cpu()
    assert y.shape == (ROWS, N) and y.dtype == dtype
    torch.testing.assert_close(y[: sum(counts)], loop(x, weights(dtype, False, "cpu"), counts))
    assert y[sum(counts) :].isnan().all(), "rows that belong to no group are not written by an NPU"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [0, 1], ids=["ends", "counts"])
@pytest.mark.parametrize("groups", GROUPS)
def test_contraction(groups: str, kind: int, dtype: torch.dtype) -> None:
    counts = GROUPS[groups]
    x, grad = random(ROWS, K, dtype=dtype), random(ROWS, N, dtype=dtype, seed=2)
    group_list = ends(counts, kind)
    y = gmm(x.npu().t(), grad.npu(), group_list=group_list, group_list_type=kind, group_type=2).cpu()
    pairs = zip(x[: sum(counts)].split(counts), grad[: sum(counts)].split(counts), strict=True)
    expected = torch.stack([(a.double().t() @ b.double()).to(dtype) for a, b in pairs])
    torch.testing.assert_close(y, expected)
    assert (y[torch.tensor(counts) == 0] == 0).all(), "a group without rows is filled with zeros"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    """2048 products of 1 added to 4096 in the dtype itself would be lost."""
    x = torch.ones(1, 4096, dtype=dtype)
    x[0, 0] = 4096
    weight = torch.ones(1, 4096, 1, dtype=dtype)
    y = gmm(x.npu(), weight.npu(), group_list=ends([1]))
    torch.testing.assert_close(y.cpu(), torch.full((1, 1), 8191.0).to(dtype), rtol=0, atol=0)


def test_no_rows() -> None:
    y = gmm(torch.empty(0, K, device="npu"), weights(torch.float32, False), group_list=ends([0] * E))
    assert y.shape == (0, N)
    x, grad = torch.empty(0, K, device="npu"), torch.empty(0, N, device="npu")
    y = gmm(x.t(), grad, group_list=ends([0] * E), group_type=2)
    assert y.shape == (E, K, N)
    assert y.isnan().all().item(), "CANN up to 8.5 leaves the result unwritten here"


def test_bias() -> None:
    for dtype in DTYPES:
        bias_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        x, bias = random(ROWS, K, dtype=dtype), random(E, N, dtype=bias_dtype, seed=3)
        y = gmm(x.npu(), weights(dtype, True), bias=[bias.npu()], group_list=ends([2] * E))
        weight = weights(dtype, False, "cpu").double()
        expected = x.double().view(E, 2, K) @ weight + bias.double().unsqueeze(1)
        torch.testing.assert_close(y.cpu(), expected.view(ROWS, N).to(dtype))


def test_lists() -> None:
    x, weight = random(ROWS, K), weights(torch.float32, False, "cpu")
    counts = GROUPS["uneven"]
    parts = [w.npu() for w in weight]
    expected = loop(x, weight, counts)
    y = gmm(x.npu(), parts, group_list=ends(counts))
    torch.testing.assert_close(y.cpu(), expected)

    half = [x.half().npu() for x in (x, *weight)]  # an integer list is the first version: no float32
    y = torch_npu.npu_grouped_matmul(half[:1], half[1:], group_list=[5, 6, 6, 8], split_item=3)[0]
    torch.testing.assert_close(y.cpu(), loop(x.half(), weight.half(), counts))
    several = torch_npu.npu_grouped_matmul(half[:1], half[1:], group_list=[5, 6, 6, 8], split_item=0)
    assert [len(y) for y in several] == counts
    torch.testing.assert_close(torch.cat(several).cpu(), loop(x.half(), weight.half(), counts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_add(dtype: torch.dtype) -> None:
    x, grad = random(ROWS, K, dtype=dtype), random(ROWS, N, dtype=dtype, seed=2)
    total = random(E, K, N, seed=3)
    counts = GROUPS["uneven"]
    actual = total.npu()
    torch_npu.npu_grouped_matmul_add_(actual, x.npu(), grad.npu(), ends(counts))
    pairs = zip(x.split(counts), grad.split(counts), strict=True)
    torch.testing.assert_close(actual.cpu(), total + torch.stack([a.float().t() @ b.float() for a, b in pairs]))
    before = actual.clone()
    torch_npu.npu_grouped_matmul_add_(actual, x[:0].npu(), grad[:0].npu(), ends([0] * E))
    assert torch.equal(actual, before)


def strided(*shape: int) -> torch.Tensor:
    """As PyTorch makes it of [K, 1].t(): one row, contiguous, but with the strides of a transposed matrix."""
    return torch.ones(shape[1], shape[0], device="npu").t()


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device="npu", dtype=dtype)


LIST = [2, 4, 6, 8]
INT64 = {"group_list": torch.tensor(LIST)}
REFUSED: dict[str, Callable[[], tuple[Any, Any, dict[str, Any], str]]] = {
    "group list int32": lambda: (x_of(8, K), x_of(E, K, N), {"group_list": torch.tensor(LIST).int()}, "only int64"),
    "group list float": lambda: (x_of(8, K), x_of(E, K, N), {"group_list": torch.tensor(LIST).float()}, "only int64"),
    "group list 2-D": lambda: (x_of(8, K), x_of(E, K, N), {"group_list": torch.tensor([LIST])}, "1 dimension"),
    "group list too short": lambda: (
        x_of(8, K),
        x_of(E, K, N),
        {"group_list": torch.tensor([4, 8])},
        "2 entries.*4 groups",
    ),
    "group list too long": lambda: (x_of(8, K), x_of(E, K, N), {"group_list": torch.tensor([1, *LIST])}, "5 entries"),
    "group type none": lambda: (x_of(8, K), x_of(E, K, N), INT64 | {"group_type": None}, "group_type"),
    "group type n": lambda: (x_of(8, K), x_of(E, K, N), INT64 | {"group_type": 1}, "group type|group_type"),
    "group type unknown": lambda: (x_of(8, K), x_of(E, K, N), INT64 | {"group_type": 3}, "group type|group_type"),
    "single y, no groups": lambda: (x_of(8, K), x_of(E, K, N), INT64 | {"group_type": -1}, "split_item"),
    "split item unknown": lambda: (x_of(8, K), x_of(E, K, N), INT64 | {"split_item": 4}, "split_item"),
    "several y": lambda: (x_of(8, K), [x_of(K, N) for _ in range(E)], INT64 | {"split_item": 0}, "several y"),
    "pairs": lambda: (x_of(8, K), x_of(E, K, N), INT64 | {"group_list_type": 2}, "group_list_type"),
    "activation": lambda: (x_of(8, K), x_of(E, K, N), INT64 | {"act_type": 1}, "act_type"),
    "mixed dtypes": lambda: (x_of(8, K), x_of(E, K, N, dtype=torch.bfloat16), INT64, "float32.*bfloat16"),
    "float64": lambda: (x_of(8, K, dtype=torch.float64), x_of(E, K, N, dtype=torch.float64), INT64, "float64"),
    "int64": lambda: (x_of(8, K, dtype=torch.int64), x_of(E, K, N, dtype=torch.int64), INT64, "int64"),
    "other result dtype": lambda: (
        x_of(8, K, dtype=torch.bfloat16),
        x_of(E, K, N, dtype=torch.bfloat16),
        INT64 | {"output_dtype": torch.float32},
        "y.*float32, expected bfloat16",
    ),
    "bfloat16 bias": lambda: (
        x_of(8, K, dtype=torch.bfloat16),
        x_of(E, K, N, dtype=torch.bfloat16),
        INT64 | {"bias": [torch.ones(E, N, dtype=torch.bfloat16)]},
        "bias.*expected float32",
    ),
    "bias of another shape": lambda: (
        x_of(8, K),
        x_of(E, K, N),
        INT64 | {"bias": [torch.ones(E, N + 1)]},
        "n does not match",
    ),
    "x 3-D": lambda: (x_of(2, 4, K), x_of(E, K, N), INT64, "2 dimensions"),
    "x 1-D": lambda: (x_of(K), x_of(E, K, N), INT64, "2 dimensions"),
    "inner sizes": lambda: (x_of(8, K + 1), x_of(E, K, N), INT64, "k does not match"),
    "k too large": lambda: (x_of(8, 65536), x_of(E, 65536, 1), INT64, "65535"),
    "n too large": lambda: (x_of(8, 1), x_of(E, 1, 65536), INT64, "65535"),
    "too many groups": lambda: (
        x_of(8, 2),
        x_of(1025, 2, 2),
        {"group_list": torch.full((1025,), 8)},
        "1025 entries, at most 1024",
    ),
    "too many tensors": lambda: (
        x_of(8, 2),
        [x_of(2, 2) for _ in range(129)],
        {"group_list": torch.full((129,), 8)},
        "129 tensors, at most 128",
    ),
    "x transposed": lambda: (x_of(K, 8).t(), x_of(E, K, N), INT64, "x can not be transposed"),
    "x one row with strides of a transpose": lambda: (strided(1, K), x_of(E, K, N), INT64, "x can not be transposed"),
    "weights half transposed": lambda: (
        x_of(8, K),
        [x_of(K, N), x_of(N, K).t()],
        {"group_list": torch.tensor([4, 8])},
        "all weights are transposed or none",
    ),
    "k groups, x packed": lambda: (x_of(K, 8), x_of(8, N), INT64 | {"group_type": 2}, "x must be the transpose"),
    "k groups, x a slice": lambda: (
        x_of(8, 2 * K)[:, :K].t(),
        x_of(8, N),
        INT64 | {"group_type": 2},
        "x must be the transpose",
    ),
    "k groups, weight transposed": lambda: (
        x_of(8, K).t(),
        x_of(N, 8).t(),
        INT64 | {"group_type": 2},
        "at the same time",
    ),
    "k groups, weight 3-D": lambda: (
        x_of(8, K).t(),
        x_of(E, 8, N),
        INT64 | {"group_type": 2},
        "2 dimensions|length of weight",
    ),
    "k groups, bias": lambda: (
        x_of(8, K).t(),
        x_of(8, N),
        INT64 | {"group_type": 2, "bias": [torch.ones(E, N)]},
        "no bias",
    ),
    "k groups, inner sizes": lambda: (x_of(8, K).t(), x_of(9, N), INT64 | {"group_type": 2}, "k does not match"),
    "k groups, m too large": lambda: (x_of(8, 65536).t(), x_of(8, 1), INT64 | {"group_type": 2}, "65535"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    x, weight, kwargs, message = REFUSED[case]()
    kwargs = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    if "bias" in kwargs:
        kwargs["bias"] = [b.npu() for b in kwargs["bias"]]
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        gmm(x, weight, **kwargs)
    torch.npu.synchronize()  # refused before anything reached the device, which goes on working


def test_refusal_names_the_operator_and_the_code() -> None:
    with pytest.raises(RuntimeError, match="(?s)(161002.*aclnnGroupedMatmulV5|aclnnGroupedMatmulV5.*161002)"):
        gmm(x_of(8, K), x_of(E, K, N), group_list=torch.tensor(LIST, dtype=torch.int32).npu())


def test_no_group_list() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        gmm(x_of(8, K), x_of(E, K, N))


def test_integer_list_refusals() -> None:
    x, weight = [x_of(8, K).half()], [x_of(K, N).half() for _ in range(2)]
    for group_list, message in [([4, 7], "last entry"), ([4, 6, 8], "3 entries")]:
        with pytest.raises(RuntimeError, match=message):
            torch_npu.npu_grouped_matmul(x, weight, group_list=group_list, split_item=3)
    with pytest.raises(RuntimeError, match="float32 is not supported"):
        torch_npu.npu_grouped_matmul([x_of(8, K)], [x_of(K, N)] * 2, group_list=[4, 8], split_item=3)


def test_one_by_one_counts_as_packed() -> None:
    y = gmm(x_of(1, 1), x_of(1, 1, 1), group_list=ends([1]))
    assert y.item() == 1
    y = gmm(x_of(1, 1).t(), x_of(1, 1), group_list=ends([1]), group_type=2)
    assert y.item() == 1


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: an error of the device stays with the process that caused it."""
    head = "import torch, torch_npu\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("group_list", "kind", "message"),
    [
        ([2, 9, 9, 9], 0, "only 8 rows"),
        ([2, 4, 3, 8], 0, "decreases"),
        ([-1, 4, 6, 8], 0, "decreases"),
        ([4, 4, 4, 4], 1, "only 8 rows"),
        ([4, -1, 4, 1], 1, "negative count"),
    ],
)
def test_values_that_an_npu_does_not_check_fail_the_device(group_list: list[int], kind: int, message: str) -> None:
    done = run(f"""
        x, w = torch.ones(8, 4, device="npu"), torch.ones(4, 4, 2, device="npu")
        y = torch_npu.npu_grouped_matmul([x], [w], group_list=torch.tensor({group_list}).npu(), split_item=3,
                                         group_type=0, group_list_type={kind})
        print("launched", flush=True)
        torch.npu.synchronize()
    """)
    assert done.returncode != 0
    assert "launched" in done.stdout, "the host does not look at values, so the error comes later"
    assert message in done.stderr and "aclnnGroupedMatmulV5" in done.stderr


def test_newer_cann_zero_fills_without_rows() -> None:
    done = run(
        """
        x, grad = torch.empty(0, 4, device="npu"), torch.empty(0, 2, device="npu")
        y = torch_npu.npu_grouped_matmul([x.t()], [grad], group_list=torch.zeros(3, dtype=torch.int64).npu(),
                                         split_item=3, group_type=2)[0]
        assert (y == 0).all().item()
        """,
        VIRTUAL_NPU_GMM_ZERO_EMPTY_K="1",
    )
    assert done.returncode == 0, done.stderr


def test_what_is_copied_shows_in_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = run(
        """
        x, ends = torch.ones(8, 4, device="npu"), torch.tensor([3, 8]).npu()
        packed, transposed = torch.ones(2, 4, 6, device="npu"), torch.ones(2, 6, 4, device="npu").mT
        chunk = torch.ones(2, 12, 4, device="npu").chunk(2, 1)[0].mT
        for weight in (packed, transposed, chunk):
            torch_npu.npu_grouped_matmul([x], [weight], group_list=ends, split_item=3, group_type=0)
        torch.npu.synchronize()
        """,
        VIRTUAL_NPU_TRACE=str(trace),
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    calls = [line for line in lines if line.get("name") == "aclnnGroupedMatmulV5" and line["kind"] == "op"]
    copies = [line for line in lines if line["kind"] == "internal_copy"]
    assert [call["inputs"][1]["strides"] for call in calls] == [[24, 6, 1], [24, 1, 4], [48, 1, 4]]
    assert [call["attrs"]["group_type"] for call in calls] == [0, 0, 0]
    assert [(copy["bytes"], copy["tensor"]["name"]) for copy in copies] == [(2 * 4 * 6 * 4, "weight")]
