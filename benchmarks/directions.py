"""In which directions does a quadratic fail? The experiments behind docs/decisions/0023.

    python -m benchmarks directions mnist                               # both curves of small networks
    python -m benchmarks directions sentences --model M --reviews R.csv # drift of MiniLM along several directions
    python -m benchmarks directions sketch --model M --reviews R.csv    # sums of gradients of the whole network
    python -m benchmarks directions probe --model M --reviews R.csv     # drift after a repair, on several sets of texts

Every line is appended to results/forecast/directions.jsonl. The tasks of MiniLM are those of protect_sentences.
M is a folder or a name on the hub; R has the columns text, label and source ("imdb" or "rotten_tomatoes").
The images come from the Hugging Face hub, or from the folder in LIMPET_DATA.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import limpet
from common import versions
from limpet.experiments.data import images

RESULTS = common.RESULTS / "forecast" / "directions.jsonl"
EXAMPLES, BATCH = 6000, 100
STEPS = (1e-5, 3e-5, 1e-4, 3e-4)  # sizes of a displacement by signs
SUMS, REPAIRED = 32, (0.3, 1.0, 3.0)
BUDGET = 0.04
Points = Iterator[dict[str, Any]]


def mlp() -> nn.Module:
    """The network of permuted MNIST."""
    sizes = (nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    return nn.Sequential(nn.Flatten(), *sizes)


def lenet() -> nn.Module:
    """A small convolutional network."""
    first = (nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(800, 100), nn.ReLU(), nn.Linear(100, 10))


def mnist(_: argparse.Namespace) -> Points:
    """Random and coherent curves of small networks after four epochs on 6000 images."""
    data = images("mnist", "train")
    x = torch.as_tensor(data.inputs[:EXAMPLES]).float().reshape(-1, 1, 28, 28)
    x, y = x / x.max(), torch.as_tensor(data.labels[:EXAMPLES]).long()
    for build in (mlp, lenet):
        for structure in ("kronecker", "diagonal"):
            for name in ("sgd", "adam"):
                torch.manual_seed(0)
                model = build()
                weights = list(model.parameters())
                optimizer: Any = (
                    torch.optim.Adam(weights, 1e-3) if name == "adam" else torch.optim.SGD(weights, 0.05, 0.9)
                )
                for rows in (rows for _ in range(4) for rows in torch.split(torch.randperm(EXAMPLES), BATCH)):
                    optimizer.zero_grad()
                    torch.autograd.backward(F.cross_entropy(model(x[rows]), y[rows]))
                    optimizer.step()
                memory = limpet.OnlineLaplace(model, structure=structure, prior_mean="initial")
                memory.consolidate([(x[i : i + 500], y[i : i + 500]) for i in range(0, EXAMPLES, 500)], progress=False)
                (task,) = memory.history.tasks
                assert task.coherent is not None
                point: dict[str, Any] = {"network": build.__name__, "structure": structure, "optimizer": name}
                for kind, curve in (("random", task.curve), ("coherent", task.coherent)):
                    pairs = zip(curve.predicted, curve.measured, strict=True)
                    point[kind] = [[float(f"{q:.3g}"), float(f"{rise / q:.3g}")] for q, rise in pairs]
                yield point | {"agree": task.quadratic_holds}


def sentences(options: argparse.Namespace) -> Points:
    """Drift of MiniLM along several directions, on 64 of the consolidated texts."""
    from protect_sentences import Sentences
    from repair_sentences import OLD
    from rivals import Rivals

    for seed in options.seeds:
        rivals = Rivals(Sentences(options.model, options.reviews, seed))
        model = rivals.model.eval()
        parameters = dict(model.named_parameters())
        wanted = {n: parameters[n] for held in rivals.memory.posterior.held.values() for n in held.block.parameters}
        batches = rivals.experiment.train[OLD][:4]
        labels = torch.cat([batch["labels"] for batch in batches])
        with torch.no_grad():
            before = torch.cat([rivals.old_logits(model, batch) for batch in batches]).log_softmax(1)
        for kind, cotangent in directions(before, labels).items():
            logits = torch.cat([rivals.old_logits(model, batch) for batch in batches])
            gradients = torch.autograd.grad((logits * cotangent).sum(), list(wanted.values()), allow_unused=True)
            for size in STEPS:
                drifts = []
                for sign in (1, -1):
                    moved = [
                        (p, -sign * size * g.sign())
                        for p, g in zip(wanted.values(), gradients, strict=True)
                        if g is not None
                    ]
                    with torch.no_grad():
                        for p, z in moved:
                            p += z
                        q = rivals.memory._forecast().quadratic
                        now = torch.cat([rivals.old_logits(model, batch) for batch in batches]).log_softmax(1)
                        drifts.append(float(F.kl_div(now, before, log_target=True, reduction="batchmean")))
                        for p, z in moved:
                            p -= z
                yield {
                    "network": "MiniLM",
                    "seed": seed,
                    "direction": kind,
                    "size": size,
                    "q": q,
                    "drift": sum(drifts) / 2,
                }


def directions(before: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What the gradient is taken of, as a gradient in the outputs."""

    def wrong(seed: int) -> Tensor:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        return before.exp() - F.one_hot(labels[order], before.shape[1])

    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(before.shape[1], generator=generator).expand_as(before)
    return {
        "permuted targets, seed 0": wrong(0),
        "permuted targets, seed 1": wrong(1),
        "one shift of all outputs": shift,
        "a shift of the outputs of every example": torch.randn(before.shape, generator=generator),
        "the loss itself": F.one_hot(labels, before.shape[1]) - before.exp(),
    }


