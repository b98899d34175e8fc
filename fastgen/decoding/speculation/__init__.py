"""Speculative decoding: what does not depend on the toolkit. One pass of a model checks tokens that were drafted."""
