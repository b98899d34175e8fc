"""K and V in fixed buffers, read by attention: against ordinary attention over the history of each row."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from fastgen.decoding import host_memory
from fastgen.decoding.kv.fixed import FixedKV
from fastgen.decoding.kv.rows import StepState
from fastgen.decoding.kv.view import CannotBeCaptured, KVView, of_latents
from fastgen.decoding.program_memory import Growing

BATCH, PER_INPUT, KV_HEADS, HEADS, DIM = 3, 2, 2, 4, 8
PREFIX, PREFIX_CAPACITY, CAPACITY = 5, 8, 6
STARTS, ENDS = [0, 2, 1], [5, 5, 4]


class History:
    """What every row has seen, as lists of tensors: a plain definition."""

    def __init__(self, inputs: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.rows = [
            [torch.stack([keys[n, :, STARTS[n] : ENDS[n]], values[n, :, STARTS[n] : ENDS[n]]])]
            for n in range(inputs)
            for _ in range(PER_INPUT)
        ]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for row, history in enumerate(self.rows):
            history.append(torch.stack([keys[row], values[row]]))

    def reorder(self, parents: list[int]) -> None:
        self.rows = [list(self.rows[parent]) for parent in parents]

    def keep(self, counts: list[int], of: int) -> None:
        """Of the last positions, so many in each row."""
        self.rows = [row[: len(row) - of + count] for row, count in zip(self.rows, counts, strict=True)]

    def check(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, found: torch.Tensor) -> None:
        """Each of the new positions has seen the ones before it, and itself."""
        for at in range(query.shape[2]):
            self.append(keys[:, :, at : at + 1], values[:, :, at : at + 1])
            wanted = self.attend(query[:, :, at : at + 1])
            torch.testing.assert_close(found[:, :, at : at + 1], wanted, rtol=1e-5, atol=1e-5)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        results = []
        for row, history in enumerate(self.rows):
            keys, values = torch.cat(history, dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1)
            results.append(F.scaled_dot_product_attention(query[row], keys, values))
        return torch.stack(results)


@pytest.fixture(params=["beginning", "end"])
def at_end(request: pytest.FixtureRequest) -> bool:
    return request.param == "end"


def make(
    device: torch.device,
    batch: int = BATCH,
    capacity: int = CAPACITY,
    has_suffix: bool = True,
    width: int = 1,
    window: int | None = None,
):
    state = StepState(batch, PER_INPUT, capacity, device, width)
    example = torch.zeros(1, KV_HEADS, 1, DIM, device=device)
    return state, FixedKV(example, example, state, PREFIX_CAPACITY, has_suffix, window)


def prompt(device: torch.device, inputs: int = BATCH) -> tuple[torch.Tensor, ...]:
    keys, values = torch.randn(2, inputs, KV_HEADS, PREFIX, DIM, device=device)
    spans = torch.tensor([STARTS[:inputs], ENDS[:inputs]], device=device)
    return keys, values, *spans


def begun(device: torch.device, inputs: int = BATCH, at_end: bool = True, **size: int | None):
    state, kv = make(device, **size)
    given = prompt(device, inputs)
    kv.load(*given, at_end=at_end)
    state.begin()
    return state, kv, given


def go_on(state: StepState, kv: FixedKV, steps: int, keys: float = 1.0) -> None:
    """Steps that store this number in all keys, and ones in all values."""
    new = torch.ones(state.rows, KV_HEADS, state.width, DIM, device=kv.prefix[0].device)
    for _ in range(steps):
        kv.write(new * keys, new)
        state.advance(None)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spelled_out: bool) -> torch.Tensor:
    """SDPA, or the products of a model's own attention: heads of one query each are folded, others repeated."""
    if not spelled_out:
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    rows, _, width, dim = query.shape
    wide = query.view(rows, KV_HEADS, -1, DIM) if width == 1 else query
    if width > 1:
        shape = rows, HEADS, keys.shape[2], DIM
        keys, values = (
            part[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).reshape(shape) for part in (keys, values)
        )
    return ((wide @ keys.transpose(2, 3) * dim**-0.5).softmax(dim=-1) @ values).view(query.shape)


