"""The backends beside `generate`, on tiny models: they do the same work, and a failure costs one backend alone."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

import fastgen
from benchmarks import backends, smollm2
from benchmarks.__main__ import USAGE, main, run_workload
from benchmarks.backends import Job, Unsupported, elsewhere, generate
from benchmarks.backends.ctranslate2 import CTranslate2
from benchmarks.backends.llama_cpp import LlamaCpp
from benchmarks.backends.openvino import OpenVINO
from benchmarks.record import Record
from benchmarks.workload import Context, Generation
from benchmarks.workloads.shapes import bart_base, gpt2, llama_small, opus_mt
from fastgen import settings
from fastgen.decoding import layers
from fastgen.ops import gpu as operators
from fastgen.ops.linear import choose, copies
from tests.benchmarks.tiny_configs import CONFIGS

needs_ctranslate2 = pytest.mark.skipif(
    importlib.util.find_spec("ctranslate2") is None, reason="CTranslate2 is not installed"
)

_BART, _T5, _GPT2, _LLAMA = (CONFIGS[shape] for shape in ("bart", "t5", "gpt2", "llama"))


def work(shape, config, **changes) -> Generation:
    fields = {
        "name": "work",
        "title": "Work",
        "shape": shape,
        "config": config,
        "batch": 3,
        "length": 12,
        "new_tokens": 6,
        "options": {"num_beams": 3, "do_sample": False},
        "repetitions": 2,
    }
    return Generation(**{**fields, **changes})


def job(workload: Generation) -> Job:
    model, inputs = workload.build(torch.device("cpu"))
    return Job(workload, model, inputs, threads=1)


def record_of(shape, config, **changes) -> Record:
    return run_workload(work(shape, config, **changes), Context(threads=1))


@needs_ctranslate2
@pytest.mark.parametrize(
    ("shape", "config", "changes"),
    [
        (bart_base, _BART, {"options": {"num_beams": 2, "no_repeat_ngram_size": 2, "num_return_sequences": 2}}),
        (opus_mt, CONFIGS["opus"], {"shortest": 4}),
        (gpt2, _GPT2, {"shortest": 4}),
        (llama_small, _LLAMA, {"options": {"do_sample": False}}),
    ],
)
def test_ctranslate2_makes_the_same_tokens(shape, config, changes):
    task = job(work(shape, config, **changes))
    weights = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    expected, backend = backends.make("transformers"), backends.make("ctranslate2")
    expected.setup(task)
    backend.setup(task)
    try:
        found = backend.run(task.workload.new_tokens)
    finally:
        backend.close()
    assert torch.equal(found, expected.run(task.workload.new_tokens))
    # Nothing was taken out of the model, or changed in it.
    assert all(torch.equal(weights[name], tensor) for name, tensor in task.model.state_dict().items())
    assert not hasattr(task.model.config, "normalize_before")


@needs_ctranslate2
def test_every_backend_in_one_record():
    record = record_of(bart_base, _BART, further_backends=("ctranslate2", "ctranslate2-int8"))
    assert record.errors == [] and record.notes == [] and record.skipped == {} and record.status == "ok"
    assert list(record.backends) == ["transformers", "ctranslate2", "ctranslate2-int8", "fastgen"]
    assert record.same["ctranslate2"] == 1.0 and 0 <= record.same["ctranslate2-int8"] <= 1
    assert set(record.ratios) == {"transformers/fastgen", "ctranslate2/fastgen", "ctranslate2-int8/fastgen"}
    assert record.metrics["ctranslate2/fastgen"] == record.ratios["ctranslate2/fastgen"]["ratio"]
    assert record.backends["ctranslate2"]["version"] and len(record.backends["ctranslate2"]["seconds"]) == 2


@needs_ctranslate2
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"do_sample": True}, "samples"), ({"num_beams": 2, "num_beam_groups": 2}, "num_beam_groups")],
)
def test_ctranslate2_says_what_it_cannot_do(options, reason):
    with pytest.raises(Unsupported, match=reason):
        backends.make("ctranslate2").setup(job(work(gpt2, _GPT2, options=options)))


@pytest.mark.parametrize(
    ("good_runs", "length", "reason"),
    [(0, 18, "RuntimeError: out of luck"), (2, 18, "RuntimeError: out of luck"), (99, 2, "(3, 2) instead of (3, 18)")],
)
def test_a_backend_that_fails_or_does_less_work_costs_its_row(monkeypatch, good_runs, length, reason):
    runs = []

    def run(self, new_tokens):
        runs.append(new_tokens)
        if len(runs) > good_runs:
            raise RuntimeError("out of luck\nand more")
        return torch.zeros(3, length, dtype=torch.long)

    monkeypatch.setattr(CTranslate2, "setup", backends.Backend.setup)
    monkeypatch.setattr(CTranslate2, "run", run)
    record = record_of(gpt2, _GPT2, further_backends=("ctranslate2",))
    assert list(record.skipped) == ["ctranslate2"] and record.skipped["ctranslate2"].endswith(reason)
    assert list(record.backends) == ["transformers", "fastgen"] and record.status == "ok" and record.errors == []


@pytest.mark.parametrize("name", ["transformers", "fastgen"])
def test_a_main_backend_that_fails_fails_the_workload(monkeypatch, name):
    original = generate.Unpatched.run

    def run(self, new_tokens):
        if self.name == name:
            raise RuntimeError("it broke")
        return original(self, new_tokens)

    monkeypatch.setattr(generate.Unpatched, "run", run)
    record = record_of(gpt2, _GPT2)
    assert record.errors == ["RuntimeError: it broke"] and record.status == "failed"


def test_other_weights_in_one_record(monkeypatch):
    precision = "int8"
    if choose.missing(precision):
        pytest.skip(choose.missing(precision))
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    backend, before = f"fastgen-{precision}", settings.current()
    record = record_of(bart_base, _BART, further_backends=(backend,))
    assert record.errors == [] and record.notes == [] and record.skipped == {} and record.identical is True
    assert f"transformers/{backend}" in record.ratios and settings.current() == before
    seen = []
    measured = backends.make(backend)
    measured.setup(job(work(bart_base, _BART)))
    pack = copies.pack
    monkeypatch.setattr(copies, "pack", lambda *args: seen.append(1) or pack(*args))
    measured.run(3)
    assert seen


def test_chosen_backends():
    workload = work(gpt2, _GPT2)
    assert Context().chosen_backends(("ctranslate2",)) == ["transformers", "ctranslate2", "fastgen"]
    record = run_workload(replace(workload, repetitions=1), Context(threads=1, backends=("fastgen",)))
    assert list(record.backends) == ["fastgen"] and record.status == "ok" and record.identical is None
    with pytest.raises(SystemExit) as ended:
        main(["--backends", "nothing"])
    assert ended.value.code == USAGE


@pytest.mark.parametrize(("new_tokens", "captured"), [(64, True), (6, False)])
def test_a_step_is_recorded_before_the_timing(new_tokens, captured, monkeypatch):
    """Where calls wait for one, the warm-up makes as many as it takes; where there will be none, it does not wait."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    backend = backends.make("fastgen")
    backend.setup(job(work(gpt2, _GPT2, new_tokens=new_tokens)))
    backend.warm_up()
    fastgen.reset_stats()
    backend.run(new_tokens)
    assert bool(fastgen.stats().get(generate.CAPTURED_STEP, {}).get("accelerated")) is captured


