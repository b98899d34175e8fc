"""Every request gets what a call of `generate` with its input alone gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import fastgen
from tests.engine.conftest import PROMPTS, Bans, alone, assert_alone, both_kinds
from tests.equivalence.models import BY_NAME, EOS, PAD

# With these each request has a prefill of its own.
OWN_PREFILL = {"encoder_repetition_penalty", "exponential_decay_length_penalty"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 4},
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    {"num_beams": 3, "early_stopping": True, "max_new_tokens": 20},
    {"max_new_tokens": 1},
    {"max_new_tokens": None, "max_length": 45},
    {"max_new_tokens": None},
    {"max_new_tokens": None, "max_length": 60, "min_length": 44, "num_beams": 2},
    {"min_new_tokens": 9, "forced_eos_token_id": EOS},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2, "num_beams": 2},
    {"encoder_repetition_penalty": 1.3},
    {"forced_bos_token_id": 7},
    {"pad_token_id": EOS},
    {"eos_token_id": None},
    {"bad_words_ids": [[9, 10], [33]], "suppress_tokens": [40]},
    {"exponential_decay_length_penalty": (3, 1.4), "begin_suppress_tokens": [12, 13]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_in_batches(model: Any, options: dict[str, Any]) -> None:
    with fastgen.Engine(model) as engine:
        assert_alone(model, PROMPTS, engine.generate(PROMPTS, **options), **options)
        stats = engine.stats()
    assert stats["finished"] == len(PROMPTS) and not stats["repeated"] and not stats["failed"]
    assert stats["steps"] and not stats["alone"]
    assert stats["batches"] < len(PROMPTS) or not OWN_PREFILL.isdisjoint(options)


def test_an_end_at_the_first_step(model: Any) -> None:
    """Of one row, while the others go on."""
    first = [alone(model, prompt, max_new_tokens=1)[0, -1].item() for prompt in PROMPTS]
    options = {"eos_token_id": [EOS, first[1], first[3]]}
    with fastgen.Engine(model) as engine:
        results = engine.generate(PROMPTS, **options)
        assert_alone(model, PROMPTS, results, **options)
        assert engine.stats()["batches"] < len(PROMPTS)


def test_padding_and_masks(model: Any) -> None:
    """Rows out of a padded batch, of either side, with their masks."""
    inputs = []
    for side in ("left", "right"):
        for missing in (0, 3):
            ids, mask = torch.arange(20, 30).unsqueeze(0), torch.ones(1, 10, dtype=torch.long)
            where = slice(0, missing) if side == "left" else slice(10 - missing, 10)
            ids[:, where], mask[:, where] = PAD, 0
            inputs.append({"input_ids": ids, "attention_mask": mask})
    inputs.append({"input_ids": torch.arange(40, 54).unsqueeze(0)})
    with fastgen.Engine(model) as engine:
        assert_alone(model, inputs, engine.generate(inputs))
        assert engine.stats()["batches"] == 1
        # Without a mask, the library takes tokens for padding.
        padded = [[PAD, PAD, 20, 21], list(range(30, 39))]
        assert_alone(model, padded, engine.generate(padded))


def test_forms_of_an_input(llama: Any) -> None:
    row = PROMPTS[1]
    forms = [row, tuple(row), torch.tensor(row), torch.tensor([row], dtype=torch.int32), {"input_ids": row}]
    forms.append({"input_ids": [row], "attention_mask": [[1] * len(row)]})
    with fastgen.Engine(llama) as engine:
        for result in engine.generate(forms):
            assert torch.equal(result, alone(llama, row))


@both_kinds
def test_options_of_their_own(model: Any) -> None:
    """Mixed, and those that agree share batches."""
    config = GenerationConfig(num_beams=2, max_new_tokens=7, eos_token_id=EOS, pad_token_id=PAD)
    kinds: list[dict[str, Any]] = [{}, {"num_beams": 4}, {"max_new_tokens": 5}, {"generation_config": config}]
    with fastgen.Engine(model, slots=16) as engine:
        futures = [(prompt, kind, engine.submit(prompt, **kind)) for prompt in PROMPTS for kind in kinds]
        for prompt, kind, future in futures:
            assert torch.equal(future.result(), alone(model, prompt, **kind))
        assert engine.stats()["batches"] < len(futures)


def test_a_seed_leaves_the_state_of_the_generator(llama: Any) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with fastgen.Engine(llama) as engine:
        engine.submit(PROMPTS[0], do_sample=True, seed=5).result()
    assert torch.equal(before, torch.get_rng_state())


@both_kinds
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_processors_and_criteria_see_their_own_rows(model: Any, options: dict[str, Any]) -> None:
    def at_twenty(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids == 20).any(dim=1)

    with fastgen.Engine(model) as engine:
        watching = [Bans(banned) for banned in range(len(PROMPTS))]
        futures = [
            engine.submit(prompt, logits_processor=[each], stopping_criteria=[at_twenty], **options)
            for prompt, each in zip(PROMPTS, watching, strict=True)
        ]
        plain = [engine.submit(prompt, **options) for prompt in PROMPTS]
        for prompt, each, future in zip(PROMPTS, watching, futures, strict=True):
            other = Bans(each.token)
            expected = alone(model, prompt, logits_processor=[other], stopping_criteria=[at_twenty], **options)
            assert torch.equal(future.result(), expected)
            assert each.seen == other.seen
        assert_alone(model, PROMPTS, [future.result() for future in plain], **options)


@both_kinds
def test_prefix_functions(model: Any) -> None:
    def even(batch: int, tokens: torch.Tensor) -> list[int]:
        assert batch == 0
        return list(range(2, 160, 2))

    with fastgen.Engine(model) as engine:
        results = engine.generate(PROMPTS, prefix_allowed_tokens_fn=even)
    assert_alone(model, PROMPTS, results, prefix_allowed_tokens_fn=even)


def test_prompt_lookup_and_other_modes(llama: Any) -> None:
    for options in ({"prompt_lookup_num_tokens": 3}, {"max_time": 1e9}, {"guidance_scale": 1.5}):
        with fastgen.Engine(llama) as engine:
            assert_alone(llama, PROMPTS[:3], engine.generate(PROMPTS[:3], **options), **options)


@pytest.mark.parametrize("name", ["whisper", "led", "prophetnet", "bloom", "mixtral", "mistral-short-window"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_other_models(name: str, options: dict[str, Any]) -> None:
    """One that reads recordings, and has a `generate` of its own; some that must not be padded; some that may."""
    family = BY_NAME[name]
    inputs: list[Any] = PROMPTS
    if family.inputs == "audio":
        features = family.make_inputs(3)["input_features"]
        inputs = [{"input_features": features[row : row + 1]} for row in range(3)]
    with fastgen.Engine(family.build()) as engine:
        assert_alone(family.build(), inputs, engine.generate(inputs, **options), **options)
        if name in ("led", "prophetnet"):  # nobody has tested them with padding
            assert engine.stats()["batches"] - engine.stats()["repeated"] == len(set(map(len, PROMPTS)))


def test_a_model_whose_rows_depend_on_each_other(llama: Any) -> None:
    llama.config.rope_parameters = {**(llama.config.rope_parameters or {}), "rope_type": "dynamic", "factor": 2.0}
    with fastgen.Engine(llama) as engine:
        engine.generate(PROMPTS[:2])
        assert engine.stats()["batches"] == 2 and "depends on the others" in engine.stats()["why"]


def test_decoder_prompts() -> None:
    model = BY_NAME["bart"].build()
    inputs = [{"input_ids": prompt, "decoder_input_ids": [EOS, 9, 12]} for prompt in PROMPTS]
    given = [{name: torch.tensor([value]) for name, value in each.items()} for each in inputs]
    with fastgen.Engine(model) as engine:
        assert_alone(model, given, engine.generate(inputs))


@both_kinds
def test_without_fastgen(model: Any) -> None:
    fastgen.disable()
    with fastgen.Engine(model) as engine:
        assert_alone(model, PROMPTS, engine.generate(PROMPTS, num_beams=2), num_beams=2)


def test_what_is_submitted_is_copied(llama: Any) -> None:
    """The caller changes it afterwards, before it has run."""
    ids, config = torch.tensor(PROMPTS[0]), copy.deepcopy(llama.generation_config)
    config.max_new_tokens = 4
    with fastgen.Engine(llama) as engine, engine.paused():
        future = engine.submit(ids, config)
        ids.fill_(1)
        config.max_new_tokens = 8
    assert torch.equal(future.result(), alone(llama, PROMPTS[0], max_new_tokens=4))
