"""`KVView` behaves like the full tensor, and the operations of attention never build the full tensor."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.kv.view import KVView, of_latents

BATCH, PER_INPUT, HEADS, PREFIX, SUFFIX, DIM = 2, 3, 2, 7, 4, 8
ROWS = BATCH * PER_INPUT
RANK, ROTATED = 6, 3
STORED = {"with suffix": True, "prefix only": False}


def stored(has_suffix, device, heads=HEADS, dim=DIM):
    """A KVView, and the full tensor it stands for."""
    prefix = torch.randn(BATCH, heads, PREFIX, dim, device=device)
    suffix = torch.randn(ROWS, heads, SUFFIX, dim, device=device) if has_suffix else None
    full = prefix.repeat_interleave(PER_INPUT, dim=0)
    return KVView.of(prefix, suffix, PER_INPUT), full if suffix is None else torch.cat([full, suffix], dim=2)


def made_of_latents(has_suffix, device):
    (latents, full), (rotated, full_rotated) = (stored(has_suffix, device, 1, dim) for dim in (RANK, ROTATED))
    weight = torch.randn(HEADS, 2 * DIM - ROTATED, RANK, device=device)
    made = torch.einsum("rtk,hdk->rhtd", full[:, 0], weight)
    keys = torch.cat([made[..., : DIM - ROTATED], full_rotated.expand(-1, HEADS, -1, -1)], dim=-1)
    views = of_latents(latents, rotated, weight, DIM - ROTATED)
    return [*zip(views, (keys, made[..., DIM - ROTATED :].contiguous()), strict=True)]


@pytest.fixture(params=[*STORED, *(f"latents, {name}" for name in STORED)])
def pair(request, device):
    kind, _, name = request.param.rpartition(", ")
    if kind:
        return made_of_latents(STORED[name], device)
    return stored(STORED[name], device), stored(STORED[name], device)


@pytest.fixture
def never_full(monkeypatch):
    def refuse(self):
        raise AssertionError("the full tensor was built")

    monkeypatch.setattr(KVView, "materialize", refuse)


def repeat_kv(x, group):
    rows, heads, length, dim = x.shape
    return x[:, :, None, :, :].expand(rows, heads, group, length, dim).reshape(rows, heads * group, length, dim)


def test_metadata_is_that_of_the_full_tensor(pair, never_full):
    (keys, full), _ = pair
    assert keys.shape == full.shape and keys.size(-2) == full.size(-2) and keys.dim() == 4
    assert (keys.dtype, keys.device, keys.numel(), len(keys)) == (full.dtype, full.device, full.numel(), len(full))
    assert keys.is_cuda == full.is_cuda and not keys.requires_grad
    assert "KVView" in repr(keys)


def scaled_dot_product(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def eager(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    return torch.matmul((scores + mask).softmax(-1), v)


def operators(q, k, v, mask):
    return (q @ k.mT.contiguous().transpose(-1, -2).transpose(-2, -1) + mask).softmax(-1) @ v.contiguous()


def folded(q, k, v, mask):
    shape = (q.shape[0] * q.shape[1], -1, q.shape[3])
    scores = torch.bmm(q.reshape(*shape), k.reshape(*shape).transpose(1, 2))
    weights = (scores.view(*q.shape[:2], 1, -1) + mask).softmax(-1).flatten(0, 1)
    return torch.bmm(weights, v.view(*shape)).view(q.shape)


def alibi(q, k, v, mask):
    shape = (q.shape[0] * q.shape[1], -1, q.shape[3])
    bias = torch.ones(shape[0], 1, k.shape[2], device=q.device)
    scores = bias.baddbmm(batch1=q.reshape(shape), batch2=k.reshape(shape).transpose(-1, -2), beta=0.5, alpha=0.2)
    weights = (scores.view(*q.shape[:2], 1, -1) + mask).softmax(-1).flatten(0, 1)
    return torch.bmm(weights, v.reshape(shape)).view(q.shape)


def einsum(q, k, v, mask):
    scores = torch.einsum("bsij,bsjk->bsik", q, k.transpose(2, 3))
    return torch.einsum("bsij,bsjk->bsik", (scores + mask).softmax(-1), v)


def permuted(q, k, v, mask):
    return (torch.matmul(q, k.permute(0, 1, 3, 2)) + mask).softmax(-1).matmul(v.to(torch.float32))


@pytest.mark.parametrize("attention", [scaled_dot_product, eager, operators, folded, alibi, einsum, permuted])
def test_attention_is_computed_on_the_parts(attention, pair, device, request):
    if attention is not operators:  # which asks for numbers next to each other
        request.getfixturevalue("never_full")
    (keys, full_keys), (values, full_values) = pair
    query = torch.randn(ROWS, HEADS, 1, DIM, device=device)
    mask = torch.randn(ROWS, 1, 1, full_keys.shape[2], device=device)
    result = attention(query, keys, values, mask)
    torch.testing.assert_close(result, attention(query, full_keys, full_values, mask))
    assert type(result) is torch.Tensor


@pytest.mark.parametrize("pair", STORED, indirect=True)
@pytest.mark.parametrize("group", [1, 4])
def test_grouped_queries(group, pair, never_full, device):
    (keys, full_keys), (values, full_values) = pair
    query = torch.randn(ROWS, HEADS * group, 1, DIM, device=device)
    expected = F.scaled_dot_product_attention(query, full_keys, full_values, enable_gqa=True)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), expected)
    repeated = repeat_kv(keys, group), repeat_kv(values, group)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, *repeated), expected)
    weights = (torch.matmul(query, repeated[0].transpose(2, 3)) * DIM**-0.5).softmax(-1)
    torch.testing.assert_close(torch.matmul(weights, repeated[1]), expected)


def test_one_head_is_read_by_all_of_the_query(never_full, device):
    (keys, full_keys), (values, full_values) = (stored(True, device, heads=1) for _ in range(2))
    query = torch.randn(ROWS, HEADS, 1, DIM, device=device)
    for attention in (scaled_dot_product, eager):
        mask = torch.randn(ROWS, 1, 1, full_keys.shape[2], device=device)
        result = attention(query, keys, values, mask)
        torch.testing.assert_close(result, attention(query, full_keys, full_values, mask))


def test_any_other_operation_sees_the_full_tensor(pair):
    (keys, full), _ = pair
    for operation in (
        lambda x: x * 2,
        lambda x: x[:, :, 2:5],
        lambda x: x[1],
        lambda x: torch.cat([x, x], dim=2),
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(2, 0, 1, 3),
        lambda x: x.to(torch.float64),
        lambda x: x.reshape(-1),
        lambda x: x.expand(2, *x.shape),
        lambda x: torch.einsum("bhid,bhjd->bhij", x, x),
        lambda x: torch.matmul(x, x.transpose(-1, -2)),
        lambda x: x.unsqueeze(1),
        lambda x: torch.stack([x, x]),
        lambda x: x.clone(),
        lambda x: x.sum(),
        lambda x: repeat_kv(x, 2).flatten(),
    ):
        result = operation(keys)
        torch.testing.assert_close(result, operation(full), rtol=1e-5, atol=1e-5)
        assert type(result) is torch.Tensor


def test_causal_attention_and_foreign_shapes_use_the_full_tensor(pair, device):
    (keys, full_keys), (values, full_values) = pair
    query = torch.randn(ROWS, HEADS, 3, DIM, device=device)
    torch.testing.assert_close(
        F.scaled_dot_product_attention(query, keys, values, is_causal=True),
        F.scaled_dot_product_attention(query, full_keys, full_values, is_causal=True),
    )
    torch.testing.assert_close(
        F.scaled_dot_product_attention(query, keys, full_values),
        F.scaled_dot_product_attention(query, full_keys, full_values),
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2),
        lambda x: x.zero_(),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.add(torch.ones(()), 1, out=x),
        lambda x: x.copy_(torch.zeros(())),
    ],
    ids=["mul_", "zero_", "setitem", "out", "copy_"],
)
def test_writing_is_refused_rather_than_lost(write, pair):
    (keys, _), _ = pair
    with pytest.raises(RuntimeError):
        write(keys)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("halves", [False, True], ids=["all heads", "halves"])
@pytest.mark.parametrize("of_step", [False, True], ids=["hooks", "step"])
def test_heads_repeated_one_after_the_other(of_step: bool, halves: bool, group: int) -> None:
    """As in DiffLlama, of V a half for each of two attentions, and in JetMoe."""
    generator, (batch, per_input, heads, dim) = torch.Generator().manual_seed(0), (2, 2, 4, 8)
    keys, values = (torch.randn(batch, heads, 5, dim, generator=generator) for _ in range(2))
    own = [torch.randn(batch * per_input, heads, 1, dim, generator=generator) for _ in range(2)]
    query = torch.randn(batch * per_input, (1 if halves else 2) * heads * group, 1, dim, generator=generator)
    if of_step:
        state = StepState(batch, per_input, 3, torch.device("cpu"))
        kv = FixedKV(keys, values, state, 9, has_suffix=True)
        kv.load(keys, values, torch.zeros(batch), torch.full((batch,), 5), at_end=True)
        k, v = kv.write(*own)
    else:
        k, v = (KVView.of(prefix, suffix, per_input) for prefix, suffix in zip((keys, values), own, strict=True))
    full = [
        torch.cat([prefix.repeat_interleave(per_input, dim=0), suffix], dim=2)
        for prefix, suffix in zip((keys, values), own, strict=True)
    ]

    def attend(k: Any, v: Any) -> torch.Tensor:
        parts = torch.chunk(v, 2, dim=1) if halves else (v,)
        k = k if halves else k.repeat(1, 2, 1, 1)
        values = [each.repeat(1, 2, 1, 1) for each in parts]
        return torch.cat([F.scaled_dot_product_attention(query, k, v, enable_gqa=group > 1) for v in values], dim=-1)

    torch.testing.assert_close(attend(k, v), attend(*full))
    if not of_step:
        tiled, wanted = k.repeat(1, 2, 1, 1), full[0].repeat(1, 2, 1, 1)
        assert torch.equal(tiled.materialize(), wanted)
        x = torch.randn(batch * per_input, 2 * heads, 1, dim, generator=generator)
        torch.testing.assert_close(x @ tiled.transpose(2, 3), x @ wanted.transpose(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_of_an_indexer(dtype: torch.dtype) -> None:
    """[rows, positions, dim], which several heads of each query read."""
    generator, (batch, per_input, queries, heads, dim) = torch.Generator().manual_seed(0), (2, 3, 2, 4, 8)
    prefix = torch.randn(batch, 1, 5, dim, generator=generator).to(dtype)
    suffix = torch.randn(batch * per_input, 1, 3, dim, generator=generator).to(dtype)
    query = torch.randn(batch * per_input, queries, heads, dim, generator=generator)
    full = torch.cat([prefix.repeat_interleave(per_input, dim=0), suffix], dim=2).squeeze(1)
    view = KVView.of(prefix, suffix, per_input)
    keys = view.reshape(batch * per_input, 8, dim).transpose(-1, -2).float().unsqueeze(1)
    assert isinstance(keys, KVView) and torch.equal(keys.materialize(), full.transpose(-1, -2).float().unsqueeze(1))
    torch.testing.assert_close(torch.matmul(query, keys), torch.matmul(query, keys.materialize()))
