"""Configuration: exact, all problems at once, the same from TOML and from Python."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs import field, frozen, validators
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.components import NoConfig, Slot
from deepinfer_core.config import (
    SLOT_FIELDS,
    Choice,
    Choices,
    EngineConfig,
    EngineOptions,
    PluginsConfig,
    apply_environ,
    to_toml,
)
from deepinfer_core.config_file import parse_set, read_config
from deepinfer_core.errors import ComponentConflict, CompositionError, ConfigError
from deepinfer_core.plugins import PluginHost
from deepinfer_core.resolve import load_config, resolve
from deepinfer_core.structure import Misfit, structure, unstructure
from deepinfer_core.testing.plugins import offer, plugin
from deepinfer_core.toml_text import dumps
from deepinfer_core.typed import as_tuple, typed


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@frozen(kw_only=True)
class Tier:
    name: str = "host"
    size_bytes: int = field(default=1, validator=validators.ge(1))


@frozen(kw_only=True)
class PrefixConfig:
    page_size: int = field(default=16, validator=validators.ge(1))
    ttl_s: float = field(default=3.0, validator=validators.gt(0))
    exact: bool = True
    names: tuple[str, ...] = ()
    colour: Colour = Colour.RED
    mode: Literal["a", "b"] = "a"
    limit: int | None = None
    switch: bool | Literal["auto"] = "auto"
    tier: Tier = field(factory=Tier)
    tiers: tuple[Tier, ...] = ()
    weights: Mapping[str, float] = field(factory=dict)
    path: Path | None = None


@frozen(kw_only=True)
class LogConfig:
    level: str = "info"


@frozen(kw_only=True)
class PortConfig:
    port: int


@frozen(kw_only=True)
class Shared:
    size: int = 1


@frozen(kw_only=True, field_transformer=typed)
class Typed:
    mode: str = field(default="a", validator=validators.in_(("a",)))
    size: int = field(default=1, validator=validators.ge(1))
    key: str = field(default="", repr=False)
    names: tuple[str, ...] = field(default=(), converter=as_tuple)


@pytest.fixture(scope="module")
def host() -> PluginHost:
    module = plugin(
        "acme",
        offer(Slot.CACHE, "prefix", config_type=PrefixConfig),
        offer(Slot.CACHE, "pages"),
        offer(Slot.ACCELERATOR, "cpu"),
        offer(Slot.SCHEDULER, "one", config_type=Shared),
        offer(Slot.SCHEDULER, "two", config_type=Shared),
        offer(Slot.OBSERVER, "log", config_type=LogConfig),
        offer(Slot.OBSERVER, "port", config_type=PortConfig, auto=False),
        offer(Slot.DRAFTER, "taken"),
    )
    rival = plugin("rival", offer(Slot.DRAFTER, "taken"))
    return PluginHost([module, rival], discover=False, builtin=False)


@pytest.fixture
def load(tmp_path: Path, host: PluginHost) -> Callable[..., EngineConfig]:
    def load_text(text: str, *sets: str) -> EngineConfig:
        path = tmp_path / "engine.toml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, sets=sets, host=host)

    return load_text


Load = Callable[..., EngineConfig]


# ------------------------------------------------------------------------------ equality and values


def test_toml_equals_python(load: Load) -> None:
    text = """
        model = "/models/tiny"
        seed = 7
        [plugins]
        disabled = ["ascend"]
        [engine]
        page_size = 32
        overlap = false
        [cache]
        use = "prefix"
        page_size = 64
        ttl_s = 300
        tier = {name = "disk", size_bytes = 9}
        [observer]
        use = ["port", "log"]
        port.port = 9000
    """
    assert load(text) == EngineConfig(
        model="/models/tiny",
        seed=7,
        plugins=PluginsConfig(disabled=("ascend",)),
        engine=EngineOptions(page_size=32, overlap=False),
        cache=PrefixConfig(page_size=64, ttl_s=300.0, tier=Tier(name="disk", size_bytes=9)),
        observer=[PortConfig(port=9000), LogConfig()],
    )


def test_empty_file_is_the_defaults(load: Load) -> None:
    assert load("") == EngineConfig()


def test_names_objects_and_choices_mean_the_same(host: PluginHost) -> None:
    for value in ("pages", Choice(use="pages"), Choice(use="pages", options=NoConfig())):
        assert resolve(EngineConfig(cache=value), host).cache == Choice(
            use="pages", options=NoConfig()
        )
    assert resolve(EngineConfig(cache=PrefixConfig()), host).cache.use == "prefix"


def test_choices_differ_by_name_and_by_options() -> None:
    assert Choice(use="a") != Choice(use="b")
    assert Choice(use="a", options=Shared()) != Choice(use="b", options=Shared())
    assert Choice(use="a", options=Shared()) != Choice(use="a", options=Shared(size=2))
    assert Choice(use="", options=Shared()) == Choice(use="a", options=Shared())
    assert Choice() != "auto"


def test_ints_pass_as_floats_and_nothing_else_is_coerced(load: Load) -> None:
    config = load('[cache]\nuse = "prefix"\nttl_s = 3\n').cache.options
    assert (config.ttl_s, type(config.ttl_s)) == (3.0, float)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('page_size = "64"', "expected an integer, got '64' @ cache.page_size"),
        ("page_size = 4.0", "expected an integer, got 4.0 @ cache.page_size"),
        ("page_size = true", "expected an integer, got true @ cache.page_size"),
        ('exact = "false"', "expected true or false, got 'false' @ cache.exact"),
        ("exact = 1", "expected true or false, got 1 @ cache.exact"),
        ('ttl_s = "3"', "expected a number, got '3' @ cache.ttl_s"),
        ('names = "abc"', "expected an array of strings, got 'abc' @ cache.names"),
        ('names = ["a", 5]', "expected a string, got 5 @ cache.names[1]"),
        ('colour = "green"', "expected one of 'red', 'blue', got 'green' @ cache.colour"),
        ("colour = 1", "got 1 @ cache.colour"),
        ('mode = "c"', "expected 'a' or 'b', got 'c' @ cache.mode"),
        ('switch = "on"', "expected true, false or 'auto', got 'on' @ cache.switch"),
        ("limit = 1.5", "expected an integer, got 1.5 @ cache.limit"),
        ("tier = 5", "expected a table, got 5 @ cache.tier"),
        ("tier = {size = 5}", "unknown key 'size'; did you mean 'size_bytes'? @ cache.tier.size"),
        ("tiers = [{}, {size_bytes = 0}]", "must be >= 1: 0 @ cache.tiers[1].size_bytes"),
        ('weights = {a = "b"}', "expected a number, got 'b' @ cache.weights.a"),
        ("path = 5", "expected a path as a string, got 5 @ cache.path"),
        ("page_size = 0", "'page_size' must be >= 1: 0 @ cache.page_size"),
        ("pagesize = 1", "unknown key 'pagesize'; did you mean 'page_size'? @ cache.pagesize"),
    ],
)
def test_problem_has_its_path(load: Load, line: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f'[cache]\nuse = "prefix"\n{line}\n')
    (found,) = caught.value.problems
    assert found.endswith(problem)


def test_every_problem_of_the_file_is_reported_at_once(load: Load) -> None:
    text = """
        modle = "x"
        seed = -1
        dtype = "int8"
        [engine]
        page_size = 24
        max_sequences = "many"
        kv_pages = 0
        memory_fraction = 1.5
        [cahce]
        [plugins]
        disabled = "x"
        [attention]
        use = 5
        [scheduler]
        use = "three"
        [drafter]
        use = "taken"
        [cache]
        use = "prefix"
        page_size = 0
        ttl = 1
        ttl_s = -1.0
        [observer]
        use = ["log", "port"]
        log.level = 3
        extra = 1
        [kernels]
        use = ["fast"]
        slow.x = 1
    """
    with pytest.raises(ConfigError) as caught:
        load(text)
    found = {problem.rpartition(" @ ")[2] for problem in caught.value.problems}
    assert found == {
        "modle", "seed", "dtype", "engine.page_size", "engine.max_sequences", "engine.kv_pages",
        "engine.memory_fraction", "cahce", "plugins.disabled", "attention.use", "scheduler.use",
        "drafter.use", "cache.page_size", "cache.ttl", "cache.ttl_s", "observer.extra",
        "kernels.slow",
    }  # fmt: skip
    assert "engine.toml" in str(caught.value)


def test_missing_value_of_a_named_component(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"a value is required @ observer\.port\.port"):
        load('[observer]\nuse = "port"\n')


def test_cross_field_check(load: Load) -> None:
    with pytest.raises(ConfigError, match="set one @ engine"):
        load("[engine]\nkv_pages = 1\nkv_memory_bytes = 1\n")


@pytest.mark.parametrize(
    ("content", "place"),
    [(b"model = \n", ":1:9: "), (b"a = 1\na = 2\n", ":2:6: "), (b"x = 1\n[", ":2:2: ")],
)
def test_syntax_error_names_file_and_line(tmp_path: Path, content: bytes, place: str) -> None:
    path = tmp_path / "engine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert f"{path}{place}" in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config(tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="directory"):
        read_config(tmp_path)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert read_config(path).config.seed == 3


# ------------------------------------------------------------------------------ components by name


def test_only_problem_keeps_its_own_type(load: Load) -> None:
    with pytest.raises(CompositionError, match="no cache is named 'prefx'; did you mean 'prefix'"):
        load('[cache]\nuse = "prefx"\n')
    with pytest.raises(ComponentConflict, match="acme and by rival"):
        load('[drafter]\nuse = "taken"\n')


def test_config_class_of_several_components_needs_a_name(host: PluginHost) -> None:
    with pytest.raises(ConfigError, match=r"several components \(one, two\)"):
        resolve(EngineConfig(scheduler=Shared()), host)
    config = EngineConfig(scheduler=Choice(use="two", options=Shared(size=3)))
    assert resolve(config, host).scheduler.use == "two"


def test_config_class_of_nobody(host: PluginHost) -> None:
    with pytest.raises(ConfigError, match="no config class of a cache; known: NoConfig, PrefixC"):
        resolve(EngineConfig(cache=Shared()), host)


def test_options_of_another_component(host: PluginHost) -> None:
    config = EngineConfig(cache=Choice(use="pages", options=PrefixConfig()))
    with pytest.raises(ConfigError, match="'pages' takes NoConfig, got PrefixConfig @ cache"):
        resolve(config, host)


def test_options_of_an_auto_slot_must_suit_somebody(load: Load) -> None:
    assert load("[cache]\nttl_s = 5.0\n").cache.options == {"ttl_s": 5.0}
    with pytest.raises(ConfigError, match=r"@ cache\.tttl"):
        load("[cache]\ntttl = 5.0\n")


def test_none_leaves_optional_slots_empty_only(load: Load) -> None:
    assert load('[drafter]\nuse = "none"\n').drafter.use == "none"
    with pytest.raises(CompositionError, match="no cache is named 'none'"):
        load('[cache]\nuse = "none"\n')
    with pytest.raises(ConfigError, match="takes no options @ drafter"):
        load('[drafter]\nuse = "none"\nx = 1\n')


# ------------------------------------------------------------------------------ --set


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=32", 32),
        ("a.b = 1.5", 1.5),
        ("a.b=true", True),
        ('a.b="x y"', "x y"),
        ("a.b=prefix", "prefix"),
        ("a.b=org/model-1.0", "org/model-1.0"),
        ("a.b=/models/x=y", None),
        ("a.b=~/models/tiny", "~/models/tiny"),
        ('a.b=["x", "y"]', ["x", "y"]),
        ("a.b={c = 1}", {"c": 1}),
        ("a.b=", None),
        ("a.b=two words", None),
        ("a.b=1\nc = 2", None),
        ("a.b", None),
        ("=1", None),
        ("a..b=1", None),
    ],
)
def test_set_reads_toml_and_bare_words(text: str, value: Any) -> None:
    if value is None:
        with pytest.raises(ConfigError, match="--set"):
            parse_set(text)
    else:
        assert parse_set(text) == (("a", "b"), value)


def test_set_goes_before_the_file(load: Load) -> None:
    config = load('seed = 1\n[cache]\nuse = "prefix"\n', "cache.page_size=32", "seed=2")
    assert (config.seed, config.cache.options.page_size) == (2, 32)


def test_set_of_another_component_drops_the_options_of_the_first(load: Load) -> None:
    text = '[cache]\nuse = "prefix"\npage_size = 8\n'
    assert load(text, "cache.use=pages").cache == Choice(use="pages", options=NoConfig())
    assert load(text, "cache.use=prefix").cache.options.page_size == 8


def test_set_options_follow_the_name_in_any_order(load: Load) -> None:
    config = load('[cache]\nuse = "pages"\n', "cache.page_size=4", "cache.use=prefix")
    assert config.cache == PrefixConfigChoice(page_size=4)


def PrefixConfigChoice(**options: Any) -> Choice:  # noqa: N802 - reads as the class it wraps
    return Choice(use="prefix", options=PrefixConfig(**options))


def test_set_into_a_value(load: Load) -> None:
    with pytest.raises(ConfigError, match="seed is 1, not a table"):
        load("seed = 1\n", "seed.x=2")


# ------------------------------------------------------------------------------ Python values

engine_config: Any = EngineConfig
engine_options: Any = EngineOptions
plugins_config: Any = PluginsConfig
choice: Any = Choice
choices: Any = Choices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: engine_config(model=""), "'model' must be"),
        (lambda: engine_config(model=5), "'model' must be"),
        (lambda: engine_config(seed=-1), "'seed' must be >= 0"),
        (lambda: EngineOptions(num_threads=10**6), "'num_threads' must be <= 1024: 1000000"),
        (lambda: engine_config(seed=1.5), "'seed' must be an integer"),
        (lambda: engine_config(seed=True), "'seed' must be an integer"),
        (
            lambda: engine_config(dtype="int4"),
            "'dtype' must be 'auto', 'float32', .*: 'int4'",
        ),
        (lambda: engine_config(max_model_len=0), "'max_model_len' must be >= 1"),
        (lambda: engine_options(page_size=12), "power of two"),
        (lambda: engine_options(deadline_s=0), "above 0"),
        (lambda: engine_options(deadline_s=math.nan), "above 0"),
        (lambda: engine_options(deadline_s="1"), "must be a number"),
        (lambda: engine_options(overlap="yes"), "'overlap' must be true, false or 'auto'"),
        (lambda: engine_options(memory_fraction=0), "memory_fraction"),
        (lambda: engine_options(memory_fraction="a"), "'memory_fraction' must be a number: 'a'"),
        (lambda: engine_options(page_size=True), "'page_size' must be an integer: True"),
        (lambda: engine_options(kv_dtype=["int8"]), "'kv_dtype' must be 'auto', .* or 'int8'"),
        (lambda: plugins_config(disabled="abc"), "'disabled' must be an array of strings: 'abc'"),
        (lambda: plugins_config(load=[3]), "'load' must be an array of strings"),
        (lambda: plugins_config(required=3), "'required' must be an array of strings: 3"),
        (lambda: engine_config(engine={"page_size": 16}), "'engine' must be EngineOptions: {"),
        (lambda: engine_config(plugins="prefix"), "'plugins' must be PluginsConfig: 'prefix'"),
        (lambda: engine_config(scheduler=3), "'scheduler' must be a component's name, .*: 3"),
        (lambda: engine_config(drafter=["a"]), r"'drafter' must be a component's .*: \['a'\]"),
        (lambda: engine_config(cache=Choices()), "'cache' must be a component's name"),
        (lambda: engine_config(kernels=[3]), r"'kernels' must be 'auto', or a sequence .*: \[3\]"),
        (lambda: engine_config(observer={}), "'observer' must be 'auto', or a sequence"),
        (lambda: choice(use=3), "'use' must be a string: 3"),
        (lambda: choices(picks="log"), "'picks' must be an array"),
        (lambda: choices(auto="yes"), "'auto' must be true or false: 'yes'"),
    ],
)
def test_python_values_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("named", ["", "prefix"])
def test_options_made_in_python_fit_their_types(host: PluginHost, named: str) -> None:
    wrong: Any = {"page_size": 4.0, "exact": "no", "names": [3], "tier": "disk"}
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig(cache=Choice(use=named, options=PrefixConfig(**wrong))), host)
    assert caught.value.problems == (
        "expected an integer, got 4.0 @ cache.page_size",
        "expected true or false, got 'no' @ cache.exact",
        "expected an array of strings, got [3] @ cache.names",
        "expected Tier, got 'disk' @ cache.tier",
    )


def test_checks_of_options_are_errors_of_configuration() -> None:
    wrong: Any = "b"
    secret: Any = b"secret"
    with pytest.raises(ConfigError, match="'mode' must be in"):
        Typed(mode=wrong)
    with pytest.raises(ConfigError, match="'size' must be an integer: 'b'"):
        Typed(size=wrong)
    with pytest.raises(ConfigError, match=r"'key' must be a string$"):
        Typed(key=secret)
    with pytest.raises(ConfigError, match=r"'names' must be an array of strings: \{\}"):
        Typed(names={})
    assert Typed(names=["a"]).names == ("a",)


def test_every_slot_but_commands_has_a_field() -> None:
    assert set(SLOT_FIELDS) == set(Slot) - {Slot.COMMAND}
    fields = attrs.fields_dict(EngineConfig)
    for slot, name in SLOT_FIELDS.items():
        factory = getattr(fields[name].default, "factory", None)
        assert (factory is Choices) == slot.many


# ------------------------------------------------------------------------------ the variable


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("sm100", "sm100"),
        ("nvidia", "sm100"),
        ("ascend", "ascend"),
        ("cpu", "cpu"),
        (" CPU ", "cpu"),
    ],
)
def test_variable_names_the_accelerator(value: str, name: str) -> None:
    config = apply_environ(EngineConfig(), {"DEEPINFER_ACCELERATOR": value})
    assert config.accelerator.use == name


@pytest.mark.parametrize("environ", [{}, {"DEEPINFER_ACCELERATOR": ""}])
def test_no_variable_changes_nothing(environ: dict[str, str]) -> None:
    assert apply_environ(EngineConfig(), environ) == EngineConfig()


def test_variable_against_the_file() -> None:
    config = EngineConfig(accelerator="cpu")
    assert apply_environ(config, {"DEEPINFER_ACCELERATOR": "cpu"}) == config
    with pytest.raises(ConfigError, match=r"asks for 'sm100', but .* names accelerator 'cpu'"):
        apply_environ(config, {"DEEPINFER_ACCELERATOR": "nvidia"})


def test_command_line_goes_before_the_variable() -> None:
    config = EngineConfig(accelerator="cpu")
    assert apply_environ(config, {"DEEPINFER_ACCELERATOR": "sm100"}, overridden=True) == config


@pytest.mark.parametrize("overridden", [True, False])
def test_unknown_value_lists_the_valid_ones(overridden: bool) -> None:
    with pytest.raises(ConfigError, match="valid values: sm100, nvidia, ascend, cpu"):
        apply_environ(EngineConfig(), {"DEEPINFER_ACCELERATOR": "tpu"}, overridden=overridden)


# ------------------------------------------------------------------------------ round trips

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=6)
sizes = st.integers(1, 2**40)
tiers = st.builds(Tier, name=texts, size_bytes=sizes)
prefixes = st.builds(
    PrefixConfig,
    page_size=sizes,
    ttl_s=st.floats(min_value=1e-300, allow_nan=False),
    exact=st.booleans(),
    names=st.lists(texts, max_size=3).map(tuple),
    colour=st.sampled_from(Colour),
    mode=st.sampled_from(["a", "b"]),
    limit=st.none() | st.integers(),
    switch=st.booleans() | st.just("auto"),
    tier=tiers,
    tiers=st.lists(tiers, max_size=2).map(tuple),
    weights=st.dictionaries(texts, st.floats(allow_nan=False), max_size=2),
    path=st.none() | st.just(Path("/models/x")),
)
configs = st.builds(
    EngineConfig,
    model=texts.filter(str.strip),
    seed=st.integers(0, 2**63),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    max_model_len=st.none() | sizes,
    plugins=st.builds(PluginsConfig, disabled=st.lists(names, max_size=2)),
    engine=st.builds(
        EngineOptions,
        max_batch_tokens=sizes,
        kv_pages=st.none() | sizes,
        memory_fraction=st.floats(0.01, 0.95),
        overlap=st.booleans() | st.just("auto"),
        deadline_s=st.none() | st.floats(min_value=0.001, max_value=1e9),
    ),
    cache=st.just("auto") | st.just("pages") | prefixes,
    observer=st.just("auto")
    | st.lists(
        st.builds(LogConfig, level=texts) | st.builds(PortConfig, port=sizes),
        max_size=2,
        unique_by=type,
    ),
)


@given(configs)
def test_a_written_configuration_reads_back_equal(host: PluginHost, config: EngineConfig) -> None:
    config = resolve(config, host)
    text = to_toml(config)
    path = read_back(text)
    assert resolve(path, host) == config


def read_back(text: str) -> EngineConfig:
    from deepinfer_core.config_file import draft

    read = draft(tomllib.loads(text), "text")
    read.fail()
    return read.config


def test_unresolved_configuration_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="cache is named by its class PrefixConfig only"):
        to_toml(EngineConfig(cache=PrefixConfig()))


values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4))
def test_toml_text_is_the_inverse_of_tomllib(table: dict[str, Any]) -> None:
    assert tomllib.loads(dumps(table)) == table


def test_toml_has_no_form_for_none() -> None:
    with pytest.raises(ConfigError, match="no form for None"):
        dumps({"a": None})


@given(prefixes)
def test_structure_undoes_unstructure(config: PrefixConfig) -> None:
    assert structure(unstructure(config), PrefixConfig) == config


def test_unsupported_option_type() -> None:
    with pytest.raises(Misfit, match="cannot be read from a file"):
        structure({"x": 1}, complex)


def test_fixed_length_arrays_and_sets() -> None:
    assert structure([1, "a"], tuple[int, str]) == (1, "a")
    with pytest.raises(Misfit, match="expected 2 values, got 1"):
        structure([1], tuple[int, str])
    assert structure(["a", "b"], frozenset[str]) == {"a", "b"}
