"""Sources of about the same length are encoded together: the same hypotheses, from fewer positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen.decoding import unpadding
from tests.fairseq import models
from tests.fairseq.check import accelerated, check
from tests.fairseq.test_generate import generator_for

pytestmark = pytest.mark.usefixtures("strict")

LENGTHS = [21, 40, 7, 20, 6, 40]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and length of every group that was made. Groups pay for tiny models too."""
    found: list[tuple[int, int]] = []
    by_length = unpadding.by_length

    def recording(lengths: list[int], longest: int, *cost: int | None) -> Any:
        made = by_length(lengths, longest, *cost)
        found.extend((rows.shape[0], length) for rows, length in made)
        return made

    monkeypatch.setattr(unpadding, "BUCKET_COST", 4)
    monkeypatch.setattr(unpadding, "by_length", recording)
    return found


def sample(left_pad: bool = True, lengths: list[int] = LENGTHS) -> dict[str, Any]:
    longest = max(lengths)
    tokens = torch.full((len(lengths), longest), 1)
    for row, length in zip(tokens, lengths, strict=True):
        place = slice(longest - length, None) if left_pad else slice(length)
        row[place] = torch.cat([torch.randint(4, 64, (length - 1,)), torch.tensor([2])])
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("left_pad", [True, False])
@pytest.mark.parametrize("name", [name for name in models.SEQ2SEQ if name != "layerdrop"])
def test_groups(passes, name, left_pad):
    check(lambda: generator_for([models.SEQ2SEQ[name]()], beam_size=3), sample(left_pad))
    assert accelerated() == 1
    assert passes == [(2, 7), (2, 21), (2, 40)]


def test_an_ensemble(passes):
    members = [models.encoder_decoder(0), models.SEQ2SEQ["pre-norm"](1)]
    check(lambda: generator_for(members, beam_size=3), sample())
    assert len(passes) == 3


def test_padding_in_the_middle(passes):
    batch = sample(left_pad=False)
    batch["net_input"]["src_tokens"][2, 3] = 1
    check(lambda: generator_for([models.encoder_decoder()], beam_size=3), batch)
    assert passes == [(1, 6), (2, 21), (3, 40)]


def _hooked() -> Any:
    model = models.encoder_decoder()
    model.encoder.layers[0].register_forward_hook(lambda module, inputs, output: None)
    return model


def _own_forward() -> Any:
    model = models.encoder_decoder()
    model.encoder.forward = lambda *args, forward=model.encoder.forward, **kwargs: forward(*args, **kwargs)
    return model


@pytest.mark.parametrize(
    "make",
    [_hooked, _own_forward, lambda: models.SEQ2SEQ["layerdrop"]()],
    ids=["a hook", "a forward pass of its own", "random numbers"],
)
def test_one_pass_where_more_would_be_seen(passes, make):
    model = make()
    check(lambda: generator_for([model], beam_size=3), sample())
    assert accelerated() == 1 and passes == []


def test_disabled_it_is_one_pass(passes):
    with fastgen.disabled():
        generator_for([models.encoder_decoder()], beam_size=3).generate([], sample())
    assert passes == []
