"""Runs on a Ray cluster: two nodes of one worker each, one of which is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

import fastgen
from fastgen.pipeline import RunOptions, SetupError, generate_dataset
from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.writers import FileOutput
from tests.pipeline import tiny
from tests.pipeline.children import interrupted_after

RECORDS = 300
GENERATION = {"num_beams": 2, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without a processor, and two nodes with one for a worker and one to spare."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'fastgen-transformers[ray]'")
    pytest.importorskip("ray.data")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(2):
            made.add_node(num_cpus=2, object_store_memory=2**27)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


def run(model: Any, source: Path, output: Path, **options: Any) -> Any:
    defaults = {"generation": GENERATION, "batch_size": 4, "device": "cpu", "quiet": True}
    return generate_dataset(model, source, output, **{**defaults, **options})


def on_ray(model: Any, source: Path, output: Path, cluster: Any, **options: Any) -> Any:
    return run(model, source, output, ray=cluster.address, workers=2, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    texts = tiny.sentences(RECORDS)
    texts[7], texts[90] = "", "A" * 100
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    return tmp_path / "in.txt"


@pytest.mark.parametrize(("batching", "form"), [("static", "jsonl"), ("continuous", "txt")])
def test_the_file_of_one_process(
    bart: Path, source: Path, tmp_path: Path, cluster: Any, batching: str, form: str
) -> None:
    one, several = tmp_path / f"one.{form}", tmp_path / f"several.{form}"
    run(bart, source, one, batching=batching, workers=0)
    fastgen.reset_stats()
    report = on_ray(bart, source, several, cluster, batching=batching)
    assert several.read_bytes() == one.read_bytes() and (report.samples, report.skipped) == (RECORDS - 2, 2)
    errors = (Path(f"{path}.errors.jsonl").read_bytes() for path in (one, several))
    assert len(set(errors)) == 1 and report.seconds["model"] > 0
    assert report.fastgen["stats"]["transformers.generate"]["accelerated"] > 0


def workers_of_ray() -> list[psutil.Process]:
    """The processes of the workers, one at least."""
    found = [each for each in psutil.process_iter(["cmdline"]) if "MapBatches(Worker)" in str(each.info["cmdline"])]
    assert found
    return found


def wait_for_more_than(size: float, partial: Path) -> None:
    """Outputs of that many bytes."""
    deadline = time.monotonic() + 240
    while not (partial.exists() and partial.stat().st_size > size) and time.monotonic() < deadline:
        time.sleep(0.005)


def lose_a_worker(cluster: Any) -> None:
    workers_of_ray()[0].kill()


def lose_a_node(cluster: Any) -> None:
    """With all that is on it."""
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)


@pytest.mark.parametrize("lose", [lose_a_worker, lose_a_node])
def test_a_worker_that_is_lost(bart: Path, source: Path, tmp_path: Path, cluster: Any, lose: Any) -> None:
    """Its batches run again, also in a run that was interrupted before."""
    one, several = tmp_path / "one.jsonl", tmp_path / "several.jsonl"
    run(bart, source, one, workers=0)
    with pytest.raises(KeyboardInterrupt), interrupted_after(5):
        run(bart, source, several, workers=0)
    unfinished, recorded, partial = [], FileOutput.batch, tmp_path / "several.jsonl.partial"
    before = partial.stat().st_size

    def lose_once_it_has_done_something() -> None:
        wait_for_more_than(before, partial)
        lose(cluster)

    def counted(output: FileOutput, *given: Any) -> None:
        unfinished.append(killer.is_alive())
        recorded(output, *given)

    killer = Thread(target=lose_once_it_has_done_something)
    killer.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileOutput, "batch", counted)
        report = on_ray(bart, source, several, cluster, resume=True)
    killer.join()
    assert not unfinished[-1], "all was done before the worker was lost"
    assert several.read_bytes() == one.read_bytes() and report.resumed_samples == 22


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_is_killed_at_a_random_moment(
    bart: Path, source: Path, tmp_path: Path, cluster: Any, seed: int
) -> None:
    """When a random part of the outputs is there, some of which are the worker's own."""
    one, several = tmp_path / "one.jsonl", tmp_path / "several.jsonl"
    run(bart, source, one, workers=0)
    part, left = random.Random(seed).uniform(0.05, 0.8), list[int]()

    def lose() -> None:
        partial = tmp_path / "several.jsonl.partial"
        wait_for_more_than(part * one.stat().st_size, partial)
        random.Random(seed).choice(workers_of_ray()).kill()
        left.append(RECORDS - len(partial.read_bytes().splitlines()))

    killer = Thread(target=lose)
    killer.start()
    report = on_ray(bart, source, several, cluster)
    killer.join()
    assert left and left[0] > 0, "all was done before the worker was lost"
    assert several.read_bytes() == one.read_bytes() and report.samples == RECORDS - 2
    first, second = (Path(f"{path}.errors.jsonl").read_bytes() for path in (one, several))
    assert first == second


def test_a_failure_of_workers_is_the_runs(bart: Path, source: Path, tmp_path: Path, cluster: Any) -> None:
    with pytest.raises(SetupError, match="failed on every record: .*the model has 64 positions"):
        on_ray(bart, source, tmp_path / "out.txt", cluster, batching="continuous", generation={"max_new_tokens": 100})
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_what_it_needs(bart: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.txt"
    with pytest.raises(SetupError, match="give --workers"):
        run(bart, source, output, ray="local")
    loaded = load(RunOptions(model=str(bart), input="-", output="-", device="cpu", quiet=True))
    for is_there, message in ((True, "give its folder"), (False, r"needs the package ray, .* pip install '.*\[ray\]'")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, is_there=is_there: is_there or None)
        with pytest.raises(SetupError, match=message):
            run(loaded.model, source, output, tokenizer=loaded.tokenizer, ray="local", workers=2)
