"""Speculative decoding: what does not depend on the toolkit. One forward pass verifies drafted tokens."""
