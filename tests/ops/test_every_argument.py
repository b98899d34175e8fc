"""Each argument of each operator in turn: one that does not fit is refused, and nothing has been written.

The arguments that fit are those of the fuzzer (tests/ops/fuzz), which draws what else may be wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.ops import _library
from tests.ops.fuzz import __main__ as fuzzer
from tests.ops.fuzz import cases

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another type": lambda x: x.to(torch.complex64),
    "a dimension more": lambda x: x.unsqueeze(0),
    "a row more": lambda x: torch.cat([x, x.new_zeros(1, *x.shape[1:])]) if x.dim() else x.expand(3),
}
# What takes these: of a packed weight and of a copy only the numbers are counted, and some have rows of their own.
PACKED = {"qweight", "scales", "zeros", "mins"}
TAKEN: dict[str, dict[str, set[str]]] = {
    "a dimension more": {
        "grouped_linear": PACKED, "grouped_linear_out": PACKED, "grouped_linear_batch_out": PACKED,
        "grouped_rows": {*PACKED, "like"}, "exact_cast_out": {"x", "out"}, "rms_norm_out": {"x", "out"},
        "decode_attention_out": {"suffix_lengths"}, "kv_write": {"position"}, "top_p_": {"share"},
    },
    "a row more": {
        "advance_": {"numbers"}, "commit_": {"eos"}, "take_beams_": {"eos"}, "take_rows_": {"eos"},
        "group_extremes": {"weight"}, "pack_panels": {"weight"}, "pack_bf16": {"weight"}, "bf16_gemm": {"x"},
        "grouped_linear": {"x"},
        "grouped_rows": {"like", "which"}, "packed_attention": {"query", "lengths"},
        "packed_attention.out": {"lengths"}, "rms_norm_out": {"x", "out"},
        "decode_attention_out": {"suffix_lengths", "mask"}, "kv_write": {"position"}, "top_p_": {"scores"},
    },
}  # fmt: skip
# These take numbers of any type and shape, or no tensors.
OF_ANY = {"evict", "fingerprint", "elementwise"}
OF_NONE = {"open_plan", "close_plan", "run_plan", "drop_plan", "take_team", "give_team_back", "instruction_set"}
NAMES = sorted(cases.CASES.keys() - OF_ANY - OF_NONE)
Place = tuple[int, int]  # the argument, and where in it, if it is a list


@pytest.fixture(scope="module", autouse=True)
def all_are_known() -> None:
    fuzzer.operators()


def fitting(name: str) -> Iterator[list[Any]]:
    for seed in range(4):
        torch.manual_seed(seed)
        case = cases.CASES[name](random.Random(seed))
        is_read = name != "advance_" or None not in case.args  # parents without a table of them are not
        if is_read and not case.refused:  # by this processor
            yield case.args


def listed(arg: Any) -> list[Any]:
    return arg if isinstance(arg, list) else [arg]


def tensors(args: list[Any]) -> dict[Place, Tensor]:
    found = {(place, number): x for place, arg in enumerate(args) for number, x in enumerate(listed(arg))}
    return {place: x for place, x in found.items() if isinstance(x, Tensor)}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_refused(name: str, args: list[Any], changes: dict[Place, Tensor], match: str | None = None) -> None:
    operator = fuzzer.overload(name)
    schema = operator._schema.arguments
    args = [list(arg) if isinstance(arg, list) else arg for arg in args]
    for (place, number), x in changes.items():
        if isinstance(args[place], list):
            args[place][number] = x
        else:
            args[place] = x
    plain = [each for each, about in zip(args, schema, strict=True) if not about.kwarg_only]
    named = {about.name: each for each, about in zip(args, schema, strict=True) if about.kwarg_only}
    before = {place: bits(x).clone() for place, x in tensors(args).items()}
    with pytest.raises((RuntimeError, NotImplementedError), match=match):
        operator(*plain, **named)
        pytest.fail(f"taken: {[schema[place].name for place, _ in changes]}")
    assert all(torch.equal(bits(x), before[place]) for place, x in tensors(args).items())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused(name: str, change: str) -> None:
    schema, taken = fuzzer.overload(name)._schema.arguments, TAKEN.get(change, {}).get(name, set())
    for args in fitting(name):
        for place, x in tensors(args).items():
            if schema[place[0]].name not in taken:
                assert_refused(name, args, {place: CHANGES[change](x)})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_lies_in_nothing_that_is_read(name: str) -> None:
    writes = [about.is_write for about in fuzzer.overload(name)._schema.arguments]
    for args in fitting(name):
        found = {place: x for place, x in tensors(args).items() if x.numel()}
        for target in (place for place in found if writes[place[0]] and name not in fuzzer.MAY_SHARE):
            for source in (place for place in found if not writes[place[0]]):
                written, read = found[target], found[source]
                memory = torch.zeros(written.numel() + read.numel(), dtype=torch.complex64).view(torch.uint8)
                both = [memory[: x.nbytes].view(x.dtype).view(x.shape) for x in (written, read)]
                both[1].copy_(read)
                assert_refused(name, args, {target: both[0], source: both[1]}, "shares memory")