def step(kv: FixedKV, rows: int, device: torch.device, width: int = 1, spelled_out: bool = False):
    keys, values = torch.randn(2, rows, KV_HEADS, width, DIM, device=device)
    query = torch.randn(rows, HEADS, width, DIM, device=device)
    return query, keys, values, attend(query, *kv.write(keys, values), spelled_out)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("reorders", [False, True])
@pytest.mark.parametrize("spelled_out", [False, True])
@pytest.mark.parametrize(("width", "inputs"), [(1, BATCH), (1, 1), (2, BATCH), (3, BATCH)])
def test_rows_attend_to_their_own_history(device, at_end, width, inputs, spelled_out, reorders, each_backend):
    """Inputs may be fewer than the capacity. Rows keep some of the new positions, as of tokens that were drafted, or
    one; one that keeps none writes over them. Beams of an input keep equally many, and continue other beams.
    """
    capacity, rows, draw = CAPACITY * width, inputs * PER_INPUT, random.Random(width)
    state, kv, given = begun(device, inputs, at_end, capacity=capacity, width=width)
    history = History(inputs, *given[:2])
    for number in range(2 * CAPACITY):
        if int(state.position.max()) + width > capacity:
            break
        made = step(kv, BATCH * PER_INPUT, device, width, spelled_out)
        history.check(*(part[:rows] for part in made))
        parents, kept = None, [1] * BATCH * PER_INPUT
        if reorders:
            own = [range(row - row % PER_INPUT, row - row % PER_INPUT + PER_INPUT) for row in range(len(kept))]
            parents = [draw.choice(each) for each in own]
        if width > 1 and number % 3:
            kept = [draw.randrange(width + 1) for _ in kept]
            kept = [kept[row - row % PER_INPUT] for row in range(len(kept))] if reorders else kept
        counts = torch.tensor(kept, device=device) if width > 1 and number % 3 else 1
        state.advance(None if parents is None else torch.tensor(parents, device=device), counts)
        history.keep(kept[:rows], of=width)
        if parents is not None:
            history.reorder(parents[:rows])
    assert number >= CAPACITY - 1


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("inputs", [slice(None), slice(1, 2)])
def test_nothing_of_the_last_call_is_left_in_the_buffers(device, width, inputs):
    """NaN that a call has stored would spoil the scores of positions that a mask leaves out."""
    state, kv, _ = begun(device, capacity=CAPACITY + width - 1, width=width)
    go_on(state, kv, 4, keys=torch.nan)
    kv.load(*(part[inputs] for part in prompt(device)), at_end=True, inputs=inputs)
    state.begin(inputs)
    for part in kv.suffix:
        assert not part.unflatten(0, (BATCH, PER_INPUT))[inputs].count_nonzero()


def test_nothing_is_left_of_rows_that_went_back(device):
    """Nor by the call after a call that took them over in larger buffers."""
    (small_state, small, _), (state, kv) = begun(device), make(device, capacity=2 * CAPACITY)
    go_on(small_state, small, 5)
    small_state.keep_max_length()
    small_state.advance(None, -3)
    kv.insert(small, slice(None), slice(None))
    state.insert(small_state, slice(None), slice(None))
    for part_state, part in ((small_state, small), (state, kv)):
        assert part_state.max_length() == 6 and all(own.count_nonzero() for own in part.suffix)
        part.load(*prompt(device), at_end=True)
        part_state.begin()
        assert part_state.max_length() == 1 and not any(own.count_nonzero() for own in part.suffix)


def test_nothing_is_left_in_larger_buffers_that_go_on_for_smaller_ones(device):
    """They may have been those of another call, which has got further than this one will. All of the prompt is there,
    also what is padding: the cache may be returned.
    """
    (small_state, small), (state, kv, _) = make(device), begun(device, capacity=2 * CAPACITY)
    go_on(state, kv, 2 * CAPACITY, keys=torch.nan)
    keys, values, starts, ends = prompt(device)
    small.load(keys, values, starts.clamp(min=1), ends, at_end=True)
    small_state.begin()
    go_on(small_state, small, 2)
    kv.insert(small, slice(None), slice(None))
    state.insert(small_state, slice(None), slice(None))
    for part in kv.suffix:
        assert bool((part[:, :, :2] == 1).all()) and not part[:, :, 2:].count_nonzero()
    assert all(map(torch.equal, kv.prefix, small.prefix))


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_that_is_added(device, lowest):
    """It is always read: the model may have learned what says nothing now."""
    _, kv, _ = begun(device, at_end=False, width=2)
    seen = kv.counts().unsqueeze(1)
    mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, lowest)
    kv.host_may_wait = True
    assert torch.equal(kv._needed(mask, 2), mask)
    assert kv._needed(seen, 2) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [1, 3, 6, 20])
