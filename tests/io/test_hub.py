"""Tests of the Hub integration: memories from the command line, loaded from folders and over HTTP."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import limpet
from limpet.errors import LimpetError, MemoryFileError
from limpet.integrations import causal_lm
from limpet.io import hub

transformers = pytest.importorskip("transformers")
WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as a publisher has it, and two texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from language_models import llama

    folder = tmp_path_factory.mktemp("published")
    llama(vocab_size=22).save_pretrained(folder / "model")
    words = {"<unk>": 0, "</s>": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    for name, count in (("one.txt", 600), ("two.txt", 900)):
        numbers = torch.randint(0, 20, (count,), generator=generator).tolist()
        (folder / name).write_text(" ".join(WORDS[i] for i in numbers))
    (folder / "three.csv").write_text("text,label\n" + "\n".join(f"{WORDS[i]} {WORDS[i + 1]},1" for i in range(19)))
    return folder


def consolidate(published: Path, out: Path, *more: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "limpet", "consolidate", "--model", str(published / "model"), "-o", str(out)]
    command += ["--data", str(published / "one.txt"), "--data", str(published / "two.txt"), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@pytest.mark.slow
def test_the_command_makes_the_memory_that_a_person_would_and_goes_on_when_killed(
    published: Path, tmp_path: Path
) -> None:
    sizes = ("--tokens", "400", "--length", "8", "--batch-size", "2")
    whole = consolidate(published, tmp_path / "memory.safetensors", *sizes)
    told, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, told
    assert "50 sequences of 8 tokens" in told
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "model")
    memory = limpet.load(tmp_path, model)  # a folder with a memory in it
    assert memory.examples == 50 * 7 and memory.tasks == 1
    assert not any("embed" in name or "lm_head" in name for name in memory.posterior.held)
    tokenizer = transformers.AutoTokenizer.from_pretrained(published / "model")
    sources = [str(published / name) for name in ("one.txt", "two.txt")]
    rows = causal_lm.pack_tokens(tokenizer, sources, tokens=400, length=8)
    again = causal_lm.consolidate_lm(model, torch.split(rows, 2), progress=False)
    for name, held in memory.posterior.held.items():
        assert torch.equal(held.mean, again.posterior.held[name].mean)
        a, b = held.precision.dense(), again.posterior.held[name].precision.dense()
        assert (a - b).norm() < 1e-5 * b.norm()
    page = (tmp_path / "memory.md").read_text()
    assert "350 tokens" in page and "limpet.load(" in page

    script = (
        "import time, sys\n"
        "from limpet.curvature import checkpoint\n"
        "checkpoint.Checkpoint.due = lambda self: True\n"
        "save = checkpoint.Checkpoint.save\n"
        "def slow(self, one):\n"
        "    save(self, one); time.sleep(0.2)\n"
        "checkpoint.Checkpoint.save = slow\n"
        "from limpet import cli\n"
        "cli.main()\n"
    )
    other = tmp_path / "other.safetensors"
    words = ["consolidate", "--model", str(published / "model"), "-o", str(other), *sizes]
    words += [word for source in sources for word in ("--data", source)]
    killed = subprocess.Popen([sys.executable, "-c", script, *words])
    try:
        deadline = time.monotonic() + 90
        while not other.with_suffix(".pass").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        killed.wait(timeout=30)
        assert other.with_suffix(".pass").exists() and not other.exists()
    finally:
        killed.kill()
    ended = consolidate(published, other, *sizes)
    told, _ = ended.communicate(timeout=120)
    assert ended.returncode == 0, told
    assert not other.with_suffix(".pass").exists()
    assert other.read_bytes() == (tmp_path / "memory.safetensors").read_bytes()


@pytest.mark.slow
def test_the_command_on_two_processes_makes_the_same_memory(published: Path, tmp_path: Path) -> None:
    sizes = ("--tokens", "400", "--length", "8", "--batch-size", "2")
    for name, launcher in (("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"])):
        command = [sys.executable, *launcher, "-m", "limpet", "consolidate", "--model", str(published / "model")]
        command += ["--data", str(published / "one.txt"), "-o", str(tmp_path / f"{name}.safetensors"), *sizes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert (tmp_path / f"{name}.md").exists(), done.stdout + done.stderr
        assert done.stdout.count("50 sequences") == 1  # one of them speaks
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "model")
    one, two = (limpet.load(tmp_path / f"{name}.safetensors", model) for name in ("one", "two"))
    assert one.examples == two.examples == 350 and not list(tmp_path.glob("*.pass*"))
    for name, held in one.posterior.held.items():
        v = torch.randn(held.block.shape, generator=torch.Generator().manual_seed(0))
        expected = held.precision.fisher().apply(v)
        other = two.posterior.held[name].precision.fisher().apply(v)
        assert (other - expected).norm() < 1e-4 * expected.norm(), name
    # the strength is measured on a few examples, of which each process takes as many
    strengths = [memory._strength for memory in (one, two)]
    assert strengths[1] == pytest.approx(strengths[0], rel=0.05)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--dtype", "int8"), "--dtype must be one of float32, bfloat16"),
        (("--length", "5000"), "smaller --length"),
    ],
)
@pytest.mark.slow
def test_what_is_wrong_is_said_in_one_line(published: Path, tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    process = consolidate(published, tmp_path / "memory.safetensors", *words)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and told in text.replace("\n", " ") and "Traceback" not in text


@pytest.mark.slow
def test_texts_come_from_files_folders_and_columns(published: Path) -> None:
    assert len(list(causal_lm.iter_texts(str(published / "three.csv")))) == 19
    in_folder = list(causal_lm.iter_texts(str(published)))
    assert len(in_folder) >= 19 + 2
    with pytest.raises(LimpetError, match=r"not a dataset that can be loaded|the Hub cannot be reached"):
        list(causal_lm.iter_texts("nobody/has-this-set"))


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one file as the hub does."""

    file = b""
    asked: ClassVar[list[str]] = []

    def _head(self, path: str) -> bool:
        self.asked.append(path)
        if path not in [f"/somebody/small-1.5B/resolve/{name}/memory.safetensors" for name in ("main", "v2")]:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        self.send_response(200)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(self.file)))
        self.end_headers()
        return True

    def do_HEAD(self) -> None:
        self._head(self.path)

    def do_GET(self) -> None:
        if self._head(self.path):
            self.wfile.write(self.file)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