def sketch(options: argparse.Namespace) -> Points:
    """Whether signed sums of the gradients of the whole network forecast the drift of MiniLM, also after a repair."""
    from protect_sentences import RATES, Sentences
    from repair_sentences import NEW, OLD
    from rivals import MOMENTS, Rivals

    for seed in options.seeds:
        rivals = Rivals(Sentences(options.model, options.reviews, seed))
        names = [name for held in rivals.memory.posterior.held.values() for name in held.block.parameters]
        sums, count = signed_sums(rivals, names, rivals.experiment.train[OLD][:13])

        def found(
            step: int, sums: Any = sums, count: int = count, rivals: Any = rivals, names: Any = names
        ) -> dict[str, Any]:
            weights = dict(rivals.model.named_parameters())
            moved = [weights[name].detach() - rivals.start[name] for name in names]
            products = torch.stack(
                [torch.stack([(s * d).sum() for s, d in zip(one, moved, strict=True)]).sum() for one in sums]
            )
            q = products.square() / (2 * count)
            moment: dict[str, Any] = rivals.moment(step)
            return moment | {f"sketch_{k}": float(q[:k].mean()) for k in (8, 16, SUMS)}

        for rate in ("3e-5", "1e-4"):
            rivals.restart()
            lr, steps = RATES[rate]
            points: list[dict[str, Any]] = []
            look: Callable[[int], None] = lambda step: points.append(found(step)) if step in MOMENTS else None  # noqa: E731, B023
            rivals.experiment.fit(rivals.model, NEW, lr, steps, after=look)
            yield from ({"network": "MiniLM", "seed": seed, "rate": rate, "repaired": 0.0, **point} for point in points)
            repair = limpet.repair(rivals.model, rivals.memory, rivals.experiment.train[NEW], limit=200, progress=False)
            for strength in REPAIRED:
                repair.at(strength)
                yield {"network": "MiniLM", "seed": seed, "rate": rate, "repaired": strength, **found(steps)}


def signed_sums(rivals: Any, names: list[str], batches: list[Any]) -> tuple[list[list[Tensor]], int]:
    """Sums of the gradients of single texts at sampled labels, with random signs."""
    model = rivals.model.eval()
    parameters = dict(model.named_parameters())
    wanted = [parameters[name] for name in names]
    generator = torch.Generator().manual_seed(0)
    sums = [[torch.zeros_like(w) for w in wanted] for _ in range(SUMS)]
    count = 0
    for batch in batches:
        for i in range(len(batch["labels"])):
            logits = rivals.old_logits(model, {name: value[i : i + 1] for name, value in batch.items()})
            label = torch.multinomial(logits.detach().softmax(1), 1, generator=generator).squeeze(1)
            gradients = torch.autograd.grad(F.cross_entropy(logits, label), wanted, allow_unused=True)
            signs = torch.randint(0, 2, (SUMS,), generator=generator) * 2 - 1
            for one, sign in zip(sums, signs.tolist(), strict=True):
                for total, gradient in zip(one, gradients, strict=True):
                    if gradient is not None:
                        total.add_(gradient, alpha=sign)
            count += 1
    return sums, count


def probe(options: argparse.Namespace) -> Points:
    """Drift of MiniLM after a repair to a budget: on the probe, and on texts that it was not measured on."""
    from protect_sentences import RATES, Sentences
    from repair_sentences import MEASURED, NEW, OLD
    from rivals import Rivals

    for seed in options.seeds:
        rivals = Rivals(Sentences(options.model, options.reviews, seed))
        old, measured = rivals.experiment.train[OLD], -(-MEASURED // 16)
        texts = {
            "that the curvature was measured on": old[:measured],
            "of training, not measured on": old[measured:],
            "of the test set": rivals.experiment.test[OLD],
        }
        rivals.restart()
        rivals.experiment.fit(rivals.model, NEW, *RATES["1e-4"])
        limpet.repair(
            rivals.model, rivals.memory, rivals.experiment.train[NEW], limit=MEASURED, budget=BUDGET, progress=False
        )
        found = {"of the probe": rivals.memory.drift()}
        found |= {kind: rivals.drift_on(rivals.probe_of(batches)) for kind, batches in texts.items()}
        for kind, drift in found.items():
            point = {"network": "MiniLM", "seed": seed, "rate": "1e-4", "budget": BUDGET, "texts": kind}
            yield point | {"drift": round(float(drift), 5), "standard_error": round(drift.standard_error, 5)}


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("what", choices=["mnist", "sentences", "sketch", "probe"])
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = common.parse(parser)
    kinds: dict[str, Callable[[argparse.Namespace], Points]] = {
        "mnist": mnist,
        "sentences": sentences,
        "sketch": sketch,
        "probe": probe,
    }
    for point in kinds[options.what](options):
        print(point, flush=True)
        common.append_record(options.out, {"what": options.what, **point, "versions": versions("transformers")})


if __name__ == "__main__":
    main()
