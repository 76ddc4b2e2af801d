"""``liveserve bench kv-text``: a text model's conversations over KV memory that holds two of them.

Plain vLLM, one server after another: without a prefix cache, with one, with the host's own
OffloadingConnector behind it, and with LiveServe's tier behind it. The same seeded conversations
run in each; a turn's prompt is everything that was said before and something new. Both tiers copy
as fast as the machine's memory does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from liveserve.bench.launch import Server, ServerFailed, add_server_arguments, running_server
from liveserve.bench.metrics import percentiles, prompt_metrics
from liveserve.bench.result_file import build_result, ratio_of, write_result
from liveserve.bench.server import exposition, kv_totals, parse_prompt_tokens
from liveserve.config import ENV_SWITCH

STOCK, CACHE, OFFLOAD, LIVE = "stock", "stock prefix cache", "stock offloading", "liveserve"
SCHEDULER = "liveserve.host.plain.LiveScheduler"

_NAMES = ("<pad>", "<eos>", *map(chr, range(32, 127)))  # the model's vocabulary
_LAYERS, _KV_HEADS, _HEAD_DIM = 6, 2, 64
_BYTES_PER_TOKEN = 2 * 4 * _LAYERS * _KV_HEADS * _HEAD_DIM  # keys and values, float32
_BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Talk:
    """The conversations; token counts, and seconds of wall time."""

    sessions: int = 6
    turns: int = 6
    first_tokens: int = 1600
    turn_tokens: int = 60
    answer_tokens: int = 16
    reply_gap_s: float = 1.0
    resident: float = 2.0
    seed: int = 5

    @property
    def last_tokens(self) -> int:
        """Of a session's last prompt and answer, at most."""
        return self.first_tokens + self.turns * (self.turn_tokens + self.answer_tokens)


@dataclass
class Answer:
    session: int
    turn: int
    prompt_tokens: int
    ttft_s: float
    total_s: float
    token_ids: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    d = Talk()
    parser.add_argument("--sessions", type=int, default=d.sessions, help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=d.turns, help="per session (%(default)s)")
    parser.add_argument(
        "--first-tokens", type=int, default=d.first_tokens, help="of a first prompt (%(default)s)"
    )
    parser.add_argument(
        "--resident",
        type=float,
        default=d.resident,
        help="sessions that the KV cache holds (%(default)s)",
    )
    parser.add_argument(
        "--reply-gap", type=float, default=d.reply_gap_s, help="mean s between turns (%(default)s)"
    )
    parser.add_argument("--dram-gb", type=float, default=0.25, help="of each tier (%(default)s)")
    parser.add_argument("--seed", type=int, default=d.seed, help="(%(default)s)")
    parser.add_argument(
        "--arms", metavar="A,B", help=f"only these servers of {STOCK}, {CACHE}, {OFFLOAD}, {LIVE}"
    )
    add_server_arguments(parser, "kv-text", "tiny-text")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")