FROM_THE_HUB = """
import warnings, torch, limpet
model = torch.nn.Linear(3, 2)
memory = limpet.load("hub://somebody/small-1.5B", model, sha256={digest!r})
print(memory.examples, memory.tasks)
memory = limpet.load("hub://somebody/small-1.5B", model, revision="v2")
print(memory.examples)
try:
    limpet.load("hub://somebody/small-1.5B", model, sha256="0" * 64)
except limpet.MemoryFileError as error:
    print("rejected" if "{digest}" in str(error) else error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    limpet.load("somebody/small-1.5B", model)
found = [one for one in caught if one.category is DeprecationWarning]
print(len(found), found[0].filename, "write hub://somebody/small-1.5B" in str(found[0].message))
"""


def test_a_memory_is_found_by_the_name_of_its_model(endpoint: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    memory = limpet.OnlineLaplace(model)
    memory.consolidate([(torch.randn(20, 3), torch.randint(0, 2, (20,)))], progress=False)
    memory.save(tmp_path / "memory.safetensors")
    Hub.file = (tmp_path / "memory.safetensors").read_bytes()
    Hub.asked = []
    script = FROM_THE_HUB.format(digest=hashlib.sha256(Hub.file).hexdigest())
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["20", "1", "20", "rejected", "1", "<string>", "True"], done.stderr
    assert any("/resolve/v2/" in path for path in Hub.asked)
    assert limpet.load(tmp_path, model).examples == 20
    assert hub.local_file(tmp_path / "other.safetensors") == tmp_path / "other.safetensors"


@pytest.mark.parametrize("name", ["runs/last", "nobody/has-this", "runs/last.safetensors", "last", "./runs/last"])
def test_a_path_that_does_not_exist_stays_off_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(MemoryFileError, match="there is no file") as raised:
        limpet.load(name, torch.nn.Linear(3, 2))
    assert ("write hub://" in str(raised.value)) == (name in ("runs/last", "nobody/has-this"))


def test_options_that_do_not_apply_are_rejected(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match="revision= applies to names on the Hub only"):
        limpet.load(tmp_path / "m.safetensors", model, revision="main")
    with pytest.raises(ValueError, match="write hub://user/model"):
        limpet.load("hub://model", model)
    for wrong in ("abc", "g" * 64, "0" * 63):
        with pytest.raises(ValueError, match="sha256 must consist of 64 hexadecimal digits"):
            limpet.load(tmp_path / "m.safetensors", model, sha256=wrong)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="do not apply to"):
        limpet.load(tmp_path, model, sha256="0" * 64)
    with pytest.raises(MemoryFileError, match="cannot be read: File name too long"):
        limpet.load("x" * 5000, model)


