"""Moving bytes: against a server on this machine that cuts, lies, refuses and is slow to say so."""

from __future__ import annotations

import errno
import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import pytest

from deepinfer_core.errors import PullError
from deepinfer_core.hub.progress import Silent, TerminalProgress
from deepinfer_core.hub.pull import RemoteFile, UnreachableError, fetch, open_part
from deepinfer_core.hub.remote import check_reachable

CONTENT = bytes(range(256)) * 20_000  # 5 MB: several chunks
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT and does what its fields say.

    Attributes:
        cuts: for each request in turn, after how many bytes the connection breaks.
        ranges: whether it honours Range headers.
        statuses: for each request in turn, a status to refuse with.
        redirect: where to send every request for /start.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.ranges = True
        self.redirect = ""
        self.requests: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.requests.append({"path": self.path, **dict(self.headers)})
        if self.server.redirect and self.path == "/start":
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
            return
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
            return
        content, start = self.server.content, 0
        wanted = self.headers.get("Range", "")
        if self.server.ranges and wanted:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + self.server.cuts.pop(0) if self.server.cuts else len(content)
        self.wfile.write(content[start:end])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def remote(server: Server, **changes: Any) -> RemoteFile:
    return RemoteFile(
        **{"url": f"{server.url}/m", "num_bytes": len(CONTENT), "sha256": SHA256, **changes}
    )


class Recorder(Silent):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int | None, int]] = []
        self.num_bytes = 0
        self.open = 0
        self.notices: list[str] = []

    def start(self, label: str, total_bytes: int | None, done_bytes: int) -> None:
        self.starts.append((label, total_bytes, done_bytes))
        self.open += 1

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def finish(self) -> None:
        self.open -= 1

    def notice(self, text: str) -> None:
        self.notices.append(text)


def test_a_file_arrives_whole_and_alone(server: Server, tmp_path: Path) -> None:
    recorder = Recorder()
    fetch(remote(server), tmp_path / "deep" / "model.gguf", progress=recorder)
    assert (tmp_path / "deep" / "model.gguf").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model.gguf"]
    assert recorder.starts == [("model.gguf", len(CONTENT), 0)]
    assert (recorder.num_bytes, recorder.open) == (len(CONTENT), 0)


def test_cut_connections_are_taken_up_where_they_broke(server: Server, tmp_path: Path) -> None:
    server.cuts = [1_500_000, 0, 100, 2_000_000]
    recorder = Recorder()
    fetch(remote(server), tmp_path / "m", progress=recorder)
    assert (tmp_path / "m").read_bytes() == CONTENT
    starts = [request.get("Range") for request in server.requests]
    assert starts == [None, "bytes=1500000-", "bytes=1500000-", "bytes=1500100-", "bytes=3500100-"]
    assert recorder.num_bytes == len(CONTENT)


def test_a_line_that_stays_dead_ends_the_attempt_and_keeps_the_part(
    server: Server, tmp_path: Path
) -> None:
    server.cuts = [1_000_000, *[0] * 20]
    with pytest.raises(PullError, match="cut off at byte 1,000,000"):
        fetch(remote(server), tmp_path / "m")
    assert not (tmp_path / "m").exists()
    server.cuts.clear()
    server.requests.clear()
    fetch(remote(server), tmp_path / "m")
    assert server.requests[0]["Range"] == "bytes=1000000-"
    assert (tmp_path / "m").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "m.part").write_bytes(CONTENT[:1000])
    fetch(remote(server), tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == CONTENT


def test_a_part_of_another_version_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(b"x" * 1000)
    recorder = Recorder()
    fetch(remote(server), tmp_path / "m", progress=recorder)
    assert (tmp_path / "m").read_bytes() == CONTENT
    assert "from the start" in recorder.notices[0]


def test_a_part_that_is_too_long_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(CONTENT + b"more")
    fetch(remote(server), tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == CONTENT


def test_a_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(CONTENT)
    fetch(remote(server), tmp_path / "m")
    assert server.requests == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, f"SHA-256 is {SHA256} instead of 0000"),
        ({"sha256": None, "git_sha1": "0" * 40}, "git checksum"),
    ],
)
def test_a_wrong_checksum_leaves_nothing_behind(
    server: Server, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PullError, match=message):
        fetch(remote(server, **changes), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_git_checksums_are_those_of_git(server: Server, tmp_path: Path) -> None:
    server.content = b"hello\n"  # git hash-object gives this for these six bytes
    file = remote(
        server, num_bytes=6, sha256=None, git_sha1="ce013625030ba8dba906f756967f9e9ca394464a"
    )
    fetch(file, tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == b"hello\n"


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, PullError, "does not exist"),
        (401, PullError, "access token"),
        (403, PullError, "access token"),
        (400, PullError, "HTTP 400"),
        (503, UnreachableError, "not available at the moment"),
        (429, UnreachableError, "not available at the moment"),
    ],
)
def test_refusals_are_explained(
    server: Server, tmp_path: Path, status: int, error: type[Exception], message: str
) -> None:
    server.statuses = [status]
    with pytest.raises(PullError, match=message) as caught:
        fetch(remote(server), tmp_path / "m")
    assert type(caught.value) is error
    assert server.url in str(caught.value)


