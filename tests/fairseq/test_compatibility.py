"""FairSeq on a current Python, torch and NumPy: it works, and nothing outside of it has changed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fairseq
import numpy
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils, indexed_dataset, language_pair_dataset, token_block_dataset
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import CommonConfig, FairseqConfig
from fairseq.logging.meters import AverageMeter
from fairseq.modules import dynamic_crf_layer
from omegaconf import OmegaConf

import fastgen
from tests.fairseq import models

ROOT = Path(__file__).parents[2]


def python(program: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, from the repository."""
    return subprocess.run(
        [program, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


NOTHING_GLOBAL = """
import dataclasses, sys, numpy, torch
before = dataclasses.dataclass, dataclasses._process_class, torch.load, numpy.__dict__.copy(), sys.meta_path[:]
{imports}
assert before[:3] == (dataclasses.dataclass, dataclasses._process_class, torch.load)
assert not hasattr(numpy, "int") and not hasattr(numpy, "compat")
assert all(allowed.__module__.startswith("torch.") for allowed in torch.serialization.get_safe_globals())
class Mutable:
    __hash__ = None
try:
    dataclasses.make_dataclass("C", [("x", Mutable, Mutable())])
except ValueError:
    pass
else:
    assert sys.version_info < (3, 11)
from fairseq.dataclass import configs
import inspect
assert configs.__loader__ is configs.__spec__.loader and configs.__builtins__ is __builtins__
assert "class CommonConfig" in inspect.getsource(configs.CommonConfig)
import multiprocessing
from fairseq.data import Dictionary
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply(len, (Dictionary(),)) == 4
fastgen.disable()
assert not any(type(finder).__module__.startswith("fastgen") for finder in sys.meta_path)
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "imports",
    [
        "import fastgen, fairseq",
        "import fastgen, torch.nn, fairseq.models, fairseq_cli.generate",
        "import fastgen; fastgen.disable(); fastgen.enable(); from fairseq.dataclass import configs",
    ],
)
def test_fairseq_imports_and_nothing_outside_of_it_changes(imports):
    done = python(sys.executable, NOTHING_GLOBAL.format(imports=imports))
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("code", "environment"),
    [("import fastgen; fastgen.disable(); import fairseq", {}), ("import fastgen, fairseq", {"FASTGEN_DISABLE": "1"})],
)
def test_disabled_it_is_fairseq_as_it_is(code, environment, programs):
    done = python(programs / "python", code, **environment)
    if sys.version_info >= (3, 11) and fairseq.__version__.startswith("0.12.2"):
        assert "mutable default" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_status_names_every_patch_and_the_version():
    status = fastgen.status()
    states = {name: state for name, state in status.patches.items() if name.startswith("fairseq.")}
    assert set(states.values()) == {"applied"} or not fairseq.__version__.startswith("0.12.2"), states
    assert status.versions["fairseq"] == fairseq.__version__ and not status.notes
    # Whatever the release, generation goes through FastGen.
    modules = ("sequence_generator", "search", "ngram_repeat_block", "modules.multihead_attention")
    hooks = {name: state for name, state in states.items() if name.startswith(tuple(f"fairseq.{m}." for m in modules))}
    assert len(hooks) == 9 and set(hooks.values()) == {"applied"}, hooks


# ---- configuration classes


@dataclass
class Inner(FairseqDataclass):
    size: int = 3


@dataclass
class Outer(FairseqDataclass):
    inner: Inner = Inner()  # noqa: RUF009
    names: list[str] = field(default_factory=list)


def test_configurations_of_ones_own_take_instances_as_defaults():
    assert OmegaConf.structured(Outer).inner.size == 3
    assert Inner() == Inner() and len({Inner(), Inner()}) == 2


def test_configurations_keep_their_defaults():
    default = FairseqConfig.__dataclass_fields__["common"].default
    # An instance; fairseq-fixed has the class there.
    assert CommonConfig in (default, type(default)) and FairseqConfig().common is default
    assert OmegaConf.structured(FairseqConfig).common.seed == 1


# ---- checkpoints


def state(**more: Any) -> dict[str, Any]:
    """What FairSeq and its tasks write besides weights."""
    meters = {"loss": AverageMeter(round=3)}
    meters["loss"].update(numpy.float64(2.5))
    parts = {
        "model": {"weight": torch.arange(3.0)},
        "extra_state": {"train_iterator": {"epoch": 2}, "train_meters": meters, "val_loss": numpy.int64(3)},
        "task_state": {"dictionary": models.dictionary(), "counts": numpy.arange(4)},
    }
    return models.checkpoint(**parts | more)


def configuration() -> Any:
    values = {"model": {"_name": "transformer", "layers": [1, 2.5, None, True]}, "task": Namespace(x=1)}
    return OmegaConf.create(values, flags={"allow_objects": True})


def allowed() -> set[Any]:
    """What `torch.load` accepts besides what torch itself allows."""
    every = torch.serialization.get_safe_globals()
    return {one for one in every if isinstance(one, tuple) or not one.__module__.startswith("torch.")}


@pytest.fixture(autouse=True)
def allowed_types_stay_as_they_are() -> Iterator[None]:
    before = allowed()
    yield
    assert allowed() == before


@pytest.mark.parametrize("new_format", [True, False])
def test_what_fairseq_writes_can_be_read(tmp_path, new_format):
    path = tmp_path / "checkpoint.pt"
    torch.save(state(cfg=configuration()), path, _use_new_zipfile_serialization=new_format)
    read = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert read["cfg"].model.layers == [1, 2.5, None, True] and read["cfg"].task.x == 1
    assert read["extra_state"]["val_loss"] == 3
    assert read["task_state"]["dictionary"] == models.dictionary()
    assert read["task_state"]["counts"].tolist() == [0, 1, 2, 3]
    assert read["model"]["weight"].tolist() == [0, 1, 2]


def test_what_earlier_releases_wrote_can_be_read(tmp_path):
    path = tmp_path / "checkpoint.pt"
    arguments = Namespace(arch="transformer", task="translation", data="here", best=numpy.float32(1.5))
    torch.save(state(args=arguments), path)
    read = checkpoint_utils.load_checkpoint_to_cpu(str(path), {"data": "there"})
    assert read["args"].data == "there" and read["args"].best == numpy.float32(1.5)
    assert read["cfg"].task.data == "there"


class Intruder:
    """Something that runs code when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["FASTGEN_TEST_DIRECTORY"],)


class Harmless:
    pass


def test_code_in_a_checkpoint_does_not_run_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGEN_TEST_DIRECTORY", str(tmp_path / "intruded"))
    torch.save(state(task_state=Intruder()), tmp_path / "checkpoint.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"contains \w+\.mkdir.*add_safe_globals"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt"))
    assert not (tmp_path / "intruded").exists()