def test_a_sliding_window(device, window, each_backend):
    state, kv, given = begun(device, window=window)
    history = History(BATCH, *given[:2])
    for number in range(CAPACITY):
        query, keys, values, found = step(kv, BATCH * PER_INPUT, device)
        spelled_out = kv.leave_out(torch.zeros(BATCH * PER_INPUT, 1, 1, PREFIX_CAPACITY + CAPACITY, device=device))
        history.append(keys, values)
        # Positions behind the last one of the prompt that counts are padding, which takes up a position in the window.
        behind = [PREFIX - ENDS[row // PER_INPUT] for row in range(BATCH * PER_INPUT)]
        for row, left_out in enumerate(behind):
            both = torch.cat(history.rows[row], dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1)
            seen = min(window, number + 1) + max(window - number - 1 - left_out, 0)
            keys, values = both[:, :, -seen:]
            wanted = F.scaled_dot_product_attention(query[row], keys, values)
            torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=1e-5)
            assert int((spelled_out[row] == 0).sum()) == keys.shape[1]
        state.advance(torch.arange(BATCH * PER_INPUT, device=device))


@pytest.mark.parametrize("spelled_out", [False, True])
@pytest.mark.parametrize(("width", "window"), [(1, None), (1, 3), (2, None)])
def test_an_input_begins_while_others_go_on(device, width, window, spelled_out):
    size = {"capacity": CAPACITY + width - 1, "width": width, "window": window}
    (state, kv), (later, alone) = make(device, **size), make(device, **size)
    rows, new_rows = BATCH * PER_INPUT, slice(PER_INPUT, 2 * PER_INPUT)
    others = [row for row in range(rows) if not new_rows.start <= row < new_rows.stop]
    state_of_others, kv_of_others = make(device, **size)
    given = prompt(device)
    for each, part in ((state, kv), (state_of_others, kv_of_others)):
        part.load(*given, at_end=True)
        each.begin()

    for number in range(CAPACITY):
        if number == 2:
            new = [part[:1] for part in prompt(device, 1)]
            kv.load(*new, at_end=True, inputs=slice(1, 2))
            state.begin(slice(1, 2))
            alone.load(*prompt(device), at_end=True)
            alone.load(*new, at_end=True, inputs=slice(1, 2))
            later.begin()
        query = torch.randn(rows, HEADS, width, DIM, device=device)
        stored = torch.randn(2, rows, KV_HEADS, width, DIM, device=device)
        found, wanted = (attend(query, *part.write(*stored), spelled_out) for part in (kv, kv_of_others))
        torch.testing.assert_close(found[others], wanted[others], rtol=1e-5, atol=1e-6)
        parents = torch.tensor([1, 1, 3, 2, 4, 4], device=device)
        if number >= 2:
            wanted = attend(query, *alone.write(*stored), spelled_out)
            torch.testing.assert_close(found[new_rows], wanted[new_rows], rtol=1e-5, atol=1e-6)
            later.advance(parents)
        state.advance(parents)
        state_of_others.advance(parents)


@pytest.mark.parametrize("capacity", [CAPACITY, 2 * CAPACITY])
def test_taking_over_some_inputs(device, capacity):
    """Their rows have changed places before, and are as long as each other, but not as those of other inputs."""
    large, many, given = begun(device)
    small, few, _ = begun(device, 2, batch=2, capacity=capacity)  # of another call, which has got further
    for _ in range(5):
        step(few, 2 * PER_INPUT, device)
        small.advance(None)
    history, inputs = History(BATCH, *given[:2]), torch.tensor([0, 2], device=device)
    for parents, counts in (([1, 1, 2, 2, 5, 4], [1, 1, 0, 0, 1, 1]), ([0, 0, 2, 3, 4, 4], [1, 1, 1, 1, 0, 0])):
        _, keys, values, _ = step(many, BATCH * PER_INPUT, device)
        history.append(keys, values)
        history.keep(counts, of=1)
        large.advance(torch.tensor(parents, device=device), torch.tensor(counts, device=device))
        history.reorder(parents)
    few.insert(many, inputs, slice(None))
    small.insert(large, inputs, slice(None))
    history.reorder([0, 1, 4, 5])
    for _ in range(3):
        history.check(*step(few, 2 * PER_INPUT, device))
        small.advance(torch.tensor([1, 0, 3, 3], device=device))
        history.reorder([1, 0, 3, 3])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("says_more", [False, True])
def test_masks(device, says_more, each_backend):
    """One that says what the lengths say is not read after the first look; another one always is."""
    _, kv, _ = begun(device)
    first = PREFIX_CAPACITY - PREFIX
    query, *_ = step(kv, BATCH * PER_INPUT, device)
    mask = torch.zeros(BATCH, PREFIX_CAPACITY + CAPACITY, dtype=torch.bool, device=device)
    for n in range(BATCH):
        mask[n, first + STARTS[n] : first + ENDS[n]] = True
    mask[:, PREFIX_CAPACITY] = True
    if says_more:
        mask[0, first + 1] = False
    mask = mask.repeat_interleave(PER_INPUT, dim=0)[:, None, None]
    kv.host_may_wait = True
    wanted = F.scaled_dot_product_attention(query, *kv.read(), attn_mask=mask, enable_gqa=True)
    kv.host_may_wait = False
    again = F.scaled_dot_product_attention(query, *kv.read(), attn_mask=mask, enable_gqa=True)
    assert torch.equal(again, wanted)
    unread = F.scaled_dot_product_attention(query, *kv.read(), attn_mask=torch.ones_like(mask), enable_gqa=True)
    plain = F.scaled_dot_product_attention(query, *kv.read(), enable_gqa=True)
    torch.testing.assert_close(unread, plain)
    assert torch.equal(wanted, plain) is not says_more


@pytest.mark.parametrize("attention", ["sdpa", "products"])
def test_latents_are_read_where_they_are_stored(attention):
    """Beside what is rotated, in one tensor, which nobody else sees."""
    device, rank, rotated, dim = torch.device("cpu"), 6, 3, 5
    state = StepState(BATCH, PER_INPUT, CAPACITY, device, 1)
    weight = torch.randn(HEADS, 2 * dim, rank)

    def new(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 1, length, rank), torch.randn(rows, 1, length, rotated)

    kv = FixedKV(*new(1, 0), state, PREFIX_CAPACITY, has_suffix=True)
    assert [part.shape[3] for part in kv.like()] == [rank, rotated]
    given = new(BATCH, PREFIX)
    kv.load(*given, torch.tensor(STARTS), torch.tensor(ENDS), at_end=True)
    state.begin()
    stored = [part.repeat_interleave(PER_INPUT, dim=0) for part in given]
    for _ in range(CAPACITY - 1):
        own = new(BATCH * PER_INPUT, 1)
        stored = [torch.cat(parts, dim=2) for parts in zip(stored, own, strict=True)]
        query = torch.randn(BATCH * PER_INPUT, HEADS, 1, dim + rotated)
        keys, values = of_latents(*kv.write(*own), weight, dim)
        if attention == "sdpa":
            found = F.scaled_dot_product_attention(query, keys, values)
        else:
            found = ((query @ keys.transpose(2, 3)) * (dim + rotated) ** -0.5).softmax(-1) @ values
        made = torch.einsum("rtk,hdk->rhtd", stored[0][:, 0], weight)
        full = torch.cat([made[..., :dim], stored[1].expand(-1, HEADS, -1, -1)], dim=-1)
        position = torch.arange(full.shape[2])
        starts, ends = (torch.tensor(each).repeat_interleave(PER_INPUT)[:, None] for each in (STARTS, ENDS))
        counts = ((position >= starts) & (position < ends)) | (position >= PREFIX)
        wanted = F.scaled_dot_product_attention(query, full, made[..., dim:], attn_mask=counts[:, None, None])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        state.advance(None)
    found = kv.materialize(BATCH, PREFIX, CAPACITY - 1, at_end=True)
    assert all(torch.equal(one, other) for one, other in zip(found, stored, strict=True))


def test_the_full_tensor_is_refused(device):
    _, kv = make(device, has_suffix=False)
    kv.load(*prompt(device), at_end=False)
    keys, _ = kv.read()
    assert isinstance(keys, KVView) and keys.shape == (BATCH * PER_INPUT, KV_HEADS, PREFIX_CAPACITY, DIM)
    with pytest.raises(CannotBeCaptured, match="as one tensor"):
        keys + 1


@pytest.mark.parametrize("part", ["prefix", "suffix"])
def test_without_memory_for_k_and_v_neither_grows(part, device, monkeypatch):
    state, example = StepState(BATCH, PER_INPUT, CAPACITY, device), torch.zeros(1, KV_HEADS, 1, DIM, device=device)
    kv = FixedKV(example, example, state, PREFIX_CAPACITY, True, growing=Growing())
    zeros, made = host_memory.zeros, []

    def only_for_keys(*args):
        if made:
            raise MemoryError
        made.append(zeros(*args))
        return made[0]

    def sizes():
        return [each.shape[2] for each in (*kv.prefix, *kv.suffix)], kv.prefix_capacity, kv.length

    before = sizes()
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "zeros", only_for_keys)
        with pytest.raises(MemoryError):
            getattr(kv, f"reserve_{part}")(2 * PREFIX_CAPACITY)
    assert sizes() == before
    getattr(kv, f"reserve_{part}")(2 * PREFIX_CAPACITY)()
    assert [each.shape[2] for each in getattr(kv, part)] == 2 * [2 * PREFIX_CAPACITY]


