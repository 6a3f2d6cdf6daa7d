"""How much of a factor remains if its side is split into pieces, for every kind of layer in a memory.

    python -m benchmarks pieces memory.safetensors

For a factor P (a partial trace, as stored in the memory): the sum of squares of the entries in k equal diagonal blocks,
as a fraction of the sum of all squares, averaged over the layers of a kind. Without splitting it is 1.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from safetensors import safe_open
from torch import Tensor

import common
from limpet.precision.block_diagonal import cut

PIECES = (2, 3, 4, 8)


def kept(factor: Tensor, count: int) -> float:
    """The share of the squares that lie in so many pieces."""
    size = len(factor)
    rows = torch.arange(size).split_with_sizes(cut(size, -(-size // count)))
    return sum(float(factor[own][:, own].square().sum()) for own in rows) / float(factor.square().sum())


def main() -> None:
    """Read a memory and print the table."""
    parser = common.parser(__doc__)
    parser.add_argument("memory")
    options = common.parse(parser)
    found: dict[tuple[str, str, int], list[list[float]]] = defaultdict(list)
    with safe_open(options.memory, "pt") as file:
        for name in sorted(file.keys()):
            if not (layer := re.fullmatch(r"(.*)/precision/(inputs|outputs)\.vectors", name)):
                continue
            vectors = file.get_tensor(name).double()
            trace = file.get_tensor(name.replace("vectors", "trace")).double()
            factor = (vectors * trace) @ vectors.mT
            kind = layer[1].rpartition(".")[2]
            shares = [kept(factor, len(factor)), *(kept(factor, count) for count in PIECES)]
            found[kind, layer[2], len(factor)].append(shares)
    print(f"| side | length | diagonal | {' | '.join(f'{count} pieces' for count in reversed(PIECES))} |")
    print("| --- | --- |" + " --- |" * (1 + len(PIECES)))
    for (kind, side, size), layers in sorted(found.items(), key=lambda one: -one[0][2]):
        diagonal, *shares = torch.tensor(layers).mean(0).tolist()
        cells = [diagonal, *reversed(shares)]
        print(f"| {kind}, {side} | {size:,} | {' | '.join(f'{share:.2f}' for share in cells)} |")


if __name__ == "__main__":
    main()
