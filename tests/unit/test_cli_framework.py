"""The command line: what is shared, how errors look, and the commands of the framework."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deepinfer_core.cli.conformance import by_name, by_plugin
from deepinfer_core.cli.main import (
    COMMANDS,
    EngineArgs,
    SamplingArgs,
    cli,
    engine_options,
    run,
    sampling_options,
)
from deepinfer_core.components import Slot
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import CompositionError, ConfigError, DeepInferError
from deepinfer_core.plugins import PluginHost
from deepinfer_core.requests import SamplingParams
from deepinfer_core.testing.plugins import offer, plugin

Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture
def deepinfer(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Run a command line in this process; return its status, output and error output."""
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = run([str(item) for item in arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return call


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution whose plugin cannot be imported."""
    info = tmp_path / "acme_bad-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-bad\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[deepinfer.plugins]\nbad = no_such_module_x\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_help_lists_every_command_without_importing_it(deepinfer: Shown) -> None:
    status, out, err = deepinfer("--help")
    assert status == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert "\n  plan " in out
    assert not err


@pytest.mark.parametrize("name", ["config", "conformance", "plan", "plugins"])
def test_command_table_points_at_commands(deepinfer: Shown, name: str) -> None:
    status, out, _ = deepinfer(name, "--help")
    assert status == 0
    assert out.startswith(f"Usage: deepinfer {name}")


def test_version(deepinfer: Shown) -> None:
    from deepinfer_core import __version__

    assert deepinfer("--version") == (0, f"deepinfer-core {__version__}\n", "")


def test_unknown_command_is_suggested(deepinfer: Shown) -> None:
    status, _, err = deepinfer("plam")
    assert status == 2
    assert "no command 'plam'; did you mean 'plan'?" in err


def test_unknown_option(deepinfer: Shown) -> None:
    status, _, err = deepinfer("plan", "--nope")
    assert status == 2
    assert "No such option" in err


# ------------------------------------------------------------------------------ errors


def fail_with(error: BaseException) -> click.Command:
    @click.command()
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make ``deepinfer fail`` raise an error."""

    def install(error: BaseException) -> None:
        module = plugin("failing_command")
        vars(module)["fail"] = fail_with(error)
        monkeypatch.setitem(sys.modules, "failing_command", module)
        monkeypatch.setitem(COMMANDS, "fail", ("failing_command", "fail", "Fail."))

    return install


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("bad file", ["x @ y"]), 2, "error: bad file\n  - x @ y\n"),
        (DeepInferError("no luck"), 1, "error: no luck\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device"), 1, "error: cannot write: No space left on device"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "error: cannot use /x: No such file\n"),
        (
            ZeroDivisionError("1/0"),
            1,
            "error: ZeroDivisionError: 1/0 (this is a bug; --debug shows",
        ),
    ],
)
def test_errors_are_one_message_without_traceback(
    deepinfer: Shown, failing: Any, error: BaseException, status: int, text: str
) -> None:
    failing(error)
    found, out, err = deepinfer("fail")
    assert (found, out) == (status, "")
    assert err.lstrip("\n").startswith(text)
    assert "Traceback" not in err


def test_debug_shows_the_traceback(deepinfer: Shown, failing: Any) -> None:
    failing(DeepInferError("no luck"))
    _, _, err = deepinfer("--debug", "fail")
    assert "Traceback" in err
    assert err.endswith("error: no luck\n")


def test_reader_that_leaves_is_no_error() -> None:
    code = "from deepinfer_core.cli import main; main(['plugins', 'list'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() in (0, 1)


# ------------------------------------------------------------------------------ shared options


def parsed(*arguments: str) -> tuple[EngineArgs, SamplingArgs]:
    seen: list[Any] = []

    @click.command()
    @engine_options
    @sampling_options
    def command(engine_args: EngineArgs, sampling_args: SamplingArgs) -> None:
        seen.extend([engine_args, sampling_args])

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return seen[0], seen[1]


