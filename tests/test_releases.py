"""Releases of Transformers: what each calls things, and what happens on one that is not tested."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastgen
from fastgen import releases
from fastgen.models.unilm import UniLMForSeq2SeqLM
from tests import stub_release
from tests.equivalence.models import BY_NAME, FAMILIES

ROOT = Path(__file__).parents[1]
LLAMA = BY_NAME["llama"]
_MAIN = "import runpy; runpy.run_module('fastgen', run_name='__main__')"
_STUB = """
import inspect, sys, warnings
from tests import stub_release
stub_release.install({names})
warnings.simplefilter("ignore")
import torch, transformers
import fastgen
warnings.simplefilter("always")
from tests.equivalence.models import BY_NAME
model, inputs = BY_NAME["{model}"].build(), BY_NAME["{model}"].make_inputs()
for options in ({{}}, {{"num_beams": 3}}):
    with warnings.catch_warnings(), fastgen.disabled():
        warnings.simplefilter("ignore")
        expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options), expected)
print(sorted(fastgen.stats().get("transformers.generate", {{}}).get("fallback", ())))
from fastgen import selfcheck
print(selfcheck.line()[0])
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FASTGEN_CACHE": "", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


# ---- tested releases


def test_models_are_those_that_must_be_accelerated() -> None:
    assert {family.model_class for family in FAMILIES} == releases.MODELS


def test_the_installed_release_is_a_tested_one() -> None:
    assert releases.version() == transformers.__version__
    assert releases.is_tested(transformers.__version__)
    assert releases.cache_name() in inspect.signature(type(LLAMA.build()).forward).parameters


@pytest.mark.parametrize(
    ("release", "tested"),
    [("5.4.0", True), ("5.24.3", True), ("5.10.0.dev0", True), ("5.3.9", False), ("5.25.0", False), ("6.0", False)],
)
def test_tested_releases(release: str, tested: bool) -> None:
    assert releases.is_tested(release, ("5.4", "5.24")) is tested


@pytest.mark.parametrize("name", releases.CACHE_NAMES[:2])
def test_a_model_of_fastgens_takes_the_cache_by_both_names(name: str) -> None:
    @releases.takes_cache
    def forward(self: Any, ids: int, cache: Any = None, *, more: int = 0) -> tuple[Any, ...]:
        return ids, cache, more

    assert forward(None, 3) == (3, None, 0)
    assert forward(None, 3, more=2, **{name: "given"}) == (3, "given", 2)
    assert forward(None, 3, "given") == (3, "given", 0)
    assert list(inspect.signature(forward).parameters) == ["self", "ids", releases.cache_name(), "more"]
    assert releases.cache_name() in inspect.signature(UniLMForSeq2SeqLM.forward).parameters
    with pytest.raises(TypeError, match="by two names"):
        forward(None, 3, cache=1, past_key_values=2)


def test_names_of_a_release_are_spelled_out_in_one_file() -> None:
    changed = re.compile(r"past_key_values|cache_params|_encoder_decoder_kwargs_for_generation|get_max_(cache|length)")
    spelled = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "fastgen").rglob("*.py")
        if changed.search(re.sub(r'(?s)""".*?"""', "", path.read_text()))
    ]
    assert spelled == ["fastgen/releases.py"]


