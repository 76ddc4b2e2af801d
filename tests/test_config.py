"""Configuration: defaults, environment, flags, and what each mistake is told."""

from __future__ import annotations

import argparse
import json

import pytest

from liveserve import config as live_config
from liveserve.config import ConfigError, LiveServeConfig, export, from_env, parse_config
from liveserve.host import serve


def test_environment_round_trip():
    environ: dict[str, str] = {}
    config = LiveServeConfig(ring_capacity=7, stages={"talker": live_config.StageConfig(0.25)})
    export(config, environ)
    assert from_env(environ) == config


@pytest.mark.parametrize("switch", ["", "0", "off", "OFF", "false", "no"])
def test_off(switch):
    assert from_env({"LIVESERVE": switch}) is None


def test_unset_is_off_and_on_is_the_defaults():
    assert from_env({}) is None
    assert from_env({"LIVESERVE": "on"}) == LiveServeConfig()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('{"ring_capacity": 0}', "ring_capacity"),
        ('{"ring_capacity": "many"}', "ring_capacity"),
        ('{"heartbeat_ms": -1}', "heartbeat_ms"),
        ('{"playback": "psychic"}', "playback"),
        ('{"colour": "red"}', "colour"),
        ('{"stages": {"talker": {"p_safe_s": -1}}}', r"stages.*p_safe_s"),
        ('{"stages": {"talker": {"gamma": 1}}}', "gamma"),
        ('{"stages": {"talker": {"p_hold_s": 1, "p_release_s": 2}}}', r"stages\.talker: p_hold_s"),
        ('{"switches": {"order": 1}}', r"switches.*order"),
        ("{not json", "not JSON"),
        ("/no/such/file.json", r"/no/such/file\.json"),
    ],
)
def test_mistakes_are_named(source, names):
    with pytest.raises(ConfigError, match=names):
        parse_config(source)


def test_a_bad_switch_is_named():
    with pytest.raises(ConfigError, match="LIVESERVE='maybe'"):
        from_env({"LIVESERVE": "maybe"})


def test_configuration_from_a_file(tmp_path):
    path = tmp_path / "live.json"
    path.write_text(json.dumps({"max_sessions": 12}))
    assert parse_config(str(path)).max_sessions == 12


def flags(*argv: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    return parser.parse_known_args(list(argv))


def test_flags_win_over_the_configuration_and_the_rest_passes_through():
    args, rest = flags(
        "MODEL",
        "--port",
        "8123",
        "--liveserve-config",
        '{"max_sessions": 5, "stages": {"talker": {"p_safe_s": 0.1}}}',
        "--liveserve-max-sessions",
        "6",
        "--liveserve-p-safe",
        "thinker=1.5",
        "--max-num-seqs=4",
    )
    config = serve.build_config(args)
    assert config.max_sessions == 6
    assert config.policy("talker", config.switches).p_safe_s == 0.1
    thinker = config.policy("thinker", config.switches)
    bounds = (thinker.p_safe_s, thinker.p_release_s, thinker.p_hold_s)
    assert bounds == pytest.approx((1.5, 1.5, 3.0))
    assert config.policy("talker", config.switches).pace
    assert not thinker.pace
    assert rest == ["MODEL", "--port", "8123", "--max-num-seqs=4"]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--liveserve-p-safe", "thinker"], "liveserve-p-safe 'thinker'"),
        (["--liveserve-p-safe", "thinker=soon"], "thinker=soon"),
        (["--liveserve-p-safe", "thinker=-1"], "p_safe_s"),
        (["--liveserve-p-safe", "thinker=nan"], "p_safe_s"),
        (["--liveserve-max-sessions", "0"], "max_sessions"),
        (["--liveserve-flush-interval-ms", "-3"], "flush_interval_ms"),
        (["--liveserve-flush-interval-ms", "inf"], "flush_interval_ms"),
        (["--liveserve-config", "{"], "not JSON"),
    ],
)
def test_bad_flags_are_named(argv, names):
    args, _ = flags(*argv)
    with pytest.raises(ConfigError, match=names):
        serve.build_config(args)


def test_plugin_list_keeps_what_the_user_allowed():
    assert serve.plugin_names({"VLLM_PLUGINS": "mine"}).split(",") == [
        "liveserve",
        "liveserve_cpu",
        "mine",
    ]
    assert {"liveserve", "vllm_omni_register_models"} <= set(serve.plugin_names({}).split(","))