def test_who_trusts_a_checkpoint_names_its_types(tmp_path):
    torch.save(state(task_state=Harmless()), tmp_path / "checkpoint.pt")
    with pytest.raises(pickle.UnpicklingError, match="Harmless"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt"))
    with torch.serialization.safe_globals([Harmless]):
        read = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt"))
    assert isinstance(read["task_state"], Harmless)


def test_what_the_user_allows_stays_allowed(tmp_path):
    torch.save(state(cfg=configuration()), tmp_path / "checkpoint.pt")
    with torch.serialization.safe_globals([Namespace]):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt"))
        assert allowed() == {Namespace}


def test_a_model_that_has_loaded_its_weights_encodes_sources_of_different_lengths():
    model = models.encoder_decoder()
    again = models.encoder_decoder(seed=1)
    again.load_state_dict(model.state_dict(), strict=True, model_cfg=None)
    source = models.sources(4)["net_input"]
    with torch.no_grad():
        want, have = (m.encoder(**source)["encoder_out"][0] for m in (model, again.eval()))
    torch.testing.assert_close(have, want)


# ---- NumPy


def test_numpy_names_are_there_for_the_modules_that_use_them():
    assert data_utils.np.int is int and dynamic_crf_layer.np.float is float
    assert token_block_dataset.np.compat.long is language_pair_dataset.np.compat.long is int
    assert data_utils.np.array is numpy.array and not hasattr(numpy, "int")
    fastgen.disable()
    assert data_utils.np is token_block_dataset.np is numpy


def test_lengths_in_buckets():
    assert data_utils.get_buckets(numpy.array([9, 4, 4, 7, 2]), 2).tolist() == [4, 9]


# ---- binary data


@pytest.mark.parametrize("end", ["idx", "bin"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_data_that_cannot_be_read_are_one_error(tmp_path, end):
    builder = indexed_dataset.MMapIndexedDatasetBuilder(str(tmp_path / "data.bin"))
    builder.add_item(torch.tensor([4, 5, 6]))
    builder.finalize(str(tmp_path / "data.idx"))
    assert indexed_dataset.MMapIndexedDataset(str(tmp_path / "data"))[0].tolist() == [4, 5, 6]
    (tmp_path / f"data.{end}").write_bytes((tmp_path / f"data.{end}").read_bytes()[:30] if end == "idx" else b"")
    with pytest.raises(ValueError):
        indexed_dataset.MMapIndexedDataset(str(tmp_path / "data"))