def test_shared_options() -> None:
    engine, sampling = parsed(
        *("--model", "m", "--config", "c.toml", "--set", "a=1", "--set", "b=2"),
        *("--accelerator", "cpu", "--drafter", "none"),
        *("--max-tokens", "5", "--temperature", "0.5", "--seed", "3"),
    )
    assert engine == EngineArgs(
        model="m", config=Path("c.toml"), sets=("a=1", "b=2"), accelerator="cpu", drafter="none"
    )
    assert sampling.given() == {"max_tokens": 5, "temperature": 0.5, "seed": 3}


def test_shared_options_default_to_nothing_said() -> None:
    engine, sampling = parsed()
    assert (engine, sampling.given()) == (EngineArgs(), {})
    assert engine.load() == EngineConfig()


def test_model_option_is_a_string_whatever_it_looks_like() -> None:
    assert EngineArgs(model='7"x').load().model == '7"x'


def test_drafter_option_names_the_drafter() -> None:
    assert EngineArgs(drafter="none", sets=("drafter.use=auto",)).load().drafter.use == "none"
    with pytest.raises(DeepInferError, match="no drafter is named 'acme'"):
        EngineArgs(drafter="acme").load()


def test_accelerator_goes_before_variable_goes_before_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('[accelerator]\nuse = "cpu"\n')
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    with pytest.raises(
        ConfigError, match="DEEPINFER_ACCELERATOR=nvidia asks for accelerator 'sm100'"
    ):
        EngineArgs(sets=('plugins.disabled=["sm100"]',)).load()
    with pytest.raises(ConfigError, match="asks for 'sm100'"):
        EngineArgs(config=path).load()
    for args in (EngineArgs(accelerator="cpu"), EngineArgs(sets=("accelerator.use=cpu",))):
        assert args.load().accelerator.use == "cpu"


@pytest.mark.parametrize("command", ["inspect", "pull"])
def test_an_empty_name_is_no_model(deepinfer: Shown, command: str) -> None:
    status, out, err = deepinfer(command, "")
    assert (status, out) == (2, "")
    assert "the name of the model is empty" in err


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**64 - 1])
def test_seeds_are_those_of_the_python_api(seed: int) -> None:
    @click.command()
    @sampling_options
    def command(sampling_args: SamplingArgs) -> None:
        assert SamplingParams(**sampling_args.given()).seed == seed

    command.main(["--seed", str(seed)], standalone_mode=False)


def test_broken_plugins_are_named_in_one_line_at_every_start(
    deepinfer: Shown, broken: None
) -> None:
    line = (
        "warning: broken plugins: bad (acme-bad 1.5); see: deepinfer plugins doctor "
        "(with the same --config)\n"
    )
    for arguments in (["--help"], ["config", "show"], ["plugins", "list"], ["plan"]):
        _, _, err = deepinfer(*arguments)
        assert err.count(line) == 1, arguments


# ------------------------------------------------------------------------------ config


