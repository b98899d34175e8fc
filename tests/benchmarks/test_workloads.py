"""The workloads, made tiny: that each runs, checks what it claims to check, and reports it. No time is looked at."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

import fastgen
from benchmarks import ROOT, smollm2
from benchmarks.__main__ import DONE, FAILED, USAGE, main, run_workload, select
from benchmarks.backends.generate import Unpatched
from benchmarks.workload import CAPTURED_STEP, Context, Generation, Workload
from benchmarks.workloads import all_workloads, smollm2_chat
from benchmarks.workloads.encoders import Encoding
from benchmarks.workloads.fairseq_shapes import InFairSeq
from benchmarks.workloads.shapes import bart_base, llama_small
from fastgen.decoding.kv import growing as kv
from fastgen.ops import gpu as operators
from tests.benchmarks.tiny_configs import CONFIGS

_ALL = {workload.name: workload for workload in all_workloads()}
_GENERATION = [
    name
    for name, w in _ALL.items()
    if isinstance(w, Generation) and not isinstance(w, (smollm2_chat.Chat, InFairSeq, Encoding)) and not w.needs_gpu
]


@pytest.fixture(autouse=True)
def shared_when_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "MIN_SHARED_BYTES", 0, raising=False)


def tiny(name: str, /, **changes) -> Generation:
    workload = _ALL[name]
    assert isinstance(workload, Generation)
    config = next(config for shape, config in CONFIGS.items() if workload.shape.__name__.startswith(shape))
    sizes = {"batch": min(workload.batch, 2), "length": min(workload.length, 40), "new_tokens": 5, "repetitions": 1}
    return replace(workload, **{"config": config, "further_backends": (), **sizes, **changes})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", _GENERATION)
def test_options_are_accepted_and_nothing_ends_early(name):
    workload = tiny(name)
    model, inputs = workload.build(torch.device("cpu"))
    tokens = workload.generate(model, inputs)
    sequences = workload.batch * workload.options.get("num_return_sequences", 1)
    assert tokens.shape == (
        sequences,
        workload.new_tokens + (1 if model.config.is_encoder_decoder else workload.length),
    )
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    assert lengths == [workload.shortest or workload.length, workload.length][-workload.batch :]


@pytest.mark.parametrize(
    "name", ["bart-base-b16-s1024", "t5-base-b16-s128", "gpt2-sample4-b4-p512", "small-gpt2-beam2-padded"]
)
def test_generation(name):
    record = run_workload(tiny(name), Context(threads=1))
    assert record.errors == [] and record.notes == []
    assert record.identical is True and record.accelerated is True
    assert set(record.fallbacks) <= {CAPTURED_STEP}  # calls that did without one, and were accelerated all the same
    assert set(record.backends) == {"transformers", "fastgen"} and record.metrics["ratio"] > 0
    assert record.status == "ok" and record.date
    json.dumps(record.to_json())


def test_other_tokens_are_noticed(monkeypatch):
    original = Generation.generate

    def generate(self, model, inputs, new_tokens=None):
        tokens = original(self, model, inputs, new_tokens)
        if fastgen.stats():  # the patched backend
            tokens[1, -1] += 1
        return tokens

    monkeypatch.setattr(Generation, "generate", generate)
    record = run_workload(tiny("small-gpt2-greedy-b16"), Context(threads=1))
    assert record.identical is False and record.status == "different"
    assert record.notes == ["run 1 of fastgen: 1 of 2 sequences differ, the first at position 36"]


def test_a_fallback_is_noticed():
    record = run_workload(tiny("gpt2-b4-p512", options={"num_beams": 2, "use_cache": False}), Context(threads=1))
    assert record.accelerated is False and record.identical is True and record.status == "ok"
    (reason,) = record.fallbacks["transformers.generate"]
    assert "use_cache" in reason


def test_an_unpatched_backend_that_is_patched_is_an_error(monkeypatch):
    monkeypatch.setattr(Unpatched, "active", lambda self: nullcontext())
    record = run_workload(tiny("gpt2-b4-p512"), Context(threads=1))
    assert "unpatched backend ran FastGen" in record.errors[0]


def test_import_reports_the_difference(monkeypatch):
    from benchmarks.workloads import first_call

    # Real imports of torch, several times over, would be most of the time of these tests.
    light = (
        ("import torch", "pass", "import json"),
        ("import fastgen", "pass", "import csv"),
        ("import fastgen after torch", "import json", "import csv"),
        ("import fastgen after transformers", "import json", "import csv"),
    )
    monkeypatch.setattr(first_call, "_IMPORTS", light)
    record = run_workload(_ALL["import"], Context(repetitions=1))
    assert record.errors == [] and set(record.backends) == {name for name, _, _ in light}
    assert {"alone_minus_torch_ms", "after_torch_ms", "after_transformers_ms"} <= set(record.metrics)


def test_selection():
    workloads = all_workloads()
    assert select(workloads, None, quick=False) == workloads
    assert all(workload.quick for workload in select(workloads, None, quick=True))
    assert [w.name for w in select(workloads, ["import", "llama-*"], False)] == [
        "import",
        "llama-1b-beam-b4-p128",
        "llama-1b-greedy-b16-p128",
    ]
    with pytest.raises(LookupError, match="no workload is called bert"):
        select(workloads, ["bert"], False)


class _Broken(Workload):
    def run(self, context, record):
        record.parameters = {"got": "this far"}
        raise ValueError("it broke")


def _run_main(monkeypatch, tmp_path, workloads, *arguments) -> int:
    monkeypatch.setattr("benchmarks.__main__.all_workloads", lambda: workloads)
    return main(["--out", str(tmp_path), *arguments])


def test_command_line(monkeypatch, tmp_path, capsys):
    workloads = [_Broken(name="broken", title="Broken"), tiny("gpt2-b4-p512", name="good")]
    assert _run_main(monkeypatch, tmp_path, workloads, "--only", "good", "--threads", "1") == DONE
    assert _run_main(monkeypatch, tmp_path, workloads, "--repetitions", "2", "--threads", "1") == FAILED
    (path,) = tmp_path.glob("*/results.json")
    broken, good = json.loads(path.read_text())["workloads"]
    assert broken["status"] == "failed" and broken["errors"] == ["ValueError: it broke"]
    assert broken["parameters"] == {"got": "this far"}
    # The workload after the broken one was run all the same.
    assert good["status"] == "ok" and len(good["backends"]["fastgen"]["seconds"]) == 2
    assert "not identical or failed: broken" in capsys.readouterr().err
    assert _run_main(monkeypatch, tmp_path, workloads, "--only", "none") == USAGE


def test_an_interruption_keeps_what_was_done(monkeypatch, tmp_path):
    def interrupt(self, context, record):
        raise KeyboardInterrupt

    stopped = type("_Stopped", (_Broken,), {"run": interrupt})(name="stopped", title="Stopped")
    workloads = [tiny("gpt2-b4-p512", name="good"), stopped]
    assert _run_main(monkeypatch, tmp_path, workloads, "--threads", "1") == 130
    (path,) = tmp_path.glob("*/results.json")
    assert [each["name"] for each in json.loads(path.read_text())["workloads"]] == ["good"]


@pytest.mark.parametrize("beams", [1, 2])
def test_slots_and_static_batches_make_the_same_tokens(beams, monkeypatch):
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    workload = replace(
        _ALL["continuous-bart-base"], shape=lambda: bart_base(**CONFIGS["bart"]), requests=5, prompts=(4, 9),
        outputs=(2, 6), slots=4, beams=beams,
    )  # fmt: skip
    record = run_workload(workload, Context(threads=1))
    assert record.errors == [] and record.identical is True and record.accelerated is True
    assert list(record.backends) == ["transformers", "fastgen-static", "fastgen"]
    assert "fastgen-static/fastgen" in record.ratios and 0 < record.metrics["busy"] <= 1


_CHATS = [
    workload for workload in smollm2_chat.WORKLOADS if workload.name in ("smollm2-b4", "smollm2-b4-beam4-bfloat16")
]


@pytest.mark.parametrize("workload", _CHATS, ids=lambda workload: workload.name)
def test_chat(workload, tmp_path, monkeypatch):
    """On a tiny model with a tokenizer that has a template."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "models" / "kjv-gpt2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    llama_small(**CONFIGS["llama"] | {"vocab_size": len(tokenizer)}).save_pretrained(tmp_path)
    monkeypatch.setenv(smollm2.VARIABLE, str(tmp_path))
    record = run_workload(replace(workload, new_tokens=5, repetitions=1, further_backends=()), Context(threads=1))
    assert record.errors == [] and record.accelerated is True
    assert record.identical is True or workload.dtype != "float32"
    model, inputs = workload.build(torch.device("cpu"))
    assert model.dtype is getattr(torch, workload.dtype)
    lengths = inputs["attention_mask"].sum(dim=1)
    assert lengths.shape == (4,) and lengths.min() < lengths.max() == inputs["input_ids"].shape[1]


def test_a_chat_in_float32_has_weights_that_need_32_bits(tmp_path, monkeypatch):
    """FastGen would read others in the bits that they need, and the row would compare these with float32."""
    llama_small(**CONFIGS["llama"]).bfloat16().float().save_pretrained(tmp_path)
    monkeypatch.setenv(smollm2.VARIABLE, str(tmp_path))
    work = _ALL["smollm2-b1"]
    assert "32-bit weights" in work.title
    for weight in work.make_model(torch.device("cpu")).parameters():
        assert weight.dtype is torch.float32 and not torch.equal(weight, weight.bfloat16().float())


def test_a_chat_without_its_model(monkeypatch):
    monkeypatch.delenv(smollm2.VARIABLE, raising=False)
    record = run_workload(_CHATS[0], Context())
    assert record.errors == [] and "python -m benchmarks.smollm2" in record.skipped["the model"]
