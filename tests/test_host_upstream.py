"""What vLLM can do, it still does under our scheduler, whatever the policy decides.

Every scenario runs twice: with the host's own scheduler, and with ours while every round orders the
requests at random and holds a random share of them. Tokens are the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from tiny_text import OURS, Driver, params, prompt

pytestmark = pytest.mark.host

LENGTHS = (30, 90, 5, 60, 120, 44)
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
ROOMY = {"skip_tokenizer_init": False}
CACHED = {"max_num_batched_tokens": 32, "enable_prefix_caching": True}
# Room for about two of the three requests that run at once.
SMALL = {
    "kv_cache_memory_bytes": 1 << 20,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "enable_prefix_caching": False,
}


def scenarios(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    tiny_text.write_tokenizer(folder)
    found: dict[str, Any] = {}
    for name, scheduler in (("stock", None), ("ours", OURS)):
        machine = Machine(folder, scheduler)
        found[name] = {
            scenario.__name__: scenario(machine)
            for scenario in (
                generation,
                chunks_and_prefixes,
                preemption,
                streaming_input,
                aborts,
                grammars,
            )
        }
        found[name]["held"] = machine.held
    return found


class Machine:
    """Engines with one of the two schedulers, one for each set of options."""

    def __init__(self, folder: Path, scheduler: str | None) -> None:
        self.folder, self.scheduler = folder, scheduler
        self.held = 0
        self._engines: dict[int, Any] = {}

    def engine(self, options: dict[str, Any]) -> Driver:
        llm = self._engines.get(id(options))
        if llm is None:
            llm = self._engines[id(options)] = tiny_text.make(
                self.folder, self.scheduler, **options
            )
        driver = Driver(llm)
        if self.scheduler is not None:
            self._held = tiny_text.shuffle_plans(driver.scheduler)
        return driver

    def done(self, driver: Driver) -> dict[str, Any]:
        """Tokens and reasons; every block is back in the pool."""
        driver.step()  # the worker hears of the last ones
        scheduler = driver.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert not scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        if self.scheduler is not None:
            self.held += sum(self._held)
            runtime = scheduler.liveserve
            runtime.round()
            assert not runtime.ranks
            assert runtime.errors == 0
        return {"tokens": driver.tokens, "finished": driver.finished}


def generation(machine: Machine) -> dict[str, Any]:
    driver = machine.engine(ROOMY)
    sampled = params(8, n=3, temperature=1.0, seed=5)
    found = {
        "greedy": tiny_text.generate(driver.llm, PROMPTS, params()),
        "n": tiny_text.generate(driver.llm, PROMPTS[:2], sampled),
    }
    machine.done(driver)
    return found


def chunks_and_prefixes(machine: Machine) -> dict[str, Any]:
    driver = machine.engine(CACHED)
    schedule, computed = driver.scheduler.schedule, []

    def counted(*args: Any) -> Any:
        output = schedule(*args)
        computed[-1] += output.total_num_scheduled_tokens
        return output

    driver.scheduler.schedule = counted
    for turn in range(2):
        computed.append(0)
        for index, ids in enumerate(PROMPTS):
            driver.add(f"{turn}-{index}", ids, params(12))
        driver.run_out()
    return machine.done(driver) | {"computed": computed}


def preemption(machine: Machine) -> dict[str, Any]:
    driver = machine.engine(SMALL)
    scheduler, preempted = driver.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    for index, ids in enumerate(PROMPTS):
        driver.add(str(index), ids, params(120))
    driver.run_out()
    return machine.done(driver) | {"preemptions": len(preempted)}


def streaming_input(machine: Machine) -> dict[str, Any]:
    """Two sessions whose input comes in three parts, beside an ordinary request."""
    driver = machine.engine(ROOMY)
    driver.add("plain", PROMPTS[3], params(60))
    for part in range(3):
        for name in ("one", "two"):
            driver.add(name, prompt(part + len(name), 20), params(6), resumable=True)
        driver.until(
            lambda: {driver.status("one"), driver.status("two")} == {"WAITING_FOR_STREAMING_REQ"}
        )
    for name in ("one", "two"):
        driver.add(name, [0], params(6))  # no more input
    driver.run_out()
    return machine.done(driver)


def aborts(machine: Machine) -> dict[str, Any]:
    """One abort in every state a request can be in; the others never notice."""
    driver = machine.engine(SMALL)
    scheduler, states = driver.scheduler, {}

    def abort(name: str) -> None:
        request = scheduler.requests[name]
        chunk = "_PREFILL" if request.is_prefill_chunk else ""
        states[name] = request.status.name + chunk
        driver.abort(name)

    driver.add("stays", PROMPTS[0], params(220))
    driver.add("fresh", PROMPTS[1], params(10))
    abort("fresh")
    driver.add("prefill", PROMPTS[4], params(10))
    driver.until(lambda: scheduler.requests["prefill"].is_prefill_chunk)
    abort("prefill")
    driver.add("decode", PROMPTS[2], params(100))
    driver.until(lambda: len(driver.tokens.get("decode", ())) > 5)
    abort("decode")
    driver.add("listens", PROMPTS[2], params(3), resumable=True)
    driver.until(lambda: driver.status("listens") == "WAITING_FOR_STREAMING_REQ")
    abort("listens")
    for name in ("big", "bigger"):
        driver.add(name, PROMPTS[4], params(120))
    pair = ("big", "bigger")
    driver.until(lambda: "PREEMPTED" in map(driver.status, pair))
    for name in sorted(pair, key=lambda name: driver.status(name) != "PREEMPTED"):
        abort(name)
    driver.run_out()
    found = machine.done(driver)
    return {"stays": found["tokens"].get("stays"), "states": sorted(set(states.values()))}


def grammars(machine: Machine) -> dict[str, Any]:
    """Answers that a grammar binds, beside free ones; and an abort while one is compiled."""
    from vllm.sampling_params import StructuredOutputsParams

    driver = machine.engine(ROOMY)
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    bound = {
        "choice": StructuredOutputsParams(choice=["yes it is", "no"]),
        "regex": StructuredOutputsParams(regex="[a-c]{4}-[0-9]{3}"),
        "json": StructuredOutputsParams(json=schema, disable_any_whitespace=True),
    }
    for name, grammar in bound.items():
        sampling = params(30, structured_outputs=grammar, ignore_eos=False, detokenize=True)
        driver.add(name, PROMPTS[2], sampling)
        driver.add(f"free-{name}", PROMPTS[3], params(20))
    slow = StructuredOutputsParams(regex="(a|b|cd){50}e{40}[f-z]{30}")
    driver.add("aborted", PROMPTS[2], params(30, structured_outputs=slow, detokenize=True))
    driver.abort("aborted")
    driver.run_out()
    tokenizer = driver.llm.get_tokenizer()
    found = machine.done(driver)
    found["text"] = {
        name: tokenizer.decode(found["tokens"][name], skip_special_tokens=True) for name in bound
    }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("upstream"))


@pytest.mark.parametrize(
    "what", ["generation", "chunks_and_prefixes", "streaming_input", "grammars"]
)
def test_results_are_those_of_the_host(found, what):
    assert found["ours"][what] == found["stock"][what]


def test_most_of_the_prompts_comes_from_the_cache_the_second_time(found):
    first, second = found["ours"]["chunks_and_prefixes"]["computed"]
    assert first - second > sum(LENGTHS) / 2


def test_preempted_requests_resume(found):
    ours, stock = (found[name]["preemption"] for name in ("ours", "stock"))
    assert ours["preemptions"] > 0
    assert stock["preemptions"] > 0
    assert ours["tokens"] == stock["tokens"]
    assert ours["finished"] == stock["finished"]


def test_sessions_take_input_in_parts(found):
    tokens = found["ours"]["streaming_input"]["tokens"]
    assert {name: len(ids) for name, ids in tokens.items()} == {"plain": 60, "one": 18, "two": 18}


def test_grammars_bind(found):
    text = found["ours"]["grammars"]["text"]
    assert text["choice"] in ("yes it is", "no")
    assert re.fullmatch("[a-c]{4}-[0-9]{3}", text["regex"])
    assert "aborted" not in found["ours"]["grammars"]["tokens"]


def test_a_request_can_be_aborted_in_every_state(found):
    ours, stock = (found[name]["aborts"] for name in ("ours", "stock"))
    assert ours["stays"] == stock["stays"]
    assert {"WAITING", "RUNNING", "RUNNING_PREFILL", "PREEMPTED"} <= set(ours["states"])
    assert "WAITING_FOR_STREAMING_REQ" in ours["states"]


def test_the_rounds_really_held(found):
    assert found["ours"]["held"] > 300
