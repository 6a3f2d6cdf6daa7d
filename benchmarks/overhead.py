"""Overhead of limpet relative to a bare run: the curvature pass, the loss curve after it, and the protected step.

    python -m benchmarks overhead                 print the table
    python -m benchmarks overhead --output F      and write it to a Markdown file
    python -m benchmarks overhead --only curvature --cpu-time

The last one measures the passes only, in CPU time, which other processes on the machine change less, and prints the
most memory that is allocated at once during a pass over one batch.

One thread; medians over interleaved rounds, so that a temporary slowdown of the machine affects all cases alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import limpet
from common import peak, versions_text
from limpet.curvature import Fisher, FisherPass, Structure
from limpet.forgetting.measurement import measure as measure_curve
from limpet.model import discover

BATCH = 250
BATCHES = 40
RANK = 128
BOUNDS = {
    "MLP: curvature pass, sampled": 3.3,
    "MLP: curvature pass, exact": 5.5,
    "LeNet: curvature pass, sampled": 3.3,
    "LeNet: curvature pass, exact": 6.0,
    "MLP: the curve, of the pass it belongs to": 0.2,
    "LeNet: the curve, of the pass it belongs to": 0.25,
    "MLP: protected step, proximal, every=8": 1.25,
    "MLP: protected step, gradient": 2.4,
    "MLP: protected step, gradient, memory of two tasks": 2.4,
    "MLP: protected step, proximal, every=8, rank 128": 1.15,
    "MLP: protected step, gradient, rank 128, memory of two tasks": 2.0,
    "MLP: entering and leaving protect, proximal, in plain steps": 10.0,
    "LoRA of rank 8, 1536 x 1536: gradient of the penalty, of the dense one": 0.2,
}
Batches = list[tuple[Tensor, Tensor]]
Protect = Callable[[], AbstractContextManager[object]]
clock = time.perf_counter


def mlp() -> nn.Module:
    """The network of the permuted-MNIST experiment."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def lenet() -> nn.Module:
    """The network of the vision experiment."""
    return nn.Sequential(
        nn.Conv2d(3, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1250, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def data(*shape: int, batches: int = BATCHES) -> Batches:
    """Batches of noise: what is in them does not matter for the time."""
    return [(torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,))) for _ in range(batches)]


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    within: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> dict[str, list[float]]:
    """The seconds, by `clock`, of every case in every round, after one round to warm up.

    Every case runs within a context, made from its name, which is entered and left outside of the timing.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            with within(name):
                start = clock()
                case()
                if number:
                    times[name].append(clock() - start)
    return times


def ratio(times: dict[str, list[float]], name: str) -> float:
    """The median over rounds of a case's time against the bare one's of the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times["bare"], strict=True))


def one_pass(model: nn.Module, batches: Batches, fisher: str) -> Callable[[], object]:
    """A whole curvature pass over the batches, to be called."""
    structure, likelihood = Structure("kronecker", 4096), limpet.Categorical()
    return lambda: FisherPass(model, discover(model), likelihood, structure, fisher=fisher).run(batches, progress=False)


def peaks() -> str:
    """The most memory that is allocated at once during a pass over one batch, after a first one."""
    found = []
    for label, model, batches in (("MLP", mlp(), data(784, batches=1)), ("LeNet", lenet(), data(3, 32, 32, batches=1))):
        for fisher in ("sampled", "exact"):
            run = one_pass(model, batches, fisher)
            run()
            found.append(f"{label}, {fisher}: {peak(run)[0] / 1e6:.1f} MB")
    return f"Peak of a pass over one batch of {BATCH}: {'; '.join(found)}."


def curvature(label: str, model: nn.Module, batches: Batches, rounds: int) -> dict[str, float]:
    """A whole pass (the audit of its first batch included) against forward and backward on the same batches."""

    def bare() -> None:
        for x, y in batches:
            model.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x), y))

    runs = {fisher: one_pass(model, batches, fisher) for fisher in ("sampled", "exact")}
    times = interleaved({"bare": bare, **runs}, rounds)
    return {f"{label}: curvature pass, {kind}": ratio(times, kind) for kind in ("sampled", "exact")}


def curve(label: str, model: nn.Module, batches: Batches, rounds: int) -> dict[str, float]:
    """Measuring how the loss really rises, against the curvature pass at the end of which it is done."""
    structure, likelihood = Structure("kronecker", 4096), limpet.Categorical()
    memory = limpet.OnlineLaplace(model)
    memory.consolidate(batches, progress=False)

    def run() -> Fisher:
        return FisherPass(model, discover(model), likelihood, structure, fisher="exact").run(batches, progress=False)

    fisher = run()
    cases: dict[str, Callable[[], object]] = {
        "bare": run,
        "curve": lambda: measure_curve(memory.posterior, fisher, likelihood, None, 0),
    }
    return {f"{label}: the curve, of the pass it belongs to": ratio(interleaved(cases, rounds), "curve")}


