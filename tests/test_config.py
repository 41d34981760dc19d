"""Owns the tests of settings and of the logger: precedence, units, suggestions, messages that name what is wrong."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from gfkernels import trace
from gfkernels.config import Config
from gfkernels.errors import ConfigError


def test_options_over_environment_over_defaults() -> None:
    environ = {"GFKERNELS_PLAN": "ring", "GFKERNELS_TIMEOUT_S": "5", "PATH": "/bin"}
    config = Config.load({"plan": "direct"}, environ)
    assert (config.plan, config.timeout_s, config.transport) == ("direct", 5.0, "auto")
    assert Config.load() == Config()


def test_a_given_config_takes_the_environments_place() -> None:
    base = Config(plan="ring", lanes=3)
    config = Config.load({"lanes": 2}, {"GFKERNELS_PLAN": "direct"}, base)
    assert (config.plan, config.lanes) == ("ring", 2)


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().plan = "ring"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("GFKERNELS_SEGMENT_BYTES", "64KiB", "segment_bytes", 65536),
        ("GFKERNELS_SEGMENT_BYTES", "1M", "segment_bytes", 1 << 20),
        ("GFKERNELS_STAGING_BYTES", " 2 gb ", "staging_bytes", 2 << 30),
        ("GFKERNELS_INLINE_BYTES", "0", "inline_bytes", 0),
        ("GFKERNELS_WIRE", "none", "wire", None),
        ("GFKERNELS_WIRE", "BFloat16", "wire", "bfloat16"),
        ("GFKERNELS_LOG", "DEBUG", "log", "debug"),
        ("GFKERNELS_TIMEOUT_S", "0.5", "timeout_s", 0.5),
        ("GFKERNELS_PLAN", "", "plan", "auto"),
        ("GFKERNELS_SPIN_US", "0", "spin_us", 0),
        ("GFKERNELS_SECRET", "long enough", "secret", "long enough"),
        ("GFKERNELS_CACHE_DIR", "/x", "cache_dir", "/x"),
    ],
)
def test_values(variable: str, text: str, name: str, value: Any) -> None:
    assert getattr(Config.load({}, {variable: text}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transport", "udp"),
        ("transport", 3),
        ("plan", None),
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("timeout_s", "soon"),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", True),
        ("segment_bytes", "64 furlongs"),
        ("segment_bytes", -1),
        ("segment_bytes", 1.5),
        ("segment_bytes", 1),
        ("lanes", 0),
        ("lanes", 17),
        ("lanes", True),
        ("wire", "float32"),
        ("log", "loud"),
        ("ptrace", "on"),
        ("job_id", " "),
        ("interface", 7),
    ],
)
def test_bad_values_name_the_setting_the_value_and_what_is_allowed(name: str, value: Any) -> None:
    allowed = next(setting.allowed for setting in Config.settings() if setting.name == name)
    with pytest.raises(ConfigError) as caught:
        Config.load({name: value})
    assert f"{name}={value!r}" in str(caught.value) and allowed in str(caught.value)


def test_bad_variables_name_the_variable() -> None:
    with pytest.raises(ConfigError, match="GFKERNELS_PLAN='rings'"):
        Config.load({}, {"GFKERNELS_PLAN": "rings"})


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        ({"GFKERNELS_TRANSPROT": "shm"}, {}, "GFKERNELS_TRANSPROT: did you mean GFKERNELS_TRANSPORT?"),
        ({"GFKERNELS_timeout_s": "1"}, {}, "did you mean GFKERNELS_TIMEOUT_S?"),
        ({"GFKERNELS_TIMEOUT": "1"}, {}, "did you mean GFKERNELS_TIMEOUT_S?"),
        ({"GFKERNELS_": "1"}, {}, "unknown environment variable GFKERNELS_"),
        ({}, {"lane": 1}, "unknown option lane: did you mean lanes?"),
        ({}, {"TIMEOUT_S": 1}, "did you mean timeout_s?"),
        ({}, {"qqqqqqq": 1}, "known are arena_bytes,"),
    ],
)
def test_unknown_names_suggest_the_nearest(environ: dict[str, str], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(options, environ)
    assert words in str(caught.value)


def test_unknown_variables_are_refused_beside_a_given_config() -> None:
    with pytest.raises(ConfigError, match="GFKERNELS_PLANN"):
        Config.load({}, {"GFKERNELS_PLANN": "ring"}, Config())


def test_the_secret_is_never_shown() -> None:
    assert "hunter22" not in repr(Config(secret="hunter22"))
    with pytest.raises(ConfigError) as caught:
        Config.load({"secret": "hunter2"})
    assert "hunter2" not in str(caught.value) and "at least 8" in str(caught.value)


def test_every_field_is_documented_and_its_default_is_allowed() -> None:
    settings = Config.settings()
    assert [setting.name for setting in settings] == [field.name for field in dataclasses.fields(Config)]
    for setting in settings:
        assert setting.doc.endswith(".") and setting.allowed
        assert setting.variable == f"GFKERNELS_{setting.name.upper()}"
        if setting.default is not None:
            assert getattr(Config.load({setting.name: setting.default}), setting.name) == setting.default


def test_default_memory_stays_within_the_budget() -> None:
    assert Config().staging_bytes + Config().inline_bytes <= 64 << 20


def test_log_lines_carry_the_rank(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        trace.configure("info", 3)
        trace.log.info("hello %d", 5)
        trace.log.debug("not this")
        assert [record.getMessage() for record in caplog.records] == ["[rank 3] hello 5"]
        assert capsys.readouterr().err == "", "an application with handlers of its own gets no second copy"
        trace.configure("off", 3)
        trace.log.error("nor this")
        assert len(caplog.records) == 1
    finally:
        trace.configure("warning")


def test_log_lines_go_to_stderr_where_nobody_else_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    try:
        trace.configure("warning", 1)
        trace.configure("warning", 1)
        trace.log.warning("look")
        assert capsys.readouterr().err == "gfkernels WARNING: [rank 1] look\n"
    finally:
        trace.configure("warning")
