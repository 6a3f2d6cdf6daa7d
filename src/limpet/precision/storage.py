"""Storage of eigenbases between uses: in a narrower dtype, or offloaded to the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Storage dtypes of all bases."""

EIGHT_BITS = "int8"
"""Storage dtype of truncated bases (`limpet.precision.reflections`); complete ones are then stored in float16."""


@dataclass(frozen=True)
class Storage:
    """How eigenbases are stored between uses.

    Rounded bases are orthonormal to a few digits only (float16, whose range suffices for them, has about one digit more
    than bfloat16). A vector rotated into such a basis and back loses as much, even in directions without curvature;
    `Kronecker.proximal` avoids this.

    Args:
        dtype: Storage dtype: "bfloat16", "float16" or, for truncated bases, "int8". None keeps the dtype of use.
        offload: Whether to store the bases in CPU memory.

    Raises:
        ValueError: If the dtype is not supported.
    """

    dtype: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in (*DTYPES, EIGHT_BITS):
            raise ValueError(
                f"storage_dtype must be one of {', '.join(DTYPES)}, {EIGHT_BITS} or None, not {self.dtype!r}"
            )

    @property
    def of_complete(self) -> torch.dtype | None:
        """The dtype that complete bases are stored in; None for that of use."""
        return None if self.dtype is None else DTYPES.get(self.dtype, torch.float16)

    @property
    def epsilon(self) -> float:
        """Resolution of stored bases, at best that of float32, because a memory may have been converted to float64."""
        return torch.finfo(self.of_complete or torch.float32).eps

    def lay(self, vectors: Tensor) -> Tensor:
        """Return eigenvectors in the storage dtype and on the storage device."""
        return vectors.to("cpu" if self.offload else vectors.device, self.of_complete or vectors.dtype)

    def metadata(self) -> dict[str, Any]:
        """Return the settings as plain JSON values; empty if bases are stored as they are used."""
        return {"at_rest": self.dtype, "offload": self.offload} if self != AS_USED else {}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Storage:
        """Read the settings from metadata, the inverse of `metadata`."""
        return cls(metadata.get("at_rest"), bool(metadata.get("offload", False)))


AS_USED = Storage()
"""Bases stored in the dtype and on the device of use."""
