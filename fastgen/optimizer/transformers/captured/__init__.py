"""The captured step: one replay, of a CUDA graph or a recorded program, for a decode step of Transformers."""
