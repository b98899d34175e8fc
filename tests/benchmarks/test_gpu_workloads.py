"""The workloads for a GPU, made tiny, on the CPU: that each runs from end to end and reports what it should."""

from __future__ import annotations

import importlib.util
import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastgen
from benchmarks import backends
from benchmarks.__main__ import DONE, main, run_workload
from benchmarks.memory import DevicePeaks
from benchmarks.tables import markdown
from benchmarks.workload import Context, Generation
from benchmarks.workloads import gpu_host_time, gpu_largest
from benchmarks.workloads.fairseq_shapes import InFairSeq
from benchmarks.workloads.gpu_ablation import Ablation
from benchmarks.workloads.gpu_host_time import HostTime
from benchmarks.workloads.gpu_largest import LargestBatch
from benchmarks.workloads.gpu_models import news_lengths, sentence_lengths
from fastgen import settings
from fastgen.ops import gpu as operators
from tests.benchmarks.tiny_gpu import GENERATION, ON_CPU, WORKLOADS, tiny
from tests.pipeline import tiny as pipeline_models


@pytest.mark.parametrize("name", GENERATION)
def test_generation_in_half_precision(name):
    work = WORKLOADS[name]
    record = run_workload(tiny(work), ON_CPU)
    assert record.errors == [] and record.status == "ok"
    assert record.parameters["dtype"] in ("float16", "bfloat16")
    # What half precision makes of a tie is reported, not required.
    assert record.identical is None and 0 <= record.same["fastgen"] <= 1
    assert record.metrics["ratio"] > 0 and len(record.targets) == len(work.targets)
    assert all(target["measured"] is not None for target in record.targets)
    json.dumps(record.to_json())


def test_it_is_the_captured_step_that_counts_as_accelerated():
    record = run_workload(tiny(WORKLOADS["gpu-gpt2-b32"]), ON_CPU)
    assert record.accelerated is False, "no step is captured on a CPU"


def test_hooks_are_a_backend_on_a_gpu_alone():
    work = WORKLOADS["gpu-bart-large-b32"]
    on_gpu = Context(device=torch.device("cuda")).chosen_backends(work.further_backends, work.gpu_backends)
    assert on_gpu == ["transformers", "fastgen", "fastgen-hooks"]
    assert ON_CPU.chosen_backends(work.further_backends, work.gpu_backends) == ["transformers", "fastgen"]
    record = run_workload(tiny(work), replace(ON_CPU, backends=("transformers", "fastgen", "fastgen-hooks")))
    assert "transformers/fastgen-hooks" in record.ratios and record.status == "ok"
    page = markdown(
        {"machine": {"cpu": "c", "cores": 1, "memory_gib": 1, "system": "s", "instructions": "i"},
         "versions": {"torch": "2"}, "settings": {"device": "cpu", "threads": 1}},
        [record],
    )  # fmt: skip
    assert f"{100 * record.same['fastgen']:.0f} %" in page


