"""Finished inputs leave the batch: the same tokens from fewer rows. They stay if that could be seen."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.configuration_utils import PreTrainedConfig

import fastgen
from fastgen.optimizer.transformers.loop_hooks import BatchCompaction
from tests import near_ties
from tests.equivalence.cases import BEAM, BEAM_SAMPLE, SAMPLE
from tests.equivalence.check import accelerated, check, run
from tests.equivalence.models import BY_NAME, EOS, FAMILIES, FIRST_WORD, LONG, SHORT, Family
from tests.equivalence.others import made
from tests.equivalence.speculation import configured, of_its_own
from tests.equivalence.user_code import Never
from tests.noting import noted

# Sequences end early and at different steps: several tokens end one.
ENDS = {"eos_token_id": [EOS, *range(FIRST_WORD, FIRST_WORD + 70)], "max_new_tokens": 30}
DECODINGS = {
    "greedy": {},
    "sample": {"do_sample": True},
    "samples": SAMPLE,
    "beam": BEAM,
    "early": {**BEAM, "early_stopping": True},
    "never": {**BEAM, "early_stopping": "never", "length_penalty": 0.5},
    "beam-sample": {**BEAM_SAMPLE, "early_stopping": True},
}
greedy_and_beam = pytest.mark.parametrize("decoding", [{}, BEAM], ids=["greedy", "beam"])

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each step of the accelerated call, without the prefill."""
    found: list[int] = []
    select = BatchCompaction.select

    def counting_select(compaction: BatchCompaction, inputs: dict[str, Any]) -> dict[str, Any]:
        selected = select(compaction, inputs)
        ids = selected.get("decoder_input_ids", selected.get("input_ids"))
        found.append(ids.shape[0])
        return selected

    monkeypatch.setattr(BatchCompaction, "select", counting_select)
    return found


# Inputs of these models end at different steps.
LEAVING = ("bart", "t5", "gpt2", "llama")
MODELS = [(family, LONG) for family in FAMILIES] + [(BY_NAME[name], SHORT) for name in LEAVING]


@pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)
@pytest.mark.parametrize(("family", "length"), MODELS, ids=str)
def test_inputs_leave(family: Family, length: int, decoding: dict[str, Any], rows: list[int]) -> None:
    if family.exceeds_window(decoding):
        pytest.skip("one sequence per input beyond a sliding window is left to the original code")
    check(family.build(), family.make_inputs(batch=9, length=length), {**decoding, **ENDS})
    assert accelerated() == 1
    assert rows == sorted(rows, reverse=True)
    if family.name in LEAVING:
        assert rows[-1] < 9 * max(decoding.get("num_beams", 1), decoding.get("num_return_sequences", 1))


@greedy_and_beam
def test_a_few_that_end_together_wait(decoding: dict[str, Any], rows: list[int]) -> None:
    family = BY_NAME["gpt2"]
    check(family.build(), family.make_inputs(batch=16), {**decoding, **ENDS})
    present = [16 * decoding.get("num_beams", 1), *rows]
    for before, after in itertools.pairwise(present):
        assert after == before or after <= 0.75 * before


