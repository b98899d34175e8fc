from __future__ import annotations

import json

import torch

from benchmarks import machine


def test_slug():
    assert machine.slug({"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 2}) == "intel-xeon-cpu-2-core"
    assert machine.slug({"cpu": "AMD EPYC", "cores": 16, "gpu": "NVIDIA H100"}) == "nvidia-h100-amd-epyc-16-core"
    assert machine.slug({"cpu": "AMD EPYC", "cores": 2, "instructions": "AVX512"}) == "amd-epyc-2-core"
    assert machine.slug({"cpu": "AMD EPYC", "cores": 2, "instructions": "AVX2"}) == "amd-epyc-2-core-avx2"


def test_description_is_json_and_stays_the_same():
    device = torch.device("cpu")
    found = machine.describe_machine(device)
    assert found == json.loads(json.dumps(machine.describe_machine(device)))
    assert found["cores"] >= 1 and found["memory_gib"] > 0 and found["cpu"]


def test_versions():
    versions = machine.describe_versions()
    assert versions["torch"] == torch.__version__
    assert {"python", "fastgen", "transformers"} <= set(versions)