def test_config_check(deepinfer: Shown, tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text("seed = 3\n")
    assert deepinfer("config", "check", path) == (0, f"{path}: ok\n", "")
    path.write_text('seed = "3"\nsede = 3\n')
    status, _, err = deepinfer("config", "check", path)
    assert status == 2
    assert err.splitlines() == [
        f"error: invalid configuration {path}",
        "  - unknown key 'sede'; did you mean 'seed'? @ sede",
        "  - expected an integer, got '3' @ seed",
    ]


def test_config_show_reads_back(deepinfer: Shown, tmp_path: Path) -> None:
    status, out, _ = deepinfer("config", "show", "--set", "engine.page_size=32", "--model", "m")
    assert status == 0
    path = tmp_path / "shown.toml"
    path.write_text(out)
    config = EngineArgs(config=path).load()
    assert (config.engine.page_size, config.model) == (32, "m")
    assert deepinfer("config", "show", path)[1] == out


def test_configuration_given_twice(deepinfer: Shown) -> None:
    status, _, err = deepinfer("config", "show", "a.toml", "--config", "b.toml")
    assert status == 2
    assert "give the configuration once" in err


# ------------------------------------------------------------------------------ plan and plugins

NO_MODEL = ("--model", "no-such-org/no-such-model")


def test_plan_without_the_model_says_so(deepinfer: Shown) -> None:
    status, out, err = deepinfer("plan", "--accelerator", "cpu", *NO_MODEL)
    assert status == 0
    assert "note: no-such-org/no-such-model is not on this machine" in err
    assert "\naccelerator  cpu " in out


def test_plan_as_json_with_ops(deepinfer: Shown) -> None:
    status, out, _ = deepinfer("plan", "--json", "--ops", "--accelerator", "cpu", *NO_MODEL)
    assert status == 0
    content = json.loads(out)
    assert content["slots"]["accelerator"][0]["component"] == "cpu"
    assert {row["op"] for row in content["ops"]} >= {"linear", "rms_norm"}


def test_plan_of_a_path_that_is_not_there(deepinfer: Shown) -> None:
    status, _, err = deepinfer("plan", "--accelerator", "cpu", "--model", "/no/such/model.gguf")
    assert status == 2
    assert err.startswith("error: ")
    assert "/no/such/model.gguf" in err


def test_plugins_list(deepinfer: Shown) -> None:
    status, out, _ = deepinfer("plugins", "list")
    assert status == 0
    assert out.startswith("builtin (deepinfer-core ") or "\nbuiltin (deepinfer-core " in out
    content = json.loads(deepinfer("plugins", "list", "--json")[1])
    assert "builtin" in [item["name"] for item in content["plugins"]]


def test_doctor_names_distribution_cause_and_remedy(deepinfer: Shown, broken: None) -> None:
    status, out, _ = deepinfer("plugins", "doctor")
    assert status == 1
    assert "broken  bad (acme-bad 1.5)" in out
    assert "cause:  it cannot be imported: ModuleNotFoundError" in out
    assert "remedy: install the distribution that provides 'no_such_module_x'" in out
    status, out, _ = deepinfer("plugins", "doctor", "--json")
    assert status == 1
    assert json.loads(out)["broken"][0]["distribution"] == "acme-bad"


def test_plugins_of_a_configuration(deepinfer: Shown, tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('[plugins]\nload = ["no_such_module_x"]\n')
    status, out, _ = deepinfer("plugins", "doctor", "--config", path)
    assert status == 1
    assert "broken  no_such_module_x" in out
    status, _, err = deepinfer("config", "check", path)
    assert status == 2
    assert "plugin no_such_module_x is broken (import)" in err
    assert deepinfer("plugins", "list", "--config", path)[0] == 0


def test_lock_and_check(deepinfer: Shown, tmp_path: Path) -> None:
    path = tmp_path / "deepinfer.lock"
    common = ("--accelerator", "cpu", *NO_MODEL)
    assert deepinfer("plugins", "lock", "--output", path, *common)[0] == 0
    status, out, _ = deepinfer("plugins", "lock", "--check", path, *common)
    assert status == 0
    assert out.startswith(f"{path}: ok")
    changed = ("--set", "engine.page_size=16")
    status, _, err = deepinfer("plugins", "lock", "--check", path, *common, *changed)
    assert status == 1
    assert "  - options: locked " in err


# ------------------------------------------------------------------------------ commands of plugins


def test_command_of_a_plugin(
    deepinfer: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_hello.py").write_text(
        """
from deepinfer_core import Component, hookimpl
DEEPINFER_API = 1
def build(config, context):
    import click
    return click.Command("hello", callback=lambda: click.echo("hello from acme"))
@hookimpl
def deepinfer_commands():
    return (
        Component(name="hello", build=build, summary="Say hello."),
        Component(name="odd", build=lambda config, context: 5),
        Component(name="plan", build=build),
        Component(name="away", build=build, available=lambda: "no terminal"),
    )
"""
    )
    info = tmp_path / "acme_hello-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hello\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepinfer.plugins]\nhello = acme_hello\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_hello", raising=False)
    assert deepinfer("hello") == (0, "hello from acme\n", "")
    assert "Say hello. [acme-hello 1.0]" in deepinfer("--help")[1]
    assert "built int, not a click.Command" in deepinfer("odd")[2]
    assert deepinfer("plan", "--help")[1].startswith("Usage: deepinfer plan")
    assert deepinfer("away")[0] == 2
    sys.modules.pop("acme_hello", None)


# ------------------------------------------------------------------------------ conformance

TARGETS = PluginHost(
    [
        plugin("acme", offer(Slot.CACHE, "acme"), offer(Slot.DRAFTER, "acme")),
        plugin("other", offer(Slot.CACHE, "other")),
        plugin("silent", deepinfer_configured=lambda: None),
    ],
    discover=False,
    builtin=False,
)


def test_targets_of_conformance() -> None:
    assert [(str(slot), item.name) for slot, item in by_name(TARGETS, "cache/acme")] == [
        ("cache", "acme")
    ]
    assert by_name(TARGETS, "other")[0][0] is Slot.CACHE
    assert [str(slot) for slot, _ in by_plugin(TARGETS, "acme")] == ["cache", "drafter"]


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (by_name, "acme", "in several slots; name one\n  - cache/acme\n  - drafter/acme"),
        (by_name, "cash/acme", "no slot is named 'cash'; did you mean 'cache'?"),
        (by_name, "nobody", "no component is named 'nobody'; known: acme, other"),
        (by_name, "cache/nobody", "no cache is named 'nobody'; known: acme, other"),
        (by_plugin, "nobody", "no plugin is named 'nobody'; known: acme, other, silent"),
        (by_plugin, "silent", "offers no component"),
    ],
)
def test_targets_that_are_not_there(find: Any, name: str, message: str) -> None:
    with pytest.raises(CompositionError) as caught:
        find(TARGETS, name)
    assert message in str(caught.value)