@pytest.fixture
def environments(tmp_path, monkeypatch):
    python = {name: tmp_path / name / "bin" / "python" for name in ("openvino", "llama")}
    for path in python.values():
        path.parent.mkdir(parents=True)
        path.symlink_to(sys.executable)
    monkeypatch.setattr(elsewhere, "ENVIRONMENTS", tmp_path)
    return python


# A script that answers as the one of a library does.
_FAKE = """
def load(asked):
    assert {checks}
    print("no answer")

    def generate(work):
        count = work["new_tokens"]
        assert count <= 6, "out of luck"
        return [row + count * [1] for row in asked["inputs"]["input_ids"]]

    return "7", generate
"""


@pytest.fixture
def fake_openvino(environments, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        _FAKE.format(checks='(asked["precision"], asked["threads"], asked["options"]["num_beams"]) == ("f32", 1, 3)')
    )
    monkeypatch.setattr(OpenVINO, "script", script)


def test_openvino_answers_from_its_own_process(fake_openvino):
    record = record_of(gpt2, _GPT2, further_backends=("openvino",))
    assert record.errors == [] and record.skipped == {}
    assert record.backends["openvino"]["version"] == "7" and 0 <= record.same["openvino"] <= 1
    assert "openvino/fastgen" in record.ratios


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"options": {"do_sample": True}}, "samples"), ({"dtype": "float16"}, "float16"), ({}, "make bench-openvino")],
)
def test_openvino_says_what_it_cannot_do(changes, reason, environments):
    if not changes:
        environments["openvino"].unlink()
    with pytest.raises(Unsupported, match=reason):
        backends.make("openvino").setup(job(work(gpt2, _GPT2, **changes)))


