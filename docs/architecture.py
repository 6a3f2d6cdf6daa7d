"""Which part of limpet knows which: read from the imports, held against the layers, drawn.

    python docs/architecture.py         the table of docs/architecture.md and docs/architecture.svg, anew
    python docs/architecture.py --check only say what is wrong

A part is a folder or a module right in src/limpet. It may import from layers below its own and, where no circle comes
of it, from its own. `tests/project/test_architecture.py` fails otherwise. A new file in a folder needs no change here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
SOURCE = Path(__file__).parents[1] / "src" / "limpet"
FACE = "limpet"
"""The name that `limpet/__init__.py` has as a part."""

LAYERS: list[tuple[str, list[str]]] = [
    ("foundation", ["errors", "version", "deprecation"]),
    ("independent", ["precision", "likelihoods", "layers", "distributed"]),
    ("model and files", ["model", "io"]),
    ("curvature", ["curvature"]),
    ("posterior", ["posterior"]),
    ("uses of a posterior", ["predictive", "forgetting"]),
    ("training", ["protection"]),
    ("methods", ["methods", FACE]),
    ("applications", ["planning", "integrations"]),
    ("commands", ["experiments", "cli", "__main__"]),
]
"""From the ground up. A name for which there is no part does no harm."""

ALONE = {"precision", "likelihoods", "layers", "distributed"}
"""Parts that know nothing of limpet but its errors."""

ROW = 0.62
"""Inches from one row of the drawing to the next; columns are counted in inches."""

EVERYWHERE = {"errors", "version", "deprecation"}
"""What so many parts import that it is left out of the drawing."""

NEEDED = {"torch", "numpy", "safetensors"}
"""What a core part may import from elsewhere, where it is loaded."""

EXTRAS_WELCOME = {"integrations", "experiments", "cli"}
"""Parts that are an extra themselves, and may import others of it at their top."""


@dataclass(frozen=True)
class Import:
    """One import statement: who, what, and whether it is run when the module is loaded."""

    path: str
    line: int
    part: str
    target: str  # a part of limpet, or a package from elsewhere
    ours: bool
    at_load: bool

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.path}:{self.line}"


def part_of(path: Path, source: Path) -> str:
    """The part that a file belongs to."""
    inside = path.relative_to(source).parts
    return inside[0] if len(inside) > 1 else FACE if path.stem == "__init__" else path.stem


def imports(source: Path = SOURCE) -> list[Import]:
    """Every import in the package, those inside functions and under TYPE_CHECKING included."""
    found = []
    for path in sorted(source.rglob("*.py")):
        part, shown = part_of(path, source), str(path.relative_to(source.parents[1]))
        for node, at_load in statements(ast.parse(path.read_text()), True):
            for target in targets(node, path, source):
                ours = target.partition(".")[0] == "limpet"
                name = [*target.split("."), FACE][1] if ours else target.partition(".")[0]
                if not (ours and name == part):
                    found.append(Import(shown, node.lineno, part, name, ours, at_load))
    return found


def statements(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements under a node, and whether they are run on loading."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_load
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from statements(child, False)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(child, at_load and not inside)


def targets(node: ast.Import | ast.ImportFrom, path: Path, source: Path) -> list[str]:
    """The modules that a statement names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    if node.level:
        package = path.relative_to(source.parent).parts[: -node.level]
        module = ".".join([*package, module]).rstrip(".")
    if module == "limpet":  # its names are parts, or the face's own
        parts = {entry.stem for entry in source.iterdir()}
        return [f"limpet.{alias.name}" if alias.name in parts else "limpet" for alias in node.names]
    return [module]


def layer_of() -> dict[str, int]:
    """The number of each part's layer, the ground being 0."""
    return {part: number for number, (_, parts) in enumerate(LAYERS) for part in parts}


def existing(source: Path = SOURCE) -> list[str]:
    """The parts that are there."""
    return sorted({part_of(path, source) for path in source.rglob("*.py")})


