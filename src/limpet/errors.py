"""What limpet raises and warns: every message says what is wrong and how to mend it."""


class LimpetError(Exception):
    """The root of every error that limpet raises on purpose."""


class UnsupportedError(LimpetError):
    """Something that cannot be done right, and is refused rather than done wrong."""


class CurvatureError(LimpetError):
    """The pass over the data met something it cannot measure."""


class MemoryFileError(LimpetError):
    """A memory file (or state) that is damaged, of another version, or made for another model."""


class LimpetWarning(UserWarning):
    """The root of every warning that limpet gives."""


class NotProtectedWarning(LimpetWarning):
    """Something in the model that the memory does not hold fast."""
