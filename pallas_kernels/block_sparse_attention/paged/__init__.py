"""Attention of one token per sequence over the few pages and experts that it was given: what decoding does."""
