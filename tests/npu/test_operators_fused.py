# SPDX-License-Identifier: Apache-2.0
"""Fused operators of an NPU against compositions on the CPU: attention, MoE, lists of tensors, optimizer steps."""

import math
import unittest
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_npu
from parameterized import parameterized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def label(function, number: int, param) -> str:
    return f"{function.__name__}_{number}_{param.args[0]}"


def compare(
    case: unittest.TestCase,
    npu: Callable,
    cpu: Callable,
    leaves: list[torch.Tensor],
    others: tuple = (),
    tolerance: float | None = None,
) -> None:
    """`npu` on the device in the leaves' dtype, `cpu` in float32: the outputs and the gradients of the leaves."""
    dtype = leaves[0].dtype
    tolerance = tolerance or TOLERANCE[dtype]
    results = []
    cotangent = None
    for function, device in ((npu, "npu"), (cpu, "cpu")):
        inputs = [(x.to(device) if device == "npu" else x.float().clone()).requires_grad_() for x in leaves]
        rest = [x.to(device) if isinstance(x, torch.Tensor) else x for x in others]
        output = function(*inputs, *rest)
        if cotangent is None:
            cotangent = torch.randn(output.shape).to(dtype)
        output.backward(cotangent.to(device=device, dtype=output.dtype))
        results.append([output.detach().cpu(), *(x.grad.cpu() for x in inputs)])
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(
            actual.float(),
            expected.float(),
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda text, i=i: f"output or gradient {i}: {text}",
        )


def qkv(dtype: torch.dtype, batch=2, heads=4, kv_heads=2, rows=5, columns=5, size=8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((batch, heads, rows, size), (batch, kv_heads, columns, size), (batch, kv_heads, columns, size))
    return [torch.randn(shape).to(dtype) for shape in shapes]


class ScaledDotProductAttentionTest(unittest.TestCase):
    @parameterized.expand([(str(dtype).split(".")[1], dtype) for dtype in FLOATS], name_func=label)
    def test_masks(self, _: str, dtype: torch.dtype) -> None:
        lower = torch.ones(5, 5).tril().bool()
        padded = torch.ones(2, 1, 5, 5).bool()
        padded[1, :, :, :2] = False
        for arguments in (
            {},
            {"is_causal": True},
            {"attn_mask": lower},
            {"attn_mask": torch.zeros(5, 5).masked_fill(~lower, -1e4)},
            {"attn_mask": padded & lower},
            {"attn_mask": (padded & lower).expand(2, 4, 5, 5)},
            {"attn_mask": padded[:, :, :1]},
            {"scale": 0.3},
        ):
            with self.subTest(arguments=list(arguments)):

                def attention(q, k, v, arguments=arguments):
                    moved = dict(arguments)
                    if (mask := arguments.get("attn_mask")) is not None:
                        moved["attn_mask"] = mask.to(q.device, q.dtype if mask.is_floating_point() else None)
                    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **moved)

                compare(self, attention, attention, qkv(dtype))

    def test_lengths_differ(self) -> None:
        def attention(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        compare(self, attention, attention, qkv(torch.float32, rows=3, columns=7))

    def test_transposed_heads(self) -> None:
        """As transformers hands them over: [B, S, N, D] memory seen as [B, N, S, D]."""

        def attention(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        torch.manual_seed(0)
        compare(self, attention, attention, [torch.randn(2, 6, 3, 8) for _ in range(3)])

    def test_dropout(self) -> None:
        torch.manual_seed(0)
        q = torch.zeros(2, 2, 16, 8, device="npu", requires_grad=True)
        v = torch.eye(16, device="npu").expand(2, 2, 16, 16)
        weights = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        kept = weights != 0
        torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 2 / 16))
        self.assertAlmostEqual(kept.float().mean().item(), 0.5, delta=0.1)


