"""The workloads for a GPU, made tiny, on the CPU: that each runs from end to end and reports what it should."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import DONE, main, run_workload
from benchmarks.memory import DevicePeaks
from tests.benchmarks.tiny_gpu import GENERATION, ON_CPU, WORKLOADS, tiny
from tests.pipeline import tiny as pipeline_models


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GENERATION)
def test_generation_in_half_precision(name):
    work = WORKLOADS[name]
    record = run_workload(tiny(work), ON_CPU)
    assert record.errors == [] and record.status == "ok"
    assert record.parameters["dtype"] in ("float16", "bfloat16")
    # What half precision makes of a tie is reported, not required.
    assert record.identical is None and 0 <= record.same["fastgen"] <= 1
    assert record.metrics["ratio"] > 0 and "transformers/fastgen-hooks" in record.ratios
    json.dumps(record.to_json())


def test_bandwidth_utilisation(monkeypatch):
    monkeypatch.setattr("benchmarks.workloads.gpu_models.copy_bandwidth", lambda device, size: 1e9)
    record = run_workload(tiny(WORKLOADS["gpu-llama-7b-b1"]), ON_CPU)
    head = 32 // 4
    layer = 32 * 32 * 2 + 2 * 32 * 2 * head + 3 * 32 * 64 + 2 * 32
    # Two layers, the last norm and the output layer, in bfloat16; not the embedding.
    assert record.parameters["weight_bytes_read"] == 2 * (2 * layer + 32 + 97 * 32)
    seconds = record.backends["fastgen"]["median"]
    assert record.metrics["mbu"] == pytest.approx(record.parameters["weight_bytes_read"] * 5 / seconds / 1e9)


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
        assert [note.partition(":")[0] for note in record.notes] == ["fp32", "fp16", "bf16"]

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


def test_on_a_cpu_they_are_listed_as_skipped(tmp_path, capsys):
    assert main(["--only", "gpu-*", "--out", str(tmp_path)]) == DONE
    said = capsys.readouterr().err
    for name in WORKLOADS:
        assert f"{name} is skipped: it needs an NVIDIA GPU" in said
    assert list(tmp_path.glob("*/results.json")) == []
    assert main(["--list"]) == DONE
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpu-")]
    assert [line.split()[0] for line in listed] == list(WORKLOADS) and all(" GPU " in line for line in listed)
