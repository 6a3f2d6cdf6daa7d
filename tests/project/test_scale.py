"""docs/scale.md is what benchmarks/scale.py prints, and the models in it are the published ones."""

from __future__ import annotations

import pytest

from conftest import benchmark

pytest.importorskip("transformers")

PUBLISHED = {"Llama-3.2-1B": 1_235_814_400, "Llama-2-7B": 6_738_415_616, "Llama-3-70B": 70_553_706_496}


@pytest.mark.slow
def test_the_document_is_what_the_command_prints() -> None:
    scale = benchmark("scale")
    for name, parameters in PUBLISHED.items():
        model = scale.model(name)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    text = scale.DOCUMENT.read_text()
    tables = {name: scale.markdown(table()) for name, table in scale.TABLES.items()}
    assert scale.common.with_tables(text, tables) == text
    assert all(text.count(table) == 1 for table in tables.values())


def test_a_table_by_hand() -> None:
    """Llama-2-7B: 128 attention blocks of 4096^2, 96 with a long side of 11,008 in three pieces, and 65 norms."""
    found = benchmark("scale").planned("Llama-2-7B")
    side, long = 4096, 11_008
    squares, cubes = (3670**power + 2 * 3669**power for power in (2, 3))
    attention = 4 * side**2 + 2 * side
    feed_forward = 2 * side * long + side**2 + squares + side + long
    assert found.nbytes == 4 * (128 * attention + 96 * feed_forward + 65 * 2 * side)
    rotations = 128 * 2 * 2 * side**3 + 96 * 2 * (side**2 * long + squares * side)
    assert found.replicated.step == 2 * rotations
    assert found.share_of_step(found.replicated) == pytest.approx(2 * rotations / (6 * 6_738_415_616 * 131_072))
    assert found.in_tokens(found.replicated) == pytest.approx(
        (128 * 15 * 2 * side**3 + 96 * 15 * (side**3 + cubes) + rotations) / (6 * 6_738_415_616)
    )
