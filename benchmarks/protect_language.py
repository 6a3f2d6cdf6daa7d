"""Fine-tune a language model on new text with the protections that limpet has, and with their rivals.

    python -m benchmarks protect_language --model M --new C.html --old A.txt B.csv      # all runs still missing
    python -m benchmarks protect_language --model M --new C.html --old A.txt --time     # a protected step / a plain one
    python -m benchmarks protect_language --draw                                         # the tables

The model, the texts and the training are those of repair_language: LoRA on all linear layers for 300 steps (kind
"lora"; "qlora" on a base in NF4, which is then the model before), or all weights except the vocabulary matrix for 60
steps (kind "full"), with AdamW. "Protect" is training under `memory.protect`, with a memory of the model's own samples.
"Self-rehearsal" is training under `limpet.SelfRehearsal(model, weight=1.0).protect`. Replay adds one row of old text to
every batch of four, from a pool of 5 % as many rows as the new text has; distillation adds KL(before || now) on the new
rows. Losses are in nats per token on held-out text; drift is KL(before || now) per token on samples that no memory has
seen. Every point is recorded when it is measured, so an interrupted command resumes with the next run.
M is a folder or a name on the hub; texts are .txt, .html (tags are removed), or .csv (the column "text").
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import common
import limpet
from common import versions
from fine_tuning import BATCH, HELD_OUT, NEW_BLOCKS, adamw, adapted, blocks, distilled, fresh, loss
from limpet.forgetting.drift import measured_drift
from repair_figures import markdown
from repair_language import RATES, exact_probe, remembered, samples

RESULTS = common.RESULTS / "protect" / "language.jsonl"
STEPS = {"lora": 300, "qlora": 300, "full": 60}
RUNS = ("plain", "protect", "self-rehearsal", "replay", "distillation")
QUANTIZED_RUNS = ("quantized", "plain", "protect")
MOMENTS = (5, 15, 30, 60, 100, 150, 200, 250, 300)
BUDGETS = (0.01, 0.03, 0.1)
REPLAYED = 0.05


class EndOfTimingError(Exception):
    """The steps have been timed."""


class Bench:
    """The texts, and what every run is measured on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        text = blocks(tokenizer, options.new, NEW_BLOCKS + HELD_OUT, seed=1)
        self.new_test, self.new = text[:HELD_OUT], text[HELD_OUT:]
        old = blocks(tokenizer, options.old, HELD_OUT + round(REPLAYED * NEW_BLOCKS), seed=0)
        self.old_test, self.replayed = old[:HELD_OUT], old[HELD_OUT:]
        self.teacher = self._base().eval().requires_grad_(False)
        self.rows = [{"input_ids": part} for part in torch.split(samples(options, "test"), BATCH)]
        self.probe = exact_probe(self.teacher, self.rows)
        remembered(options)

    def _base(self) -> Any:
        """The model before training, without adapters."""
        if self.options.kind != "qlora":
            return fresh(self.options.model)
        chosen = transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(self.options.model, quantization_config=chosen)
        model.config.use_cache = False
        return model

    def quantization(self) -> dict[str, Any]:
        """The quantized base before training, with its drift from the model that was quantized."""
        unquantized = exact_probe(fresh(self.options.model), self.rows)
        drift = measured_drift(self.teacher, [unquantized], limpet.Categorical())
        found = self.point("quantized", self.teacher, 0.0, None)
        return found | {"drift": round(float(drift), 4), "drift_error": round(drift.standard_error, 4)}

    @property
    def learning_rate(self) -> float:
        """The largest learning rate."""
        return RATES["full" if self.options.kind == "full" else "lora"]

    def run(self, what: str) -> Iterator[dict[str, Any]]:
        """One run: its end, and for the memory the budgets along the path of its repair, each when it is measured."""
        options = self.options
        if what == "quantized":
            yield self.quantization()
            return
        trained = self._fresh()
        memory: Any = None
        if what in ("plain", "protect"):
            memory = limpet.load(options.work / "memory-self.safetensors", trained)
        elif what == "self-rehearsal":
            memory = limpet.SelfRehearsal(trained, weight=1.0, seed=options.seed)
            memory.consolidate()
        begin = time.perf_counter()
        moments: list[dict[str, Any]] = []
        protection = self._fit(trained, what, memory, moments)
        end = self.point(what, trained, time.perf_counter() - begin, memory, moments)
        repair = protection.repair if what == "protect" else None
        if repair is None:
            yield end
            return
        yield end | {"strength": repair.strength}
        for budget in BUDGETS:
            begin = time.perf_counter()
            repair.within_budget(budget)
            yield self.point(f"budget {budget}", trained, time.perf_counter() - begin, memory)

    def _fresh(self) -> Any:
        """The model before training, with adapters if it is for LoRA."""
        torch.manual_seed(self.options.seed)
        model: Any = self._base()
        if self.options.kind != "full":
            return adapted(model)
        model.get_input_embeddings().requires_grad_(False)
        return model

    def time(self, rounds: int = 12) -> dict[str, Any]:
        """Seconds of a step under `memory.protect`, of a plain one, interleaved, after two rounds to warm up."""
        plain, trained = self._fresh(), self._fresh()
        memory = limpet.load(self.options.work / "memory-self.safetensors", trained)
        optimizers = [
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=self.learning_rate)
            for model in (plain, trained)
        ]
        times: list[list[float]] = [[], []]
        with (
            suppress(EndOfTimingError),
            memory.protect(optimizers[1], examples=self.new[:, 1:].numel(), mode="repair"),
        ):
            for number in range(rounds + 2):
                rows = self.new[BATCH * number : BATCH * (number + 1)]
                for model, optimizer, found in zip((plain, trained), optimizers, times, strict=True):
                    begin = time.perf_counter()
                    optimizer.zero_grad()
                    torch.autograd.backward(model(input_ids=rows, labels=rows).loss)
                    optimizer.step()
                    found.append(time.perf_counter() - begin)
            raise EndOfTimingError  # the block is left with an error, so nothing is repaired
        ratios = [b / a for a, b in list(zip(*times, strict=True))[2:]]
        found_at = {"kind": self.options.kind, "seed": self.options.seed, "what": "time of a step"}
        return found_at | {"ratio": round(statistics.median(ratios), 3), "rounds": rounds, "versions": versions("peft")}

    def _fit(self, trained: Any, what: str, memory: Any, moments: list[dict[str, Any]]) -> Any:
        options, steps = self.options, STEPS[self.options.kind]
        optimizer, rate = adamw(trained, self.learning_rate, steps)
        generator = torch.Generator().manual_seed(2 + options.seed)
        extra = self._extra(what)
        trained.train()
        protecting: AbstractContextManager[Any] = nullcontext()
        if what == "self-rehearsal":
            protecting = memory.protect(optimizer)
        elif what == "protect":  # the memory's strength is a number, so "auto" would not choose this mode
            protecting = memory.protect(optimizer, examples=self.new[:, 1:].numel(), mode="repair")
        with protecting as protection:
            for step in range(1, steps + 1):
                rows = self.new[torch.randint(0, len(self.new), (BATCH,), generator=generator)]
                optimizer.zero_grad()
                found = trained(input_ids=rows, labels=rows)
                torch.autograd.backward(found.loss + extra(trained, rows, found.logits))
                optimizer.step()
                rate.step()
                if what == "plain" and step in MOMENTS:
                    moments.append(self.moment(step, trained, memory))
                    print(moments[-1], flush=True)
        return protection

    def _extra(self, what: str) -> Callable[[Any, Tensor, Tensor], Any]:
        """The further loss of a rival."""
        generator = torch.Generator().manual_seed(100 + self.options.seed)

        def replay(model: Any, _: Tensor, __: Tensor) -> Tensor:
            row = self.replayed[torch.randint(0, len(self.replayed), (1,), generator=generator)]
            found: Tensor = model(input_ids=row, labels=row).loss
            return found

        def distillation(_: Any, rows: Tensor, logits: Tensor) -> Tensor:
            return distilled(self.teacher, rows, logits)

        return {"replay": replay, "distillation": distillation}.get(what, lambda *_: 0.0)

    def moment(self, step: int, model: Any, memory: Any) -> dict[str, Any]:
        """What the memory says at the current weights, and what is true there."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", limpet.LimpetWarning)
            forecast = memory.forecast()
        drift = measured_drift(model, [self.probe], limpet.Categorical())
        found = {
            "forecast": float(forecast),
            "forecast_drift": forecast.drift,
            "quadratic": forecast.quadratic,
            "drift": float(drift),
        }
        rounded = {name: None if value is None else float(f"{value:.4g}") for name, value in found.items()}
        return {"step": step, "trusted": forecast.trusted, **rounded}

    def point(
        self, what: str, model: Any, seconds: float, memory: Any, moments: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Losses and drift where the model is now."""
        options = self.options
        drift = measured_drift(model, [self.probe], limpet.Categorical())
        found: dict[str, Any] = {"kind": options.kind, "seed": options.seed, "what": what}
        found |= {"new": round(loss(model, self.new_test), 4), "old": round(loss(model, self.old_test), 4)}
        found |= {"drift": round(float(drift), 4), "drift_error": round(drift.standard_error, 4)}
        if memory is not None and memory.probes:
            found["drift_probe"] = round(float(memory.drift()), 4)
        if moments:
            found["moments"] = moments
        return found | {"seconds": round(seconds), "versions": versions("transformers", "peft")}


