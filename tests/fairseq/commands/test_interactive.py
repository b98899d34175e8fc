"""FairSeq's `fairseq-interactive` and FastGen's answer the same."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import threading

import pytest
import torch

from fastgen import patching, settings
from fastgen.pipeline import RunReport
from fastgen.pipeline import fairseq as pipeline
from fastgen_cli import fairseq as commands
from tests.fairseq.commands.world import ROOT, both_interactive, configuration, printed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        "--nbest 3 --buffer-size 7 --batch-size 3",
        "--print-alignment --remove-bpe",
        "--sampling --nbest 3 --seed 3 --buffer-size 4 --batch-size 2",
        "--source-lang de --target-lang en --tokenizer moses --buffer-size 100 --max-tokens 80",
        "--print-step --retain-iter-history --buffer-size 30 --batch-size 30",
    ],
)
def test_interactive_prints_the_same(world, options):
    original, ours = both_interactive(world, world.folder / "test.de", *options.split())
    assert ours == original
    assert sum(line.startswith("S-") for line in ours) == 30


def test_interactive_with_soft_alignments(world):
    """FairSeq's command ends with an error there."""
    words = [world.data, "--path", world.model, "--input", world.folder / "test.de", "--cpu", "--max-len-b", 5]
    words += ["--print-alignment", "soft", "--buffer-size", 30, "--batch-size", 30]
    text = printed(lambda: pipeline.interact(configuration("interactive_generation", *words), 0))
    found = re.findall(r"^A-\d+\t(.*)$", text, re.MULTILINE)
    assert len(found) == 30
    assert all(sum(map(float, place.split(","))) == pytest.approx(1, abs=1e-4) for place in found[0].split())


def test_interactive_with_constraints(world, tmp_path):
    source = tmp_path / "source.txt"
    source.write_text("and he said\tLORD\tgod\nin the day\n")
    original, ours = both_interactive(world, source, "--constraints", "--batch-size", 2, "--buffer-size", 2)
    assert ours == original
    assert sum(line.startswith("C-0") for line in ours) == 2


def test_an_interactive_user_is_answered_before_the_next_question(world, programs):
    command = [programs / "python", "-m", "fastgen_cli.fairseq", "interactive", world.data, "--path", world.model]
    with subprocess.Popen(
        [*map(str, command), "--cpu", "--max-len-b", "5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        # An answer that does not come ends the wait for it.
        watch = threading.Timer(600, process.kill)
        watch.start()
        for number in range(2):
            process.stdin.write("and he said\n")
            process.stdin.flush()
            kinds = ""
            while not kinds.endswith("P"):
                line = process.stdout.readline()
                assert line, "it has ended"
                if re.match(rf"[A-Z]-{number}\t", line):
                    kinds += line[0]
            assert kinds == "SWHDP"
        process.stdin.close()
        assert process.wait(timeout=300) == 0
        watch.cancel()


@pytest.mark.parametrize("options", ["", "--no-fastgen", "--weight-dtype bf16"])
def test_processes_of_several_gpus_keep_the_options(world, monkeypatch, options):
    """FairSeq starts one for each. Here a thread stands for it, which knows nothing of this one's settings either."""
    seen = {}

    def interact(cfg, workers, begins):
        seen.update(
            active=patching.is_active(),
            dtype=settings.current().weight_dtype,
            disabled=os.environ.get("FASTGEN_DISABLE"),
        )
        return RunReport(seconds=dict.fromkeys(("load", "generate", "finish"), 0.0))

    def spawn(fn, args, nprocs, join):
        main, cfg, kwargs = pickle.loads(pickle.dumps(args))
        del kwargs["start_rank"]
        process = threading.Thread(target=main, args=(cfg,), kwargs=kwargs)
        process.start()
        process.join()

    monkeypatch.setattr(pipeline, "interact", interact)
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("FASTGEN_DISABLE", "1")
    words = [world.data, "--path", world.model, "--distributed-world-size", 2, *options.split()]
    assert commands.interactive([str(word) for word in words]) == 0
    assert seen == {
        "active": "--no-fastgen" not in options,
        "dtype": "bf16" if "bf16" in options else "fp32",
        "disabled": None,
    }
    assert os.environ["FASTGEN_DISABLE"] == "1"
