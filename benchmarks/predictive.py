"""How good is the predictive uncertainty? Compare the predictions of a memory with those of laplace-torch.

    python -m benchmarks predictive                          # 784-100-100-10 on MNIST, about 5 minutes
    python -m benchmarks predictive --network lenet --epochs 3 --fitted 5000 --tested 200     # a LeNet on CIFAR-10

One network is trained. Each library then fits its Kronecker-factored Laplace approximation to the same training
examples, chooses its prior precision by the marginal likelihood, and predicts the same test examples. The negative log
likelihood and the calibration error are those on the test set; "unknown" is the area under the ROC curve of the
predictive entropy, with Fashion-MNIST as inputs of a kind that the network has never seen. The data come from the
Hugging Face hub, or from the folder in LIMPET_DATA.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import common
import limpet
from common import versions_text
from limpet.experiments.data import images
from limpet.experiments.metrics import calibration_error
from limpet.experiments.networks import build

BATCH = 50


def data(name: str, split: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Standardised images in the shape of a network's input."""
    examples = images(name, split)
    x = (examples.inputs.float() / 255 - 0.3) / 0.3
    if len(shape) == 3:
        x = x.reshape(len(x), -1, *x.shape[-2:])
        x = F.pad(x.expand(-1, 3, -1, -1), [(32 - x.shape[-1]) // 2] * 4, value=-1.0)
    return x.reshape(len(x), *shape), examples.labels


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Nesterov momentum with a cosine."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(x) // 100))
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(x)), 100)[: len(x) // 100]:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()
            schedule.step()
    model.eval()


def entropy(p: Tensor) -> Tensor:
    """Of each row of probabilities."""
    return -(p * p.clamp_min(1e-12).log()).sum(-1)


def area(known: Tensor, unknown: Tensor) -> float:
    """The area under the ROC curve: how often something unknown scores higher than something known."""
    ranks = torch.cat([known, unknown]).argsort().argsort().double()
    return float((ranks[len(known) :].sum() - len(unknown) * (len(unknown) - 1) / 2) / (len(known) * len(unknown)))


def judged(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, others: Tensor) -> list[float]:
    """NLL, calibration error in percent, accuracy in percent, area under the curve, seconds."""
    begin = time.perf_counter()
    p, q = (torch.cat([predict(part).detach() for part in torch.split(inputs, BATCH)]) for inputs in (x, others))
    confidence, chosen = p.max(-1)
    nll = float(-p[torch.arange(len(y)), y].clamp_min(1e-12).log().mean())
    correct = chosen == y
    error = 100 * calibration_error(confidence, correct.float())
    return [nll, error, 100 * float(correct.float().mean()), area(entropy(p), entropy(q)), time.perf_counter() - begin]


def theirs(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """laplace-torch, as its documentation has it."""
    import laplace

    own = copy.deepcopy(model)
    for parameter in own.parameters():
        parameter.data = parameter.data.contiguous()  # it takes no weights that are kept channels last
    fitted: Any = laplace.Laplace(own, "classification", subset_of_weights="all", hessian_structure="kron")
    fitted.fit(DataLoader(TensorDataset(x, y), batch_size=250))
    fitted.optimize_prior_precision(method="marglik")
    return fitted


def main() -> None:
    parser = common.parser(__doc__, threads=1)
    parser.add_argument("--network", choices=["mlp", "lenet"], default="mlp")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--fitted", type=int, default=60_000, help="examples that the approximations are fitted to")
    parser.add_argument("--tested", type=int, default=500, help="test examples, known and unknown")
    options = common.parse(parser)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    name, shape = ("mnist", (784,)) if options.network == "mlp" else ("cifar10", (3, 32, 32))
    model = nn.Sequential(build(options.network, {}, shape, (10,), 0))
    x, y = data(name, "train", shape)
    test, labels = (part[: options.tested] for part in data(name, "test", shape))
    others = data("fashion_mnist", "test", shape)[0][: options.tested]
    train(model, x, y, options.epochs)

    rows = {"network alone": judged(lambda x: model(x).softmax(-1), test, labels, others)}
    memory = limpet.OnlineLaplace(model)
    begin = time.perf_counter()
    memory.consolidate(
        list(zip(torch.split(x[: options.fitted], 250), torch.split(y[: options.fitted], 250), strict=True)),
        examples=options.fitted,
        progress=False,
    )
    ours_fit = time.perf_counter() - begin
    evidence: dict[str, Any] = {"prior_precision": "evidence"}
    for how in ("probit", "linearised", "sampled"):
        predict = partial(memory.predictive, link_approximation=how, draws=20 if how == "sampled" else 100, **evidence)
        rows[f"limpet, {how}"] = judged(predict, test, labels, others)
    begin = time.perf_counter()
    other = theirs(model, x[: options.fitted], y[: options.fitted])
    their_fit = time.perf_counter() - begin
    rows["laplace-torch, probit"] = judged(lambda x: other(x, link_approx="probit"), test, labels, others)
    rows["laplace-torch, Monte Carlo"] = judged(
        lambda x: other(x, link_approx="mc", n_samples=100), test, labels, others
    )
    print("| | NLL | calibration error (%) | accuracy (%) | unknown (AUROC) | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for key, (nll, error, accuracy, found, seconds) in rows.items():
        print(f"| {key} | {nll:.4f} | {error:.2f} | {accuracy:.2f} | {found:.4f} | {seconds:.1f} |")
    print(f"\nfitting: limpet {ours_fit:.1f} s, laplace-torch {their_fit:.1f} s (with the choice of its prior)")
    print(f"prior precision: limpet {memory._prior('evidence'):.3g}, laplace-torch {float(other.prior_precision):.3g}")
    print(f"{versions_text('laplace-torch')}, one thread")


if __name__ == "__main__":
    main()
