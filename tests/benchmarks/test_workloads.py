"""The workloads, made tiny: that each runs, checks what it claims to check, and reports it. No time is looked at."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import fastgen
from benchmarks import smollm2
from benchmarks.__main__ import DONE, FAILED, USAGE, main, run_workload, select
from benchmarks.backends.generate import Unpatched
from benchmarks.machine import ROOT
from benchmarks.workload import CAPTURED_STEP, Context, Generation, Workload
from benchmarks.workloads import all_workloads, real_calls, smollm2_chat
from benchmarks.workloads.shapes import llama_small
from fastgen.decoding.kv import growing as kv
from tests.benchmarks.tiny_configs import CONFIGS

_ALL = {workload.name: workload for workload in all_workloads()}
_GENERATION = [
    name
    for name, w in _ALL.items()
    if isinstance(w, Generation) and not isinstance(w, smollm2_chat.Chat) and not w.needs_gpu
]


@pytest.fixture(autouse=True)
def shared_when_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are shared like large ones."""
    monkeypatch.setattr(kv, "MIN_SHARED_BYTES", 0, raising=False)


def tiny(name: str, /, **changes) -> Generation:
    workload = _ALL[name]
    assert isinstance(workload, Generation)
    config = next(config for shape, config in CONFIGS.items() if workload.shape.__name__.startswith(shape))
    sizes = {"batch": min(workload.batch, 2), "length": min(workload.length, 40), "new_tokens": 5, "repetitions": 1}
    fixed = {"memory": False, "targets": (), "further_backends": ()}
    return replace(workload, **{"config": config, **sizes, **fixed, **changes})


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


@pytest.mark.long
def test_memory_in_paired_processes():
    # Large enough to be shared without help: the processes know nothing of what is set here.
    config = {**CONFIGS["bart"], "d_model": 64}
    record = run_workload(
        tiny("bart-base-b16-s1024", config=config, batch=4, length=512, memory=True), Context(threads=1)
    )
    assert record.errors == [] and record.identical is True
    for backend in record.memory.values():
        assert 0 < backend["kv_bytes_at_end"] <= backend["kv_bytes_largest"]
        assert backend["peak_bytes"] > 0 and backend["model_bytes"] > 0 and backend["forward_passes"] == 5
    assert record.memory["fastgen"]["digest"] == record.memory["transformers"]["digest"]
    # 2 layers, keys and values, 16 rows of source and of 4 generated tokens, in float32.
    assert record.memory["transformers"]["kv_bytes_at_end"] == 2 * 2 * 16 * (512 + 5) * 64 * 4
    assert record.metrics["kv_ratio"] < 0.3


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


def test_cost_of_beams():
    workload = _ALL["bart-base-beam-cost"]
    work = tiny("bart-base-b4-s512", options=workload.work.options)
    record = run_workload(replace(workload, work=work, beams=(1, 3), repetitions=1), Context(threads=1))
    assert record.errors == [] and record.identical is True
    assert set(record.backends) == {
        "transformers, 1 beam",
        "transformers, 3 beams",
        "fastgen, 1 beam",
        "fastgen, 3 beams",
    }
    assert {"cost fastgen", "cost transformers"} <= record.metrics.keys()
    assert record.targets[0]["measured"] == record.metrics["cost fastgen"] and record.metrics["ratio"] > 0
    (note,) = record.notes
    assert "(transformers)" in note and "(fastgen)" in note


def test_attention_alone(monkeypatch):
    workload = replace(_ALL["attention-b16-s1024"], batch=2, heads=3, beams=2, prefix=16, dim=8)
    record = run_workload(workload, Context(repetitions=1))
    assert record.errors == [] and set(record.backends) == {"transformers", "fastgen", "copy"}
    assert record.targets[0]["measured"] == record.metrics["of_copy_bandwidth"] > 0


def test_attention_that_is_wrong_is_an_error(monkeypatch):
    from fastgen.ops import attention

    original = attention.shared_prefix_attention
    monkeypatch.setattr(attention, "shared_prefix_attention", lambda *args: original(*args) * 1.01)
    workload = replace(_ALL["attention-b16-s1024"], batch=2, heads=3, beams=2, prefix=16, dim=8)
    record = run_workload(workload, Context(repetitions=1))
    assert record.status == "failed" and "the operator differs" in record.errors[0]


