"""The tiny models of the pipeline's tests."""

from tests.pipeline.conftest import bart, gpt2, inputs

__all__ = ["bart", "gpt2", "inputs"]
