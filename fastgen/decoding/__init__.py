"""The decoding core, which knows no toolkit: the KV cache with shared prefixes, searches, captures, weight copies."""
