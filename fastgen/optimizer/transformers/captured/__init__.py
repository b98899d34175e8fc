"""The captured step: a decoding step of Transformers as one replay, of a CUDA graph or a recorded program."""