def run(args: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        talk, arms = _talk(args), _arms(args)
    except ValueError as exc:
        print(f"liveserve bench kv-text: {exc}", file=sys.stderr)
        return 2
    write_model(args.model_dir)
    cases: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[Answer]] = {}
    try:
        for name, (flags, env) in arms.items():
            log = args.logs / f"{name.replace(' ', '-')}.log"
            with running_server(
                args.model_dir,
                log,
                serve=(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"),
                omni=False,
                flags=[*server_flags(talk), *flags],
                env=env,
            ) as server:
                console.print(f"{name}: ready after {server.started_in_s:.0f} s")
                answers[name], cases[name] = asyncio.run(_converse(server, talk))
    except ServerFailed as exc:
        print(f"liveserve bench kv-text: {exc}", file=sys.stderr)
        return 1
    for name, made in answers.items():
        cases[name]["identical_answers"] = _ids(made) == _ids(next(iter(answers.values())))
    ratios = compare(cases)
    for table in tables(cases, ratios):
        console.print(table)
    if args.json:
        result = build_result(
            "kv-text",
            [
                {"params": {"arm": name, "dram_gb": args.dram_gb, **asdict(talk)}, "metrics": case}
                for name, case in cases.items()
            ],
            command=shlex.join(["liveserve", *sys.argv[1:]]),
            ratios=ratios,
        )
        write_result(args.json, result)
        console.print(f"result: {args.json}", soft_wrap=True)
    return 0 if all(case["identical_answers"] for case in cases.values()) else 1


def _talk(args: argparse.Namespace) -> Talk:
    for flag in ("sessions", "turns", "first_tokens"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: use 1 or more")
    if not args.resident >= 1:
        raise ValueError(f"--resident {args.resident}: use 1 or more, a session must fit")
    if not (args.reply_gap >= 0 and args.dram_gb > 0 and args.seed >= 0):
        raise ValueError("--reply-gap, --dram-gb, --seed: use no negative number, and some memory")
    return Talk(
        sessions=args.sessions,
        turns=args.turns,
        first_tokens=args.first_tokens,
        reply_gap_s=args.reply_gap,
        resident=args.resident,
        seed=args.seed,
    )


def _arms(args: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Flags and environment of the servers to run, by name."""
    from liveserve.host.cpu.adapt import default_env
    from liveserve.host.serve import plugin_names

    off, on = {**default_env(), ENV_SWITCH: "off"}, {**default_env(), ENV_SWITCH: "on"}
    caching = "--enable-prefix-caching"
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuHostOffloadingSpec",
            "spec_module_path": "liveserve.host.cpu.offload",
            "cpu_bytes_to_use": int(args.dram_gb * (1 << 30)),
            "offload_prompt_only": False,
        },
    }
    tier = {
        "kv_connector": "liveserve",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dram_gb": args.dram_gb},
    }
    known = {
        STOCK: (["--no-enable-prefix-caching"], off),
        CACHE: ([caching], off),
        OFFLOAD: ([caching, "--kv-transfer-config", json.dumps(offloading)], off),
        LIVE: (
            [caching, "--scheduler-cls", SCHEDULER, "--kv-transfer-config", json.dumps(tier)],
            on | {"VLLM_PLUGINS": plugin_names({})},
        ),
    }
    names = [name.strip() for name in args.arms.split(",")] if args.arms else list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"--arms {name!r}: choose from {', '.join(known)}")
    return {name: known[name] for name in names}


def server_flags(talk: Talk) -> list[str]:
    """Sizes of every server. One block of a pool is never used for tokens."""
    blocks = int(talk.resident * -(-talk.last_tokens // _BLOCK_TOKENS)) + 1
    tokens = blocks * _BLOCK_TOKENS
    return [
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(_BLOCK_TOKENS)),
        *("--max-model-len", str(-(-talk.last_tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS)),
        *("--max-num-batched-tokens", "4096", "--max-num-seqs", str(max(2, talk.sessions))),
        *("--kv-cache-memory-bytes", str(tokens * _BYTES_PER_TOKEN)),
    ]


def write_model(folder: Path) -> None:
    """A small random Qwen3 with one token per printable character, unless it is there."""
    if (folder / "config.json").exists():
        return
    from liveserve.host.cpu.adapt import stub_cuda_wheels

    stub_cuda_wheels()
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    made = folder.with_name(folder.name + ".partial")
    shutil.rmtree(made, ignore_errors=True)
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(_NAMES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(made)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(_NAMES),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(made)
    made.rename(folder)


# -- the users ------------------------------------------------------------------------------------


async def _converse(server: Server, talk: Talk) -> tuple[list[Answer], dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=None, connect=30, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        # The first answer of a server is slow.
        await _ask(http, server, list(range(3, 67)), talk.answer_tokens)
        before = parse_prompt_tokens(await exposition(http, server.url)).get("0", {})
        sessions = [_session(http, server, talk, index) for index in range(talk.sessions)]
        answers = [answer for made in await asyncio.gather(*sessions) for answer in made]
        after = parse_prompt_tokens(await exposition(http, server.url)).get("0", {})
    by_source = {source: count - before.get(source, 0.0) for source, count in after.items()}
    kv = await asyncio.to_thread(kv_totals, server.url)
    return answers, text_metrics(answers, by_source) | {"kv": kv}


async def _session(
    http: aiohttp.ClientSession, server: Server, talk: Talk, index: int
) -> list[Answer]:
    """All turns of one user. The texts and gaps depend on the seed and the index alone."""
    draw = np.random.default_rng(np.random.SeedSequence(talk.seed, spawn_key=(index,)))
    sigma = 0.5
    answers: list[Answer] = []
    history: list[int] = []
    await asyncio.sleep(float(draw.uniform(0, talk.reply_gap_s)))
    for turn in range(talk.turns):
        length = talk.turn_tokens if turn else talk.first_tokens
        history += [int(token) for token in draw.integers(2, len(_NAMES), length)]
        ttft_s, total_s, ids = await _ask(http, server, history, talk.answer_tokens)
        answers.append(Answer(index, turn, len(history), ttft_s, total_s, ids))
        history += ids
        gap = talk.reply_gap_s * np.exp(sigma * draw.standard_normal() - sigma**2 / 2)
        await asyncio.sleep(float(gap))
    return answers


async def _ask(
    http: aiohttp.ClientSession, server: Server, prompt: Sequence[int], tokens: int
) -> tuple[float, float, list[int]]:
    """(seconds to the first token, to the last, token ids)."""
    body = {
        "model": server.name,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    start_s, first_s = time.monotonic(), None
    ids: list[int] = []
    async with http.post(server.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise ServerFailed(f"a completion failed: {(await response.text())[:500]}")
        async for line in response.content:
            data = line.decode().removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            for choice in json.loads(data).get("choices", ()):
                ids += choice.get("token_ids") or ()
            if ids and first_s is None:
                first_s = time.monotonic() - start_s
    if first_s is None or len(ids) != tokens:
        raise ServerFailed(f"a completion of {tokens} tokens had {len(ids)}; see {server.log}")
    return first_s, time.monotonic() - start_s, ids


def _ids(answers: Sequence[Answer]) -> dict[tuple[int, int], list[int]]:
    return {(answer.session, answer.turn): answer.token_ids for answer in answers}


# -- figures --------------------------------------------------------------------------------------


def text_metrics(answers: Sequence[Answer], by_source: Mapping[str, float]) -> dict[str, Any]:
    """Times of the turns that have a history, and what the prompts' KV came from."""
    later = [answer for answer in answers if answer.turn]
    return {
        "answers": len(answers),
        **percentiles("later_ttft", (answer.ttft_s for answer in later)),
        **percentiles("first_ttft", (answer.ttft_s for answer in answers if not answer.turn)),
        **percentiles("later_total", (answer.total_s for answer in later)),
        **prompt_metrics(by_source),
        **{f"prompt_tokens_{source}": count for source, count in by_source.items()},
    }


def compare(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """LiveServe against each other server: named with that server's name behind ``vs``."""
    found: dict[str, dict[str, Any]] = {}
    if LIVE not in cases:
        return found
    ours = cases[LIVE]
    for name, theirs in cases.items():
        if name == LIVE:
            continue
        for metric in ("later_ttft_p50_s", "later_ttft_p90_s"):
            if theirs[metric] and ours[metric]:
                quotient = theirs[metric] / ours[metric]
                named = f"{metric.removesuffix('_s')}_speedup vs {name}"
                found[named] = ratio_of([quotient], "higher")
        if theirs["prefill_tokens_computed"]:
            saved = 1 - ours["prefill_tokens_computed"] / theirs["prefill_tokens_computed"]
            found[f"prefill_tokens_saved_fraction vs {name}"] = ratio_of([saved], "higher")
    return found


def tables(
    cases: Mapping[str, Mapping[str, Any]], ratios: Mapping[str, Mapping[str, Any]]
) -> list[Table]:
    servers = Table(title="turns with a history", title_justify="left")
    for column in ("server", "TTFT P50", "P90", "asked", "computed", "hits", "answers"):
        servers.add_column(column)
    for name, case in cases.items():
        servers.add_row(
            name,
            *(_seconds(case[f"later_ttft_{p}_s"]) for p in ("p50", "p90")),
            *(f"{case[key]:,.0f}" for key in ("prompt_tokens", "prefill_tokens_computed")),
            "-" if case["prefix_hit_fraction"] is None else f"{case['prefix_hit_fraction']:.0%}",
            "the same" if case["identical_answers"] else "DIFFER",
        )
    summary = Table(title="LiveServe's tier", title_justify="left")
    for column in ("", "value"):
        summary.add_column(column)
    for name, ratio in ratios.items():
        summary.add_row(name, f"{ratio['value']:.3f}")
    return [servers, summary]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
