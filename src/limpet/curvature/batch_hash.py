"""Hashes of batches: of resumed passes, and of data that every rank reads."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from limpet.io.state import update_digest
from limpet.model.batch import plain_batch


def batch_hash(batch: Any) -> int:
    """Hash a batch: the names, dtypes, shapes and bytes of its tensors, and all plain values.

    Args:
        batch: A batch of any form.

    Returns:
        A 64-bit signed integer.
    """
    leaves, form = tree_flatten(plain_batch(batch))
    digest = hashlib.blake2b(str(form).encode(), digest_size=8)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            update_digest(digest, str(number), leaf)
        else:
            value = repr(leaf) if isinstance(leaf, bool | int | float | str | bytes | None) else type(leaf).__name__
            digest.update(f"\0{number}\0{value}\0".encode())
    return int.from_bytes(digest.digest(), "little", signed=True)