def wrong(source: Path = SOURCE) -> list[str]:
    """What breaks the rules, a line each with the mend; nothing where all is well."""
    layers, found = layer_of(), imports(source)
    said = [
        f"src/limpet/{part} has no place: add '{part}' to a layer of LAYERS in docs/architecture.py (the lowest from "
        "which it imports only downwards), and run python docs/architecture.py"
        for part in existing(source)
        if part not in layers
    ]
    for one in (each for each in found if each.part in layers):
        if one.ours and layers.get(one.target, -1) > layers[one.part]:
            said.append(
                f"{one.place}: '{one.part}' ({name_of(one.part)}) imports '{one.target}' ({name_of(one.target)}), "
                "which is above it: move what is needed down, or let the upper part hand it in"
            )
        elif one.ours and one.part in ALONE and one.target != "errors":
            said.append(f"{one.place}: '{one.part}' knows limpet's errors and nothing else, not '{one.target}'")
        elif not one.ours and one.at_load and one.part not in EXTRAS_WELCOME and not standard(one.target):
            said.append(
                f"{one.place}: '{one.part}' is a core part and imports {one.target} when it is loaded: import it in "
                "the function that needs it"
            )
    circle = a_circle({part: downwards(found, part) for part in existing(source)}) or a_circle(modules(source))
    if circle:
        said.append(f"a circle of imports: {' -> '.join(circle)}; move what both need into a part below them")
    return said


def modules(source: Path = SOURCE) -> dict[str, list[str]]:
    """The modules of limpet that each of its modules imports, anywhere in it."""
    known = {".".join(path.relative_to(source.parent).with_suffix("").parts): path for path in source.rglob("*.py")}
    graph: dict[str, list[str]] = {}
    for module, path in known.items():
        graph[module] = []
        for node, _ in statements(ast.parse(path.read_text()), True):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else [""]
            for target in targets(node, path, source):
                inside = {f"{target}.{name}" for name in names} & known.keys()
                graph[module] += sorted(inside or {target} & known.keys())
    return graph


def standard(package: str) -> bool:
    """Whether a package is Python's own, or one that everybody has who has limpet."""
    return package in sys.stdlib_module_names or package in NEEDED


def name_of(part: str) -> str:
    """The name of a part's layer."""
    return LAYERS[layer_of()[part]][0]


def downwards(found: list[Import], part: str) -> list[str]:
    """The parts that a part imports, anywhere in it."""
    return sorted({one.target for one in found if one.part == part and one.ours})


def a_circle(graph: dict[str, list[str]]) -> list[str]:
    """Parts that import each other in a circle, if there are any."""
    done: set[str] = set()

    def walk(part: str, way: list[str]) -> list[str]:
        if part in way:
            return [*way[way.index(part) :], part]
        if part in done:
            return []
        for target in graph.get(part, ()):
            circle = walk(target, [*way, part])
            if circle:
                return circle
        done.add(part)
        return []

    return next((circle for part in graph if (circle := walk(part, []))), [])


# --- the page ------------------------------------------------------------------------------------------------------


def about(part: str, source: Path = SOURCE) -> str:
    """The first sentence of a part's docstring."""
    folder, inside = source / part, "__init__.py"
    path = source / inside if part == FACE else folder / inside if folder.is_dir() else folder.with_suffix(".py")
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return re.split(r"(?<=\.) ", " ".join(text.split()))[0].rstrip(".")


