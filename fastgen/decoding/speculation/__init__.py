"""The toolkit-independent part of speculative decoding, in which one forward pass verifies drafted tokens."""
