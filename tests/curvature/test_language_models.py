"""Language models of transformers: predicted positions, padding, and shared weights and inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import limpet
from limpet.curvature import Fisher, FisherPass, Structure
from limpet.model import discover
from limpet.precision import KroneckerTerm

transformers = pytest.importorskip("transformers")
from language_models import VOCABULARY, llama  # noqa: E402


def tokens(n: int = 6, length: int = 9) -> Tensor:
    return torch.randint(1, VOCABULARY, (n, length), generator=torch.Generator().manual_seed(1))


def padded(n: int = 6, length: int = 9) -> dict[str, Tensor]:
    """Sequences of several lengths, padded on the right."""
    ids = tokens(n, length)
    lengths = torch.tensor([length - i % 4 for i in range(n)])
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def fisher(model: nn.Module, batches: Any, **options: Any) -> Fisher:
    likelihood = limpet.Categorical()
    return FisherPass(model, discover(model), likelihood, Structure("kronecker", 4096), **options).run(
        batches, progress=False
    )


def factors(found: Fisher) -> dict[str, list[Tensor]]:
    return {
        name: [part for term in terms for part in (vars(term).values()) if isinstance(part, Tensor)]
        for name, terms in found.terms.items()
    }


def far(a: Fisher, b: Fisher) -> float:
    """The largest relative difference between the factors of two passes."""
    ours, theirs = factors(a), factors(b)
    assert ours.keys() == theirs.keys()
    return max(
        float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30))
        for name, parts in ours.items()
        for x, y in zip(parts, theirs[name], strict=True)
    )


def test_the_next_token_is_what_is_predicted() -> None:
    model, ids = llama(), tokens()

    def by_hand(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(input_ids=batch["input_ids"]).logits[:, :-1], batch["input_ids"][:, 1:]

    found = fisher(model, [{"input_ids": ids}])
    assert found.examples == found.seen == 6 * 8 and found.rows == 6
    assert far(found, fisher(model, [{"input_ids": ids}], forward=by_hand)) == 0
    given, none = (
        fisher(model, [batch], fisher="empirical") for batch in ({"input_ids": ids, "labels": ids}, {"input_ids": ids})
    )
    assert far(given, none) == 0
    loss = model(input_ids=ids, labels=ids).loss
    look = limpet.Categorical().loss(*by_hand(model, {"input_ids": ids}))
    assert float(look.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)


def test_labels_that_are_ignored_have_no_fisher() -> None:
    model, ids = llama(), tokens()
    labels = ids.clone()
    labels[:, :5] = -100  # a prompt, of which no token is predicted
    found = fisher(model, [{"input_ids": ids, "labels": labels}], fisher="empirical")
    assert found.examples == 6 * 4
    single = fisher(model, [{"input_ids": ids[:1], "labels": labels[:1]}], fisher="empirical")
    (term,) = single.terms["lm_head"]
    assert isinstance(term, KroneckerTerm)
    hidden = model.model(input_ids=ids[:1]).last_hidden_state[0]
    # every position is an input of the head, only four have a gradient
    assert torch.allclose(term.inputs, hidden.mT @ hidden / 9, atol=1e-5)
    logits = model(input_ids=ids[:1]).logits[0, 4:-1]
    g = logits.softmax(-1) - nn.functional.one_hot(ids[0, 5:], VOCABULARY)
    assert torch.allclose(term.outputs, g.mT @ g, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(side: str) -> None:
    model, batch = llama().double(), padded()
    lengths = batch["attention_mask"].sum(1).tolist()
    ids = [row[:n] for row, n in zip(batch["input_ids"], lengths, strict=True)]
    if side == "left":
        shifts = [len(row) - n for row, n in zip(batch["input_ids"], lengths, strict=True)]
        batch = {
            key: torch.stack([row.roll(s) for row, s in zip(value, shifts, strict=True)])
            for key, value in batch.items()
        }
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if side == "left":  # the first real token is predicted from padding alone: it is not predicted at all
        first = labels.ne(-100).float().argmax(1)
        labels[torch.arange(len(labels)), first] = -100
    together = fisher(model, [{**batch, "labels": labels}], fisher="empirical")
    alone = fisher(model, [{"input_ids": row.unsqueeze(0)} for row in ids], fisher="empirical")
    assert together.examples == alone.examples == sum(n - 1 for n in lengths)
    assert far(together, alone) < 1e-6


def test_gradient_checkpointing_and_half_precision_agree() -> None:
    model, batch = llama(), padded()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    data = [{**batch, "labels": labels}]
    plain = fisher(model, data, fisher="empirical")
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed.train()  # it is only used in training mode
    assert far(fisher(checkpointed, data, fisher="empirical"), plain) < 1e-5
    half = fisher(copy.deepcopy(model).bfloat16(), data, fisher="empirical")
    assert far(half, plain) < 0.05


def test_an_embedding_tied_to_the_head_has_a_term_for_each_use() -> None:
    model, ids = llama(tie_word_embeddings=True), tokens()
    apart = llama(tie_word_embeddings=False)
    apart.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight.clone()})
    tied, both = (fisher(m, [{"input_ids": ids}], fisher="empirical") for m in (model, apart))
    (name,) = [block.name for block in tied.blocks if "embed" in block.name]
    first, second = tied.terms[name]
    embed, head = both.terms["model.embed_tokens"][0], both.terms["lm_head"][0]
    for ours, theirs in ((first, embed), (second, head)):
        for part in ("inputs", "outputs"):
            a, b = (getattr(term, part).double() for term in (ours, theirs))
            assert (a - b).norm() < 1e-5 * b.norm()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([{"input_ids": ids}], progress=False)
    (row,) = [row for row in memory.report().rows if row.block == name]
    assert "two uses" in row.note


def test_norms_of_model_libraries_are_seen_without_a_pass_for_each_example() -> None:
    model, ids = llama(), tokens()
    blocks = {block.name: block.kind for block in fisher(model, [{"input_ids": ids}]).blocks}
    assert blocks["model.norm"] == "layer norm" and "direct" not in blocks.values()
    memory = limpet.OnlineLaplace(model, fisher="empirical")
    memory.consolidate([{"input_ids": ids}], progress=False)
    squares = torch.zeros(12)
    for row in ids:
        model.zero_grad()
        loss = model(input_ids=row.unsqueeze(0), labels=row.unsqueeze(0)).loss * 8
        loss.backward()
        squares += model.model.norm.weight.grad.square()
    assert torch.allclose(memory.posterior.held["model.norm"].precision.diagonals()[0].flatten(), squares, rtol=1e-3)


def test_sequence_to_sequence_and_classification_go_the_same_way() -> None:
    torch.manual_seed(0)
    small = {"d_model": 8, "d_ff": 10, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**small, decoder_start_token_id=0))
    ids, labels = tokens(), tokens(6, 4)
    labels[0, 3] = -100
    found = fisher(t5, [{"input_ids": ids, "labels": labels}])
    assert found.examples == 6 * 4 - 1
    t5.eval()
    outputs = t5(input_ids=ids, labels=labels)
    ours = limpet.Categorical().loss(outputs.logits, labels)
    assert float(ours.detach()) == pytest.approx(float(outputs.loss.detach()), rel=1e-5)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12
    )
    bert = transformers.BertForSequenceClassification(config)
    data = {**padded(), "labels": torch.tensor([0, 1, 0, 1, 1, 0])}
    memory = limpet.OnlineLaplace(bert, exclude=["bert.pooler"])
    memory.consolidate([data], progress=False)
    assert memory.examples == 6 and math.isfinite(float(memory.penalty().detach()))


def test_more_tokens_bring_the_sampled_factors_nearer() -> None:
    """The error of the factors falls with the number of tokens, about as one over its root."""
    model = llama()
    generator = torch.Generator().manual_seed(0)
    many = [{"input_ids": torch.randint(1, VOCABULARY, (64, 9), generator=generator)} for _ in range(8)]
    reference = fisher(model, many, fisher="sampled", draws=20)

    def off(batches: list[dict[str, Tensor]], seed: int) -> float:
        found = fisher(model, batches, fisher="sampled", seed=seed)
        term, true = found.terms["model.layers.0.mlp.down_proj"][0], reference.terms["model.layers.0.mlp.down_proj"][0]
        assert isinstance(term, KroneckerTerm) and isinstance(true, KroneckerTerm)
        ours, theirs = term.outputs / found.examples, true.outputs / reference.examples
        return float((ours - theirs).norm() / theirs.norm())

    few = sum(off(many[:1], seed) for seed in range(3)) / 3
    more = sum(off(many, seed) for seed in range(3)) / 3
    assert more < 0.6 * few and more < 0.2