@pytest.mark.parametrize("length", [2, 64])
def test_no_repeat_ngram(length, monkeypatch):
    workload = replace(_ALL["no-repeat-ngram-64"], length=length, rows=3, vocabulary=50, different_tokens=4)
    record = run_workload(workload, Context(repetitions=1))
    assert record.errors == [] and record.identical is True and len(record.backends) == 2
    assert (record.metrics["banned"] > 0) == (length == 64)


def test_pipeline_reads_the_report(tmp_path, monkeypatch):
    from benchmarks.workloads import pipeline

    (tmp_path / "model").mkdir()
    (tmp_path / "inputs.txt").write_text("one\ntwo\nthree\n")
    calls = []

    def command(words, **options):
        calls.append(words)
        Path(words[5]).write_text(Path(words[4]).read_text().upper())
        counts = {"accelerated": 0 if "--no-fastgen" in words else 3, "fallback": {}}
        report = {
            "seconds": {"generate": 9.0, "finish": 1.0, "waiting_for_output": 0.5},
            "waiting_for_output_share": 0.01,
            "fastgen": {"stats": {"transformers.generate": counts}},
        }
        Path(words[words.index("--report") + 1]).write_text(json.dumps(report))
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(pipeline.subprocess, "run", command)
    workload = replace(_ALL["pipeline-2000"], outputs=7, model=tmp_path / "model", inputs=tmp_path / "inputs.txt")
    # The commit is asked for with the function that is replaced here.
    monkeypatch.setattr("benchmarks.machine.commit", lambda: None)
    record = run_workload(workload, Context())
    assert record.errors == [] and record.identical is True and record.accelerated is True
    assert len(calls) == 2 and "--no-fastgen" in calls[0] and "--detokenizer" in calls[1]
    assert record.backends["fastgen"]["seconds"] == [10.0]
    assert record.metrics["waiting_percent"] == 1.0 and record.metrics["held_up_percent"] == pytest.approx(15.0)
    assert [target["met"] for target in record.targets] == [True, False, True]


def test_import_reports_the_difference(monkeypatch):
    from benchmarks.workloads import imports

    # Real imports of torch, several times over, would be most of the time of these tests.
    light = (
        ("import torch", "pass", "import json"),
        ("import fastgen", "pass", "import csv"),
        ("import fastgen after torch", "import json", "import csv"),
        ("import fastgen after transformers", "import json", "import csv"),
    )
    monkeypatch.setattr(imports, "_BACKENDS", light)
    record = run_workload(_ALL["import"], Context(repetitions=1))
    assert record.errors == [] and set(record.backends) == {name for name, _, _ in light}
    assert {"alone_minus_torch_ms", "after_torch_ms", "after_transformers_ms"} <= set(record.metrics)
    assert [target["met"] is not None for target in record.targets] == [True, True]


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
    workloads = [_Broken(name="broken", title="Broken"), tiny("gpt2-b4-p512", name="good", memory=False)]
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


def test_real_calls_are_measured_one_by_one(monkeypatch):
    monkeypatch.delenv(smollm2.VARIABLE, raising=False)
    calls = (
        real_calls.Call("kjv-gpt2", 2, 3, {"num_beams": 2}),
        real_calls.Call("kjv-bart", 1, 3, {"do_sample": True}),
        real_calls.Call("smollm2", 1, 3, {}),
    )
    workload = replace(_ALL["real-calls-float32"], calls=calls, repeated_for=0.0, repetitions=1)
    record = run_workload(workload, Context(threads=1))
    assert record.errors == [] and list(record.skipped) == ["smollm2"]
    assert set(record.parameters["ratios"]) == {str(call) for call in calls[:2]}
    assert record.metrics["slowest"] == pytest.approx(min(record.parameters["ratios"].values()), abs=1e-3)
    assert record.identical is True
    json.dumps(record.to_json())


def test_real_calls_see_other_tokens(monkeypatch):
    call = real_calls.Call("kjv-gpt2", 1, 3, {})
    run = real_calls.RealCalls._run
    other = torch.zeros(1, 1)
    monkeypatch.setattr(
        real_calls.RealCalls, "_run", lambda *given: run(*given) if fastgen.patching.is_active() else other
    )
    record = run_workload(
        replace(_ALL["real-calls-float32"], calls=(call,), repeated_for=0.0, repetitions=1), Context(threads=1)
    )
    assert record.identical is False and record.status == "different"


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
    record = run_workload(
        replace(workload, new_tokens=5, repetitions=1, further_backends=(), targets=()), Context(threads=1)
    )
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
