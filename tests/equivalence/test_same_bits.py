"""What docs/precision.md says of bits: a run can be repeated, whatever rows, threads, memory and calls there are."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

import fastgen
from fastgen import memory
from fastgen.decoding.layers import FastLayers
from fastgen.ops import gpu as operators
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa
from fastgen.optimizer.transformers.captured import graph_cache, key
from tests.equivalence.captured import captures, reasons
from tests.equivalence.cases import BEAM
from tests.equivalence.check import check, run
from tests.ops.instructions import threads

pytestmark = pytest.mark.skipif(
    choose.instruction_set() is Isa.PORTABLE, reason="all products are torch's on this instruction set"
)

SCORES = {**BEAM, "output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 8}


def _bart() -> Any:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(vocab_size=90, d_model=384, max_position_embeddings=64, **sizes)
    ).eval()


def _gpt2() -> Any:  # which stores its weights transposed
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=384, n_layer=1, n_head=4, n_positions=64)).eval()


INPUTS = {"inputs": torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))}
every = pytest.mark.parametrize("build", [_bart, _gpt2])


def _assert_the_same_bits(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    if "sequences_scores" in one:
        assert torch.equal(one.sequences_scores, other.sequences_scores)
    assert all(torch.equal(left, right) for left, right in zip(one.scores, other.scores, strict=True))


@every
@pytest.mark.parametrize("captured_step", ["never", "always"])
def test_memory_and_earlier_calls_change_no_bit(
    build: Any, captured_step: str, strict: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    model = build()
    fastgen.enable(captured_step=captured_step)
    first = check(model, INPUTS, SCORES)
    for _ in range(3):
        _assert_the_same_bits(first, run(model, INPUTS, SCORES))
    monkeypatch.setattr(memory, "free_host_memory", lambda: 0)
    graph_cache.drop_all()
    _assert_the_same_bits(first, run(model, INPUTS, SCORES))


@every
@pytest.mark.parametrize("options", [SCORES, {**SCORES, "num_beams": 1}, {**SCORES, "num_beams": 1, "do_sample": True}])
def test_captured_steps_change_no_bit(build: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a step is recorded in this call or was before, and with more capacity later."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    monkeypatch.setattr(key, "_MAX_FIRST_NEW_ON_CPU", 13)
    monkeypatch.setattr(key, "_NEW_ON_CPU", (13, 3))
    model, options = build(), {**options, "max_new_tokens": 40}
    fastgen.enable(captured_step="always", strict=True)
    first = check(model, INPUTS, options)
    for _ in range(2):
        _assert_the_same_bits(first, run(model, INPUTS, options))
        graph_cache.drop_all()
        _assert_the_same_bits(first, run(model, INPUTS, options))
    assert captures() == 5, reasons()


def test_longer_prompts_before_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of a captured step stay as large as they were for those."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=64, n_layer=1, n_head=2, n_positions=640)).eval()
    fastgen.enable(captured_step="always", strict=True)
    short, long = ({"input_ids": torch.randint(3, 90, (2, length))} for length in (300, 600))
    first, _, again = (run(model, each, {**SCORES, "num_beams": 1}) for each in (short, long, short))
    _assert_the_same_bits(first, again)
    assert captures() == 3, reasons()


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    fastgen.enable()
    with torch.no_grad():
        torch.manual_seed(0)
        yield nn.Linear(600, 200)


def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads(layer: nn.Linear) -> None:
    """Within a regime: as many rows as one kernel of the table serves."""
    x, model = torch.randn(300, 600), nn.Sequential(layer)
    of_kernel: dict[Any, list[int]] = {}
    for rows in (1, 2, 7, 8, 9, 15, 16, 17, 64, 300):
        of_kernel.setdefault(choose.kernel_for(x[:rows], layer.weight, layer.bias), []).append(rows)
    with FastLayers.of(model):
        for counts in of_kernel.values():
            expected = torch.cat([model(some) for some in x[: 300 // counts[0] * counts[0]].split(counts[0])])
            for number, rows in itertools.product((1, 2, 3), counts):
                with threads(number):
                    found = torch.cat([model(some) for some in x[: 300 // rows * rows].split(rows)])
                both = min(len(found), len(expected))
                assert torch.equal(found[:both], expected[:both])
    assert len(of_kernel) >= 2


@pytest.mark.parametrize("precision", choose.PRECISIONS)
def test_no_precision_depends_on_free_memory(precision: str, strict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights in the precision that was asked for do not fit, the call fails; nothing is float32 instead."""
    if choose.missing(precision) is not None:
        pytest.skip(choose.missing(precision) or "")
    model = _bart()
    fastgen.enable(weight_dtype=precision)
    plenty = run(model, INPUTS, SCORES)
    monkeypatch.setattr(memory, "free_host_memory", lambda: 2 * 384 * 1024 + 1)  # enough for each of the weights
    _assert_the_same_bits(plenty, run(model, INPUTS, SCORES))
    monkeypatch.setattr(memory, "free_host_memory", lambda: 0)
    with pytest.raises(torch.OutOfMemoryError, match=f"no memory for weights in {precision}"):
        run(model, INPUTS, SCORES)


_PROGRAM = """
import hashlib, sys, torch
from transformers import BartConfig, BartForConditionalGeneration
import fastgen
from fastgen.decoding import layers
layers.MIN_WEIGHT = 2**16  # this model's weights are small
torch.manual_seed(0)
model = BartForConditionalGeneration(BartConfig(
    vocab_size=300, d_model=256, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=64)).eval()
inputs = torch.randint(3, 300, (4, 12))
for captured_step in ("never", "always"):
    fastgen.enable(captured_step=captured_step)
    for _ in range(int(sys.argv[1])):  # earlier calls
        model.generate(inputs[:2], num_beams=2, max_new_tokens=9, min_new_tokens=9)
    result = model.generate(inputs, num_beams=4, max_new_tokens=16, min_new_tokens=16, output_scores=True,
                            return_dict_in_generate=True)
    print(hashlib.sha256(b"".join(step.numpy().tobytes() for step in result.scores)).hexdigest())
"""


def test_another_process_and_earlier_calls(tmp_path: Path, programs: Path) -> None:
    """Nothing is measured, and nothing written to the cache folder."""

    def digests(calls: int) -> list[str]:
        environment = {**os.environ, "FASTGEN_STRICT": "1", "FASTGEN_CACHE": str(tmp_path / "cache")}
        command = [str(programs / "python"), "-c", _PROGRAM, str(calls)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()

    found = digests(0)
    assert found == digests(2) and len(found) == 2
    assert not (tmp_path / "cache").exists()
