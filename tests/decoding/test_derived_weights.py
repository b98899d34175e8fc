"""The derived-weight cache: who shares a copy, when one stands for its weight, and which goes where memory is short."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fastgen import memory
from fastgen.decoding import derived_weights
from fastgen.decoding.derived_weights import DerivedWeight, Format
from fastgen.ops import fingerprint
from fastgen.ops.linear import choose
from tests.noting import noted

# Each copy has as many bytes as its weight.
DOUBLED = Format("doubled", lambda weight: weight * 2, 4.0)
COMPARED = Format("compared", lambda weight: weight * 2, 4.0, is_compared=True)
NBYTES = 64 * 64 * 4


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No other test's copies are counted."""
    derived_weights.drop_all()
    another_call()
    with torch.no_grad():
        yield


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a new call finds to be free, without copies: room for two of them."""
    found = [math.ceil(2 * NBYTES / derived_weights.SHARE_OF_MEMORY)]

    def left() -> int:
        return found[0] - sum(each.nbytes for each in derived_weights.known())

    monkeypatch.setattr(memory, "free_host_memory", left)
    return found


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(64, 64))


def derived(weight: nn.Parameter, format: Format = DOUBLED) -> DerivedWeight:
    return derived_weights.of(weight, format, weight)


def another_call() -> None:
    """Of this thread, which is over: until the next one begins, what happens counts as a part of it."""
    with derived_weights.call():
        pass


def test_a_weight_is_one_in_a_format_whoever_asks() -> None:
    weight = parameter()
    first = derived(weight)
    assert derived(weight) is first and derived(weight, COMPARED) is not first
    assert derived_weights.of(weight.t(), DOUBLED, weight) is not first
    copy = first.optional()
    assert torch.equal(copy, weight * 2) and derived(weight).optional() is copy and first.nbytes == NBYTES


def test_it_goes_with_the_last_one_that_holds_it() -> None:
    held = derived(parameter())
    copy = weakref.ref(held.make())
    assert held in derived_weights.known()
    del held
    gc.collect()
    assert copy() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: setattr(weight, "data", weight * 2),
        lambda weight: setattr(weight, "data", weight.data[:12]),
        lambda weight: setattr(weight, "data", weight.data.t()),
    ],
    ids=["in place", "its data replaced", "fewer outputs", "transposed"],
)
def test_a_changed_parameter_is_another_weight(change: object) -> None:
    weight = parameter()
    before = derived(weight)
    before.make()
    assert before.is_of(weight) and not before.is_of(parameter())
    change(weight)
    assert not before.is_of(weight)
    assert torch.equal(derived(weight).optional(), weight * 2)


def test_a_copy_counts_for_those_that_began_before_it_was_validated() -> None:
    weight = parameter()
    plain, compared = derived(weight), derived(weight, COMPARED)
    begun = derived_weights.now()
    copies = plain.make(), compared.make()
    assert (plain.current(begun), compared.current(begun)) == copies
    since = derived_weights.now()
    assert plain.current(since) is None  # nothing tells whether it still stands for the weight
    assert compared.current(since) is copies[1]
    weight.data.add_(1)
    assert compared.is_of(weight) and compared.current(since) is copies[1]
    assert compared.current(derived_weights.now()) is None and compared.copy is None


def test_contents_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = derived(parameter(), COMPARED)
    compared.make()
    since, looks = derived_weights.now(), noted(monkeypatch, fingerprint, "fingerprint")
    for _ in range(3):
        assert compared.current(since) is not None
    assert len(looks) == 1


def test_each_copy_has_a_number_of_its_own() -> None:
    held = derived(parameter())
    assert held.number is None
    numbers = [(held.make(), held.number)[1] for _ in range(3)]
    assert len(set(numbers)) == 3


def test_users_are_told_when_a_copy_goes() -> None:
    class User:
        told = 0

        def forget(self) -> None:
            self.told += 1

    user, held = User(), derived(parameter())
    held.tell(user)
    held.make()
    memory.free_all()
    assert user.told == 1 and held.copy is None
    assert held.optional() is not None


# ---- memory


def test_there_is_one_budget(free: list[int]) -> None:
    held = [derived(parameter(), each) for each in (DOUBLED, COMPARED, DOUBLED)]
    assert [each.optional() is not None for each in held] == [True, True, False]
    held[0].drop()
    assert held[2].optional() is not None


def test_copies_that_were_not_used_lately_go_for_new_ones(free: list[int]) -> None:
    held = [derived(parameter()) for _ in range(4)]
    assert held[0].make() is not None and held[1].make() is not None
    for _ in range(derived_weights.BACK_OFF):
        another_call()
    held[0].current()
    assert held[2].make() is None and held[1].copy is not None
    another_call()
    assert held[2].make() is not None and held[1].copy is None and held[0].copy is not None
    assert held[3].make() is None


def test_nothing_is_evicted_in_vain(free: list[int]) -> None:
    held = derived(parameter())
    held.make()
    for _ in range(derived_weights.BACK_OFF + 1):
        another_call()
    assert not derived_weights.has_memory(3 * NBYTES, torch.device("cpu")) and held.copy is not None
    assert derived_weights.has_memory(2 * NBYTES, torch.device("cpu")) and held.copy is None


def test_what_the_user_asks_for_is_not_evicted_and_fails_where_it_does_not_fit(free: list[int]) -> None:
    free[0] = 5 * NBYTES + NBYTES // 2
    asked = derived(parameter())
    for _ in range(3):  # more than the budget
        assert asked.required(derived_weights.now()) is not None
    others = [derived(parameter()) for _ in range(3)]
    assert all(each.required(0) is not None for each in others)
    for _ in range(derived_weights.BACK_OFF + 1):
        another_call()
    assert derived(parameter()).make() is None and all(each.copy is not None for each in (asked, *others))
    free[0] = 4 * NBYTES
    more = derived(parameter())
    with pytest.raises(torch.OutOfMemoryError, match="no memory for weights in doubled: 16384 more bytes"):
        more.required(0)
    assert more.copy is None


# ---- in captured steps


def test_a_copy_that_cannot_be_made_is_not_tried_for_some_calls() -> None:
    tried: list[int] = []
    never = Format("never", lambda weight: tried.append(1), 4.0)
    held = derived(parameter(), never)
    for _ in range(derived_weights.BACK_OFF + 1):
        another_call()
        assert [held.in_step() for _ in range(3)] == [None] * 3
    assert len(tried) == 1
    another_call()
    assert not any(held.in_step() for _ in range(derived_weights.STEPS_OF_COPY)) and len(tried) == 2


def test_what_a_draft_has_made_does_not_count_for_who_asks_later() -> None:
    """Somebody has written through `.data` in between, which torch does not count."""
    weight = parameter()
    held = derived(weight)
    held.optional()
    since = derived_weights.now()
    weight.data.mul_(3)
    assert torch.equal(held.required(since), weight * 2)


def test_a_copy_that_the_user_asks_for_is_his_whoever_made_it(free: list[int]) -> None:
    held, others = derived(parameter()), [derived(parameter()) for _ in range(3)]
    held.optional()
    held.required(0)
    for _ in range(derived_weights.BACK_OFF + 1):
        another_call()
    for each in others:
        each.optional()
    assert held.copy is not None


def test_a_copy_that_goes_while_it_is_validated_stays_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    held = derived(parameter(), COMPARED)
    held.optional()
    taken = fingerprint.fingerprint

    def dropping(weight: torch.Tensor) -> int:
        found = taken(weight)
        derived_weights.drop_all()  # as another thread may
        return found

    monkeypatch.setattr(fingerprint, "fingerprint", dropping)
    held.current(derived_weights.now())
    assert held.copy is None


FORMATS = [
    derived_weights.PANELS,
    derived_weights.LM_HEAD,
    derived_weights.DRAFT_HEAD,
    *(derived_weights.low_bit(*each) for each in [("bf16", 32), ("int8", 32), ("int8", 128), ("int4", 32)]),
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.name} {format.itemsize}")
def test_a_copy_takes_about_what_its_format_says(format: derived_weights.Format) -> None:
    if format.name == "bf16" and choose.unavailable("bf16") is not None:
        pytest.skip(str(choose.unavailable("bf16")))
    weight = nn.Parameter(torch.randn(1024, 512).bfloat16().float(), requires_grad=False)
    copy = derived_weights.of(weight, format, weight)
    with derived_weights.call():
        assert copy.optional() is not None
    assert copy.nbytes == pytest.approx(format.nbytes(weight), rel=0.1)
