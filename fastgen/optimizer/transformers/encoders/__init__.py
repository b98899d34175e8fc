"""Encoder-only models: their layers do not compute the padding of a batch."""
