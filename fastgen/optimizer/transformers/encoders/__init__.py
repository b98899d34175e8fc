"""Models that only encode: the padding of a batch is left out of what their layers compute."""