def refused() -> OSError:
    """An error as transformers raises it: the cause is three links down, and the text says only half of it."""
    try:
        try:
            try:
                raise ConnectionRefusedError(111, "Connection refused")
            except OSError as error:
                raise FileNotFoundError("an error happened while trying to locate the file") from error
        except OSError as error:
            raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck it.") from error
    except OSError as error:
        return error


def test_the_cause_of_a_failed_download_is_told_from_a_name_that_does_not_exist() -> None:
    assert hub.unreachable(refused()) == "[Errno 111] Connection refused"
    assert hub.unreachable(OSError("somebody/model is not a valid model identifier")) is None
    assert "cannot be reached to look for it ([Errno 111] Connection refused)" in str(
        hub.load_error("a/b", refused(), "is not a model")
    )
    wrong = OSError("there is no such thing\nat all")
    assert str(hub.load_error("a/b", wrong, "is not a model")) == "a/b is not a model: there is no such thing"


@pytest.mark.parametrize("read", ["memory", "model", "tokenizer"])
def test_without_a_connection_that_is_what_is_reported(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.integrations import checkpoints

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    readers: dict[str, Any] = {
        "memory": lambda: limpet.load("hub://nobody/has-this", torch.nn.Linear(3, 2)),
        "model": lambda: checkpoints.read_base("nobody/has-this"),
        "tokenizer": lambda: checkpoints.read_tokenizer("nobody/has-this"),
    }
    told = "nobody/has-this is not a local path, and the Hub cannot be reached"
    if read == "memory":
        told = "the Hub cannot be reached to look for hub://nobody/has-this"
    with pytest.raises(LimpetError, match=told):
        readers[read]()


def test_a_published_model_without_a_memory_is_named(endpoint: str, tmp_path: Path) -> None:
    script = (
        "import torch, limpet\n"
        "try:\n    limpet.load('hub://somebody/other', torch.nn.Linear(3, 2))\n"
        "except limpet.LimpetError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    expected = "hub://somebody/other is not a model on the Hub with a memory.safetensors: "
    assert done.stdout.startswith(expected), done.stderr


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_with_another_head_is_not_a_causal_language_model(tmp_path: Path, tied: bool) -> None:
    from language_models import llama
    from limpet.integrations import checkpoints

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(LimpetError, match=r"it was saved as BertForSequenceClassification, and \d+ parameters of Bert"):
        checkpoints.read_base(str(tmp_path / "classifier"))
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "causal")
    assert type(checkpoints.read_base(str(tmp_path / "causal"))).__name__ == "LlamaForCausalLM"


def test_a_table_without_a_text_column_says_so(tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("label,review\n1,good\n")
    with pytest.raises(LimpetError, match="""has no column "text", only 'label', 'review'"""):
        list(causal_lm.iter_texts(str(tmp_path / "reviews.csv")))
