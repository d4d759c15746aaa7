"""Mixers against their definitions."""