@pytest.mark.parametrize("name", releases.CACHE_NAMES[:2])
def test_a_cache_of_the_users_by_both_names(name: str) -> None:
    if name == "cache" != releases.cache_name():
        pytest.skip("a name that this release does not know")
    model, inputs = LLAMA.build(), LLAMA.make_inputs()

    def run() -> tuple[torch.Tensor, int, list[str]]:
        cache = transformers.DynamicCache(config=model.config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = model.generate(**inputs, **{name: cache}, num_beams=2)
        return found, cache.get_seq_length(), [str(each.message) for each in caught]

    with fastgen.disabled():
        expected = run()
    fastgen.reset_stats()
    found = run()
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
    assert fastgen.stats()["transformers.generate"]["accelerated"] == 1


def test_a_call_that_is_repeated_warns_of_a_former_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if releases.cache_name() != "cache":
        pytest.skip("this release has but one name")
    model, inputs = LLAMA.build(), LLAMA.make_inputs()
    from fastgen.optimizer.transformers.cache import SharedLayer

    monkeypatch.setattr(SharedLayer, "update", lambda *_, **__: 1 / 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(**inputs, past_key_values=transformers.DynamicCache())
    messages = [str(each.message) for each in caught]
    assert len([each for each in messages if "past_key_values" in each]) == 1
    assert len([each for each in messages if "ZeroDivisionError" in each]) == 1


# ---- a release that does not exist


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"cache": "kv_store"}, "no K/V cache"),
        ({"_prefill": "_first_pass"}, "has no attribute '_prefill'"),
        ({"_sample": "_draw", "_beam_search": "_search"}, "has a decoding loop of its own"),
        ({"DynamicLayer": "GrowingLayer"}, "cannot import name 'DynamicLayer'"),
        ({"custom_generate": "own_loop"}, "has no parameter custom_generate"),
    ],
)
def test_an_unknown_release_warns_once(names: dict[str, str], reason: str) -> None:
    done = python("-c", _STUB.format(names=names, model="llama"))
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "FastGen" in line]
    assert len(warned) == 1, done.stderr
    for part in (stub_release.VERSION, reason, "pip install 'transformers<5.25'"):
        assert part in warned[0]
    first = done.stdout.splitlines()[-1]
    assert "does NOT accelerate" in first and stub_release.VERSION in first


def test_an_unknown_release_that_looks_the_same_is_accelerated_without_a_word() -> None:
    done = python("-c", _STUB.format(names={}, model="bart"))
    assert (done.returncode, done.stderr) == (0, "")
    fallbacks, first = done.stdout.splitlines()
    assert fallbacks == "[]" and first.startswith("FastGen accelerates here") and "not tested" in first


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}]
)
def test_what_any_release_leaves_to_the_original_code_is_no_reason_to_warn(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", stub_release.VERSION)
    monkeypatch.setattr(releases, "_has_warned", False)
    fastgen.reset_stats()
    with fastgen.settings.changed(captured_step="never"), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        LLAMA.build().generate(**LLAMA.make_inputs(batch=1), **options)
    assert fastgen.stats()["transformers.generate"]["accelerated"] == 0


def test_a_failure_on_an_unknown_release_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgen.optimizer.transformers.cache import SharedLayer

    model, inputs = LLAMA.build(), LLAMA.make_inputs()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", stub_release.VERSION)
    monkeypatch.setattr(releases, "_has_warned", False)
    monkeypatch.setattr(releases, "_failed", {})
    tried: list[None] = []
    monkeypatch.setattr(SharedLayer, "update", lambda *_, **__: (tried.append(None), 1 / 0))
    with fastgen.disabled():
        expected = model.generate(**inputs)
    fastgen.reset_stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(model.generate(**inputs), expected)
    assert len(tried) == 1
    assert [stub_release.VERSION in str(each.message) for each in caught] == [True]
    assert list(fastgen.stats()["transformers.generate"]["fallback"].values()) == [3]


# ---- the check of an installation


def test_the_first_line_of_the_status_says_that_it_accelerates() -> None:
    done = python("-m", "fastgen")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("FastGen accelerates here") and transformers.__version__ in first


def test_a_disabled_installation_does_not_accelerate() -> None:
    script = (
        "import os; os.environ['FASTGEN_DISABLE'] = '1'; import runpy; runpy.run_module('fastgen', run_name='__main__')"
    )
    done = python("-c", script)
    assert done.returncode == 1 and "does NOT accelerate" in done.stdout.splitlines()[0]
