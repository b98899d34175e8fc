"""Every option of `generate`, on models that stand for the others: the same tokens, scores and everything returned."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, StoppingCriteria

import fastgen
from fastgen import releases, settings
from fastgen.optimizer.transformers import prefill
from tests import near_ties
from tests.equivalence.cases import BEAM, BEAM_SAMPLE, CONTROL, DRAWING, SAMPLE, SEARCH
from tests.equivalence.check import accelerated, assert_same, check, run
from tests.equivalence.models import BY_NAME, EOS, LLAMA, LONG, VOCABULARY, Family, Weights
from tests.equivalence.options import FAMILIES, SCORES, any_decoding, beam_and_sample, checked, every
from tests.equivalence.others import made

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(5)]


def _id(value: Any) -> str:
    return str(value).replace(" ", "-").replace(",", "")


@pytest.fixture
def defined_ties(device: torch.device) -> None:
    """A captured step on a GPU takes the lowest of equal scores; torch.topk there promises no order."""
    if device.type == "cuda":
        pytest.skip("ties have no order on a GPU")


# ---- options that are plain values


@pytest.mark.parametrize("option", SEARCH, ids=_id)
@every
def test_search(family: Family, option: str) -> None:
    checked(family, BEAM, SEARCH[option])


@beam_and_sample
@pytest.mark.parametrize(
    ("family", "option"),
    # T5 has no decoder without an encoder, which is what guidance runs.
    [(f, name) for f in FAMILIES for name in CONTROL if (f.name, name) != ("t5", "guidance_scale")],
    ids=_id,
)
def test_control(family: Family, option: str, decoding: dict[str, Any], request: pytest.FixtureRequest) -> None:
    options = dict(CONTROL[option])
    if option == "forced_eos_token_id, several":  # which have the same score
        request.getfixturevalue("defined_ties")
    if family.encoder_decoder:
        # Lengths count what the decoder holds: the prompt is not a part of it.
        options.update({key: options[key] - LONG for key in ("max_length", "min_length") if key in options})
    checked(family, decoding, options)


@pytest.mark.parametrize("decoding", [SAMPLE, BEAM_SAMPLE], ids=["sample", "beam"])
@pytest.mark.parametrize("option", DRAWING, ids=_id)
@every
def test_drawing(family: Family, option: str, decoding: dict[str, Any]) -> None:
    checked(family, decoding, DRAWING[option])


@every
def test_generation_config_object(family: Family) -> None:
    """The options in an object, given by position, as scripts do."""
    model, inputs = family.build(), family.make_inputs()
    config = transformers.GenerationConfig(**{**model.generation_config.to_diff_dict(), **BEAM, "max_new_tokens": 9})
    near_ties.check(lambda: model.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"]))
    assert accelerated() == 1


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_the_same_seed_gives_the_same_samples(name: str) -> None:
    """And leaves the generator in the same state: what is drawn after the call is the same, too."""
    fastgen.enable(captured_step="never")  # which draws the same distribution from another stream
    family = BY_NAME[name]
    with fastgen.disabled():
        original = run(family.build(), family.make_inputs(), SAMPLE, seed=5), torch.rand(3)
    assert_same(original, (run(family.build(), family.make_inputs(), SAMPLE, seed=5), torch.rand(3)))


# ---- long and degenerate


@every
def test_growth(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """More positions than are allocated at first, and more than are added then."""
    monkeypatch.setattr(prefill, "_MAX_FIRST_CAPACITY", 8)
    checked(family, {"num_beams": 3}, {"min_new_tokens": 90, "max_new_tokens": 90, "output_scores": False})


@every
def test_ties(family: Family, defined_ties: None) -> None:
    """All scores are equal at all steps: which token comes first is decided in the same way."""
    model = copy.deepcopy(family.build())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for decoding in (BEAM, {}, {"num_beams": 3, "num_return_sequences": 3}):
        check(model, family.make_inputs(), {**decoding, **SCORES})
    assert accelerated() == 3


@pytest.mark.parametrize("length", [9.0, 9.5, math.inf], ids=repr)
def test_a_length_that_is_no_integer(length: float) -> None:
    """The library goes on until it is reached."""
    ends = None if math.isfinite(length) else list(range(EOS, VOCABULARY // 2))
    check(*made("llama"), {"max_new_tokens": length, "eos_token_id": ends})
    assert accelerated() == 1


# ---- what is returned


@any_decoding
@every
def test_everything_returned(family: Family, decoding: dict[str, Any]) -> None:
    """Scores, logits, beam indices, attentions, hidden states and the cache."""
    model = family.build("eager")
    names = ("output_logits", "output_attentions", "output_hidden_states")
    result = check(model, family.make_inputs(), {**decoding, **SCORES, **dict.fromkeys(names, True)})
    assert accelerated() == 1
    assert {"scores", "logits", releases.cache_name()} <= set(result)
    assert ("decoder_attentions" if family.encoder_decoder else "attentions") in result


def test_hidden_states_of_several_predictions() -> None:
    """AltUp has its predictions in front of the rows, as many as there are inputs, or more."""
    of_its_own = {"head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    config = {**LLAMA, **of_its_own, "num_kv_shared_layers": 0, "laurel_rank": 4}
    model = Family("gemma3n", "Gemma3nForCausalLM", Weights(1), config).build()
    returned = {"output_hidden_states": True, "return_dict_in_generate": True}
    for batch in (2, model.config.altup_num_inputs):
        inputs = {"input_ids": torch.arange(5, 5 + 6 * batch).view(batch, 6)}
        check(model, inputs, {**BEAM, "max_new_tokens": 4, **returned})
    assert accelerated() == 2


# ---- code of the user's


class WritesInPlace(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, int(input_ids[0, -1]) % VOCABULARY] -= 3
        return scores


def allowed(row: int, tokens: torch.Tensor) -> list[int]:
    return [token for token in range(VOCABULARY) if (token + int(tokens[-1]) + row) % 3]


CODE: dict[str, dict[str, Any]] = {
    "a processor that writes in place": {"logits_processor": [WritesInPlace()], "output_logits": True},
    # Which works in place where it may: raw logits are returned untouched by it.
    "n-grams": {"output_logits": True, "no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 1},
    "a prefix function": {"prefix_allowed_tokens_fn": allowed},
}


@beam_and_sample
@pytest.mark.parametrize("code", CODE, ids=_id)
@every
def test_code_that_changes_scores(family: Family, code: str, decoding: dict[str, Any]) -> None:
    checked(family, decoding, CODE[code])


@any_decoding
@every
def test_nested_generate(family: Family, decoding: dict[str, Any]) -> None:
    """A stopping criterion that generates: with the same model, and with another."""
    others = [(family.build(), family.make_inputs(batch=2)), (BY_NAME["opt"].build(), BY_NAME["opt"].make_inputs())]

    class Nests(StoppingCriteria):
        def __init__(self) -> None:
            self.found: list[Any] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if len(self.found) < 4:
                self.found += [model.generate(**inputs, num_beams=2, max_new_tokens=4) for model, inputs in others]
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def call() -> Any:
        mine = Nests()
        return run(
            family.build(), family.make_inputs(), {**decoding, **SCORES, "stopping_criteria": [mine]}
        ), mine.found

    near_ties.check(call)
    assert accelerated() == 5


# ---- where it runs


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
@any_decoding
@every
def test_modes_of_torch(family: Family, decoding: dict[str, Any], mode: Any) -> None:
    """Parameters may be trained, in a model that is in evaluation mode for the moment: scores have no gradients."""
    with mode():
        checked(family, decoding)
        with settings.changed(captured_step="never"):  # which would keep no scores
            result = run(family.build(), family.make_inputs(), {**decoding, **SCORES})
    assert not result.scores[0].requires_grad


@any_decoding
@every
def test_double_precision(family: Family, decoding: dict[str, Any]) -> None:
    check(copy.deepcopy(family.build()).double(), family.make_inputs(), {**decoding, **SCORES})
    assert accelerated() == 1


# ---- with a tokenizer


@any_decoding
@every
def test_stop_strings(family: Family, decoding: dict[str, Any], tokenizer: Any) -> None:
    checked(family, decoding, {"stop_strings": ["ac", "ifa", "gg", "lb", "eed"], "tokenizer": tokenizer})


# ---- errors are those of the original


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_return_sequences": 2},
        {"num_beams": 2, "num_return_sequences": 3},
        {"num_beams": 0},
        {"max_new_tokens": -1},
        {"no_such_option": 1},
        {"stop_strings": ["x"]},
    ],
    ids=str,
)
@every
def test_invalid_calls(family: Family, wrong: dict[str, Any]) -> None:
    """A call that the original refuses is refused with the same words."""
    with pytest.raises(Exception) as original, fastgen.disabled():
        run(family.build(), family.make_inputs(), wrong)
    with pytest.raises(type(original.value)) as ours:
        run(family.build(), family.make_inputs(), wrong)
    assert str(ours.value) == str(original.value)
