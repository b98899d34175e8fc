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
from fastgen.ops import gpu as operators
from tests import stub_release
from tests.equivalence.models import BY_NAME, FAMILIES
from tests.equivalence.others import OTHERS
from tests.equivalence.test_captured import NOT_ACCELERATED

pytestmark = pytest.mark.sampled(3)

ROOT = Path(__file__).parents[1]
LLAMA = BY_NAME["llama"]
has_two_names = pytest.mark.skipif(releases.cache_name() != "cache", reason="this release has but one name")
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
from fastgen import report
print(report.line()[0])
"""


def python(*arguments: str, program: str | Path = sys.executable, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FASTGEN_CACHE": "", "OMP_NUM_THREADS": "1", **settings}
    environment.pop("TRITON_INTERPRET", None)
    command = [str(program), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed release says that it is one that nobody has tested."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", stub_release.VERSION)
    monkeypatch.setattr(releases, "_has_warned", False)


# ---- tested releases


def test_models_are_those_that_must_be_accelerated() -> None:
    assert {family.model_class for family in FAMILIES} == releases.MODELS


def test_other_models_that_are_accelerated_are_known() -> None:
    """So that whoever has one is told, too, where a release takes that away."""
    accelerated = {family.model_class for family in OTHERS if family.name not in NOT_ACCELERATED}
    assert accelerated == releases.OTHER_MODELS


def test_a_class_of_the_users_is_known_by_those_that_it_is_made_of(unknown: None) -> None:
    class Own(transformers.Phi3ForCausalLM):
        pass

    with pytest.warns(RuntimeWarning, match="Own.*no reason"):
        releases.note(Own.__new__(Own), "no reason")


def test_the_installed_release_is_a_tested_one() -> None:
    assert releases.version() == transformers.__version__
    assert releases.is_tested(transformers.__version__)
    assert releases.cache_name() in inspect.signature(type(LLAMA.build()).forward).parameters


def test_the_tested_releases_are_the_same_wherever_they_are_named() -> None:
    first, last = releases.TESTED
    makefile, constraints, *pages = (
        (ROOT / name).read_text()
        for name in ("Makefile", "constraints.txt", "README.md", "docs/index.md", "CHANGELOG.md", "docs/support.md")
    )
    tried = re.search(r"^TRANSFORMERS_VERSIONS \?= (.*)$", makefile, re.M)
    pinned = re.search(r"^transformers==(.*)$", constraints, re.M)
    assert tried is not None and pinned is not None and pinned[1] == tried[1].split()[-1]
    assert [re.sub(r"\.\d+$", "", tried[1].split()[place]) for place in (0, -1)] == [first, last]
    assert all(f"Transformers {first} to {last}" in page for page in pages)
    assert f"with transformers {pinned[1]}." in pages[-1]
    assert f'"transformers>={first}"' in (ROOT / "pyproject.toml").read_text()


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


# Names that some tested releases have, and others do not; `cache` alone says too little.
CHANGED = (
    "past_key_values|cache_params|_encoder_decoder_kwargs_for_generation|get_max_(cache|length)|get_query_offset|"
    "record_past|is_croppable|multi_token_biases|PreTrainedTokenizerBase|assistant_ensemble_weight|speculation_type|use_mtp|"
    "GgufHfQuantizer|read_gguf_metadata|modeling_attn_mask_utils"
)


def test_names_of_a_release_are_spelled_out_in_one_file() -> None:
    changed = re.compile(rf"\b\w*({CHANGED})")
    spelled = [
        str(path.relative_to(ROOT))
        for part in ("fastgen", "fastgen_cli")
        for path in (ROOT / part).rglob("*.py")
        if changed.search(re.sub(r'(?s)""".*?"""', "", path.read_text()))
    ]
    # Options that a user of any release may give are data.
    assert sorted(spelled) == ["fastgen/pipeline/generation/options.py", "fastgen/releases.py"]


@pytest.mark.parametrize("name", releases.CACHE_NAMES[:2])
def test_a_cache_of_the_users_by_both_names(name: str) -> None:
    if name == "cache" != releases.cache_name():
        pytest.skip("a name that this release does not know")
    model, inputs = LLAMA.build(), LLAMA.make_inputs()

    def run() -> tuple[torch.Tensor, int, list[tuple[str, str, int]]]:
        cache = transformers.DynamicCache(config=model.config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = model.generate(**inputs, **{name: cache}, num_beams=2)
        return found, cache.get_seq_length(), [(str(each.message), each.filename, each.lineno) for each in caught]

    with fastgen.disabled():
        expected = run()
    fastgen.reset_stats()
    found = run()
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
    assert fastgen.stats()["transformers.generate"]["accelerated"] == 1


@has_two_names
def test_a_call_that_is_repeated_warns_of_a_former_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = LLAMA.build(), LLAMA.make_inputs()
    from fastgen.optimizer.transformers.cache_layers import SharedLayer

    monkeypatch.setattr(SharedLayer, "update", lambda *_, **__: 1 / 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(**inputs, past_key_values=transformers.DynamicCache())
    messages = [str(each.message) for each in caught]
    assert len([each for each in messages if "past_key_values" in each]) == 1
    assert len([each for each in messages if "ZeroDivisionError" in each]) == 1


@has_two_names
def test_a_warning_about_the_inputs_of_a_step_names_the_models_code() -> None:

    class OwnInputs(transformers.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> dict[str, Any]:
            return super().prepare_inputs_for_generation(input_ids, past_key_values=cache, **kwargs)

    model = OwnInputs(LLAMA.build().config).eval()

    def run() -> list[tuple[str, str, int]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FutureWarning)
            model.generate(**LLAMA.make_inputs(), max_new_tokens=3)
        return [(str(each.message), each.filename, each.lineno) for each in caught]

    with fastgen.disabled():
        expected = run()
    assert run() == expected and {filename for _, filename, _ in expected} == {__file__}


@pytest.mark.parametrize("captured_step", ["never", "always"])
@pytest.mark.parametrize("name", ["llama", "bart", "mistral-long-window"])
def test_a_returned_cache_has_what_the_release_puts_into_one(
    name: str, captured_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers have no `dtype` from 5.24 on, and other things before."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    model, inputs = BY_NAME[name].build(), BY_NAME[name].make_inputs()

    def run() -> list[dict[str, Any]]:
        found = model.generate(**inputs, num_beams=2, max_new_tokens=20, return_dict_in_generate=True)
        cache = releases.cache_in(found)
        parts = [getattr(cache, part, None) for part in ("self_attention_cache", "cross_attention_cache")]
        layers = [layer for part in parts if part is not None for layer in part.layers] or cache.layers
        return [
            {key: value.shape if isinstance(value, torch.Tensor) else value for key, value in vars(layer).items()}
            for layer in layers
        ]

    with fastgen.disabled():
        expected = run()
    fastgen.reset_stats()
    with fastgen.settings.changed(captured_step=captured_step):
        assert run() == expected
    assert fastgen.stats()["transformers.generate"]["accelerated"] == 1


# ---- a release that does not exist


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"cache": "kv_store"}, "no K/V cache (the release has another name for it"),
        ({"_prefill": "_other_prefill"}, "cannot hook the prefill"),
        ({"is_first_iteration": "is_first"}, "cannot hook the prefill"),
        ({"_sample": "_draw", "_beam_search": "_search"}, "has a decoding loop of its own"),
        ({"DynamicLayer": "GrowingLayer"}, "cannot import name 'DynamicLayer'"),
        ({"custom_generate": "own_loop"}, "has no parameter custom_generate"),
    ],
)
def test_an_unknown_release_warns_once(names: dict[str, str], reason: str, programs: Path) -> None:
    done = python("-c", _STUB.format(names=names, model="llama"), program=programs / "python")
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "FastGen" in line]
    assert len(warned) == 1, done.stderr
    for part in (stub_release.VERSION, reason, "pip install 'transformers<5.25'"):
        assert part in warned[0]
    first = done.stdout.splitlines()[-1]
    assert "does NOT accelerate" in first and stub_release.VERSION in first


def test_an_unknown_release_that_looks_the_same_is_accelerated_without_a_word(programs: Path) -> None:
    done = python("-c", _STUB.format(names={}, model="bart"), program=programs / "python")
    assert done.returncode == 0 and "FastGen" not in done.stderr, (
        done.stderr
    )  # other packages may have something to say
    fallbacks, first = done.stdout.splitlines()
    assert fallbacks == "[]" and first.startswith("FastGen accelerates here") and "not tested" in first


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}]
)
def test_what_any_release_leaves_to_the_original_code_is_no_reason_to_warn(
    options: dict[str, Any], unknown: None
) -> None:
    fastgen.reset_stats()
    with fastgen.settings.changed(captured_step="never"), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        LLAMA.build().generate(**LLAMA.make_inputs(batch=1), **options)
    assert fastgen.stats()["transformers.generate"]["accelerated"] == 0


def test_a_failure_on_an_unknown_release_is_not_tried_again(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgen.optimizer.transformers.cache_layers import SharedLayer

    model, inputs = LLAMA.build(), LLAMA.make_inputs()
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


def test_the_first_line_of_the_status_says_that_it_accelerates(programs: Path) -> None:
    done = python("-m", "fastgen", "--verbose", program=programs / "python")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("FastGen accelerates here") and transformers.__version__ in first
    assert any("no_repeat_ngram" in line for line in rest)


def test_a_disabled_installation_does_not_accelerate(programs: Path) -> None:
    done = python("-m", "fastgen", program=programs / "python", FASTGEN_DISABLE="1")
    assert done.returncode == 1 and "does NOT accelerate" in done.stdout.splitlines()[0]
