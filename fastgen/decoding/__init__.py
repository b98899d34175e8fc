"""The decoding core: K/V with a shared prefix and the bookkeeping of beams. It knows no toolkit."""
