"""The workloads for a GPU, made tiny, on the CPU: that each runs from end to end and reports what it should."""

from __future__ import annotations

import gc
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastgen
from benchmarks import backends
from benchmarks.__main__ import DONE, main, run_workload
from benchmarks.backends import Job
from benchmarks.budget import Budget
from benchmarks.measure import summary
from benchmarks.memory import DevicePeaks
from benchmarks.tables import markdown
from benchmarks.workload import Context, Generation
from benchmarks.workloads import all_workloads, gpu_host_time, gpu_largest, no_repeat_ngram
from benchmarks.workloads.fairseq_shapes import InFairSeq
from benchmarks.workloads.gpu_ablation import Ablation
from benchmarks.workloads.gpu_host_time import HostTime
from benchmarks.workloads.gpu_largest import LargestBatch
from benchmarks.workloads.gpu_models import OnGpu, WeightBound, news_lengths, sentence_lengths
from tests.pipeline import tiny as pipeline_models

# The seconds that they have are those of a GPU; a CPU may take an hour.
_WORKLOADS = {
    workload.name: replace(workload, seconds=workload.seconds and 3600.0)
    for workload in all_workloads()
    if workload.needs_gpu
}
_GENERATION = [name for name, workload in _WORKLOADS.items() if isinstance(workload, OnGpu)]

