"""The report on captured steps, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

import fastgen
from benchmarks import steps
from benchmarks.workload import Generation
from benchmarks.workloads import opus_mt
from fastgen.decoding.captured.program import Program
from fastgen.ops import _team as team
from fastgen.ops import triton as operators
from tests.benchmarks.tiny_configs import CONFIGS


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Generation:
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    monkeypatch.setattr(steps, "_COPY_BYTES", 2**16)
    (found,) = [each for each in opus_mt.WORKLOADS if each.name == "opus-mt-b1"]
    made = replace(found, new_tokens=9, length=7, config=CONFIGS["opus"])
    monkeypatch.setattr(steps, "all_workloads", lambda: [made])
    return made


def test_an_output_layer_that_is_estimated_is_a_product() -> None:
    x, weight, out = torch.randn(1, 8), torch.randn(40, 8), torch.zeros(1, dtype=torch.int64)
    program = Program()
    program.capture(lambda: out.copy_((x @ weight.t()).argmax(dim=-1)))
    assert [steps.kind(call) for call in program.calls(planned=False)][:2] == [steps.PRODUCTS, steps.OTHERS]


def test_steps_of_a_workload(tiny: Generation) -> None:
    calls = Program.calls
    seen, speed = steps.measure_steps(tiny, calls=2)
    assert Program.calls is calls and speed > 0
    assert len(seen.seconds) == len(seen.inside) == len(seen.operators) and len(seen.seconds) % 2 == 0
    assert all(inside < seconds for inside, seconds in zip(seen.inside, seen.seconds, strict=True))
    assert 0 < seen.alone < seen.calls
    names = [name for name, _ in seen.rows()]
    assert names == [steps.PRODUCTS, "attention", "small operators", steps.OTHERS, "the step"]
    assert all(seconds > 0 for _, seconds in seen.rows())
    outside = seen.share_outside(steps.Smallest(0.0, 0.0))
    assert 0 < outside < seen.share_outside(steps.Smallest(1e-6, 0.0)) < 1
    assert outside < seen.share_outside(steps.Smallest(0.0, 1e-6))

    model, _ = tiny.build(torch.device("cpu"))
    # The layers of the decoder, and the vocabulary, which is the embedding; not the encoder, nor what is read per call.
    decoder = model.get_decoder()
    matrices = {name: weight.nbytes for name, weight in decoder.layers.named_parameters() if weight.dim() == 2}
    of_a_call = sum(size for name, size in matrices.items() if "encoder_attn.k" in name or "encoder_attn.v" in name)
    least = sum(matrices.values()) - of_a_call + model.lm_head.weight.nbytes
    vectors = sum(weight.nbytes for weight in decoder.parameters() if weight.dim() == 1)
    assert least <= sum(seen.weights.values()) <= least + vectors + model.final_logits_bias.nbytes


def test_timed_steps_are_replays(tiny: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that a program does around its operators."""
    entered, execute, for_replay = [False], steps.Steps.execute, team.for_replay

    @contextmanager
    def watched() -> Iterator[None]:
        entered[0] = True
        with for_replay():
            yield
        entered[0] = False

    def checked(seen: steps.Steps, call: Callable[[], object]) -> None:
        assert entered[0] and torch.is_inference_mode_enabled()
        execute(seen, call)

    monkeypatch.setattr(team, "for_replay", watched)
    monkeypatch.setattr(steps.Steps, "execute", checked)
    assert steps.measure_steps(tiny, calls=1)[0].calls


def test_no_captured_steps(tiny: Generation) -> None:
    with fastgen.disabled(), pytest.raises(RuntimeError, match="opus-mt-b1 has no captured steps"):
        steps.measure_steps(tiny, calls=1)


def test_what_an_operator_is() -> None:
    product, attention = torch.ops.fastgen.gemv_out.default, torch.ops.fastgen.decode_attention_out.default
    assert steps.kind(partial(product)) == steps.kind(partial(torch.ops.aten.mm.out)) == steps.PRODUCTS
    assert steps.kind(partial(print, partial(attention), [])) == "attention"
    assert steps.kind(partial(torch.ops.aten.add.Tensor)) == steps.OTHERS


def test_the_smallest_operator() -> None:
    smallest = steps.smallest_operator()
    assert min(smallest) > 0


def test_command(tiny: Generation, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main([tiny.name, "--calls", "1", "--models", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"### {tiny.title}" in lines
    assert [line.split("|")[1].strip() for line in lines[-5:]] == [name for name, _ in steps.FIRST_CALLS] + [
        "a later call"
    ]
    with pytest.raises(SystemExit, match="2"):
        steps.main(["unknown"])
