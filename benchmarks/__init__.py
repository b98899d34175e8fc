"""Benchmarks of FastGen: `python -m benchmarks`. See README.md in this folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