def test_models_are_made_where_they_run(monkeypatch):
    work = tiny(WORKLOADS["gpu-llama-7b-b1"])
    model, inputs = work.build(torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert inputs["input_ids"].shape == (1, 24)


def test_bandwidth_utilisation(monkeypatch):
    monkeypatch.setattr("benchmarks.workloads.gpu_models.copy_bandwidth", lambda device, size: 1e9)
    record = run_workload(tiny(WORKLOADS["gpu-llama-7b-b1"]), ON_CPU)
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
    workload = replace(WORKLOADS["gpu-no-repeat-ngram-128x4"], rows=4, vocabulary=50, length=20, calls=3)
    record = run_workload(workload, replace(ON_CPU, repetitions=1))
    assert record.errors == [] and record.identical is True
    assert record.targets[0]["measured"] == record.metrics["graph_us"] > 0
    assert "fastgen, in a graph" in record.backends


def test_decode_attention():
    workload = WORKLOADS["gpu-attention-b128-s1024"]
    workload = replace(workload, batch=2, beams=2, heads=2, prefix=16, dim=16, dtype="float32", copy_bytes=2**12)
    record = run_workload(workload, ON_CPU)
    assert record.errors == [] and set(record.backends) == {"transformers", "fastgen", "copy"}
    assert record.targets[0]["measured"] == record.metrics["of_copy_bandwidth"] > 0


def test_decode_attention_that_is_wrong_is_an_error(monkeypatch):
    from fastgen.ops import decode_attention

    original = decode_attention.decode_attention
    monkeypatch.setattr(decode_attention, "decode_attention", lambda *args, **more: original(*args, **more) * 1.1)
    workload = WORKLOADS["gpu-attention-b128-s1024"]
    workload = replace(workload, batch=2, beams=2, heads=2, prefix=16, dim=16, dtype="float32", copy_bytes=2**12)
    assert "off by" in run_workload(workload, ON_CPU).errors[0]


class TestHostTime:
    def test_report(self):
        workload = WORKLOADS["gpu-host-time"]
        assert isinstance(workload, HostTime)
        workload = replace(workload, work=tiny(workload.work, batch=1, new_tokens=24), short=4, repetitions=2)
        record = run_workload(workload, ON_CPU)
        assert record.errors == [] and record.accelerated is False
        assert record.notes == ["no step was captured: the time is that of the hooks"]
        assert record.targets[0]["measured"] == record.metrics["host_ms_per_step"]
        # Nothing waits for a device here.
        assert record.metrics["waits_per_step"] == 0
        assert record.metrics["wall_ms_per_step"] == pytest.approx(record.metrics["host_ms_per_step"], abs=1e-6)

    def test_what_it_replaces_does_not_stop_capturing(self, monkeypatch):
        monkeypatch.setattr(operators, "is_interpreted", lambda: False)
        workload = WORKLOADS["gpu-host-time"]
        workload = replace(workload, work=tiny(workload.work, batch=1, new_tokens=48), short=24, repetitions=1)
        with settings.changed(captured_step="always"):
            record = run_workload(workload, ON_CPU)
        assert record.errors == [] and not record.fallbacks and record.accelerated is True

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

        before, synchronize = attributes(), torch.cuda.synchronize
        with gpu_host_time.waits():
            assert torch.cuda.synchronize is not synchronize
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
        workload = WORKLOADS["gpu-gpt2-largest"]
        assert isinstance(workload, LargestBatch)
        return replace(workload, work=tiny(workload.work), probes=(1, 3))

    def test_nine_tenths_are_filled(self, workload):
        record = run_workload(workload, ON_CPU)
        assert record.errors == []
        # (0.9 * 5800 - 1000) / 100 = 42, and graphs are made for 32 and 48.
        assert record.parameters["batches"] == {"transformers": 32, "fastgen": 32}
        assert record.metrics["batch fastgen"] == 32 and record.metrics["ratio"] > 0
        assert record.targets[0]["measured"] == record.metrics["ratio"]

    def test_as_many_as_are_tried(self, workload):
        record = run_workload(replace(workload, most=16), ON_CPU)
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
        record = run_workload(workload, ON_CPU)
        assert record.errors == [] and record.parameters["batches"] == {"transformers": 32, "fastgen": 18}
        assert ("fastgen", 32) in tried and ("fastgen", 24) in tried

    def test_times_are_those_of_an_input(self, workload, monkeypatch):
        monkeypatch.setattr(gpu_largest, "timed", lambda work, device: (6.4, work()))
        record = run_workload(workload, ON_CPU)
        assert record.backends["fastgen"]["median"] == pytest.approx(0.2)


def test_what_each_part_adds():
    workload = WORKLOADS["gpu-bart-large-parts"]
    assert isinstance(workload, Ablation)
    work = tiny(workload.work, dtype="float32")
    record = run_workload(replace(workload, work=work, inputs=6, larger=6), ON_CPU)
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
            WORKLOADS["gpu-half-precision"], passages=5, beams=2, model=model,
            sources=tmp_path / "sources.txt", references=tmp_path / "sources.txt",
        )  # fmt: skip
        return lambda **changes: run_workload(replace(workload, **changes), ON_CPU)

    @pytest.mark.parametrize("needs_gpu", [True, False])
    def test_report(self, run, needs_gpu):
        """On a GPU a captured step is expected in every call."""
        record = run(needs_gpu=needs_gpu)
        assert record.errors == [] and record.identical is True and record.accelerated is not needs_gpu
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
        record = run_workload(tiny(WORKLOADS["gpu-gpt2-b32"]), ON_CPU)
        assert record.memory["fastgen"] == {"peak_bytes": 1000, "peak_method": "torch.cuda.max_memory_allocated"}
        assert record.metrics["peak_ratio"] == pytest.approx(1 / 3)


def test_on_a_cpu_they_are_listed_as_skipped(tmp_path, capsys):
    assert main(["--only", "gpu-*", "--out", str(tmp_path)]) == DONE
    said = capsys.readouterr().err
    for name in WORKLOADS:
        assert f"{name} is skipped: it needs an NVIDIA GPU" in said
    assert list(tmp_path.glob("*/results.json")) == []
    assert main(["--list"]) == DONE
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpu-")]
    assert [line.split()[0] for line in listed] == list(WORKLOADS) and all(" GPU " in line for line in listed)


def test_those_that_tell_most_come_first_and_end():
    names = list(WORKLOADS)
    assert names[0] == "gpu-bart-large-b32" and len(set(names)) == len(names)
    assert names.index("gpu-llama-7b-b1") < names.index("gpu-t5-base-b32") < names.index("gpu-bart-large-b32-compiled")
    for workload in WORKLOADS.values():
        assert workload.seconds or isinstance(workload, InFairSeq)


def test_every_number_that_must_be_shown_has_a_target():
    targets = {(name, target.metric): target for name, w in WORKLOADS.items() for target in w.targets}
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
