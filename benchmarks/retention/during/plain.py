"""Plain training. Its curve over steps is that of early stopping."""

from retention.method import During

METHOD = During("plain", "nothing")
