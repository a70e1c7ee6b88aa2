"""Looking at pages kept on disk, explaining misses, and clearing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepinfer_core.errors import DeepInferError
from deepinfer_core.interfaces.kv_store import KvStoreContext, StoredPage
from deepinfer_core.testing.contracts import CommandContract
from deepinfer_prefix.commands.cache import cache
from deepinfer_prefix.explain import contents, token_bytes
from deepinfer_prefix.keys import block_keys, bounded_key, root_key
from deepinfer_prefix.tiers.configs import DiskConfig
from deepinfer_prefix.tiers.disk import DiskStore, namespace_id

TOKENS = list(range(100, 135))
BLOCK = 8


class TestCacheCommand(CommandContract):
    component = "cache"
    failing_args = ("stats", "--directory", "/no/such/folder")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def opened(folder: Path, namespace: str = "space", page_size: int = BLOCK) -> DiskStore:
    labels = {"model": f"model-{namespace}", "dtype": "float32", "page_size": str(page_size)}
    context = KvStoreContext(namespace=namespace, clock=time.time, directory=folder, labels=labels)
    return DiskStore(DiskConfig(), context)


def keys(token_ids: Sequence[int], namespace: str = "space", salt: str = "") -> list[bytes]:
    return list(block_keys(root_key(namespace, salt), token_bytes(token_ids), BLOCK))


def fill(
    folder: Path, token_ids: Sequence[int], *, namespace: str = "space", salt: str = ""
) -> None:
    store = opened(folder, namespace)
    digests = contents(token_bytes(token_ids), BLOCK)
    for key, content in zip(keys(token_ids, namespace, salt), digests, strict=True):
        assert store.put(key, StoredPage(data=b"state" * 100, content=content))
    store.close()


def run(*args: object) -> Any:
    words = [str(arg) for arg in args]
    result = CliRunner().invoke(cache, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def explain(folder: Path, token_ids: Sequence[int], *more: str) -> list[dict[str, Any]]:
    ids = ",".join(map(str, token_ids))
    found: list[dict[str, Any]] = run("explain", "--directory", folder, "--token-ids", ids, *more)
    return found


def test_stats_and_ls_count_what_is_kept(folder: Path) -> None:
    fill(folder, TOKENS)
    fill(folder, TOKENS[:16], namespace="other")
    stats = run("stats", "--directory", folder)
    assert (stats["pages"], stats["namespaces"], stats["writer_pid"]) == (6, 2, None)
    assert stats["bytes"] >= 6 * 500
    rows = {row["labels"]["model"]: row for row in run("ls", "--directory", folder)}
    assert rows["model-space"]["pages"] == 4
    assert rows["model-other"]["id"] == namespace_id("other").hex()
    [listed] = [
        row
        for row in run("ls", "--directory", folder, "--pages")
        if row["labels"]["model"] == "model-space"
    ]
    assert {page["key"] for page in listed["page_list"]} == {key.hex() for key in keys(TOKENS)}


def test_figures_are_for_people_too(folder: Path) -> None:
    fill(folder, TOKENS)
    text = CliRunner().invoke(cache, ["stats", "--directory", str(folder)]).stdout
    assert "pages        4" in text


def test_the_configured_folder_is_found(folder: Path, tmp_path: Path) -> None:
    fill(folder, TOKENS)
    sets = ["--set", "kv_store.use='disk'", "--set", f"kv_store.directory='{folder}'"]
    assert run("stats", *sets)["pages"] == 4
    file = tmp_path / "engine.toml"
    file.write_text(f'[kv_store]\nuse = "tiered"\n[kv_store.disk]\ndirectory = "{folder}"\n')
    assert run("stats", "--config", file)["pages"] == 4


def test_a_stored_prompt_is_found(folder: Path) -> None:
    fill(folder, TOKENS)
    [found] = explain(folder, TOKENS)
    assert (found["found_blocks"], found["num_blocks"], found["missing"]) == (4, 4, None)
    [longer] = explain(folder, [*TOKENS[:32], *range(20)])
    assert longer["found_tokens"] == 32
    assert longer["missing"]["state"] == "unknown"
    assert "block 4 (tokens 32 to 39) was never stored" in longer["text"]


def test_another_salt_and_another_layout_are_named(folder: Path) -> None:
    fill(folder, TOKENS, salt="tenant a")
    [found] = explain(folder, TOKENS, "--salt", "tenant a")
    assert found["missing"] is None
    [found] = explain(folder, TOKENS, "--salt", "tenant b")
    assert (found["found_blocks"], found["missing"]["state"]) == (0, "other salt")
    opened(folder, "other").close()
    rows = {row["labels"]["model"]: row for row in explain(folder, TOKENS)}
    assert rows["model-other"]["missing"]["state"] == "other layout"
    assert rows["model-space"]["missing"]["state"] == "other salt"


def test_approximations_are_named(folder: Path) -> None:
    fill(folder, TOKENS)
    store = opened(folder)
    for key in keys(TOKENS)[2:4]:
        store.delete(key)
        store.put(bounded_key(key), StoredPage(data=b"state", exact=False))
    store.close()
    [found] = explain(folder, TOKENS)
    assert (found["found_blocks"], found["bounded_from"], found["missing"]) == (4, 2, None)
    assert "4 of 4 blocks (32 tokens), from block 2 on as approximations" in found["text"]


def test_deleted_and_expired_pages_are_named(folder: Path) -> None:
    fill(folder, TOKENS)
    store = opened(folder)
    names = keys(TOKENS)
    store.delete(names[3])
    store.put(names[2], StoredPage(data=b"short"), expires_at_s=time.time() + 0.01)
    time.sleep(0.02)
    store.close()
    [found] = explain(folder, TOKENS)
    assert (found["found_blocks"], found["missing"]["state"]) == (2, "expired")
    assert "expired 0 s ago" in found["text"]


def test_a_text_is_read_by_the_tokenizer(folder: Path, model_path: Path) -> None:
    from deepinfer_core.checkpoint.gguf import GgufFormat

    checkpoint = GgufFormat().open(model_path)
    text = "The quick brown fox jumps over the lazy dog and runs away from it."
    ids = checkpoint.tokenizer().encode(text)
    checkpoint.close()
    fill(folder, ids)
    args = ["explain", "--directory", folder, "--model", model_path]
    [found] = run(*args, "--prompt", text)
    assert found["num_tokens"] == len(ids)
    assert found["missing"] is None


def test_purging(folder: Path) -> None:
    fill(folder, TOKENS)
    fill(folder, TOKENS, namespace="other")
    assert run("purge", "--directory", folder, "--older", 3600)["pages"] == 0
    one = namespace_id("other").hex()
    assert run("purge", "--directory", folder, "--namespace", one)["pages"] == 4
    assert run("stats", "--directory", folder)["pages"] == 4
    [found] = [row for row in explain(folder, TOKENS) if row["namespace"] == one]
    assert found["missing"]["state"] == "deleted"
    assert run("purge", "--directory", folder, "--all")["pages"] == 4
    assert list((folder / "segments").iterdir()) == []


def test_nothing_is_purged_under_an_engine(folder: Path, tmp_path: Path) -> None:
    fill(folder, TOKENS)
    import fcntl

    with (folder / "writer.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("12345")
        lock.flush()
        result = CliRunner().invoke(cache, ["purge", "--directory", str(folder), "--all"])
        assert isinstance(result.exception, DeepInferError)
        assert "process 12345 writes" in str(result.exception)
        assert run("stats", "--directory", folder)["pages"] == 4


@pytest.mark.parametrize(
    "args",
    [
        ["purge"],
        ["explain"],
        ["explain", "--token-ids", "1,x"],
        ["explain", "--token-ids", "1", "--prompt", "a"],
        ["purge", "--namespace", "ab"],
    ],
)
def test_what_makes_no_sense_is_refused(folder: Path, args: list[str]) -> None:
    fill(folder, TOKENS)
    result = CliRunner().invoke(cache, [*args, "--directory", str(folder)])
    assert isinstance(result.exception, DeepInferError), result.output
