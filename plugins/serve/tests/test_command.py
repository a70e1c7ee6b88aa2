"""The command ``deepinfer serve``: core's contract, names, keys, and a whole life as a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

import deepinfer_serve
from deepinfer_core.errors import ConfigError
from deepinfer_core.testing.contracts.command import CommandContract
from deepinfer_serve.command import public_name, serve

COMMAND = [sys.executable, "-c", "from deepinfer_core.cli import main; main()", "serve"]


class TestServe(CommandContract):
    component = "serve"
    plugins = (deepinfer_serve,)
    failing_args = ("--api-key-file", "/no/such/file")


def test_names_tell_nothing_of_folders(tmp_path: Path) -> None:
    file = tmp_path / "small.Q4_1.gguf"
    file.write_bytes(b"")
    assert public_name(str(file)) == "small.Q4_1"
    assert public_name(str(tmp_path)) == tmp_path.name
    assert public_name("org/name") == "org/name"


@pytest.mark.parametrize("text", ["", "\n# none\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    result = CliRunner().invoke(serve, ["--api-key-file", str(tmp_path / "keys")])
    assert isinstance(result.exception, ConfigError)
    assert "no API key" in str(result.exception)


def test_an_open_door_is_refused_before_anything_is_read() -> None:
    result = CliRunner().invoke(serve, ["--host", "0.0.0.0", "--model", "/no/such/model"])
    assert isinstance(result.exception, ConfigError)
    assert "no API key" in str(result.exception)


def test_from_start_to_sigterm(tiny_path: Path) -> None:
    server = subprocess.Popen(
        [*COMMAND, "--model", str(tiny_path), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    found = next(filter(None, (re.search(r"http://[0-9.]+:[0-9]+", s) for s in server.stderr)))
    listed = httpx.get(f"{found[0]}/v1/models", trust_env=False).json()
    assert listed["data"][0]["id"] == tiny_path.name
    assert listed["data"][0]["max_model_len"] == 512
    page = httpx.get(found[0], trust_env=False)
    assert "<title>DeepInfer" in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    server.stderr.close()
