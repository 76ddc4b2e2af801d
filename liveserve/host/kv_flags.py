"""Flags of the KV tier, for ``liveserve serve`` and, added by the plugin, for ``vllm serve``."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from liveserve.config import ConfigError, KvConfig
from liveserve.host.seam import expect
from liveserve.kvtier import host_memory
from liveserve.kvtier.policies import POLICIES

NAME = "liveserve"
GIB = 1 << 30
_MODULE = "liveserve.host.connector"
_CLASS = "LiveServeConnector"


def gib(text: str) -> float:
    """For argparse: a positive number of GiB."""
    return _positive(text, "a number of GiB above 0, e.g. 8")


def gbps(text: str) -> float:
    """For argparse: a positive rate in 1e9 bytes/s."""
    return _positive(text, "a rate above 0 in 1e9 bytes a second, e.g. 24")


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
        if not (math.isfinite(value) and value > 0):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
    return value


def add_arguments(parser: Any) -> None:
    """Add the tier's flags to ``parser``, in a group of their own."""
    group = parser.add_argument_group("LiveServe KV tier")
    group.add_argument(
        "--kv-connector",
        choices=(NAME,),
        help="keep the KV of sessions in host memory beyond their turn; turns prefix caching on",
    )
    group.add_argument(
        "--kv-dram-gb", type=gib, metavar="GIB", help="host memory for KV in each worker process"
    )
    group.add_argument(
        "--kv-policy", choices=POLICIES, help="who is evicted first (default next-use)"
    )
    group.add_argument(
        "--link-gbps",
        type=gbps,
        metavar="GBPS",
        help="without a GPU: copy no faster than a link of this rate, 1e9 bytes a second",
    )


def from_args(args: argparse.Namespace, base: KvConfig) -> KvConfig | None:
    """The tier's settings that the flags ask for, over ``base``; None: no tier.

    Raises:
        ConfigError: flags that contradict one another, or more memory than there is.
    """
    given = {
        "--kv-dram-gb": args.kv_dram_gb,
        "--kv-policy": args.kv_policy,
        "--link-gbps": args.link_gbps,
    }
    if args.kv_connector is None:
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(f"{flag} is of no use alone: add --kv-connector {NAME}")
        return None
    changes: dict[str, Any] = {}
    if args.kv_dram_gb is not None:
        changes["dram_bytes"] = int(args.kv_dram_gb * GIB)
    if args.kv_policy is not None:
        changes["policy"] = args.kv_policy
    if args.link_gbps is not None:
        changes["link_gbps"] = args.link_gbps
    settings = msgspec.structs.replace(base, **changes)
    check_memory(settings)
    return settings


def check_memory(settings: KvConfig) -> None:
    """Raises ConfigError unless there is memory for the tier."""
    if settings.dram_bytes < 1:
        raise ConfigError(
            f"--kv-connector {NAME} needs memory: give --kv-dram-gb GIB (or kv.dram_bytes)"
        )
    available = host_memory.available_bytes()
    if settings.dram_bytes > available:
        raise ConfigError(
            f"--kv-dram-gb {settings.dram_bytes / GIB:g}: {available / GIB:.1f} GiB of host memory "
            "are available; give less"
        )


def settings(base: KvConfig, extra: Mapping[str, Any]) -> KvConfig:
    """``base`` with the connector's extra configuration laid over it: fields of `KvConfig`, or
    ``dram_gb``.

    Raises:
        ConfigError: a key or a value that is not allowed.
    """
    changes = dict(extra)
    where = "kv_connector_extra_config"
    if "dram_gb" in changes:
        try:
            changes["dram_bytes"] = int(gib(str(changes.pop("dram_gb"))) * GIB)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{where}, dram_gb: {error}") from None
    try:
        return msgspec.convert(msgspec.to_builtins(base) | changes, KvConfig)
    except msgspec.ValidationError as error:
        names = ", ".join(("dram_gb", *KvConfig.__struct_fields__))
        raise ConfigError(f"{where}: {error}; its keys are {names}") from None


def check_engine(settings: KvConfig, prefix_caching: bool) -> None:
    """Raises ConfigError unless an engine can have the tier."""
    check_prefix_caching(prefix_caching)
    if settings.dram_bytes < 1:
        raise ConfigError(
            f"the {NAME} KV connector needs memory: give --kv-dram-gb GIB, or "
            '"kv_connector_extra_config": {"dram_gb": GIB}'
        )


def check_prefix_caching(on: object) -> None:
    """Raises ConfigError unless ``on``."""
    if not on:
        raise ConfigError(
            f"the {NAME} KV connector works through the prefix cache, which is switched off: "
            "remove --no-enable-prefix-caching, or set enable_prefix_caching: true"
        )


def transfer_config(settings: KvConfig | None) -> dict[str, Any]:
    """The host's ``kv_transfer_config``. ``settings``: None if they come through the environment.

    The role: see `liveserve.host.connector`.
    """
    made: dict[str, Any] = {
        "kv_connector": NAME,
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
    }
    if settings is not None:
        made["kv_connector_extra_config"] = msgspec.to_builtins(settings)
    return made


# ---- in the host --------------------------------------------------------------------------------


def install() -> None:
    """Make the connector known to the host, and its flags to ``vllm serve``. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    expect(hasattr(KVConnectorFactory, "_registry"), "KVConnectorFactory._registry is gone")
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, _MODULE, _CLASS)
    _install_flags()


def _install_flags() -> None:
    from vllm.engine.arg_utils import EngineArgs

    add, make = EngineArgs.add_cli_args, EngineArgs.__dict__.get("from_cli_args")
    if hasattr(add, "liveserve"):
        return
    expect(isinstance(make, classmethod), "EngineArgs.from_cli_args is no class method")
    assert isinstance(make, classmethod)
    wrapped = make.__func__

    @functools.wraps(add)
    def add_cli_args(parser: Any) -> Any:
        parser = add(parser)
        if "--kv-connector" not in parser._option_string_actions:
            add_arguments(parser)
        return parser

    @functools.wraps(wrapped)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        if getattr(args, "kv_connector", None) is not None or getattr(args, "kv_dram_gb", None):
            _apply(args)
        return wrapped(cls, args)

    add_cli_args.liveserve = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)  # type: ignore[method-assign]
    EngineArgs.from_cli_args = classmethod(from_cli_args)  # type: ignore[assignment]


def _apply(args: argparse.Namespace) -> None:
    """Turn our flags into the host's settings."""
    from vllm.config import KVTransferConfig

    from liveserve.config import LiveServeConfig, from_env

    try:
        base = from_env() or LiveServeConfig()
        chosen = from_args(args, base.kv)
        assert chosen is not None
        if getattr(args, "omni", False):
            raise ConfigError(
                "--kv-connector would reach every stage of an omni model, and only the thinker can "
                "use it: start it with `liveserve serve`"
            )
        if getattr(args, "kv_transfer_config", None) is not None:
            raise ConfigError("--kv-connector and --kv-transfer-config: give one of them")
        if getattr(args, "enable_prefix_caching", None) is False:
            check_prefix_caching(False)
    except ConfigError as error:
        print(f"vllm serve: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    args.kv_transfer_config = KVTransferConfig(**transfer_config(chosen))
    args.enable_prefix_caching = True
