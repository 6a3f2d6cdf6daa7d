"""Hold on to a memory while an optimizer trains."""