_GREEDY = {"do_sample": False, "num_beams": 1}


def beside_a_gguf(tmp_path, **changes) -> Job:
    """Generation with a saved model that has a file for llama.cpp."""
    task = job(work(llama_small, _LLAMA, **{"options": _GREEDY, "shortest": 4, **changes}))
    task.model.config.name_or_path = task.model.name_or_path = str(tmp_path)
    (tmp_path / smollm2.GGUF).write_bytes(b"weights")
    return task


@pytest.mark.parametrize(("name", "precision"), [("llama.cpp-f32", "F32"), ("llama.cpp-q4_1", "Q4_1")])
def test_llama_cpp_answers_from_its_own_process(name, precision, environments, tmp_path, monkeypatch):
    task = beside_a_gguf(tmp_path)
    asked = {"file": str(tmp_path / smollm2.GGUF), "precision": precision, "threads": 1, "new_tokens": 6}
    asked["end"] = [task.model.generation_config.eos_token_id]
    script = tmp_path / "script.py"
    script.write_text(_FAKE.format(checks=f"{asked!r}.items() <= asked.items()"))
    monkeypatch.setattr(LlamaCpp, "script", script)
    backend = backends.make(name)
    try:
        backend.setup(task)
        found = backend.run(6)
    finally:
        backend.close()
    assert backend.version == "7" and found.shape == (3, 18)
    assert torch.equal(found[:, :-6], task.inputs["input_ids"])


def test_the_bits_of_a_file_are_kept(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack
    from transformers import AutoModelForCausalLM

    from tests.optimizer.transformers.quantized.test_gguf import write_llama

    write_llama(tmp_path / smollm2.GGUF, ("Q4_1", "Q8_0"))

    def unpacked() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=smollm2.GGUF, dtype=torch.float32)

    further = ("fastgen-gguf", "openvino-genai")
    record = record_of(unpacked, {}, options=_GREEDY, further_backends=further)
    assert record.errors == [] and record.same == {"fastgen-gguf": 1.0}
    assert {"transformers/fastgen-gguf", "fastgen/fastgen-gguf"} <= set(record.ratios)
    assert set(record.skipped) == {"openvino-genai"}


def test_drafts_are_held_against_captured_steps(monkeypatch):
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    further = ("fastgen-captured", "fastgen-self-draft", "fastgen-lookup")
    record = record_of(llama_small, _LLAMA, batch=1, options=_GREEDY, new_tokens=12, further_backends=further)
    assert record.errors == [] and record.skipped == {} and record.identical is True
    assert {"fastgen-captured/fastgen-self-draft", "fastgen-captured/fastgen-lookup"} <= set(record.ratios)
