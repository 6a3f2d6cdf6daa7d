"""Protect a memory while an optimizer trains the model."""
