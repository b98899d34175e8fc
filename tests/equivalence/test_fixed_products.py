"""With `linear_products="fixed"` a run can be repeated to the last bit, whatever was measured and done before."""

from __future__ import annotations

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
from fastgen.decoding import layers
from fastgen.decoding.layers import FastLayers
from fastgen.ops import triton as operators
from fastgen.ops.linear import gemm, quantized
from fastgen.optimizer.transformers.captured import graph_cache, sizes
from tests.equivalence.captured import captures, reasons
from tests.equivalence.cases import BEAM
from tests.equivalence.check import check, run

pytestmark = pytest.mark.skipif(not gemm.has_vectors(), reason="torch's product is used without AVX2")

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

# What a machine may have measured, or nothing yet.
TIMINGS = {
    "torch's is the fastest": gemm.Costs(plain=1.0, packed=2.0, packing=0.0, streamed=2.0),
    "the packed one is": gemm.Costs(plain=2.0, packed=1.0, packing=0.0, streamed=2.0),
    "the streamed one is": gemm.Costs(plain=2.0, packed=2.0, packing=0.0, streamed=1.0),
    "nothing is known": None,
}


def _measured(costs: gemm.Costs | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "costs", lambda *shape, measure: costs)
    monkeypatch.setattr(FastLayers, "_shapes", {})


def _assert_the_same_bits(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    if "sequences_scores" in one:
        assert torch.equal(one.sequences_scores, other.sequences_scores)
    assert all(torch.equal(left, right) for left, right in zip(one.scores, other.scores, strict=True))


@every
@pytest.mark.parametrize("packed_weights", ["call", "keep"])
def test_timings_memory_and_earlier_calls_change_no_bit(
    build: Any, packed_weights: str, strict: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    fastgen.enable(linear_products="fixed", packed_weights=packed_weights)
    first = check(model, INPUTS, SCORES)
    for costs in TIMINGS.values():
        _measured(costs, monkeypatch)
        _assert_the_same_bits(first, run(model, INPUTS, SCORES))
    FastLayers.drop_kept()
    monkeypatch.setattr(layers, "free_host_memory", lambda: 0)  # nothing can be packed
    monkeypatch.setattr(gemm, "pack", lambda weight: pytest.fail("packed"))
    _assert_the_same_bits(first, run(model, INPUTS, SCORES))


@every
@pytest.mark.parametrize("options", [SCORES, {**SCORES, "num_beams": 1}, {**SCORES, "num_beams": 1, "do_sample": True}])
def test_captured_steps_change_no_bit(build: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a step is recorded in this call or was before, whatever is measured, and with more capacity later."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    monkeypatch.setattr(sizes, "_MAX_FIRST_NEW_ON_CPU", 13)
    monkeypatch.setattr(sizes, "_NEW_ON_CPU", (13, 3))
    model, options = build(), {**options, "max_new_tokens": 40}
    fastgen.enable(linear_products="fixed", captured_step="always", strict=True)
    first = check(model, INPUTS, options)
    for costs in TIMINGS.values():
        _measured(costs, monkeypatch)
        _assert_the_same_bits(first, run(model, INPUTS, options))
        graph_cache.drop_all()
        _assert_the_same_bits(first, run(model, INPUTS, options))
    assert captures() == 1 + 2 * len(TIMINGS), reasons()


def test_measured_products_do_depend_on_the_timings(strict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would show nothing."""
    model, results = _bart(), []
    for costs in (TIMINGS["torch's is the fastest"], TIMINGS["the packed one is"]):
        _measured(costs, monkeypatch)
        results.append(run(model, INPUTS, SCORES))
    assert not torch.equal(results[0].scores[0], results[1].scores[0])


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    fastgen.enable(linear_products="fixed")
    with torch.no_grad():
        torch.manual_seed(0)
        yield nn.Linear(600, 200)


def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads(layer: nn.Linear) -> None:
    x, model = torch.randn(300, 600), nn.Sequential(layer)
    threads = torch.get_num_threads()
    with FastLayers.of(model):
        alone = torch.cat([model(row) for row in x.split(1)])
        assert not torch.equal(alone, torch.cat([nn.functional.linear(row, layer.weight, layer.bias) for row in x]))
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                for rows in (2, 7, 64, 300):
                    assert torch.equal(torch.cat([model(some) for some in x.split(rows)]), alone)
        finally:
            torch.set_num_threads(threads)


def test_without_vectors_the_product_is_torchs(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    x, model = torch.randn(5, 600), nn.Sequential(layer)
    with FastLayers.of(model):
        for _ in range(10):
            assert torch.equal(model(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("precision", quantized.PRECISIONS)
def test_whether_a_precision_is_used_is_not_measured(
    precision: str, layer: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quantized._missing(precision) is not None:
        pytest.skip(quantized._missing(precision) or "")
    monkeypatch.setattr(quantized, "_measure", lambda precision: pytest.fail("measured"))
    fastgen.enable(weight_dtype=precision)
    x, model = torch.randn(5, 600), nn.Sequential(layer)
    plain = model(x)
    with FastLayers.of(model):
        assert not torch.equal(model(x), plain)
    assert fastgen.stats()[f"{precision} weights"]["accelerated"] == 1


@pytest.mark.parametrize("precision", quantized.PRECISIONS)
def test_no_precision_depends_on_free_memory(precision: str, strict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights in the precision that was asked for do not fit, the call fails; nothing is float32 instead."""
    if quantized._missing(precision) is not None:
        pytest.skip(quantized._missing(precision) or "")
    model = _bart()
    fastgen.enable(linear_products="fixed", weight_dtype=precision)
    plenty = run(model, INPUTS, SCORES)
    # More than the half that is taken otherwise, and enough for each of the weights.
    monkeypatch.setattr(layers, "free_host_memory", lambda: 2 * 384 * 1024 + 1)
    _assert_the_same_bits(plenty, run(model, INPUTS, SCORES))
    monkeypatch.setattr(layers, "free_host_memory", lambda: 0)
    with pytest.raises(torch.OutOfMemoryError, match='linear_products="fixed"'):
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
for _ in range(int(sys.argv[1])):  # earlier calls
    model.generate(inputs[:2], num_beams=2, max_new_tokens=9, min_new_tokens=9)
result = model.generate(inputs, num_beams=4, max_new_tokens=16, min_new_tokens=16, output_scores=True,
                        return_dict_in_generate=True)
print(hashlib.sha256(b"".join(step.numpy().tobytes() for step in result.scores)).hexdigest())
"""


def test_processes_with_a_cold_and_a_warm_cache(tmp_path: Path, programs: Path) -> None:
    """A fresh one, one that measures, and one that has measured and generated before."""

    def digest(products: str, cache: str, calls: int) -> str:
        environment = {**os.environ, "FASTGEN_LINEAR_PRODUCTS": products, "FASTGEN_CACHE": str(tmp_path / cache)}
        environment["FASTGEN_STRICT"] = "1"
        command = [str(programs / "python"), "-c", _PROGRAM, str(calls)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    digest("measured", "warm", 4)
    assert (tmp_path / "warm" / "timings.json").exists()
    cold = digest("fixed", "cold", 0)
    assert digest("fixed", "cold", 4) == digest("fixed", "warm", 0) == cold
    assert not (tmp_path / "cold").exists()  # nothing was measured