def test_where_memory_cannot_be_given_back_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that leave, and that never came, write to nothing but what others have written to."""
    monkeypatch.setattr(host_memory, "_give_back", lambda *given: False)
    cpu, capacity = torch.device("cpu"), 2**15
    state = StepState(4, PER_INPUT, capacity, cpu)
    example = torch.zeros(1, KV_HEADS, 1, 64)
    kv = FixedKV(example, example, state, capacity, True)
    before = host_memory._resident()
    kv.leave(slice(None))
    kv.load(*torch.randn(2, 1, KV_HEADS, 3, 64), torch.tensor([0]), torch.tensor([3]), False, slice(1, 2))
    assert kv.prefix[0][1, :, :3].all()
    kv.leave(slice(0, 4))
    assert not kv.prefix[0][:, :, :8].any() and not kv.prefix[1][:, :, :8].any()
    assert host_memory._resident() - before < 2**22 < kv.prefix[0].nbytes


@pytest.mark.parametrize("follows", ["leave", "load", "insert"])
def test_inputs_that_are_over_take_no_memory(follows: str) -> None:
    """Nor do those that come in their place, but for their own positions, though others had more."""
    cpu, capacity = torch.device("cpu"), 4096
    states = [StepState(4, PER_INPUT, capacity, cpu) for _ in range(2)]
    example = torch.zeros(1, KV_HEADS, 1, 64)
    kv, other = (FixedKV(example, example, state, capacity, True) for state in states)
    spans = torch.tensor([0] * 4), torch.tensor([capacity] * 4)
    kv.load(*torch.randn(2, 4, KV_HEADS, capacity, 64), *spans, at_end=False)
    for part in kv.suffix:
        part.fill_(1)
    states[0].position_table.add_(capacity - 1)
    other.load(*torch.randn(2, 4, KV_HEADS, 3, 64), torch.tensor([0] * 4), torch.tensor([3] * 4), at_end=False)
    before, of_input = host_memory._resident(), 2 * (1 + PER_INPUT) * KV_HEADS * capacity * 64 * 4

    if follows == "leave":
        kv.leave(slice(1, 3))
    elif follows == "load":
        kv.load(*torch.randn(2, 2, KV_HEADS, 3, 64), spans[0][:2], spans[0][:2] + 3, at_end=False, inputs=slice(1, 3))
    else:
        for place in (1, 2):
            kv.insert(other, slice(1), slice(place, place + 1))
            states[0].insert(states[1], slice(1), slice(place, place + 1))
            assert torch.equal(kv.prefix[0][place, :, :3], other.prefix[0][0, :, :3])
    assert before - host_memory._resident() > of_input * 3 // 2
    left = 0 if follows == "leave" else 3
    for part in kv.prefix:
        assert not part[1:3, :, left:].any() and part[0].all() and part[3].all() and part[1:3, :, :left].all()
    for part in kv.suffix:
        rows = part.unflatten(0, (4, -1))
        assert not rows[1:3].any() and rows[0].all() and rows[3].all()
