"""Mixers by name: what a stack's pattern may contain."""