class FullDisk:
    """A file on a disk with little space left."""

    def __init__(self, stream: BinaryIO, space: int) -> None:
        self._stream = stream
        self._space = space

    def write(self, data: bytes) -> int:
        if len(data) > self._space:
            self._stream.write(data[: self._space])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._space -= len(data)
        return self._stream.write(data)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def test_a_full_disk_is_reported_and_the_part_kept(server: Server, tmp_path: Path) -> None:
    def opener(path: Path, append: bool) -> Any:
        return FullDisk(open_part(path, append), 1_300_000)

    with pytest.raises(PullError, match=r"disk is full.*free some space"):
        fetch(remote(server), tmp_path / "m", opener=opener)
    assert not (tmp_path / "m").exists()
    assert (tmp_path / "m.part").read_bytes() == CONTENT[:1_300_000]
    fetch(remote(server), tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == CONTENT


def test_space_is_checked_before_the_first_byte(tmp_path: Path, server: Server) -> None:
    class Huge(Handler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 60))
            self.end_headers()

    server.RequestHandlerClass = Huge
    with pytest.raises(PullError, match="disk is full"):
        fetch(remote(server, num_bytes=None), tmp_path / "m")
    assert not (tmp_path / "m.part").exists()


def test_missing_permission_is_reported(server: Server, tmp_path: Path) -> None:
    def opener(path: Path, append: bool) -> BinaryIO:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with pytest.raises(PullError, match=r"no permission to write .*m\.part; choose another cache"):
        fetch(remote(server), tmp_path / "m", opener=opener)


def test_a_file_in_the_way_of_the_folder_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(PullError, match="cannot write"):
        fetch(remote(server), tmp_path / "cache" / "m")


def test_nobody_at_the_other_end_is_told_apart(server: Server, tmp_path: Path) -> None:
    with Server() as gone:
        url = gone.url
    with pytest.raises(UnreachableError, match="cannot be reached"):
        fetch(RemoteFile(url=f"{url}/m"), tmp_path / "m")
    with pytest.raises(UnreachableError):
        check_reachable(url)
    check_reachable(server.url)
    server.statuses = [404]
    check_reachable(server.url)


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError):
            check_reachable(url, timeout_s=0.2)


def test_tokens_do_not_follow_redirects(server: Server, tmp_path: Path) -> None:
    with Server() as elsewhere:
        thread = threading.Thread(target=elsewhere.serve_forever, args=(0.01,))
        thread.start()
        server.redirect = f"{elsewhere.url}/blob"
        file = remote(server, url=f"{server.url}/start", token="secret")
        fetch(file, tmp_path / "m")
        elsewhere.shutdown()
        thread.join()
    assert server.requests[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in elsewhere.requests[0]
    assert "secret" not in repr(file)


def test_only_http_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="only http and https"):
        fetch(RemoteFile(url="file:///etc/passwd"), tmp_path / "m")


class Stream:
    """A text stream that may claim to be a terminal."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_drawn_on_terminals_only(terminal: bool) -> None:
    stream = Stream(terminal)
    progress = TerminalProgress(cast("TextIO", stream))
    progress.start("model.gguf", 100, 40)
    progress.advance(60)
    progress.finish()
    progress.notice("done")
    assert ("model.gguf" in stream.text) == terminal
    assert stream.text.endswith("done\n")