def reference_attention(q, k, v, mask=None, pse=None, scale=1.0):
    """softmax(mask(scale (q k^T + pse))) v for [B, N, S, D] and a mask that is True where a score is left out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3)
    if pse is not None:
        scores = scores + pse
    scores = scores * scale
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


class FusionAttentionTest(unittest.TestCase):
    @parameterized.expand([(layout, layout) for layout in ("BNSD", "BSND", "BSH", "SBH")], name_func=label)
    def test_layouts(self, _: str, layout: str) -> None:
        def pack(x):
            if layout == "BSND":
                return x.transpose(1, 2)
            if layout == "BSH":
                return x.transpose(1, 2).flatten(2)
            return x.permute(2, 0, 1, 3).flatten(2) if layout == "SBH" else x

        def npu(q, k, v):
            return torch_npu.npu_fusion_attention(pack(q), pack(k), pack(v), 4, layout, scale=0.5)[0]

        def cpu(q, k, v):
            return pack(reference_attention(q, k, v, scale=0.5))

        for dtype in FLOATS:
            compare(self, npu, cpu, qkv(dtype))

    def test_statistics(self) -> None:
        q, k, v = qkv(torch.float32, kv_heads=4)
        out = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 4, "BNSD", scale=0.5)
        scores = q @ k.transpose(2, 3) * 0.5
        row_max = scores.amax(-1, keepdim=True)
        torch.testing.assert_close(out[1].cpu(), row_max.expand(2, 4, 5, 8))
        torch.testing.assert_close(
            out[2].cpu(), (scores - row_max).exp().sum(-1, keepdim=True).expand(2, 4, 5, 8), rtol=1e-5, atol=1e-5
        )

    @parameterized.expand([("sparse_2", 2), ("sparse_3", 3), ("sparse_4", 4)], name_func=label)
    def test_sparse_modes(self, _: str, mode: int) -> None:
        compressed = torch.ones(2048, 2048).triu(1).bool()
        for rows, columns in ((5, 5), (3, 6)):
            i, j = torch.arange(rows).view(-1, 1), torch.arange(columns)
            shift = 0 if mode == 2 else columns - rows
            mask = j > i + shift + (1 if mode == 4 else 0)
            if mode == 4:
                mask = mask | (j < i + shift - 2)

            def npu(q, k, v, mask=mask):
                return torch_npu.npu_fusion_attention(
                    q,
                    k,
                    v,
                    4,
                    "BNSD",
                    atten_mask=compressed.npu(),
                    scale=0.5,
                    sparse_mode=mode,
                    pre_tockens=2,
                    next_tockens=1,
                )[0]

            compare(
                self,
                npu,
                lambda q, k, v, mask=mask: reference_attention(q, k, v, mask, scale=0.5),
                qkv(torch.float32, rows=rows, columns=columns),
            )

    def test_position_shift(self) -> None:
        torch.manual_seed(1)
        pse = torch.randn(2, 4, 5, 5)

        def npu(q, k, v, pse):
            return torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", pse=pse, scale=0.5)[0]

        def cpu(q, k, v, pse):
            return reference_attention(q, k, v, pse=pse, scale=0.5)

        compare(self, npu, cpu, qkv(torch.float32), (pse,))

    def test_sink(self) -> None:
        torch.manual_seed(1)
        sink = torch.randn(4)

        def npu(q, k, v, sink):
            return torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.5, sink=sink)[0]

        def cpu(q, k, v, sink):
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            scores = torch.cat((q @ k.transpose(2, 3) * 0.5, sink.view(1, 4, 1, 1).expand(2, 4, 5, 1)), -1)
            return scores.softmax(-1)[..., :-1] @ v

        compare(self, npu, cpu, [*qkv(torch.float32), sink])

    def test_rows_without_a_score_give_zeros(self) -> None:
        q, k, v = qkv(torch.float32)
        mask = torch.zeros(5, 5).bool()
        mask[2] = True
        out = torch_npu.npu_fusion_attention(
            q.npu(), k.npu(), v.npu(), 4, "BNSD", atten_mask=mask.npu(), inner_precise=2
        )[0].cpu()
        self.assertEqual(out[:, :, 2].abs().max().item(), 0)
        torch.testing.assert_close(out, reference_attention(q, k, v, mask), rtol=1e-5, atol=1e-5)
        out = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 4, "BNSD", atten_mask=mask.npu())[0].cpu()
        torch.testing.assert_close(out[:, :, 2], v.mean(2).repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)

    @parameterized.expand([("plain", ""), ("tnd", "TND")], name_func=label)
    def test_packed_sequences(self, _: str, softmax_layout: str) -> None:
        q_ends, kv_ends = [3, 3, 8], [4, 6, 10]
        torch.manual_seed(0)
        leaves = [torch.randn(8, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)]
        compressed = torch.ones(2048, 2048).triu(1).bool()

        def npu(q, k, v):
            return torch_npu.npu_fusion_attention(
                q,
                k,
                v,
                4,
                "TND",
                atten_mask=compressed.npu(),
                scale=0.5,
                sparse_mode=3,
                actual_seq_qlen=q_ends,
                actual_seq_kvlen=kv_ends,
                softmax_layout=softmax_layout,
            )[0]

        def cpu(q, k, v):
            parts, q_first, kv_first = [], 0, 0
            for q_end, kv_end in zip(q_ends, kv_ends, strict=True):
                rows, columns = q_end - q_first, kv_end - kv_first
                if rows:
                    mask = torch.ones(rows, columns).triu(columns - rows + 1).bool()
                    one = [x.transpose(0, 1)[None] for x in (q[q_first:q_end], k[kv_first:kv_end], v[kv_first:kv_end])]
                    parts.append(reference_attention(*one, mask, scale=0.5)[0].transpose(0, 1))
                q_first, kv_first = q_end, kv_end
            return torch.cat(parts)

        compare(self, npu, cpu, leaves)

    def test_refusals(self) -> None:
        q, k, v = (x.npu() for x in qkv(torch.float32))
        mask = torch.zeros(5, 5, device="npu").bool()
        for message, arguments in (
            ("sparseMode is 5", {"atten_mask": mask, "sparse_mode": 5}),
            ("compressed mask of 2048 x 2048", {"atten_mask": mask, "sparse_mode": 2}),
            ("attenMask has shape", {"atten_mask": mask[:, :4]}),
            ("attenMask has dtype float32", {"atten_mask": mask.float()}),
            ("paddingMask", {"padding_mask": mask}),
            ("realShift has shape", {"pse": torch.zeros(2, 4, 5, 4, device="npu")}),
        ):
            with self.subTest(message), self.assertRaisesRegex(RuntimeError, message):
                torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", **arguments)
                torch.npu.synchronize()
        with self.assertRaisesRegex(RuntimeError, "dtypes float32, bfloat16"):
            torch_npu.npu_fusion_attention(q, k.bfloat16(), v, 4, "BNSD")
            torch.npu.synchronize()


def permuted(tokens, indices):
    order = indices.flatten().argsort(stable=True)
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    return tokens[order // top_k]


class MoeTest(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)
        self.indices = torch.stack([torch.randperm(8)[:2] for _ in range(6)])

    def test_permute(self) -> None:
        for dtype in FLOATS:
            for kind in (torch.int64, torch.int32):
                indices = self.indices.to(kind)
                for shaped in (indices, indices[:, 0]):
                    compare(
                        self,
                        lambda x, i: torch_npu.npu_moe_token_permute(x, i)[0],
                        permuted,
                        [torch.randn(6, 16).to(dtype)],
                        (shaped,),
                    )

    def test_sorted_indices_are_the_inverse_permutation(self) -> None:
        tokens = torch.randn(6, 16)
        rows, position = torch_npu.npu_moe_token_permute(tokens.npu(), self.indices.npu())
        self.assertEqual(position.dtype, torch.int32)
        torch.testing.assert_close(rows.cpu()[position.cpu().long()], tokens.repeat_interleave(2, 0))

    def test_dropped_tokens(self) -> None:
        compare(
            self,
            lambda x, i: torch_npu.npu_moe_token_permute(x, i, num_out_tokens=5)[0],
            lambda x, i: permuted(x, i)[:5],
            [torch.randn(6, 16)],
            (self.indices,),
        )

    def test_unpermute(self) -> None:
        position = self.indices.flatten().argsort(stable=True).argsort()

        def cpu(rows, probs, position):
            return (rows[position.long()].unflatten(0, (6, 2)) * probs.unsqueeze(-1)).sum(1)

        for dtype in FLOATS:
            rows, probs = torch.randn(12, 16).to(dtype), torch.rand(6, 2).to(dtype)
            compare(
                self,
                lambda r, p, i: torch_npu.npu_moe_token_unpermute(r, i, p),
                cpu,
                [rows, probs],
                (position.int(),),
            )
            compare(
                self,
                lambda r, i: torch_npu.npu_moe_token_unpermute(r, i),
                lambda r, i: r[i.long()],
                [rows],
                (position.int(),),
            )

    def test_permute_then_unpermute_is_the_identity(self) -> None:
        def npu(x, indices):
            rows, position = torch_npu.npu_moe_token_permute(x, indices)
            return torch_npu.npu_moe_token_unpermute(rows, position, torch.full((6, 2), 0.5, device="npu"))

        compare(self, npu, lambda x, i: x * 1, [torch.randn(6, 16)], (self.indices,))

    def test_refusals(self) -> None:
        tokens = torch.randn(6, 16, device="npu")
        indices = self.indices.npu()
        position = torch.arange(12, dtype=torch.int32, device="npu")
        many = torch.zeros(6, 513, dtype=torch.int32, device="npu")
        for message, call in (
            ("topK is 513", lambda: torch_npu.npu_moe_token_permute(tokens, many)),
            ("indices has dtype float32", lambda: torch_npu.npu_moe_token_permute(tokens, indices.float())),
            ("tokens has dtype int64", lambda: torch_npu.npu_moe_token_permute(tokens.long(), indices)),
            ("paddedMode", lambda: torch_npu.npu_moe_token_permute(tokens, indices, padded_mode=True)),
            ("should be 2 dimensional", lambda: torch_npu.npu_moe_token_permute(tokens[0], indices)),
            (
                "sortedIndices has dtype int64",
                lambda: torch_npu.npu_moe_token_unpermute(tokens, position.long()),
            ),
        ):
            with self.subTest(message), self.assertRaisesRegex((RuntimeError, ValueError), message):
                call()
                torch.npu.synchronize()

    def test_swiglu(self) -> None:
        def cpu(x, dim):
            gate, up = x.chunk(2, dim)
            return F.silu(gate) * up

        for dtype in FLOATS:
            for dim in (-1, 0):
                compare(self, torch_npu.npu_swiglu, cpu, [torch.randn(6, 8).to(dtype)], (dim,))
        compare(self, lambda x: torch_npu.npu_swiglu(x.t()), lambda x: cpu(x.t(), -1), [torch.randn(8, 6)])

    def test_rms_norm(self) -> None:
        for dtype in FLOATS:
            compare(
                self,
                lambda x, w: torch_npu.npu_rms_norm(x, w, epsilon=1e-5)[0],
                lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
                [torch.randn(2, 5, 8).to(dtype), torch.rand(8).to(dtype)],
            )
        x, w = torch.randn(2, 5, 8), torch.rand(8)
        rstd = torch_npu.npu_rms_norm(x.npu(), w.npu(), epsilon=1e-5)[1].cpu()
        torch.testing.assert_close(rstd, (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())

    def test_add_rms_norm(self) -> None:
        x, y, w = torch.randn(2, 8), torch.randn(2, 8), torch.rand(8)
        out, _, total = torch_npu.npu_add_rms_norm(x.npu(), y.npu(), w.npu())
        torch.testing.assert_close(total.cpu(), x + y)
        torch.testing.assert_close(out.cpu(), F.rms_norm(x + y, (8,), w, 1e-6))

    @parameterized.expand([("half", "half"), ("interleave", "interleave")], name_func=label)
    def test_rotary_mul(self, _: str, mode: str) -> None:
        def turn(x):
            if mode == "half":
                a, b = x.chunk(2, -1)
                return torch.cat((-b, a), -1)
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

        for dtype in FLOATS:
            for shape in ((1, 1, 5, 8), (2, 1, 5, 8)):
                leaves = [torch.randn(2, 3, 5, 8), torch.randn(shape), torch.randn(shape)]
                compare(
                    self,
                    lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, rotary_mode=mode),
                    lambda x, c, s: x * c + turn(x) * s,
                    [x.to(dtype) for x in leaves],
                )

    def test_gating(self) -> None:
        x = torch.randn(5, 8)
        weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), k=2)
        expected = x.softmax(-1).topk(2)
        torch.testing.assert_close(weights.cpu(), expected.values)
        torch.testing.assert_close(experts.cpu().long(), expected.indices)
        torch.testing.assert_close(rows.cpu().long(), torch.arange(10).view(2, 5).t())

    def test_compute_expert_tokens(self) -> None:
        experts = torch.tensor([0, 0, 2, 2, 2, 5], dtype=torch.int32)
        ends = torch_npu.npu_moe_compute_expert_tokens(experts.npu(), 6).cpu()
        self.assertEqual(ends.tolist(), [2, 2, 5, 5, 5, 6])


def tensors(dtype: torch.dtype, seed: int = 0, positive: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    result = [torch.randn(shape) for shape in ((3, 4), (5,), (), (2, 3, 2), (1, 1))] * 11  # more than one launch takes
    return [(x.abs() + 0.1 if positive else x).to(dtype, copy=True) for x in result]


UNARY = "abs cos cosh erf erfc exp expm1 log log10 log1p log2 neg reciprocal sigmoid sign sin sinh sqrt tan tanh"
ROUND = "floor ceil round trunc frac"
BINARY = "add sub mul div maximum minimum pow clamp_min clamp_max"


class ForeachTest(unittest.TestCase):
    def compare(self, name: str, dtype: torch.dtype, *arguments, positive: bool = False, first: bool = True) -> None:
        def move(x, device):
            if isinstance(x, torch.Tensor):
                return x.to(device)
            return [move(item, device) for item in x] if isinstance(x, list) else x

        function = getattr(torch, f"_foreach_{name}")
        x = tensors(dtype, positive=positive)
        expected = function(*([x] if first else []), *arguments)
        actual = function(*([move(x, "npu")] if first else []), *(move(a, "npu") for a in arguments))
        tolerance = TOLERANCE[dtype]
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance, equal_nan=True)
        in_place = getattr(torch, f"_foreach_{name}_", None)
        if in_place is not None and first:
            y = move(x, "npu")
            in_place(y, *(move(a, "npu") for a in arguments))
            for a, b in zip(y, expected, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance, equal_nan=True)

    @parameterized.expand([(name, name) for name in (UNARY.split() + ROUND.split())], name_func=label)
    def test_unary(self, _: str, name: str) -> None:
        for dtype in FLOATS:
            self.compare(name, dtype, positive=name.startswith(("log", "sqrt", "reciprocal")))

    @parameterized.expand([(name, name) for name in BINARY.split()], name_func=label)
    def test_binary(self, _: str, name: str) -> None:
        for dtype in FLOATS:
            with self.subTest(dtype=dtype):
                other = tensors(dtype, 1, positive=True)
                self.compare(name, dtype, other, positive=True)
                self.compare(name, dtype, 0.5, positive=True)
                self.compare(name, dtype, [0.25 * (i + 1) for i in range(len(other))], positive=True)

    def test_scaled(self) -> None:
        for dtype in FLOATS:
            other = tensors(dtype, 1)
            for name in ("add", "sub"):
                function = getattr(torch, f"_foreach_{name}")
                actual = function([x.npu() for x in tensors(dtype)], [x.npu() for x in other], alpha=0.3)
                expected = function(tensors(dtype), other, alpha=0.3)
                for a, b in zip(actual, expected, strict=True):
                    torch.testing.assert_close(a.cpu(), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    def test_lerp(self) -> None:
        for dtype in FLOATS:
            self.compare("lerp", dtype, tensors(dtype, 1), 0.3)
            self.compare("lerp", dtype, tensors(dtype, 1), [x.sigmoid() for x in tensors(dtype, 2)])

    def test_pointwise(self) -> None:
        for dtype in FLOATS:
            second, third = tensors(dtype, 1), tensors(dtype, 2, positive=True)
            for name in ("addcmul", "addcdiv"):
                with self.subTest(name=name, dtype=dtype):
                    self.compare(name, dtype, second, third, 0.5)
                    self.compare(name, dtype, second, third, [0.1 * i for i in range(len(second))])

    def test_pow_of_a_scalar(self) -> None:
        self.compare("pow", torch.float32, 2.0, tensors(torch.float32), first=False)

    def test_norm(self) -> None:
        for dtype in FLOATS:
            for order in (1, 2, float("inf")):
                with self.subTest(dtype=dtype, order=order):
                    self.compare("norm", dtype, order)

    def test_zero_and_copy(self) -> None:
        for dtype in FLOATS:
            x = [t.npu() for t in tensors(dtype)]
            torch._foreach_copy_(x, [t.npu() for t in tensors(dtype, 1)])
            for a, b in zip(x, tensors(dtype, 1), strict=True):
                torch.testing.assert_close(a.cpu(), b)
            torch._foreach_zero_(x)
            self.assertTrue(all(not t.any() for t in x))

    def test_clip_grad_norm(self) -> None:
        for foreach in (True, False):
            for dtype in FLOATS:
                norms = []
                grads = []
                for device in ("npu", "cpu"):
                    parameters = [torch.nn.Parameter(x.to(device)) for x in tensors(dtype)]
                    for parameter, grad in zip(parameters, tensors(dtype, 1), strict=True):
                        parameter.grad = grad.to(device)
                    norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach).cpu())
                    grads.append([p.grad.cpu() for p in parameters])
                torch.testing.assert_close(norms[0], norms[1], rtol=TOLERANCE[dtype], atol=0)
                for a, b in zip(*grads, strict=True):
                    torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw_amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adamw_maximize": (torch.optim.AdamW, {"maximize": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}),
}


class OptimizerTest(unittest.TestCase):
    def steps(self, device: str, kind: type, options: dict, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(x.to(device)) for x in tensors(dtype)]
        optimizer = kind(parameters, lr=0.01, **options)
        for step in range(3):
            for parameter, grad in zip(parameters, tensors(dtype, step), strict=True):
                parameter.grad = grad.to(device)
            optimizer.step()
        return [p.detach().cpu() for p in parameters]

    @parameterized.expand([(name, *case) for name, case in OPTIMIZERS.items()], name_func=label)
    def test_steps(self, _: str, kind: type, options: dict) -> None:
        for foreach in (True, False):
            with self.subTest(foreach=foreach):
                actual = self.steps("npu", kind, {**options, "foreach": foreach})
                for a, b in zip(actual, self.steps("cpu", kind, {**options, "foreach": False}), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_half_precision(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            actual = self.steps("npu", torch.optim.AdamW, {"foreach": True, "eps": 1e-4}, dtype)
            expected = self.steps("cpu", torch.optim.AdamW, {"foreach": True, "eps": 1e-4}, dtype)
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    @parameterized.expand(
        [("plain", {}), ("amsgrad", {"amsgrad": True}), ("maximize", {"maximize": True})], name_func=label
    )
    def test_fused_adamw(self, _: str, options: dict) -> None:
        actual = self.steps("npu", torch.optim.AdamW, {**options, "fused": True})
        for a, b in zip(actual, self.steps("cpu", torch.optim.AdamW, options), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_gradient_scaler(self) -> None:
        for bad in (False, True):
            parameter = torch.nn.Parameter(torch.ones(4, device="npu"))
            optimizer = torch.optim.SGD([parameter], lr=1.0)
            scaler = torch.amp.GradScaler("npu", init_scale=8.0, growth_interval=1)
            scaler.scale((parameter * (math.inf if bad else 2.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            self.assertEqual(parameter.detach().cpu().tolist(), [1.0 if bad else -1.0] * 4)
            self.assertEqual(scaler.get_scale(), 4.0 if bad else 16.0)


if __name__ == "__main__":
    unittest.main()
