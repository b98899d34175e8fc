from __future__ import annotations

from benchmarks import machine


def test_slug():
    assert machine.slug({"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 2}) == "intel-xeon-cpu-2-core"
    assert machine.slug({"cpu": "AMD EPYC", "cores": 16, "gpu": "NVIDIA H100"}) == "nvidia-h100-amd-epyc-16-core"
    assert machine.slug({"cpu": "AMD EPYC", "cores": 2, "instructions": "AVX512"}) == "amd-epyc-2-core"
    assert machine.slug({"cpu": "AMD EPYC", "cores": 2, "instructions": "AVX2"}) == "amd-epyc-2-core-avx2"
