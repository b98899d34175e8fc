"""The tiny models of the pipeline's tests."""

from tests.pipeline.conftest import bart, gpt2, inputs, one_thread, unilm

__all__ = ["bart", "gpt2", "inputs", "one_thread", "unilm"]
