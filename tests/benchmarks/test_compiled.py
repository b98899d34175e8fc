"""The backends that compile: the library's tokens, and only the steps are compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import backends
from benchmarks.__main__ import run_workload
from benchmarks.backends import Job
from tests.benchmarks.tiny_gpu import CONFIGS, ON_CPU, WORKLOADS, tiny


class TestCompiledLoop:
    def job(self, **changes):
        # Weights so large that attention, and with it every position, has a say in the tokens.
        config = {**CONFIGS["llama"], "initializer_range": 0.5}
        work = tiny(WORKLOADS["gpu-llama-7b-b1"], dtype="float32", **{"config": config, **changes})
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
        work = tiny(WORKLOADS["gpu-gpt2-b32"], dtype="float32")
        model, inputs = work.build(torch.device("cpu"))
        with pytest.raises(backends.Unsupported, match="written for Llama"):
            backends.make("compiled-loop").setup(Job(work, model, inputs, threads=1))


@pytest.mark.parametrize("name", ["gpu-llama-7b-b1", "gpu-bart-large-b32"])
def test_only_steps_are_compiled(name, monkeypatch):
    from benchmarks.backends import compiled

    work = tiny(WORKLOADS[name], dtype="float32", options={"num_beams": 1, "do_sample": False})
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
    work = tiny(WORKLOADS["gpu-llama-7b-b1-compiled"])
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    run_workload(work, replace(ON_CPU, backends=("transformers", "transformers-compile", "compiled-loop", "fastgen")))
    assert order == ["transformers", "fastgen", "transformers-compile", "compiled-loop"]
