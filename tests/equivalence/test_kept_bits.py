"""Tokens of models whose bits are kept: those of the unpacked model by the original code.

In eager and in captured steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import fastgen
from benchmarks import smollm2
from benchmarks.workloads.smollm2_chat import chat_prompts
from fastgen import patching, settings
from fastgen.decoding.captured.program import Program
from fastgen.ops import gpu as operators
from fastgen.quantization.formats import BLOCK_TYPES
from tests import near_ties
from tests.noting import noted
from tests.optimizer.transformers.quantized.test_gguf import VOCABULARY, write_gpt2, write_llama  # which may skip
from tests.quantization.test_layer_weight import used  # noqa: F401 (the fixture)

pytestmark = pytest.mark.sampled(4)

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20},
    "contrast": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


def both(folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """With bits kept, and unpacked."""

    def load(**named: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=smollm2.GGUF, **named).eval()

    return load(quantization_config=fastgen.KeepBits()), load()


def check(
    models: tuple[PreTrainedModel, PreTrainedModel], inputs: dict[str, Tensor], options: dict[str, Any], new_tokens: int
) -> None:
    """The original code runs the unpacked model, FastGen that whose bits are kept."""

    def call() -> Any:
        torch.manual_seed(0)
        model = models[0] if patching.is_active() else models[1]
        return model.generate(**inputs, **options, max_new_tokens=new_tokens, pad_token_id=0)

    near_ties.check(call)


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have Triton's interpreter, with which steps on the CPU are called."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)


@pytest.fixture
def floats(used: list[bool]) -> Iterator[list[bool]]:  # noqa: F811
    """For each product that is called or recorded, whether activations stayed floats: all of them did."""
    yield used
    assert used and all(used)


@pytest.mark.parametrize("captured_step", ["always", "never"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("types", [*((kind.name,) for kind in BLOCK_TYPES.values()), ("Q4_K", "Q6_K")], ids="-".join)
def test_llama(
    types: tuple[str, ...],
    name: str,
    captured_step: str,
    tmp_path: Path,
    floats: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replays = noted(monkeypatch, Program, "replay")
    write_llama(tmp_path / smollm2.GGUF, types)
    tokens = torch.randint(3, VOCABULARY, (3, 7))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    with settings.changed(captured_step=captured_step, strict=True):
        check(both(tmp_path), {"input_ids": tokens, "attention_mask": mask}, OPTIONS[name], 12)
    assert bool(replays) == (captured_step == "always")


@pytest.mark.parametrize("name", OPTIONS)
def test_gpt2(name: str, tmp_path: Path, floats: list[bool]) -> None:
    """One row, a prompt of one token, captured from the start."""
    write_gpt2(tmp_path / smollm2.GGUF, ("Q5_K", "Q6_K", "Q8_0"))
    inputs = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1, dtype=torch.int64)}
    with settings.changed(captured_step="always", strict=True):
        check(both(tmp_path), inputs, OPTIONS[name], 12)


def test_settings_that_change_between_two_calls(tmp_path: Path) -> None:
    """A step is recorded for the activations that it was recorded with."""
    write_llama(tmp_path / smollm2.GGUF, ("Q4_1",))
    model, _ = both(tmp_path)
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, 7))}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = []
    with settings.changed(captured_step="always"):
        for activations in ("float", "int8", "float", "int8"):
            with settings.changed(activations=activations):
                outputs = model.generate(**inputs, **options, output_scores=True, return_dict_in_generate=True)
            found.append(torch.stack(outputs.scores))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(("batch", "beams"), [(1, 1), (16, 1), (4, 4)])
def test_smollm2(batch: int, beams: int) -> None:
    """A trained model that a package ships, in Q4_1 and Q8_0."""
    folder = smollm2.folder()
    if folder is None:
        pytest.skip(smollm2.MISSING)
    with settings.changed(captured_step="always"):
        check(both(folder), chat_prompts(folder, batch), {"do_sample": False, "num_beams": beams}, 48)
