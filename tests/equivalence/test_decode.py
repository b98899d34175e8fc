"""`generate(custom_generate=fastgen.decode)`: FastGen's loop without a patch, with the results of the library's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

import fastgen
from fastgen import patching, releases
from fastgen.decoding.kv.growing import GrowingKV
from tests import near_ties
from tests.equivalence.captured import captures, need_programs, reasons
from tests.equivalence.cases import BEAM, BEAM_SAMPLE, SAMPLE
from tests.equivalence.check import accelerated, assert_same, fallbacks, run
from tests.equivalence.models import BY_NAME, EOS, FAMILIES, FIRST_WORD, Family
from tests.equivalence.speculation import GREEDY, assert_speculates, counts, disturbed
from tests.equivalence.test_compaction import ENDS, rows  # noqa: F401  (a fixture)
from tests.equivalence.test_failures import assert_failed_once, break_
from tests.equivalence.test_import_order import CALL, python

DECODINGS = {"greedy": {}, "samples": SAMPLE, "beam": BEAM, "beam-sample": BEAM_SAMPLE}
decodings = pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}

DECODE = {"custom_generate": fastgen.decode}
LLAMA, BART = BY_NAME["llama"], BY_NAME["bart"]


@pytest.fixture(autouse=True)
def disabled(counted: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No patch is in place; a fallback raises."""
    need_programs(device, monkeypatch)
    fastgen.enable(strict=True)
    fastgen.disable()


def decoded(family: Family, options: dict[str, Any], **inputs: Any) -> Any:
    """What such a call gives, which is what the library's own gives."""

    def call() -> Any:
        own = {} if patching.is_suspended() else DECODE
        return run(family.build(), family.make_inputs(**inputs), {**options, **own})

    return near_ties.check(call)


