"""The models and texts of the benchmarks are made from known files alone."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as `python -m benchmarks` does

import assets


def test_a_file_is_recognized_by_its_name_and_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "package.whl"
    path.write_bytes(b"content")
    with pytest.raises(SystemExit, match=r"package\.whl is not the file"):
        assets.checked(path)
    monkeypatch.setitem(assets.SHA256, "package.whl", hashlib.sha256(b"content").hexdigest())
    assets.checked(path)
    path.write_bytes(b"other content")
    with pytest.raises(SystemExit, match=r"package\.whl is not the file"):
        assets.checked(path)


def test_what_is_there_is_not_made_again_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(target: Path, _: Path) -> None:
        made.append(target.name)
        target.write_text("text")

    def fail(target: Path, _: Path) -> None:
        target.write_text("half of the te")
        raise RuntimeError("the connection is lost")

    monkeypatch.setattr(sys, "argv", ["assets", str(tmp_path / "folder")])
    monkeypatch.setattr(assets, "MAKERS", {"a.txt": make, "b.txt": fail})
    with pytest.raises(RuntimeError, match="connection"):
        assets.main()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["a.txt"]
    monkeypatch.setattr(assets, "MAKERS", {"a.txt": make, "b.txt": make})
    assets.main()
    assert made == ["a.txt", "b.txt"]
    assert (tmp_path / "folder" / "b.txt").read_text() == "text"


@pytest.mark.parametrize("command", [("no-such-command-at-all",), (sys.executable, "-c", "raise SystemExit(3)")])
def test_a_failed_download_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match=r"^package cannot be downloaded: ") as caught:
        assets.download(tmp_path / "package", *command)
    assert "\n" not in str(caught.value)