_BART = {
    "vocab_size": 97,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
_TINY = {
    "bart": _BART,
    "prophetnet": {
        "vocab_size": 97,
        "hidden_size": 16,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2,
    },
    "t5": {
        "vocab_size": 97,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
    },
    "gpt2": {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "unilm": {
        "vocab_size": 97,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "mask_token_id": 3,
    },
    "llama": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
_ON_CPU = Context(threads=1)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
    monkeypatch.setattr(no_repeat_ngram, "_SAMPLE_SECONDS", 0.001)
    yield
    torch.set_num_threads(threads)


def tiny(work: OnGpu, **changes) -> OnGpu:
    config = next(config for shape, config in _TINY.items() if work.shape.__name__.startswith(shape))
    sizes = {"batch": min(work.batch, 2), "length": min(work.length, 24), "new_tokens": 5, "repetitions": 1}
    if isinstance(work, WeightBound):
        changes["copy_bytes"] = 2**12
    return replace(work, **{"config": config, **sizes, **changes})


@pytest.mark.parametrize("name", _GENERATION)
def test_generation_in_half_precision(name):
    work = _WORKLOADS[name]
    record = run_workload(tiny(work), _ON_CPU)
    assert record.errors == [] and record.status == "ok"
    assert record.parameters["dtype"] in ("float16", "bfloat16")
    # What half precision makes of a tie is reported, not required.
    assert record.identical is None and 0 <= record.same["fastgen"] <= 1
    assert record.metrics["ratio"] > 0 and len(record.targets) == len(work.targets)
    assert all(target["measured"] is not None for target in record.targets)
    json.dumps(record.to_json())


def test_it_is_tier_2_that_counts_as_accelerated():
    record = run_workload(tiny(_WORKLOADS["gpu-gpt2-b32"]), _ON_CPU)
    assert record.accelerated is False, "no step is captured on a CPU"


def test_tier_1_is_a_backend_on_a_gpu_alone():
    work = _WORKLOADS["gpu-bart-large-b32"]
    on_gpu = Context(device=torch.device("cuda")).chosen_backends(work.further_backends, work.gpu_backends)
    assert on_gpu == ["transformers", "fastgen", "fastgen-tier1"]
    assert _ON_CPU.chosen_backends(work.further_backends, work.gpu_backends) == ["transformers", "fastgen"]
    record = run_workload(tiny(work), replace(_ON_CPU, backends=("transformers", "fastgen", "fastgen-tier1")))
    assert "transformers/fastgen-tier1" in record.ratios and record.status == "ok"
    page = markdown(
        {"machine": {"cpu": "c", "cores": 1, "memory_gib": 1, "system": "s", "instructions": "i"},
         "versions": {"torch": "2"}, "settings": {"device": "cpu", "threads": 1}},
        [record],
    )  # fmt: skip
    assert f"{100 * record.same['fastgen']:.0f} %" in page


def test_models_are_made_where_they_run(monkeypatch):
    work = tiny(_WORKLOADS["gpu-llama-7b-b1"])
    model, inputs = work.build(torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert inputs["input_ids"].shape == (1, 24)


def test_bandwidth_utilisation(monkeypatch):
    monkeypatch.setattr("benchmarks.workloads.gpu_models.copy_bandwidth", lambda device, size: 1e9)
    record = run_workload(tiny(_WORKLOADS["gpu-llama-7b-b1"]), _ON_CPU)
    head = 32 // 4
    layer = 32 * 32 * 2 + 2 * 32 * 2 * head + 3 * 32 * 64 + 2 * 32
    # Two layers, the last norm and the output layer, in bfloat16; not the embedding.
    assert record.parameters["weight_bytes_read"] == 2 * (2 * layer + 32 + 97 * 32)
    seconds = record.backends["fastgen"]["median"]
    assert record.metrics["mbu"] == pytest.approx(record.parameters["weight_bytes_read"] * 5 / seconds / 1e9)


@pytest.mark.parametrize("lengths", [news_lengths, sentence_lengths])
def test_lengths(lengths):
    found = lengths(32, 512)
    assert found.shape == (32,) and 0 < found.min() < 300 and 480 < found.max() <= 512
    assert lengths(32, 8).max() == 8


def test_news_are_as_long_as_news_are():
    found = news_lengths(1000, 10**6).double()
    assert found.mean() == pytest.approx(910, rel=0.02) and found.std() == pytest.approx(455, rel=0.1)


def test_no_repeat_ngram():
    workload = replace(_WORKLOADS["gpu-no-repeat-ngram-128x4"], rows=4, vocabulary=50, length=20, calls=3)
    record = run_workload(workload, replace(_ON_CPU, repetitions=1))
    assert record.errors == [] and record.identical is True
    assert record.targets[0]["measured"] == record.metrics["graph_us"] > 0
    assert "fastgen, in a graph" in record.backends


def test_decode_attention():
    workload = _WORKLOADS["gpu-attention-b128-s1024"]
    workload = replace(workload, batch=2, beams=2, heads=2, prefix=16, dim=16, dtype="float32", copy_bytes=2**12)
    record = run_workload(workload, _ON_CPU)
    assert record.errors == [] and set(record.backends) == {"transformers", "fastgen", "copy"}
    assert record.targets[0]["measured"] == record.metrics["of_copy_bandwidth"] > 0


def test_decode_attention_that_is_wrong_is_an_error(monkeypatch):
    from fastgen.ops.triton import decode_attention

    original = decode_attention.decode_attention
    monkeypatch.setattr(decode_attention, "decode_attention", lambda *args, **more: original(*args, **more) * 1.1)
    workload = _WORKLOADS["gpu-attention-b128-s1024"]
    workload = replace(workload, batch=2, beams=2, heads=2, prefix=16, dim=16, dtype="float32", copy_bytes=2**12)
    assert "off by" in run_workload(workload, _ON_CPU).errors[0]


class TestHostTime:
    def test_report(self):
        workload = _WORKLOADS["gpu-host-time"]
        assert isinstance(workload, HostTime)
        workload = replace(workload, work=tiny(workload.work, batch=1, new_tokens=24), short=4, repetitions=2)
        record = run_workload(workload, _ON_CPU)
        assert record.errors == [] and record.accelerated is False
        assert record.notes == ["no step was captured: the time is that of tier 1"]
        assert record.targets[0]["measured"] == record.metrics["host_ms_per_step"]
        # Nothing waits for a device here.
        assert record.metrics["waits_per_step"] == 0
        assert record.metrics["wall_ms_per_step"] == pytest.approx(record.metrics["host_ms_per_step"], abs=1e-6)

    def test_what_waits_is_left_out(self, monkeypatch):
        class Event:
            def synchronize(self):
                time.sleep(0.05)
                torch.cuda.synchronize()

        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: time.sleep(0.05))
        monkeypatch.setattr(gpu_host_time, "_WAITING", ((Event, "synchronize"), (torch.cuda, "synchronize")))
        before = Event.synchronize, torch.cuda.synchronize
        run = gpu_host_time._measure(lambda: [Event().synchronize() for _ in range(2)], torch.device("cpu"))
        # The wait inside the wait counts once.
        assert run.waits == 2 and run.wall >= 0.2 and run.host < run.wall - 0.19
        assert (Event.synchronize, torch.cuda.synchronize) == before

    def test_everything_is_put_back(self):
        def attributes():
            return [(name in vars(holder), getattr(holder, name)) for holder, name in gpu_host_time._WAITING]

        before, item = attributes(), torch.Tensor.item
        with gpu_host_time.waits():
            assert torch.Tensor.item is not item
        assert attributes() == before


class TestLargestBatch:
    @pytest.fixture
    def workload(self, monkeypatch):
        # 1,000 bytes for everything and 100 for an input.
        taken = {"batch": 0}
        make = Generation.make_inputs

        def make_inputs(self, model):
            taken["batch"] = self.batch
            return make(self, model)

        monkeypatch.setattr(Generation, "make_inputs", make_inputs)
        monkeypatch.setattr(gpu_largest, "_bytes_of", lambda run, device: 1000 + 100 * taken["batch"])
        monkeypatch.setattr(gpu_largest, "free_memory", lambda device: 5800)
        workload = _WORKLOADS["gpu-gpt2-largest"]
        assert isinstance(workload, LargestBatch)
        return replace(workload, work=tiny(workload.work), probes=(1, 3))

    def test_nine_tenths_are_filled(self, workload):
        record = run_workload(workload, _ON_CPU)
        assert record.errors == []
        # (0.9 * 5800 - 1000) / 100 = 42, and graphs are made for 32 and 48.
        assert record.parameters["batches"] == {"transformers": 32, "fastgen": 32}
        assert record.metrics["batch fastgen"] == 32 and record.metrics["ratio"] > 0
        assert record.targets[0]["measured"] == record.metrics["ratio"]

    def test_as_many_as_are_tried(self, workload):
        record = run_workload(replace(workload, most=16), _ON_CPU)
        assert record.parameters["batches"] == {"transformers": 16, "fastgen": 16}
        assert "16 (the most that are tried)" in record.notes[0]

    def test_one_that_does_not_fit_is_made_smaller(self, workload, monkeypatch):
        run = type(backends.make("fastgen")).run
        tried = []

        def limited(self, new_tokens):
            tried.append((self.name, self.job.workload.batch))
            if self.job.workload.batch > 20:
                raise torch.OutOfMemoryError("out of memory")
            return run(self, new_tokens)

        monkeypatch.setattr(type(backends.make("fastgen")), "run", limited)
        record = run_workload(workload, _ON_CPU)
        assert record.errors == [] and record.parameters["batches"] == {"transformers": 32, "fastgen": 18}
        assert ("fastgen", 32) in tried and ("fastgen", 24) in tried

    def test_times_are_those_of_an_input(self, workload, monkeypatch):
        monkeypatch.setattr(gpu_largest, "timed", lambda work, device: (6.4, work()))
        record = run_workload(workload, _ON_CPU)
        assert record.backends["fastgen"]["median"] == pytest.approx(0.2)


def test_what_each_part_adds():
    workload = _WORKLOADS["gpu-bart-large-parts"]
    assert isinstance(workload, Ablation)
    work = tiny(workload.work, dtype="float32")
    record = run_workload(replace(workload, work=work, inputs=6, larger=6), _ON_CPU)
    assert record.errors == [] and len(record.backends) == 6
    # In float32 none of the parts changes a word.
    assert set(record.same.values()) == {1.0}
    assert record.subject == "+ captured step" and record.metrics["ratio"] > 0


def test_the_ngram_operator_alone_is_taken_out_again():
    from transformers import NoRepeatNGramLogitsProcessor

    from benchmarks.workloads.gpu_ablation import _ngram_operator

    before = NoRepeatNGramLogitsProcessor.__call__
    tokens, scores = torch.tensor([[5, 6, 5]]), torch.zeros(1, 9)
    with _ngram_operator(), fastgen.disabled():
        fastgen.reset_stats()
        found = NoRepeatNGramLogitsProcessor(2)(tokens, scores)
        assert fastgen.stats() == {} and found[0, 6] == -float("inf") and scores[0, 6] == 0
    assert NoRepeatNGramLogitsProcessor.__call__ == before


class TestHalfPrecision:
    @pytest.fixture
    def run(self, tmp_path):
        (tmp_path / "sources.txt").write_text("\n".join(pipeline_models.sentences(6)) + "\n")
        model = pipeline_models.bart(tmp_path / "model")
        workload = replace(
            _WORKLOADS["gpu-half-precision"], passages=5, beams=2, model=model,
            sources=tmp_path / "sources.txt", references=tmp_path / "sources.txt",
        )  # fmt: skip
        return lambda **changes: run_workload(replace(workload, **changes), _ON_CPU)

    def test_report(self, run):
        record = run()
        assert record.errors == [] and record.identical is True and record.accelerated is False
        assert record.metrics["same fp32"] == 1.0 and record.metrics["bleu fp32"] == 0
        assert 0 <= record.same["fastgen, bf16"] <= 1 and len(record.backends) == 6
        assert all(target["measured"] is not None for target in record.targets)
        assert [note.partition(":")[0] for note in record.notes] == ["fp32", "fp16", "bf16"]

    def test_a_package_that_is_missing_costs_its_rows(self, run, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else find(name))
        record = run(dtypes=("fp32", "bf16"))
        assert record.errors == [] and record.skipped == {"bleu": "sacrebleu is not installed"}
        assert "rouge bf16" in record.metrics and "bleu bf16" not in record.metrics

    def test_other_outputs_in_float32_are_noticed(self, run, monkeypatch):
        read = Path.read_text
        outputs = ("transformers-fp32.txt", "fastgen-fp32.txt")
        monkeypatch.setattr(
            Path, "read_text", lambda path, **options: f"{path}\n" if path.name in outputs else read(path, **options)
        )
        assert run(dtypes=("fp32",)).identical is False


class TestCompiledLoop:
    def job(self, **changes):
        # Weights so large that attention, and with it every position, has a say in the tokens.
        config = {**_TINY["llama"], "initializer_range": 0.5}
        work = tiny(_WORKLOADS["gpu-llama-7b-b1"], dtype="float32", **{"config": config, **changes})
        model, inputs = work.build(torch.device("cpu"))
        return Job(work, model, inputs, threads=1)

    @pytest.mark.parametrize("changes", [{}, {"batch": 3, "new_tokens": 9}])
    def test_it_makes_the_library_s_tokens(self, changes):
        job = self.job(**changes)
        expected, backend = backends.make("transformers"), backends.make("compiled-loop")
        for each in (expected, backend):
            each.setup(job)
        backend.warm_up()
        try:
            assert torch.equal(backend.run(job.workload.new_tokens), expected.run(job.workload.new_tokens))
        finally:
            backend.close()

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [({"options": {"num_beams": 2}}, "no options"), ({"batch": 2, "shortest": 4}, "padding")],
    )
    def test_what_it_cannot_do(self, changes, reason):
        with pytest.raises(backends.Unsupported, match=reason):
            backends.make("compiled-loop").setup(self.job(**changes))

    def test_another_model(self):
        work = tiny(_WORKLOADS["gpu-gpt2-b32"], dtype="float32")
        model, inputs = work.build(torch.device("cpu"))
        with pytest.raises(backends.Unsupported, match="written for Llama"):
            backends.make("compiled-loop").setup(Job(work, model, inputs, threads=1))


@pytest.mark.parametrize("name", ["gpu-llama-7b-b1", "gpu-bart-large-b32"])
def test_only_steps_are_compiled(name, monkeypatch):
    from benchmarks.backends import compiled

    work = tiny(_WORKLOADS[name], dtype="float32", options={"num_beams": 1, "do_sample": False})
    model, _ = work.build(torch.device("cpu"))
    inputs = work.make_inputs(model)
    expected = backends.make("transformers")
    expected.setup(Job(work, model, inputs, threads=1))
    widths, modes = [], []

    def compile(forward, mode=None):
        modes.append(mode)

        def step(**inputs):
            name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
            widths.append(inputs[name].shape[1])
            return forward(**inputs)

        return step

    monkeypatch.setattr(torch, "compile", compile)
    backend = backends.make("transformers-compile")
    backend.setup(Job(work, model, inputs, threads=1))
    backend._forward = compiled._compile_steps(model)
    assert torch.equal(backend.run(5), expected.run(5))
    # The first token of a decoder-only model comes from its prompt.
    assert widths == [1] * (5 if model.config.is_encoder_decoder else 4) and modes[-1] == "reduce-overhead"


def test_compiled_backends_come_after_the_others(monkeypatch):
    order = []
    for name in ("transformers", "transformers-compile", "fastgen", "compiled-loop"):
        kind = type(backends.make(name))
        monkeypatch.setattr(kind, "warm_up", lambda self: order.append(self.name))
    work = tiny(_WORKLOADS["gpu-llama-7b-b1-compiled"])
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    run_workload(work, replace(_ON_CPU, backends=("transformers", "transformers-compile", "compiled-loop", "fastgen")))
    assert order == ["transformers", "fastgen", "transformers-compile", "compiled-loop"]


class TestBudget:
    def test_a_block_is_ended(self):
        with pytest.raises(TimeoutError, match="compiling took longer than"), Budget(0.2).limit("compiling"):
            try:
                time.sleep(60)
            except Exception:  # as FastGen has around an accelerated call
                pytest.fail("the alarm was taken for an error")

    def test_nothing_is_left(self):
        with pytest.raises(TimeoutError, match="no time was left for it"), Budget(0).limit("it"):
            pytest.fail("it was begun")

    def test_nested(self):
        outer, inner = Budget(0.3), Budget(60)
        with pytest.raises(TimeoutError, match="outer took"), outer.limit("outer"):
            with inner.limit("inner"):
                pass
            time.sleep(60)
        with pytest.raises(TimeoutError, match="inner took"), Budget(60).limit("outer"), Budget(0.1).limit("inner"):
            time.sleep(60)
        time.sleep(0.2)  # no alarm is left

    def test_a_workload_that_does_not_look_at_its_time(self, monkeypatch):
        class Endless(HostTime):
            def run(self, context, record):
                record.backends.update(measured)
                time.sleep(60)

        monkeypatch.setattr("benchmarks.__main__._GRACE_SECONDS", 0.1)
        fields = {
            "name": "endless",
            "title": "Endless",
            "seconds": 0.1,
            "work": tiny(_WORKLOADS["gpu-gpt2-b32"]),
            "short": 1,
        }
        measured = {}
        assert "the time is spent" in run_workload(Endless(**fields), _ON_CPU).errors[0]
        measured = {"fastgen": summary([1.0])}
        record = run_workload(Endless(**fields), _ON_CPU)
        assert record.errors == [] and "endless took longer" in record.notes[0]

    def test_no_time_for_all_parts(self, monkeypatch):
        workload = _WORKLOADS["gpu-bart-large-parts"]
        monkeypatch.setattr(Budget, "is_spent", property(lambda self: True))
        record = run_workload(replace(workload, work=tiny(workload.work)), _ON_CPU)
        assert record.errors == [] and len(record.skipped) == 6

    def test_without_a_limit_and_in_other_threads(self):
        with Budget().limit("it"):
            pass
        found = []

        def work():
            with Budget(100).limit("it"):
                found.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [True]

    def test_a_backend_that_takes_too_long_costs_its_row(self, monkeypatch):
        monkeypatch.setattr(type(backends.make("compiled-loop")), "warm_up", lambda self: time.sleep(60))
        work = tiny(_WORKLOADS["gpu-llama-7b-b1-compiled"], seconds=8)
        record = run_workload(work, replace(_ON_CPU, backends=("transformers", "fastgen", "compiled-loop")))
        assert record.errors == [] and record.metrics["ratio"] > 0
        assert "getting ready took longer" in record.skipped["compiled-loop"]

    def test_repetitions_end_with_the_time(self, monkeypatch):
        work = tiny(_WORKLOADS["gpu-gpt2-b32"], repetitions=3)
        monkeypatch.setattr(Budget, "is_spent", property(lambda self: True))
        record = run_workload(work, _ON_CPU)
        assert record.errors == [] and [len(backend["seconds"]) for backend in record.backends.values()] == [1, 1]


class TestDevicePeaks:
    """With a stand-in for the counters of a device."""

    @pytest.fixture
    def device(self, monkeypatch):
        now = {"allocated": 100, "peak": 100}
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: now["allocated"])
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: now["peak"])
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.update(peak=now["allocated"]))
        return now

    def test_what_a_backend_keeps_is_its_own(self, device):
        peaks = DevicePeaks(torch.device("cuda"))
        with peaks.of("fastgen"):  # takes 70 for a moment and keeps 50
            device.update(peak=170, allocated=150)
        with peaks.of("transformers"):  # 30 above what is there, and nothing kept
            device.update(peak=180)
        with peaks.of("fastgen"):  # 40 above what it has kept
            device.update(peak=190)
        assert peaks.bytes == {"fastgen": 90, "transformers": 30}

    def test_in_a_record(self, device, monkeypatch):
        peaks = DevicePeaks(torch.device("cuda"))
        peaks.bytes = {"transformers": 3000, "fastgen": 1000}
        monkeypatch.setattr(peaks, "of", lambda backend: nullcontext())
        monkeypatch.setattr("benchmarks.workload.memory.DevicePeaks", lambda device: peaks)
        record = run_workload(tiny(_WORKLOADS["gpu-gpt2-b32"]), _ON_CPU)
        assert record.memory["fastgen"] == {"peak_bytes": 1000, "peak_method": "torch.cuda.max_memory_allocated"}
        assert record.metrics["peak_ratio"] == pytest.approx(1 / 3)