def table(points: list[dict[str, Any]], kind: str) -> str:
    """The end of every run of one kind."""
    rows = [
        [
            p["what"],
            f"{p['new']:.3f}",
            f"{p['old']:.3f}",
            f"{p['drift']:.3f} +- {p['drift_error']:.3f}",
            str(p["seconds"]),
        ]
        for p in points
        if p["kind"] == kind and "new" in p
    ]
    return markdown(["", "new text", "old text", "drift", "seconds"], rows)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--new", type=Path, nargs="+", default=[])
    parser.add_argument("--old", type=Path, nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=Path("repair"), help="where samples and memories are kept")
    parser.add_argument("--kind", choices=list(STEPS), default="lora")
    parser.add_argument("--runs", nargs="+", choices=sorted({*RUNS, *QUANTIZED_RUNS}), help="by default all of a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--time", action="store_true", help="only measure the time of a step")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = common.parse(parser)
    options.source = "self"
    if options.time:
        common.append_record(options.out, found := Bench(options).time())
        print(found)
        return
    done = {(p["kind"], p["seed"], p["what"]) for p in common.read_records(options.out)}
    runs = options.runs or (QUANTIZED_RUNS if options.kind == "qlora" else RUNS)
    missing = [] if options.draw else [w for w in runs if (options.kind, options.seed, w) not in done]
    if missing:
        options.work.mkdir(parents=True, exist_ok=True)
        bench = Bench(options)
        for what in missing:
            for point in bench.run(what):
                print({name: value for name, value in point.items() if name not in ("versions", "moments")}, flush=True)
                common.append_record(options.out, point)
    for kind in STEPS:
        print(f"\n{kind}:\n\n{table(common.read_records(options.out), kind)}")


if __name__ == "__main__":
    main()
