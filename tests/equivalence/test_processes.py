"""Models whose parts are in several processes, which wait for each other in every forward pass."""

from __future__ import annotations

import inspect
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, EOS, ROWS, STEPS = 60, 2, 16, 16

# Runs in each of two processes. The seeds differ, so that each draws other tokens, and inputs end at other steps. One
# input never ends, as the library's own loop would wait for the other process otherwise.
_PROCESS = """
import json, os, sys
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.distributed import DistributedConfig
import fastgen

rank, model_path, store, result_path, options = int(sys.argv[1]), *sys.argv[2:6]
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
# The original asks for accelerate, which this does not need.
modeling_utils.check_and_set_device_map = lambda device_map: {"": device_map}
model = AutoModelForCausalLM.from_pretrained(model_path, distributed_config=DistributedConfig(tp_size=2))
model.eval()
torch.manual_seed(0)
inputs = torch.randint(3, %(vocabulary)d, (%(rows)d, 8))

def call():
    torch.manual_seed(rank)
    return model.generate(inputs, attention_mask=torch.ones_like(inputs), **json.loads(options)).tolist()

with fastgen.disabled():
    original = call()
ours = call()
with open(result_path, "w") as file:
    json.dump({"original": original, "ours": ours, "stats": fastgen.stats()}, file)
dist.barrier()
dist.destroy_process_group()
"""


def _can_shard() -> bool:
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return False
    return "tp_size" in inspect.signature(DistributedConfig).parameters


def _model(path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=1,
        attention_dropout=0.0,
    )
    LlamaForCausalLM(config).eval().save_pretrained(path)


def _run(program: Path, tmp_path: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What both processes write."""
    _model(tmp_path / "model")
    source = _PROCESS % {"vocabulary": VOCABULARY, "rows": ROWS}
    results = [tmp_path / f"result-{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [program, "-c", source, str(rank), tmp_path / "model", tmp_path / "store", result, json.dumps(options)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, result in enumerate(results)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [json.loads(result.read_text()) for result in results]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.skipif(not _can_shard(), reason="this release of Transformers does not distribute models like that")
def test_tensor_parallelism_with_other_seeds(tmp_path: Path, programs: Path) -> None:
    """Two halves of a model draw other tokens: whatever is decided from them differs between the processes."""
    found = _run(
        programs / "python", tmp_path, {"do_sample": True, "sequence_bias": [[[EOS], 1.5]], "max_new_tokens": STEPS}
    )
    for side in found:
        assert side["ours"] == side["original"]
        assert side["stats"]["transformers.generate"]["fallback"] == {"a model sharded over processes": 1}
    assert found[0]["original"] != found[1]["original"]
    # Enough of the inputs end before the others for them to leave a batch.
    assert all(sum(EOS in row for row in side["original"]) > ROWS // 2 for side in found)