def table(source: Path = SOURCE) -> str:
    """What lives where, from the top down."""
    there = set(existing(source))
    lines = ["| layer | part | what lives there |", "| --- | --- | --- |"]
    for layer, parts in reversed(LAYERS):
        for number, part in enumerate(part for part in parts if part in there):
            suffix = "/" if (source / part).is_dir() else ""
            lines.append(f"| {'' if number else layer} | `{part}{suffix}` | {about(part, source)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """A page with the table in its place."""
    between = re.compile(r"(?<=<!-- parts -->\n).*?(?=<!-- end of parts -->)", re.S)
    return between.sub(lambda _: f"\n{table()}\n\n", text)


def needed_arrows(graph: dict[str, list[str]]) -> dict[str, list[str]]:
    """The graph without what follows from the rest: no arrow where there is a longer way."""

    def reach(part: str) -> set[str]:
        return {part}.union(*(reach(target) for target in graph[part]))

    return {
        part: [
            target for target in targets if not any(target in reach(other) for other in targets if other != target)
        ]
        for part, targets in graph.items()
    }  # fmt: skip


def shelves(arrows: dict[str, list[str]]) -> list[tuple[int, list[str]]]:
    """Rows of parts from the ground up, each with the number of its layer, so that every arrow points down.

    Within a row a part stands near those that it is tied to: the mean place of its neighbours, a few times over.
    """
    layers = layer_of()

    def depth(part: str) -> int:
        return max((1 + depth(t) for t in arrows[part] if layers[t] == layers[part]), default=0)

    rows: dict[tuple[int, int], list[str]] = {}
    for part in arrows:
        rows.setdefault((layers[part], depth(part)), []).append(part)
    tied = {part: [*targets, *(p for p, ts in arrows.items() if part in ts)] for part, targets in arrows.items()}
    place = {part: (i + 0.5) / len(row) for row in rows.values() for i, part in enumerate(row)}
    for _ in range(30):
        for _, row in sorted(rows.items()):
            row.sort(key=lambda part: sum(place[t] for t in tied[part]) / max(len(tied[part]), 1))
            place |= {part: (i + 0.5) / len(row) for i, part in enumerate(row)}
    return [(layer, row) for (layer, _), row in sorted(rows.items())]


def bend(part: str, target: str, middle: dict[str, tuple[float, float]]) -> float:
    """How much to bend an arrow so that it runs behind as few boxes as may be, as matplotlib's `arc3` counts it."""
    (x, y), (u, v) = ((x, ROW * y) for x, y in (middle[part], middle[target]))
    y, v = y - 0.3 * ROW, v + 0.3 * ROW
    others = [(name, a, ROW * b) for name, (a, b) in middle.items() if name not in (part, target)]

    def behind(rad: float) -> int:
        a, b = (x + u) / 2 + rad * (v - y), (y + v) / 2 - rad * (u - x)
        points = [
            tuple((1 - t) ** 2 * one + 2 * t * (1 - t) * via + t**2 * two for one, via, two in ((x, a, u), (y, b, v)))
            for t in (i / 40 for i in range(41))
        ]
        return sum(
            any(abs(q - d) < 0.28 * ROW and abs(p - c) < 0.16 + 0.045 * len(name) for p, q in points)
            for name, c, d in others
        )

    return min((i / 20 for i in range(-13, 14)), key=lambda rad: behind(rad) + abs(rad))


def draw(path: Path, source: Path = SOURCE) -> None:
    """The layers as shelves, the parts as boxes, an arrow from a part to one that it builds on.

    What everybody uses, errors and the version, stands on the ground without arrows.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    there, found = existing(source), imports(source)
    graph = {part: [t for t in downwards(found, part) if t in there and t not in EVERYWHERE] for part in there}
    arrows = needed_arrows(graph)
    rows = shelves(arrows)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "limpet", "font.family": "sans-serif"})
    figure, axis = plt.subplots(figsize=(11, ROW * len(rows) + 0.2), layout="constrained")
    middle = {
        part: (2.8 + 0.4 * (level % 3 - 1) + 7.8 * (i + 0.5) / len(row), float(level))  # staggered, for the arrows
        for level, (_, row) in enumerate(rows)
        for i, part in enumerate(row)
    }
    for number, (layer, _) in enumerate(LAYERS):
        levels = [level for level, (of, _) in enumerate(rows) if of == number]
        if levels:
            low, high = min(levels) - 0.46, max(levels) + 0.46
            axis.axhspan(low, high, color="#e9eef1" if number % 2 else "#f3f1ea", zorder=0, linewidth=0)
            axis.text(0.1, (low + high) / 2, layer, fontsize=10, va="center", color="#444444")
    style = {"arrowstyle": "-|>", "color": "#8a9aa5", "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
    for part, targets in arrows.items():
        for target in targets:
            (x, y), (u, v) = middle[part], middle[target]
            bent = {**style, "connectionstyle": f"arc3,rad={bend(part, target, middle)}"}
            axis.annotate("", xy=(u, v + 0.24), xytext=(x, y - 0.2), arrowprops=bent, zorder=1)
    for part, (x, y) in middle.items():
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#1f6f8b", "linewidth": 1}
        axis.text(x, y, part, ha="center", va="center", fontsize=9.5, bbox=box, zorder=3)
    axis.set(xlim=(0, 11), ylim=(-0.5, len(rows) - 0.5))
    axis.axis("off")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)


def main() -> None:
    """Say what is wrong; if nothing is, make the page anew."""
    faults = wrong()
    if faults:
        sys.exit("\n".join(faults))
    if "--check" not in sys.argv:
        PAGE.write_text(page(PAGE.read_text()))
        draw(PAGE.with_suffix(".svg"))
    print(table())


if __name__ == "__main__":
    main()
