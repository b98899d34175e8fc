"""Where and when FastGen may be imported, switched off and on, and used: processes, threads, calls that are running."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import fastgen
from tests.equivalence.cases import BEAM
from tests.equivalence.check import accelerated, assert_same, fallbacks, in_threads, run
from tests.equivalence.models import BY_NAME

pytestmark = pytest.mark.sampled(3)

ROOT = Path(__file__).parents[2]

# What the scripts below have in common: a small model, and a call of it.
CALL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, eos_token_id=1, pad_token_id=0)
model = GPT2LMHeadModel(config).eval()
def call(**options):
    ids = torch.arange(2, 46).view(1, 44)
    return model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=4, **options).tolist()
def counts():
    return fastgen.stats().get("transformers.generate", {"accelerated": 0, "fallback": {}})
"""


def python(script: str, program: str | Path = sys.executable, **environment: str) -> str:
    """What a script prints, run in a process of its own."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("FASTGEN_")}
    done = subprocess.run(
        [str(program), "-c", script],
        cwd=ROOT,
        env={**settings, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- importing


def test_imports_nothing_heavy() -> None:
    """Nothing but the standard library, wrapt and FastGen itself; patches wait for the toolkit."""
    script = """
import sys
before = set(sys.modules)
import fastgen, fastgen.fairseq, fastgen.ops
new = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
import importlib.util
found = importlib.util.find_spec("fairseq")
assert found is None or found.origin != fastgen.fairseq.__file__, found
print(sorted(new))
"""
    assert python(script).strip() == "['fastgen', 'wrapt']"


def test_after_transformers(programs: Path) -> None:
    """And the objects that were there before come back."""
    script = f"""
import transformers, transformers.generation.utils as utils
original = vars(utils.GenerationMixin)["generate"]
{CALL}
expected = call()
import fastgen
assert call() == expected and counts()["accelerated"] == 1, counts()
fastgen.disable()
assert vars(utils.GenerationMixin)["generate"] is original
assert call() == expected and counts()["accelerated"] == 1, counts()
fastgen.enable()
assert call() == expected and counts()["accelerated"] == 2, counts()
"""
    python(script, programs / "python")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "first",
    [
        "import transformers.activations",
        "import transformers.pytorch_utils",
        "import transformers.generation.logits_process",
        "import transformers.cache_utils",
        "from transformers import BartForConditionalGeneration",
        "import fastgen.optimizer.transformers.prefill",
        "import fastgen.optimizer.transformers.logits",
        "import fastgen.optimizer.transformers.call",
    ],
)
def test_whatever_is_imported_first(first: str) -> None:
    """Modules of the toolkit import each other in circles: what a wrapper needs may be half done when it is applied."""
    python(f"""
import fastgen
{first}
{CALL}
call(no_repeat_ngram_size=2, min_new_tokens=2)
patches = fastgen.status().patches
states = {{name: state for name, state in patches.items() if name.startswith("transformers.generation.")}}
assert set(states.values()) == {{"applied"}}, states
assert counts()["accelerated"] == 1, fastgen.stats()
assert fastgen.stats()["transformers.no_repeat_ngram"]["accelerated"] > 0
""")


def test_environment_disable(programs: Path) -> None:
    """FASTGEN_DISABLE=1: importing changes nothing until it is enabled."""
    script = f"""
import fastgen
{CALL}
import types
from transformers.generation.utils import GenerationMixin
assert type(vars(GenerationMixin)["generate"]) is types.FunctionType
expected = call()
assert fastgen.stats() == {{}}
fastgen.enable()
assert call() == expected and counts()["accelerated"] == 1
"""
    python(script, programs / "python", FASTGEN_DISABLE="1")


# ---- switching off and on


def test_disabled_block() -> None:
    """Inside the block nothing is accelerated or counted, nor is anything refused in strict mode."""
    family = BY_NAME["gpt2"]
    fastgen.enable(strict=True)
    with fastgen.disabled():
        with fastgen.disabled():
            original = run(family.build(), family.make_inputs(), BEAM)
        run(family.build(), family.make_inputs(), {**BEAM, "use_cache": False})
    assert fastgen.stats() == {}
    assert_same(original, run(family.build(), family.make_inputs(), BEAM))
    assert accelerated() == 1


@pytest.mark.parametrize("how", ["disable", "disabled", "enable", "reset_stats"])
def test_switching_during_a_call(how: str) -> None:
    """A call that is running ends as it began."""
    family = BY_NAME["llama"]

    class Switches(StoppingCriteria):
        def __init__(self) -> None:
            self.steps = 0

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.steps += 1
            if self.steps == 3:
                if how == "disabled":
                    with fastgen.disabled():
                        run(family.build(), family.make_inputs(), {"max_new_tokens": 2})
                else:
                    getattr(fastgen, how)()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    options = {**BEAM, "no_repeat_ngram_size": 2, "return_dict_in_generate": True}
    with fastgen.disabled():
        original = run(family.build(), family.make_inputs(), options)
    assert_same(original, run(family.build(), family.make_inputs(), {**options, "stopping_criteria": [Switches()]}))


# ---- threads


def test_threads() -> None:
    """Several models at once, one of them twice, while one thread has FastGen disabled: nobody notices the others."""
    names = ["bart", "t5", "gpt2", "llama", "llama", "opt"]
    options = {**BEAM, "no_repeat_ngram_size": 2, "return_dict_in_generate": True, "output_scores": True}
    jobs = [(BY_NAME[name].build(), BY_NAME[name].make_inputs(1 + place % 3)) for place, name in enumerate(names)]
    with fastgen.disabled():
        expected = [model.generate(**inputs, **options) for model, inputs in jobs]
    results: dict[tuple[int, int], Any] = {}
    start = threading.Barrier(len(names))

    def work(number: int) -> None:
        model, inputs = jobs[number]
        start.wait()
        for repetition in range(3):
            with fastgen.disabled() if names[number] == "opt" else contextlib.nullcontext():
                results[number, repetition] = model.generate(**inputs, **options)

    in_threads(work, len(names))
    assert len(results) == 3 * len(names)
    for (number, _), result in results.items():
        assert_same(expected[number], result)
    assert accelerated() == 3 * (len(names) - 1)
    assert fallbacks() == {}
