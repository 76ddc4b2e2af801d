"""The ``liveserve`` command."""

from __future__ import annotations

import argparse
import importlib
import sys

from liveserve.version import __version__

# Subcommand → (module with add_arguments and run, help). Imported only when used.
_COMMANDS = {
    "calibrate": (
        "liveserve.bench.calibrate_server",
        "a cost model for the simulator, from a running server",
    ),
    "demo": ("liveserve.bench.demo", "spoken conversations on a CPU, from nothing to a report"),
    "profile": ("liveserve.bench.profile", "what first text and first audio wait for, live"),
    "simulate": (
        "liveserve.bench.simulator.command",
        "simulate a deployment: the shipped policies on a model of its costs",
    ),
    "tiny-model": (
        "liveserve.host.cpu.tiny_model",
        "write a tiny random Qwen3-Omni to run on a CPU",
    ),
    "tune": ("liveserve.bench.tune", "settings for a workload, found in the simulator"),
}
_BENCHES = {
    "adaptive": ("liveserve.bench.adaptive", "weights that follow the load, in the simulator"),
    "calibrate": ("liveserve.bench.calibrate", "measure this GPU's copy methods for the chooser"),
    "compare": ("liveserve.bench.compare", "the stock host against LiveServe, side by side"),
    "eviction": ("liveserve.bench.eviction", "what evicting costs, and what a policy is worth"),
    "kv-text": ("liveserve.bench.kv_text", "a text model's KV tiers side by side, on a CPU"),
    "overhead": ("liveserve.bench.overhead", "step times with LiveServe watching against stock"),
    "planning": ("liveserve.bench.planning", "the cost of one planning round"),
    "reload": ("liveserve.bench.reload", "a session's KV back from memory: what a turn waits for"),
    "sessions": ("liveserve.bench.sessions", "voice sessions against a running server"),
    "validate": ("liveserve.bench.validate", "the simulator against the real pipeline on a CPU"),
    "warmup": ("liveserve.bench.warmup", "first text and audio against how long the user spoke"),
    "paper": (
        "liveserve.bench.paper",
        "the paper's evaluation in the simulator, theirs beside ours",
    ),
    "transfer": ("liveserve.bench.transfer", "how fast blocks move, and what it costs decoding"),
}


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    module: str,
    help_text: str,
) -> None:
    parser = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
    loaded = importlib.import_module(module)
    loaded.add_arguments(parser)
    parser.set_defaults(run=loaded.run)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="liveserve", description="Interaction-aware serving for real-time omni-modal models."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve_help = "serve a model: vllm serve --omni with LiveServe on"
    if argv[:1] == ["serve"]:
        from liveserve.host import serve

        serve_parser = commands.add_parser("serve", description=serve_help, allow_abbrev=False)
        serve.add_arguments(serve_parser)
        args, passthrough = parser.parse_known_args(argv)
        return serve.run(args, passthrough)
    commands.add_parser("serve", help=serve_help)
    wanted = argv[0] if argv else ""
    for name, (module, help_text) in _COMMANDS.items():
        if wanted == name:
            _add(commands, name, module, help_text)
        else:
            commands.add_parser(name, help=help_text)
    bench = commands.add_parser("bench", help="benchmarks", description="Benchmarks.")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (module, help_text) in _BENCHES.items():
        if argv[:2] == ["bench", name]:
            _add(benches, name, module, help_text)
        else:
            benches.add_parser(name, help=help_text)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