def steps(label: str, model: nn.Module, batches: Batches, rounds: int) -> dict[str, float]:
    """Training steps under protection, by a memory of one task and of two, against the same steps without."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)

    def train() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    def protected(tasks: int, mode: str, every: int, rank: int | None = None) -> Protect:
        # weak: gradient mode must not diverge while it is timed
        memory = limpet.OnlineLaplace(model, strength=1e-3, rank=rank)
        for task in range(tasks):
            memory.consolidate([(x.roll(task, 1), y) for x, y in batches], progress=False)
        return lambda: memory.protect(optimizer, examples=BATCH * len(batches), mode=mode, every=every)

    protections: dict[str, Protect] = {
        "bare": nullcontext,
        "proximal, every=8": protected(1, "proximal", 8),
        "gradient": protected(1, "gradient", 1),
        "gradient, memory of two tasks": protected(2, "gradient", 1),
        "proximal, every=8, rank 128": protected(1, "proximal", 8, RANK),
        "gradient, rank 128, memory of two tasks": protected(2, "gradient", 1, RANK),
    }

    def enter_and_leave() -> None:
        with protections["proximal, every=8"]():
            pass

    times = interleaved(dict.fromkeys(protections, train), rounds, lambda name: protections[name]())
    ratios = {f"{label}: protected step, {name}": ratio(times, name) for name in protections if name != "bare"}
    once = statistics.median(interleaved({"once": enter_and_leave}, rounds)["once"])
    step = statistics.median(times["bare"]) / len(batches)
    return ratios | {f"{label}: entering and leaving protect, proximal, in plain steps": once / step}


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter around it, as adapter libraries build it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        """Compute W x + s B A x."""
        added: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling["default"] * added  # type: ignore[no-any-return]


def adapters(rounds: int, side: int = 1536, rank: int = 8) -> dict[str, float]:
    """The gradient of the penalty in the factors, against that in the whole weight by the fastest dense way."""
    model = nn.Sequential(nn.Linear(side, side, bias=False))
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(200, side), torch.randint(0, side, (200,)))], progress=False)
    apply = memory.posterior.held["0"].precision.applier()
    model[0] = Adapted(model[0], rank)  # type: ignore[arg-type]
    thin = memory.posterior.lora_penalties()["0"]
    (adapter,) = thin.adapters

    @torch.no_grad()
    def dense() -> None:
        G = apply(adapter.added(torch.Size((side, side))))
        adapter.scaling * (G @ adapter.right.mT), adapter.scaling * (adapter.left.mT @ G)

    @torch.no_grad()
    def factors() -> None:
        list(thin.gradients(thin.pull(thin.coordinates())))

    times = interleaved({"bare": dense, "thin": factors}, rounds)
    what = f"LoRA of rank {rank}, {side} x {side}: gradient of the penalty, of the dense one"
    return {what: ratio(times, "thin")}


def both(part: Callable[[str, nn.Module, Batches, int], dict[str, float]], rounds: int) -> dict[str, float]:
    """The ratios of both networks."""
    found = part("MLP", mlp(), data(784), rounds)
    return found | part("LeNet", lenet(), data(3, 32, 32, batches=4), max(rounds // 2, 3))


PARTS: dict[str, Callable[[int], dict[str, float]]] = {
    "curvature": lambda rounds: both(curvature, rounds),
    "curve": lambda rounds: both(curve, rounds),
    "steps": lambda rounds: steps("MLP", mlp(), data(784), rounds),
    "adapters": adapters,
}


def measure(rounds: int, parts: Iterable[str] = tuple(PARTS)) -> dict[str, float]:
    """All ratios, or those of some parts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {name: value for part in parts for name, value in PARTS[part](rounds).items()}


def table(found: dict[str, float], rounds: int) -> str:
    """The ratios as Markdown."""
    lines = ["| what | ratio to the bare run | bound |", "| --- | --- | --- |"]
    lines += [f"| {name} | {value:.2f} | {BOUNDS[name]} |" for name, value in found.items()]
    return "\n".join(
        [*lines, "", f"{versions_text()}; one thread, batches of {BATCH}, medians of {rounds} interleaved rounds."]
    )


def main() -> None:
    """Measure and print."""
    global clock
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=PARTS, help="measure one part")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path)
    options = common.parse(parser)
    start = time.perf_counter()
    if options.cpu_time:
        clock = time.process_time
    text = table(measure(options.rounds, [options.only] if options.only else PARTS), options.rounds)
    print(text)
    if options.only == "curvature":
        print(peaks())
    if options.output:
        command = f"python -m benchmarks overhead --rounds {options.rounds} --output {options.output.as_posix()}"
        wall = time.perf_counter() - start
        options.output.write_text(f"# Overhead\n\n{text}\n\n`{command}`, {wall:.0f} s.\n")


if __name__ == "__main__":
    main()