def test_on_a_cpu_they_are_listed_as_skipped(tmp_path, capsys):
    assert main(["--only", "gpu-*", "--out", str(tmp_path)]) == DONE
    said = capsys.readouterr().err
    for name in _WORKLOADS:
        assert f"{name} is skipped: it needs an NVIDIA GPU" in said
    assert list(tmp_path.glob("*/results.json")) == []
    assert main(["--list"]) == DONE
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpu-")]
    assert [line.split()[0] for line in listed] == list(_WORKLOADS) and all(" GPU " in line for line in listed)


def test_those_that_tell_most_come_first_and_end():
    names = list(_WORKLOADS)
    assert names[0] == "gpu-bart-large-b32" and len(set(names)) == len(names)
    assert names.index("gpu-llama-7b-b1") < names.index("gpu-t5-base-b32") < names.index("gpu-bart-large-b32-compiled")
    for workload in _WORKLOADS.values():
        assert workload.seconds or isinstance(workload, InFairSeq)


def test_every_number_that_must_be_shown_has_a_target():
    targets = {(name, target.metric): target for name, w in _WORKLOADS.items() for target in w.targets}
    least = {
        ("gpu-bart-large-b32", "ratio"): 8,
        ("gpu-bart-large-largest", "ratio"): 10,
        ("gpu-t5-base-largest", "ratio"): 4.3,
        ("gpu-gpt2-largest", "ratio"): 5.5,
        ("gpu-distilbart-largest", "ratio"): 5.4,
        ("gpu-prophetnet-largest", "ratio"): 3.8,
        ("gpu-unilm-largest", "ratio"): 9.6,
        ("gpu-llama-7b-b1", "ratio"): 6,
        ("gpu-llama-7b-b1", "mbu"): 0.75,
        ("gpu-attention-b128-s1024", "of_copy_bandwidth"): 0.7,
    }
    most = {("gpu-no-repeat-ngram-128x4", "graph_us"): 15, ("gpu-host-time", "host_ms_per_step"): 0.1}
    assert {key: targets[key].at_least for key in least} == least
    assert {key: targets[key].at_most for key in most} == most