@pytest.mark.sampled(8)
@decodings
@pytest.mark.parametrize("setting", ["never", "always"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_model(family: Family, setting: str, decoding: dict[str, Any]) -> None:
    if family.exceeds_window(decoding):
        pytest.skip("one sequence per input beyond a sliding window is left to the original code")
    fastgen.settings.change(captured_step=setting)
    decoded(family, {**decoding, **EVERYTHING})
    assert accelerated() == 1
    # ProphetNet's needs patches of its modules.
    assert captures() == (setting == "always" and family.name != "prophetnet"), reasons()


def test_options_of_scores() -> None:
    for setting in ("never", "always"):
        fastgen.settings.change(captured_step=setting)
        ngrams = {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2}
        decoded(BART, {**BEAM, **ngrams, "min_new_tokens": 5, "eos_token_id": [EOS, 9, 10]})
    assert accelerated() == 2


def test_in_a_process_that_has_it_disabled(programs: Path) -> None:
    script = f"import fastgen\n{CALL}assert call() == call(custom_generate=fastgen.decode)\nprint(counts())"
    found = python(script, programs / "python", FASTGEN_DISABLE="1")
    assert found == "{'accelerated': 1, 'fallback': {}}\n"


def test_where_it_is_enabled() -> None:
    """The call is that without, and no fallback; inside `disabled` the library's loop runs."""
    fastgen.enable()
    result = run(LLAMA.build(), LLAMA.make_inputs(), {**BEAM, **DECODE})
    assert accelerated() == 1
    with fastgen.disabled():
        assert_same(run(LLAMA.build(), LLAMA.make_inputs(), {**BEAM, **DECODE}), result)
    assert accelerated() == 1 and not fallbacks()


@pytest.mark.parametrize("setting", ["never", "always"])
def test_where_only_generate_is_not_hooked(setting: str) -> None:
    """Somebody has kept the library's function from before."""
    fastgen.settings.change(captured_step=setting)
    librarys, expected = GenerationMixin.generate, run(BART.build(), BART.make_inputs(), BEAM)
    fastgen.enable()
    assert_same(librarys(BART.build(), **BART.make_inputs(), **BEAM, **DECODE), expected)
    assert accelerated() == 1 and not fallbacks()


class Seen(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.values.append(input_ids.tolist())
        return scores


@pytest.mark.parametrize("setting", ["never", "always"])
@pytest.mark.parametrize("family", [LLAMA, BART], ids=str)
def test_streamers(family: Family, setting: str) -> None:
    """The library does not hand them on to a loop that is passed in."""
    fastgen.settings.change(captured_step=setting)
    seen = {name: Seen() for name in ("without", "with")}
    for name, streamer in seen.items():
        options = DECODE if name == "with" else {}
        run(family.build(), family.make_inputs(batch=1), {"streamer": streamer, "num_beams": 1, **options})
    assert seen["with"].values == seen["without"].values and accelerated() == 1
    with pytest.raises(ValueError, match="streamer"):
        run(family.build(), family.make_inputs(batch=1), {"streamer": Seen(), **BEAM, **DECODE})


@decodings
def test_code_of_the_users(decoding: dict[str, Any]) -> None:
    fastgen.settings.change(captured_step="always")
    seen, results = {}, []
    for options in ({}, DECODE):
        processor, criterion = Seen(), Seen()
        criteria = [lambda ids, scores, seen=criterion: (seen(ids, scores), ids[:, -1] == FIRST_WORD)[1]]
        own = {"logits_processor": [processor], "stopping_criteria": criteria}
        results.append(run(LLAMA.build(), LLAMA.make_inputs(), {**decoding, **own, **options}))
        seen[bool(options)] = processor.values, criterion.values
    assert_same(*results)
    assert seen[True] == seen[False] and accelerated() == 1


def test_falls_back() -> None:
    options = {**BEAM, "use_cache": False}
    expected = run(LLAMA.build(), LLAMA.make_inputs(), options)
    with pytest.raises(fastgen.FallbackError, match="use_cache=False"):
        run(LLAMA.build(), LLAMA.make_inputs(), {**options, **DECODE})
    fastgen.settings.change(strict=False)
    assert_same(expected, run(LLAMA.build(), LLAMA.make_inputs(), {**options, **DECODE}))
    assert fallbacks() == {"no K/V cache (use_cache=False)": 2} and not accelerated()


@decodings
def test_a_failure_is_made_good(decoding: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's loop, from the same random state."""
    fastgen.settings.change(strict=False, captured_step="never")
    options = {**decoding, **EVERYTHING}
    expected = run(BART.build(), BART.make_inputs(), options), torch.rand(2)
    break_(monkeypatch, GrowingKV, "extend", 13)
    with pytest.warns(RuntimeWarning) as record:
        found = run(BART.build(), BART.make_inputs(), {**options, **DECODE}), torch.rand(2)
    assert_failed_once(record)
    assert_same(expected, found)


def test_other_threads_meet_nothing_of_it() -> None:
    """While a call runs, a call of another thread on the same model is the library's own."""
    expected, others = run(LLAMA.build(), LLAMA.make_inputs(), BEAM), []

    def looks_on(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert patching.is_active() and patching.original_of(GenerationMixin.generate) is None
        if not others:
            other = threading.Thread(target=lambda: others.append(run(LLAMA.build(), LLAMA.make_inputs(), BEAM)))
            other.start()
            other.join()
        return scores

    result = run(LLAMA.build(), LLAMA.make_inputs(), {**BEAM, "logits_processor": [looks_on], **DECODE})
    assert_same(expected, result)
    assert_same(expected, others[0])
    assert accelerated() == 1 and not fallbacks()


@pytest.mark.skipif(not releases.streams_behind_criteria(), reason="before 5.17 such calls keep the library's drafts")
@pytest.mark.usefixtures("speculates_at_once", "any_lengths")
@pytest.mark.parametrize("family", [LLAMA, BART], ids=str)
def test_drafts(family: Family) -> None:
    fastgen.disable()  # the fixture enables it
    assistant = disturbed(family.build(), 0.01)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        decoded(family, {**GREEDY, **options}, batch=1)
    fastgen.settings.change(self_speculation="int8")
    decoded(family, GREEDY)
    assert_speculates(3)
    assert accelerated() == 3 and counts()["accepted"] > 0


def test_modes_without_a_loop() -> None:
    with pytest.raises(ValueError, match="no loop for contrastive_search"):
        run(LLAMA.build(), LLAMA.make_inputs(batch=1), {"penalty_alpha": 0.6, "top_k": 4, **DECODE})
