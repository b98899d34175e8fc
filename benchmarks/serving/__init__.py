"""Benchmarks of `fastgen-serve`: `python -m benchmarks.serving NAME`. See `benchmarks/README.md`.

`load` is the client, in a process of its own, `servers` starts the servers, `models` writes the models, `report` makes
tables and charts. `schedulers`, `translation`, `streams` and `overload` are the benchmarks.
"""