@pytest.mark.parametrize("target", ["nobody", "cash/pages", "cache/nobody"])
def test_conformance_of_what_is_not_there_is_wrong_usage(deepinfer: Shown, target: str) -> None:
    assert deepinfer("conformance", target)[0] == 2
    assert deepinfer("conformance", "--plugin", "nobody")[0] == 2


def test_conformance_on_a_device_leaves_a_record(deepinfer: Shown) -> None:
    status, out, _ = deepinfer("conformance", "accelerator/cpu", "--device")
    assert status == 0
    assert re.search(
        r"^\| \d{4}-\d\d-\d\d \| cpu \| threads .* \| torch .* \| passed \|$", out, re.M
    )
    assert "no accelerator was checked" in deepinfer("conformance", "eviction/lru", "--device")[1]


def test_conformance_needs_one_target(deepinfer: Shown) -> None:
    assert deepinfer("conformance")[0] == 2
    assert deepinfer("conformance", "cache/pages", "--plugin", "builtin")[0] == 2


def test_conformance_runs_the_contract_of_a_component(deepinfer: Shown) -> None:
    status, out, _ = deepinfer("conformance", "eviction/lru")
    assert status == 0, out
    assert " passed" in out


MODULE = """
from deepinfer_core.components import Component
from deepinfer_core.hookspecs import hookimpl

DEEPINFER_API = 1


def build(config, context):
    from deepinfer_core.builtin.lru import build

    return build(None, context)


@hookimpl
def deepinfer_evictions():
    return (Component(name="acme", build=build),)
"""


def test_conformance_loads_what_a_configuration_names(
    deepinfer: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_eviction.py").write_text(MODULE)
    (tmp_path / "engine.toml").write_text('[plugins]\nload = ["acme_eviction"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = deepinfer("conformance", "eviction/acme", "--config", "engine.toml")
    assert status == 0, out + err
    assert " passed" in out
    assert deepinfer("conformance", "eviction/acme")[0] == 2


def test_conformance_leaves_nothing_where_it_is_run(
    deepinfer: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert deepinfer("conformance", "observer/jsonl")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_group_and_run_agree() -> None:
    assert set(COMMANDS) <= set(cli.list_commands(click.Context(cli)))
