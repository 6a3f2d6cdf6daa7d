"""How the bases of a precision lie while nobody uses them: narrower, or off the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Storage:
    """Bases at rest: in `dtype` (None: the one they are used in), and with `offload` in the memory of the host.

    Rounded bases are orthonormal to a few digits only (float16, whose range is enough for them, has one more than
    bfloat16), so what is not held would lose as much in every rotation there and back: see `Kronecker.proximal`.
    """

    dtype: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"storage_dtype must be one of {', '.join(DTYPES)}, or None, not {self.dtype!r}")

    def lay(self, vectors: Tensor) -> Tensor:
        """Bases, laid to rest."""
        dtype = vectors.dtype if self.dtype is None else DTYPES[self.dtype]
        return vectors.to("cpu" if self.offload else vectors.device, dtype)

    def metadata(self) -> dict[str, Any]:
        """As plain values, for a file; nothing where bases lie as they are used."""
        return {"at_rest": self.dtype, "offload": self.offload} if self != AS_USED else {}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Storage:
        """The inverse of `facts`."""
        return cls(metadata.get("at_rest"), bool(metadata.get("offload", False)))


AS_USED = Storage()
"""In the dtype and on the device in which they are used."""
