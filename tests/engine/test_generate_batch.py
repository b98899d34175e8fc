"""`model.generate_batch` of Transformers, on the engine's executor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import fastgen
from fastgen.engine.generate_batch import generate_batch as hook
from tests.engine.conftest import PROMPTS, alone, both_kinds, raising
from tests.equivalence.models import BY_NAME, EOS, PAD

ENTRY_POINT = "transformers.generate_batch"


@pytest.fixture(autouse=True)
def counted() -> None:
    fastgen.reset_stats()


def _generated(model: Any, prompt: list[int], row: int, **options: Any) -> list[int]:
    """What a call of `generate` writes behind the prompt, without padding."""
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    found = alone(model, prompt, **options)[row, start:].tolist()
    return found[: found.index(EOS) + 1] if EOS in found else found


@both_kinds
@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 9}, {"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 3}]
)
def test_outputs(model: Any, options: dict[str, Any]) -> None:
    outputs = model.generate_batch(PROMPTS, **options)
    several = options.get("num_return_sequences", 1)
    assert len(outputs) == several * len(PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        for row in range(several):
            name = f"req_{number}" if row == 0 else f"req_{number}__child#{row - 1}"
            output = outputs[name]
            assert isinstance(output, GenerationOutput) and output.request_id == name and output.is_finished()
            assert output.prompt_ids == prompt and output.error is None and output.status is RequestStatus.FINISHED
            assert output.generated_tokens == _generated(model, prompt, row, **options)
            assert output.created_time <= output.lifespan[0] <= output.lifespan[1]
    assert fastgen.stats()[ENTRY_POINT]["accelerated"] == 1


def test_the_same_as_the_librarys_own() -> None:
    """Greedy tokens of a decoder alone, which it has right: ids, fields and their order."""
    model = BY_NAME["llama"].build()
    config = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    options: dict[str, Any] = {"max_new_tokens": 6, "continuous_batching_config": config, "warmup": False}
    ours = model.generate_batch(PROMPTS[:3], **options)
    with fastgen.disabled():
        librarys = model.generate_batch(PROMPTS[:3], **options)
    assert list(ours) == list(librarys)
    for one, other in zip(ours.values(), librarys.values(), strict=True):
        assert (one.prompt_ids, one.generated_tokens) == (other.prompt_ids, other.generated_tokens)
        assert (one.error, one.status, one.logprobs) == (other.error, other.status, other.logprobs)


def test_prompts_have_no_padding() -> None:
    """A token that the model is padded with elsewhere is read as any other, as the library's own does."""
    model, prompts = BY_NAME["llama"].build(), [[5, PAD, 6], [PAD, PAD, 7], [PAD]]
    for prompt, output in zip(prompts, model.generate_batch(prompts, max_new_tokens=6).values(), strict=True):
        whole = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        expected = alone(model, whole, max_new_tokens=6)[0].tolist()
        assert prompt + output.generated_tokens == expected


@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_prompt_as_a_batch_of_one(as_tensor: bool) -> None:
    """What a tokenizer gives for a text."""
    model, prompt = BY_NAME["llama"].build(), [[5, 6, 7]]
    (output,) = model.generate_batch([torch.tensor(prompt) if as_tensor else prompt], max_new_tokens=4).values()
    (expected,) = model.generate_batch(prompt, max_new_tokens=4).values()
    assert output.error is None and output.generated_tokens == expected.generated_tokens


@pytest.mark.parametrize("config", [None, GenerationConfig(do_sample=True, max_new_tokens=8, eos_token_id=EOS)])
def test_samples_with_options_that_the_library_would_ignore(config: GenerationConfig | None) -> None:
    """Of the first, it would make greedy tokens; of the second, without the processor."""
    model, options = BY_NAME["llama"].build(), {"do_sample": True, "max_new_tokens": 8}
    if config is not None:
        options = {"generation_config": config, "suppress_tokens": list(range(80, 160))}
    drawn = set[tuple[int, ...]]()
    for seed in range(4):
        torch.manual_seed(seed)
        drawn |= {tuple(output.generated_tokens) for output in model.generate_batch(PROMPTS[:1], **options).values()}
    assert len(drawn) > 1 and fastgen.stats()[ENTRY_POINT]["accelerated"] == 4
    assert config is None or max(max(tokens) for tokens in drawn) < 80


def test_a_configuration_and_processors() -> None:
    model = BY_NAME["bart"].build()
    config = GenerationConfig(num_beams=2, max_new_tokens=8, no_repeat_ngram_size=2, eos_token_id=EOS, pad_token_id=PAD)
    outputs = model.generate_batch(PROMPTS, generation_config=config, progress_bar=True)
    for output, prompt in zip(outputs.values(), PROMPTS, strict=True):
        assert output.generated_tokens == _generated(model, prompt, 0, generation_config=config)


class Fails:
    """A processor that fails for a prompt of one token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 1:
            raise LookupError("one token")
        return scores


def test_one_that_fails() -> None:
    model = BY_NAME["llama"].build()
    outputs = model.generate_batch(PROMPTS, max_new_tokens=5, logits_processor=[Fails()])
    failed = [output for output in outputs.values() if output.status is RequestStatus.FAILED]
    assert [output.prompt_ids for output in failed] == [[20]] and failed[0].error == "LookupError: one token"
    assert failed[0].generated_tokens == [] and len(outputs) == len(PROMPTS)


def test_refused() -> None:
    model = BY_NAME["llama"].build()
    for inputs, options in ((PROMPTS, {"num_beans": 2}), ([*PROMPTS, []], {}), (PROMPTS, {"max_new_tokens": 1000})):
        with pytest.raises(ValueError):
            model.generate_batch(inputs, **{"num_beams": 2, **options})
    assert model.generate_batch([]) == {}


def test_an_interrupt_ends_the_call() -> None:
    model, interrupts = BY_NAME["llama"].build(), [raising(KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        model.generate_batch(PROMPTS, max_new_tokens=5, logits_processor=interrupts)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"record_timestamps": True, "max_new_tokens": 3}, "record_timestamps"),
        ({"persistent_manager": True, "num_beams": 2}, "persistent_manager"),
        ({"continuous_batching_config": ContinuousBatchingConfig(return_logprobs=True)}, "log-probabilities"),
        ({"generation_config": GenerationConfig(do_sample=True, max_new_tokens=3)}, "sampling"),
        ({"cache_implementation": "paged", "max_new_tokens": 3}, "a paged cache"),
    ],
    ids=["timestamps", "manager", "logprobs", "sampling", "paged"],
)
def test_left_to_the_library(arguments: dict[str, Any], reason: str) -> None:
    calls = []

    def librarys(
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        persistent_manager: bool = False,
        **kwargs: Any,
    ) -> Any:
        calls.append(inputs)
        return {}

    assert hook(librarys, BY_NAME["llama"].build(), (PROMPTS,), arguments) == {}
    assert calls == [PROMPTS]
    entry = fastgen.stats()[ENTRY_POINT]
    assert entry["accelerated"] == 0 and any(reason in found for found in entry["fallback"])


def test_the_librarys_own_again_when_disabled() -> None:
    ours = ContinuousMixin.generate_batch
    fastgen.disable()
    librarys = ContinuousMixin.generate_batch
    assert librarys is not ours and librarys.__module__.startswith("transformers.")
    fastgen.enable()
    assert ContinuousMixin.generate_batch is not librarys
    fastgen.disable()
    assert ContinuousMixin.generate_batch is librarys