class _Same(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


SEEN = {
    "return_dict": {"return_dict_in_generate": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "attentions": {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True},
    "processor": {"logits_processor": [_Same()]},
    "criterion": {"stopping_criteria": [Never()]},
    "prefix": {"prefix_allowed_tokens_fn": lambda batch, tokens: list(range(150))},
}


@greedy_and_beam
@pytest.mark.parametrize("option", SEEN)
def test_all_stay_if_they_are_seen(option: str, decoding: dict[str, Any], rows: list[int]) -> None:
    family = BY_NAME["bart"]
    options = {**decoding, **ENDS, **SEEN[option]}
    if "output_attentions" in options:
        options["max_new_tokens"] = 6
    check(family.build("eager"), family.make_inputs(batch=9), options)
    assert accelerated() == 1 and rows == []


@greedy_and_beam
def test_all_stay_if_nothing_ends(decoding: dict[str, Any], rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made("gpt2", batch=6)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    check(model, inputs, {**decoding, "max_new_tokens": 8})
    assert rows == []


def test_padding_that_is_no_token(rows: list[int]) -> None:
    """The library gives it to the model, which raises. With beams, those of a finished input go on."""
    family, options = BY_NAME["gpt2"], {**ENDS, "pad_token_id": 10_000}
    with pytest.raises(IndexError, match="out of range"):
        run(family.build(), family.make_inputs(batch=9), options)
    check(family.build(), family.make_inputs(batch=9), {**BEAM, **options})
    assert rows[-1] < 9 * BEAM["num_beams"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("captured_step", ["never", "always"])
def test_a_call_copies_no_configuration_that_the_library_does_not(
    captured_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library copies a configuration with an encoder each time that the decoder's is asked for."""
    asked = noted(monkeypatch, PreTrainedConfig, "get_text_config")
    model, inputs = made("bart", batch=4)
    fastgen.enable(captured_step=captured_step)

    def count() -> int:
        asked.clear()
        run(model, inputs, ENDS)
        return len(asked)

    count()  # the library does more in the first call
    with fastgen.disabled():
        by_the_library = count()
    assert count() == by_the_library


@greedy_and_beam
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_all_stay_if_positions_depend_on_the_longest(kind: str, decoding: dict[str, Any], rows: list[int]) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = configured("llama", max_position_embeddings=32, rope_parameters=rope)
    # A copy for each call: such a model remembers the longest one.
    near_ties.check(lambda: copy.deepcopy(model).generate(**made("llama", batch=9)[1], **{**decoding, **ENDS}))
    assert accelerated() == 1 and rows == []


def test_all_stay_if_layers_have_one_scale_for_all_rows(rows: list[int]) -> None:
    model, inputs = made("llama", batch=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}).eval()
    check(model, inputs, ENDS)
    assert rows == []


def test_an_input_with_equal_scores_stays() -> None:
    compaction = BatchCompaction(None, batch=3, per_input=2, searches=True)  # type: ignore[arg-type]
    over, full = torch.zeros(3, 1, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool)
    compaction.note_search(over, full, torch.tensor([[-1.0, -2.0], [-1.0, -1.0], [-1.0, -1e9]]), False)
    assert compaction._ended.tolist() == [True, True, False, False, False, False]


@greedy_and_beam
def test_an_input_that_gives_no_numbers_leaves_the_others_alone(decoding: dict[str, Any], rows: list[int]) -> None:
    """A search would take NaN for the best hypothesis, in place of finished ones."""
    model, inputs = of_its_own("llama", batch=9)
    with torch.no_grad():
        model.get_input_embeddings().weight[FIRST_WORD] = torch.nan
    ids = inputs["input_ids"]
    ids[ids == FIRST_WORD] += 1
    ids[0, -1] = FIRST_WORD
    check(model, inputs, {**decoding, **ENDS, "suppress_tokens": [FIRST_WORD]})
    assert rows[-1] < 9 * decoding.get("num_beams", 1)


def test_positions_given_once_for_all_rows(rows: list[int]) -> None:
    """They cannot be cut, so all rows stay."""
    family = BY_NAME["llama"]
    inputs = {"input_ids": family.make_inputs(batch=9, length=SHORT, padding=None)["input_ids"]}
    inputs["position_ids"] = torch.arange(SHORT)[None]
    check(family.build(), inputs, ENDS)
    assert set(rows) == {9}


def test_a_failure_after_rows_have_left(monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    fastgen.enable(strict=False)
    model, inputs = made("bart", batch=9)
    spread = BatchCompaction.spread

    def failing(compaction: BatchCompaction, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[0] < 9:
            raise RuntimeError("planted")
        return spread(compaction, logits)

    monkeypatch.setattr(BatchCompaction, "spread", failing)
    with pytest.warns(RuntimeWarning, match="planted"):
        check(model, inputs, ENDS)
    assert rows[-1] < 9
