"""Benchmarks of `fastgen-serve`: `python -m benchmarks.serving NAME`. See `benchmarks/README.md`.

`load` is the client, in a process of its own, `servers` starts what it talks to, `models` writes the models, `report`
makes tables and pictures. `schedulers`, `translation`, `streams` and `overload` are the benchmarks.
"""
