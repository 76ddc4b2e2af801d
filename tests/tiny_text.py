"""Plain vLLM with a tiny random text model on the CPU, step by step in a process of its own.

A scenario is a function of a test module that takes a folder and returns its findings, as JSON can
hold them: `findings` runs it in a child. The rest of this module is for scenarios; it imports vLLM
only when it is called.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liveserve.events import Batch, Event, EventKind, Reply, decode_reply, encode
from liveserve.host.cpu import adapt
from liveserve.scheduler.plan import Plan

OURS = "liveserve.host.plain.LiveScheduler"
VOCABULARY = 512


def findings(scenario: Callable[[Path], Any], folder: Path, **env: str) -> Any:
    """What ``scenario(folder)`` returns in a child process, with LiveServe on."""
    module = scenario.__module__
    # vLLM first: it makes torchvision importable on a CPU build of torch.
    program = (
        f"import vllm, json, pathlib, {module}\n"
        f"made = {module}.{scenario.__name__}(pathlib.Path({str(folder)!r}))\n"
        "print('FOUND', json.dumps(made))"
    )
    environment = {**os.environ, **adapt.default_env(), "LIVESERVE": "on", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= {"PYTHONPATH": str(Path(__file__).parent)} | env
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    errors = [line for line in done.stderr.splitlines() if "leaked" not in line]  # nanobind's
    assert lines, "\n".join(errors[-60:])
    return json.loads(lines[0][6:])


def write_model(folder: Path, *, weights: bool = True, positions: int = 512) -> Path:
    """A Qwen3 of two small layers, always with the same random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=positions,
    )
    if weights:
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token per printable ASCII character, as structured output needs a vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (131 * seed + 7 * index) % 90 for index in range(length)]


def options(scheduler: str | None) -> dict[str, Any]:
    """Arguments of a small engine; None is the host's own scheduler."""
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "block_size": 32,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 25,
        "skip_tokenizer_init": True,
        "scheduler_cls": scheduler,
    }


def make(folder: Path, scheduler: str | None, **more: Any) -> Any:
    """An engine in this process."""
    from vllm import LLM

    return LLM(str(folder), **(options(scheduler) | more))


def params(tokens: int = 20, **more: Any) -> Any:
    from vllm import SamplingParams

    more = {"temperature": 0, "ignore_eos": True, "detokenize": False} | more
    return SamplingParams(max_tokens=tokens, **more)


def generate(llm: Any, prompts: list[list[int]], sampling: Any) -> list[list[list[int]]]:
    """Token ids of each prompt's samples."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


class Driver:
    """Steps an engine and keeps what its core says of every request.

    Attributes:
        tokens: token ids by request.
        finished: why, by request.
        record: which request got tokens, step by step.
    """

    def __init__(self, llm: Any) -> None:
        self.llm, self.core = llm, core_of(llm)
        self.scheduler = self.core.scheduler
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.record: list[str] = []

    def add(self, name: str, ids: list[int], sampling: Any, *, resumable: bool = False) -> None:
        engine = self.llm.llm_engine
        request = engine.input_processor.process_inputs(
            name,
            {"prompt_token_ids": ids},
            sampling,
            supported_tasks=engine.get_supported_tasks(),
            resumable=resumable,
        )
        engine.engine_core.add_request(request)

    def abort(self, *names: str) -> None:
        self.llm.llm_engine.engine_core.abort_requests(list(names))

    def step(self) -> None:
        for output in self.llm.llm_engine.engine_core.get_output().outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.record += [output.request_id] * bool(output.new_token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = str(output.finish_reason)

    def until(self, there: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Step until ``there()``; fail if that takes too long.

        A bound in steps would depend on the machine: a step that waits for a copy is short.
        """
        end_s = time.monotonic() + limit_s
        while not there():
            if time.monotonic() > end_s:
                raise AssertionError(f"not there after {limit_s:g} s; {self.status()}")
            self.step()

    def run_out(self) -> None:
        self.until(lambda: not self.scheduler.has_unfinished_requests())

    def status(self, name: str | None = None) -> Any:
        if name is None:
            return {n: r.status.name for n, r in self.scheduler.requests.items()}
        request = self.scheduler.requests.get(name)
        return request.status.name if request is not None else None


class Link:
    """The API process's end of the link to an engine in this process."""

    def __init__(self, core: Any) -> None:
        self._core, self._next = core, 0

    def tell(self, *events: Event, **more: Any) -> Reply:
        batch = Batch("", time.monotonic(), self._next, list(events), **more)
        if self._next == 0:
            batch.views = []
        self._next += len(events)
        return decode_reply(self._core.liveserve_exchange(encode(batch)))


def request_of(session: str) -> str:
    """The id of a duplex session's request."""
    name = base64.urlsafe_b64encode(session.encode()).decode().rstrip("=")
    return f"duplex-s.{name}.e.0.r.stage0-turn1"


def asks(session: str, now_s: float) -> list[Event]:
    """A session that waits for its first audio."""
    return [
        Event(EventKind.OPENED, session, now_s, 1.0, detail="duplex"),
        Event(EventKind.COMMITTED, session, now_s),
        Event(EventKind.RESPONSE_CREATED, session, now_s, response_id="r"),
    ]


def hears(session: str, now_s: float, routed_s: float) -> Event:
    """The client has so much audio of the response in all."""
    return Event(EventKind.AUDIO_ROUTED, session, now_s, routed_s, "r")


def shuffle_plans(scheduler: Any, seed: int = 1, hold: float = 0.3) -> list[int]:
    """Let every round have a random order and hold a random share of the requests: whatever a
    policy decides must do no harm. Returns a list to which each round adds how many were held.
    """
    runtime, draw, held = scheduler.liveserve, random.Random(seed), []

    def shuffled() -> Plan:
        names = sorted(runtime.ranks)
        draw.shuffle(names)
        runtime.held = frozenset(name for name in names if draw.random() < hold)
        held.append(len(runtime.held))
        return Plan(tuple(names), runtime.held, tuple(names), None, (), None)

    runtime.plan = shuffled
    return held
