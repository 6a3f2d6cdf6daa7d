"""Protect what a memory has learned while an optimizer trains the model."""
