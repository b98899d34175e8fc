"""Code in the configuration of a checkpoint, and in files of data, does not run: whatever the model and the entry."""

from __future__ import annotations

import contextlib
import tarfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fairseq
import numpy
import pytest
import torch
from fairseq import file_utils, hub_utils
from fairseq.data import Dictionary, data_utils
from fairseq.data.audio.data_cfg import S2TDataConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.fconv import FConvModel
from fairseq.models.speech_to_text import hub_interface
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel

import fastgen
from fastgen.optimizer.fairseq.compat.literals import RefusedValue, evaluate
from fastgen_cli import fairseq as commands
from fastgen_cli.generate import main as generate_any
from tests.fairseq import models

pytestmark = pytest.mark.sampled(2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dictionaries, as they lie beside a checkpoint."""
    for name in ("dict.de.txt", "dict.en.txt", "dict.txt"):
        models.dictionary().save(str(tmp_path / name))
    return tmp_path


class Trap:
    """A text that makes a directory if anything evaluates it."""

    def __init__(self, folder: Path) -> None:
        self._made = folder / "trap"
        self.code = f"__import__('os').mkdir({str(self._made)!r})"

    @property
    def has_sprung(self) -> bool:
        return self._made.exists()


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Trap]:
    made = Trap(tmp_path)
    yield made
    assert not made.has_sprung


def write(folder: Path, layout: str, arch: str, **fields: Any) -> str:
    """A checkpoint whose configuration is a Namespace, as FairSeq wrote it once, or one of omegaconf."""
    known = {"arch": arch, "task": task_name(arch), "criterion": "cross_entropy", "data": str(folder)}
    arguments = Namespace(source_lang="de", target_lang="en", tokens_per_sample=64, **{**known, **fields})
    stored = convert_namespace_to_omegaconf(arguments) if layout == "cfg" else arguments
    torch.save(models.checkpoint(**{layout: stored}), folder / "model.pt")
    return str(folder / "model.pt")


def test_the_trap_springs(tmp_path):
    made = Trap(tmp_path)
    eval(made.code)
    assert made.has_sprung


# One architecture of each family, with the field that it evaluates first.
FAMILIES = {
    "transformer": "adaptive_softmax_cutoff", "lightconv": "adaptive_softmax_cutoff", "lstm": "decoder_attention",
    "fconv": "encoder_layers", "fconv_self_att": "pretrained", "fconv_lm": "decoder_layers",
    "transformer_lm": "adaptive_softmax_cutoff", "lightconv_lm": "adaptive_softmax_cutoff",
}  # fmt: skip


def task_name(arch: str) -> str:
    return "language_modeling" if arch.endswith("_lm") else "translation"


@pytest.mark.parametrize(
    ("command", "layout", "arch"),
    [
        (commands.generate, "cfg", "transformer"), (commands.generate, "args", "fconv"),
        (commands.interactive, "args", "transformer"), (commands.interactive, "cfg", "fconv_self_att"),
        (commands.eval_lm, "cfg", "transformer_lm"), (commands.eval_lm, "args", "fconv_lm"),
        (generate_any, "cfg", "lstm"), (generate_any, "args", "transformer"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_no_command_runs_code(folder, trap, capsys, command, layout, arch):
    path = write(folder, layout, arch, **{FAMILIES[arch]: trap.code})
    words = [str(folder), "--path", path, "--cpu"]
    if command is generate_any:
        (folder / "input.txt").write_text("w1 w2\n")
        words = [path, str(folder / "input.txt"), str(folder / "output.txt"), "--cpu"]
    if command is not commands.eval_lm:
        words += ["--source-lang", "de", "--target-lang", "en"]
    assert command(words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fastgen-")]
    assert len(errors) == 1 and "__import__" in errors[0], errors


@pytest.mark.parametrize(
    ("interface", "arch", "layout"),
    [
        (TransformerModel, "transformer", "cfg"), (TransformerModel, "transformer", "args"),
        (FConvModel, "fconv", "args"), (TransformerLanguageModel, "transformer_lm", "cfg"),
    ],
    ids=lambda value: value if type(value) is str else "",
)  # fmt: skip
def test_no_hub_interface_runs_code(folder, trap, interface, arch, layout):
    write(folder, layout, arch, **{FAMILIES[arch]: trap.code})
    with pytest.raises(RefusedValue):
        interface.from_pretrained(str(folder))
    with fastgen.disabled(), pytest.raises(RefusedValue):
        interface.from_pretrained(str(folder))


def test_no_task_of_a_checkpoint_runs_code(folder, trap):
    about = {"task": "multilingual_translation", "lang_pairs": "de-en", "left_pad_source": trap.code}
    write(folder, "args", "multilingual_transformer", **about)
    with pytest.raises(RefusedValue, match="__import__"):
        hub_utils.from_pretrained(str(folder))


@pytest.mark.parametrize("layout", ["args", "cfg"])
def test_a_checkpoint_does_not_say_what_is_imported(folder, trap, layout):
    (folder / "plugin").mkdir()
    (folder / "plugin" / "__init__.py").write_text(trap.code)
    write(folder, layout, "fconv", user_dir=str(folder / "plugin"), encoder_layers="no value")
    with pytest.raises(RefusedValue, match="no value"):
        FConvModel.from_pretrained(str(folder))


# ---- published architectures


def test_every_architecture_has_values_that_are_read_as_before():
    """Those of all architectures and configurations that FairSeq registers, in fields that it evaluates."""
    fields = set(
        "adaptive_softmax_cutoff adaptive_input_cutoff character_filters encoder_layers decoder_layers pretrained "
        "encoder_attention decoder_attention self_attention project_input gated_attention downsample "
        "conv_feature_layers conv_aggregator_layers encoder_conv_feature_layers xformers_att_config".split()
    )
    texts = set()
    for arch, model in ARCH_MODEL_REGISTRY.items():
        arguments = Namespace(arch=arch)
        if getattr(model, "__dataclass", None) is not None:
            arguments = model.__dataclass()
        elif arch in ARCH_CONFIG_REGISTRY:
            with contextlib.suppress(AttributeError):  # a few need what a command line says
                ARCH_CONFIG_REGISTRY[arch](arguments)
        texts |= {value for name, value in vars(arguments).items() if name in fields and type(value) is str}
    assert len(texts) > 12
    for text in texts:
        assert evaluate(text) == eval(text), text


# ---- files of data


def test_a_data_configuration_makes_no_objects(folder, trap):
    (folder / "config.yaml").write_text(f"x: !!python/object/apply:builtins.eval [{trap.code!r}]\n")
    with pytest.raises(Exception, match="could not determine a constructor"):
        S2TDataConfig(folder / "config.yaml")


def test_a_line_of_data_is_not_run(folder, trap):
    from fairseq.data.codedataset import parse_manifest

    (folder / "manifest").write_text(f"{{'audio': {trap.code}, 'phone': 'w1'}}\n")
    with pytest.raises(RefusedValue):
        parse_manifest(str(folder / "manifest"), Dictionary())


SEQUENCES = b">one\nACGT\nAC\n>two\n>three\nA\n"


def test_sequences_of_fasta_and_names_that_are_commands(folder, trap, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "x$(mkdir trap);mkdir trap;.fasta").write_bytes(SEQUENCES)
    data = data_utils.load_indexed_dataset("x$(mkdir trap);mkdir trap;", Dictionary(), "fasta")
    assert data.sizes.tolist() == [6, 0, 1] and data.offsets.tolist() == [0, 13, 18]
    assert data.offsets.dtype == data.sizes.dtype == numpy.int64
    assert [fairseq.data.FastaDataset.__getitem__(data, i)[1] for i in range(3)] == ["ACGTAC", "", "A"]


def test_an_archive_stays_in_its_directory(folder, trap):
    (folder / "inside").mkdir()
    with tarfile.open(folder / "model.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../trap"))
    with pytest.raises(tarfile.OutsideDestinationError):
        file_utils.load_archive_file(str(folder / "model.tar.gz"))


def test_a_repository_that_data_name_is_not_run_unasked(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.hub, "load", lambda *names, **options: asked.append((names, options)))
    hub_interface.torch.hub.load("somebody/something", "model", verbose=False)
    assert asked == [(("somebody/something", "model"), {"verbose": False, "trust_repo": "check"})]
    assert hub_interface.torch.Tensor is torch.Tensor
