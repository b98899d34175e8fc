"""Speculative decoding in `generate`: which calls draft, with what, and how drafts are verified."""
