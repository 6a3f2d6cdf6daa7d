"""Position embeddings and class tokens, which all examples use at once: measured per example, in a few passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
import networks
from limpet.curvature import Fisher, FisherPass, Structure
from limpet.likelihoods import Categorical
from limpet.model import PER_SAMPLE, Block, discover
from limpet.precision import DenseTerm, DiagonalTerm, KroneckerTerm
from reference import close, dense_fisher

CATEGORICAL = Categorical()
PLACES = 5


class Positions(nn.Module):
    """Tokens, places and a class token, added up in a way that depends on the mode."""

    def __init__(self, mode: str = "row") -> None:
        super().__init__()
        self.token, self.position, self.last = nn.Embedding(6, 4), nn.Embedding(7, 4), nn.Linear(4, 3)
        self.first = nn.Parameter(torch.randn(1, 1, 4))
        self.mode, self.runs = mode, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        places = torch.arange(x.shape[1]).flip(0)
        places = self.position(places if self.mode == "vector" else places[None])
        first = self.first.expand(len(x), -1, -1)
        if self.mode == "picked":  # the first row is taken, whichever there are
            places, first = places[0], self.first[:1].expand(len(x), -1, -1)
        if self.mode == "shaped":  # fails with any other shape
            places = places.reshape(1, x.shape[1], 4)
        if self.mode == "mixed":
            places = places.mean(0, keepdim=True)
        hidden = torch.cat([first, self.token(x) + places], 1)
        return self.last((hidden * hidden.sin()).sum(1))  # type: ignore[no-any-return]


def made(mode: str = "row", n: int = 6) -> tuple[Positions, Tensor, Tensor]:
    torch.manual_seed(0)
    return Positions(mode).double(), networks.tokens(n, PLACES), torch.randint(0, 3, (n,))


class OneByOne(FisherPass):
    """As before: whatever all examples use at once is measured per sample."""

    expands = False


def measured(kind: type[FisherPass], model: nn.Module, batches: Any, structure: str) -> Fisher:
    one_pass = kind(model, discover(model), CATEGORICAL, Structure(structure, 4096))
    return one_pass.run(batches, progress=False)


@pytest.mark.parametrize("mode", ["row", "vector", "picked", "shaped", "mixed"])
@pytest.mark.parametrize(
    "sizes", [[4, 2], *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ([6], [1, 5], [5, 1]))], ids=str
)
@pytest.mark.parametrize("structure", ["diagonal", "dense", "kronecker"])
def test_they_are_the_per_sample_ones(structure: str, sizes: list[int], mode: str) -> None:
    model, x, y = made(mode)
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    found = measured(FisherPass, model, batches, structure)
    reference = measured(OneByOne, model, batches, structure)
    for block in found.blocks:
        dense = dense_fisher(model, block, x, y, CATEGORICAL)
        for term in found.terms[block.name]:
            if isinstance(term, DiagonalTerm):
                close(term.diagonal.flatten(), dense.diagonal())
            elif isinstance(term, DenseTerm):
                close(term.matrix, dense)
    kinds = {block.name: block.kind for block in found.blocks}
    assert kinds["first"] == PER_SAMPLE
    slow = {block.name for block in reference.blocks if block.kind == PER_SAMPLE}
    assert slow == {"first", "position.weight"}
    alone = sizes[0] == 1 and mode == "vector" and structure != "kronecker"  # as many examples as places, it seems
    if mode in ("row", "vector") and not alone:
        assert kinds["position"] == "embedding"
    else:
        assert kinds["position.weight"] == PER_SAMPLE
    (ours,), (theirs,) = found.terms["first"], reference.terms["first"]
    assert isinstance(ours, DiagonalTerm | DenseTerm) and type(ours) is type(theirs)
    close(*(one.diagonal if isinstance(one, DiagonalTerm) else one.matrix for one in (ours, theirs)))


def test_the_factors_of_positions_are_those_of_one_embedding_per_example() -> None:
    """A position embedding that is looked up for every example has always been an embedding."""

    class Repeated(Positions):
        def forward(self, x: Tensor) -> Tensor:
            places = self.position(torch.arange(x.shape[1]).flip(0).expand(len(x), -1))
            hidden = torch.cat([self.first.expand(len(x), -1, -1), self.token(x) + places], 1)
            return self.last((hidden * hidden.sin()).sum(1))  # type: ignore[no-any-return]

    model, x, y = made()
    other = Repeated().double()
    other.load_state_dict(model.state_dict())
    (ours,), (theirs,) = (measured(FisherPass, m, [(x, y)], "kronecker").terms["position"] for m in (model, other))
    assert isinstance(ours, KroneckerTerm) and isinstance(theirs, KroneckerTerm)
    close(ours.inputs, theirs.inputs)
    close(ours.outputs, theirs.outputs)


def test_later_batches_need_one_run_each_and_nothing_stays_behind() -> None:
    model, x, y = made()
    first = model.first
    runs = []
    for number in (2, 6):
        model.runs = 0
        measured(FisherPass, model, [(x, y)] * number, "kronecker")
        runs.append(model.runs)
    assert runs[1] - runs[0] == 4  # one for each further batch, not one for each example
    assert model.first is first and model._parameters["first"] is first
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_positions_of_padding_do_not_count() -> None:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=13,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
    )
    model = BertForMaskedLM(config).double()
    ids = torch.randint(1, 13, (4, 6), generator=torch.Generator().manual_seed(0))

    def position(batches: list[dict[str, Tensor]]) -> tuple[Any, Fisher]:
        one_pass = FisherPass(model, discover(model), CATEGORICAL, Structure("kronecker", 4096), fisher="empirical")
        found = one_pass.run(batches, progress=False)
        (term,) = found.terms["bert.embeddings.position_embeddings"]
        return term, found

    mask = torch.ones(4, 9, dtype=torch.long)
    mask[:, 6:] = 0
    wide = torch.cat([ids, ids[:, :3]], 1)
    plain, found = position([{"input_ids": ids, "labels": ids}])
    padded, _ = position([{"input_ids": wide, "attention_mask": mask, "labels": wide.masked_fill(mask == 0, -100)}])
    assert PER_SAMPLE not in {block.kind for block in found.blocks}
    close(padded.inputs, plain.inputs)
    close(padded.outputs, plain.outputs)


@pytest.mark.parametrize("kind", ["BERT", "ViT"])
def test_models_of_transformers_run_in_batches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    if kind == "BERT":
        config = transformers.BertConfig(**sizes, vocab_size=13, max_position_embeddings=16)
        model: Any = transformers.BertForMaskedLM(config).double()
        ids = torch.randint(1, 13, (4, 6))
        batch = {"input_ids": ids, "labels": ids}
        names = {"bert.embeddings.position_embeddings", "cls.predictions.bias"}
    else:
        config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
        model = transformers.ViTForImageClassification(config).double()
        batch = {"pixel_values": torch.randn(4, 3, 8, 8).double(), "labels": torch.tensor([0, 1, 2, 0])}
        names = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}
    blocks = {block.name: block for block in discover(model)}
    assert names <= blocks.keys()

    def diagonals(kind: type[FisherPass], some: list[Block]) -> Fisher:
        one_pass = kind(model, some, CATEGORICAL, Structure("diagonal", 4096), fisher="empirical")
        return one_pass.run([batch], progress=False)

    slow = diagonals(OneByOne, [part for name in names for part in blocks[name].as_per_sample()])
    monkeypatch.setattr(FisherPass, "_accumulate_direct", None)  # fails if anything is measured per sample
    fast = diagonals(FisherPass, list(blocks.values()))
    for name in names:
        (ours,) = fast.terms[name]
        (theirs,) = slow.terms[blocks[name].parameters[0]]
        assert isinstance(ours, DiagonalTerm) and isinstance(theirs, DiagonalTerm)
        close(ours.diagonal.flatten(), theirs.diagonal.flatten())
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([batch], progress=False)
