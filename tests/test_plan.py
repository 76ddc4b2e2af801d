"""Algorithm 1: order laws, budgets, priority, starvation, and what happens without inputs."""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import ArgumentParser
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveserve.bench import planning
from liveserve.bench.result_file import validate_result
from liveserve.scheduler.plan import Budgets, Candidate, plan
from liveserve.scheduler.policy_config import PolicyConfig
from liveserve.scheduler.urgency import Rank, Urgency
from liveserve.scheduler.utility import utility, weights

U0, U1, U2 = Urgency
CONFIG = PolicyConfig()
NOBODY: frozenset[str] = frozenset()
NOW_S = 100.0
OVERDUE_S = NOW_S - 2 * CONFIG.age_limit_s
ROOM = Budgets(10_000, 10_000, 10_000)

# Few values, so that ties happen.
AGES = st.sampled_from([0.0, 1.0, 2.5, 40.0])
RANKS = st.one_of(
    st.builds(Rank, st.just(U0), st.sampled_from([-1.0, 0.0, 0.25, 0.5]), AGES),
    st.builds(Rank, st.just(U1), st.none(), AGES),
    st.builds(Rank, st.just(U2), st.sampled_from([None, 0.75, 1.5, 2.5, 9.0]), AGES),
)


@st.composite
def rounds(draw, ranks=RANKS, since=(85.0, 90.0, 94.0, 97.0, 100.0)):
    """Requests, who was held before, and budgets."""
    names = draw(st.lists(st.sampled_from("abcdefghijkl"), unique=True))
    requests = [
        Candidate(
            request_id=name,
            rank=draw(ranks),
            tokens_needed=draw(st.integers(1, 8)),
            kv_blocks_held=draw(st.one_of(st.none(), st.integers(0, 20))),
            kv_blocks_needed=draw(st.integers(0, 6)),
            waiting=draw(st.booleans()),
            is_prefill=draw(st.booleans()),
            since_s=draw(st.sampled_from(since)),
        )
        for name in names
    ]
    held = frozenset(draw(st.sets(st.sampled_from(names)))) if names else NOBODY
    total = draw(st.integers(1, 60))
    pool = draw(st.one_of(st.just((None, None)), st.tuples(st.integers(0, total), st.just(total))))
    return requests, held, Budgets(draw(st.integers(0, 30)), *pool)


CONFIGS = st.builds(
    PolicyConfig,
    alpha=st.sampled_from([0.0, 1.0]),
    beta=st.sampled_from([0.0, 16.0, 200.0]),
    kv_high_watermark=st.sampled_from([0.0, 0.7, 1.0]),
    order=st.booleans(),
    pace=st.booleans(),
    utility=st.booleans(),
)
RATES = st.sampled_from([0.0, 0.5])


def category(request: Candidate, held: frozenset[str]) -> int:
    """Place of its group in the order."""
    if request.rank.urgency is U0:
        return 0
    if request.since_s <= OVERDUE_S:
        return 1
    if request.rank.urgency is U1:
        return 2
    return 4 if request.request_id in held else 3


@given(rounds(), RATES, st.booleans())
def test_order_laws(made, rate, with_utility):
    requests, held, budgets = made
    config = PolicyConfig(utility=with_utility)
    result = plan(requests, budgets, held, NOW_S, config, barge_in_rate=rate)
    of_round = weights(budgets.free_blocks, budgets.total_blocks, config)

    def key(request: Candidate):
        group = category(request, result.held)
        buffer_s, age_s = request.rank.buffer_s, request.rank.age_s
        name = request.request_id
        if group == 0:
            return (group, buffer_s, -age_s, name)
        if group == 1:
            return (group, request.waiting, request.since_s, name)
        if group == 2:
            return (group, -age_s, name)
        return (group, -utility(buffer_s, request.kv_blocks_held, of_round), -age_s, name)

    assert list(result.order) == [r.request_id for r in sorted(requests, key=key)]


@given(rounds(), CONFIGS, RATES, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(made, config, rate, shuffler):
    requests, held, budgets = made
    if not config.order:
        return
    expected = plan(requests, budgets, held, NOW_S, config, barge_in_rate=rate)
    shuffler.shuffle(requests)
    assert plan(requests, budgets, held, NOW_S, config, barge_in_rate=rate) == expected


@given(rounds(), CONFIGS, RATES)
def test_admission_keeps_the_budgets_and_stops_at_the_first_misfit(made, config, rate):
    requests, held, budgets = made
    result = plan(requests, budgets, held, NOW_S, config, barge_in_rate=rate)
    known = {r.request_id: r for r in requests}
    assert sorted(result.order) == sorted(known)
    runnable = [name for name in result.order if name not in result.held]
    tokens, blocks = budgets.tokens, budgets.free_blocks
    admitted = list(result.admitted)
    blocked = None
    for name in runnable:
        request = known[name]
        wants = min(request.tokens_needed, tokens) if request.is_prefill else request.tokens_needed
        no_block = blocks is not None and request.kv_blocks_needed > blocks
        if 0 < wants <= tokens and not no_block:
            assert admitted.pop(0) == name
            tokens -= wants
            blocks = None if blocks is None else blocks - request.kv_blocks_needed
            continue
        needs = (request.kv_blocks_held or 0) + request.kv_blocks_needed
        fits_idle = (request.is_prefill or wants <= budgets.tokens) and (
            budgets.total_blocks is None or needs <= budgets.total_blocks
        )
        if fits_idle:
            blocked = name
            break
    assert admitted == []
    assert result.blocked == blocked
    assert tokens >= 0
    assert blocks is None or blocks >= 0


@given(rounds(), CONFIGS, RATES, st.booleans())
def test_only_comfortable_u2_requests_are_held(made, config, rate, contended):
    requests, before, budgets = made
    result = plan(requests, budgets, before, NOW_S, config, barge_in_rate=rate, contended=contended)
    known = {r.request_id: r for r in requests}
    for name in result.held:
        request = known[name]
        assert request.rank.urgency is U2
        bar_s = config.p_release_s if name in before else config.p_hold_s
        assert request.rank.buffer_s > bar_s
        assert NOW_S - request.since_s < config.age_limit_s
        assert config.pace
    assert not result.held & set(result.admitted)
    assert (result.next_deadline_s is None) == (not result.held)
    others_want = any(
        r.rank.urgency is not U2 or r.waiting or r.since_s <= OVERDUE_S for r in requests
    )
    if not (rate or contended or others_want):
        assert not result.held


@given(rounds(), CONFIGS, RATES)
def test_victims_are_running_u2_from_the_back(made, config, rate):
    requests, held, budgets = made
    result = plan(requests, budgets, held, NOW_S, config, barge_in_rate=rate)
    known = {r.request_id: r for r in requests}
    expected = [
        name
        for name in reversed(result.order)
        if not known[name].waiting and category(known[name], result.held) >= 3
    ]
    assert list(result.victims) == expected


def test_held_requests_give_their_kv_back_first():
    requests = [u2("a", 5.0), u2("b", 1.0), u2("w", 9.0, waiting=True), first_audio("u")]
    result = plan(requests, ROOM, NOBODY, NOW_S, CONFIG)
    assert result.held == {"a", "w"}
    assert result.victims == ("a", "b")


@given(rounds(), st.booleans(), RATES)
def test_with_order_off_the_callers_order_stays(made, pace, rate):
    requests, held, budgets = made
    config = PolicyConfig(order=False, pace=pace)
    result = plan(requests, budgets, held, NOW_S, config, barge_in_rate=rate)
    names = [r.request_id for r in requests]
    runs = [name for name in names if name not in result.held]
    assert list(result.order) == runs + [name for name in names if name in result.held]


def u2(name, buffer_s=None, age_s=1.0, blocks=None, **changes) -> Candidate:
    made = Candidate(name, Rank(U2, buffer_s, age_s), 1, blocks, 0, False, False, NOW_S)
    return replace(made, **changes)


def first_audio(name, age_s=1.0, **changes) -> Candidate:
    return u2(name, rank=Rank(U1, None, age_s), waiting=True, **changes)


def dry(name, buffer_s=0.1, **changes) -> Candidate:
    return u2(name, rank=Rank(U0, buffer_s, 1.0), **changes)


def test_no_requests():
    assert plan([], ROOM, NOBODY, NOW_S, CONFIG) == ((), NOBODY, (), None, (), None)


# ---- each missing input on its own ----------------------------------------------------------


@given(rounds(ranks=st.builds(Rank, st.just(U2), st.none(), AGES), since=(97.0, 100.0)), RATES)
def test_no_views_and_no_counts_is_by_ready_age(made, rate):
    requests, held, budgets = made
    budgets = Budgets(budgets.tokens, None, None)
    result = plan(requests, budgets, held, NOW_S, CONFIG, barge_in_rate=rate, contended=True)
    expected = sorted(requests, key=lambda r: (-r.rank.age_s, r.request_id))
    assert list(result.order) == [r.request_id for r in expected]
    assert result.held == NOBODY


@given(rounds(), RATES)
def test_no_pool_counts_is_utility_without_its_kv_term(made, rate):
    requests, held, budgets = made
    unknown = Budgets(budgets.tokens, None, None)
    result = plan(requests, unknown, held, NOW_S, CONFIG, barge_in_rate=rate)
    no_kv = PolicyConfig(beta=0.0)
    assert result == plan(requests, unknown, held, NOW_S, no_kv, barge_in_rate=rate)
    order = plan(requests, budgets, held, NOW_S, no_kv, barge_in_rate=rate).order
    assert result.order == order


def test_one_unknown_block_count_loses_only_its_own_kv_term():
    requests = [u2("a", 1.0, blocks=30), u2("b", 1.0, blocks=None), u2("c", 1.0, blocks=10)]
    assert plan(requests, Budgets(9, 0, 100), NOBODY, NOW_S, CONFIG).order == ("a", "c", "b")


def test_one_lost_view_releases_its_request_and_leaves_the_others_held():
    before = frozenset("ab")
    both = [u2("a", 5.0), u2("b", 6.0), first_audio("u")]
    assert plan(both, ROOM, before, NOW_S, CONFIG).held == before
    lost = [u2("a", None), *both[1:]]
    result = plan(lost, ROOM, before, NOW_S, CONFIG)
    assert result.held == {"b"}
    assert result.order == ("u", "a", "b")


def test_the_heavy_go_first_only_when_the_pool_is_nearly_full():
    requests = [u2("light", 1.0, age_s=9.0, blocks=1), u2("heavy", 1.0, blocks=50)]
    assert plan(requests, Budgets(9, 50, 100), NOBODY, NOW_S, CONFIG).order == ("light", "heavy")
    assert plan(requests, Budgets(9, 0, 100), NOBODY, NOW_S, CONFIG).order == ("heavy", "light")


# ---- admission -------------------------------------------------------------------------------


def test_a_real_time_request_that_does_not_fit_is_not_overtaken():
    requests = [first_audio("big", kv_blocks_needed=9), u2("small", 1.0)]
    result = plan(requests, Budgets(100, 8, 10), NOBODY, NOW_S, CONFIG)
    assert (result.admitted, result.blocked) == ((), "big")
    result = plan(requests, Budgets(100, 9, 10), NOBODY, NOW_S, CONFIG)
    assert (result.admitted, result.blocked) == (("big", "small"), None)


def test_each_admission_leaves_less_for_the_next():
    requests = [dry(name, 0.1 * i, kv_blocks_needed=3) for i, name in enumerate("abc")]
    assert plan(requests, Budgets(9, 8, 20), NOBODY, NOW_S, CONFIG).admitted == ("a", "b")
    assert plan(requests, Budgets(2, 20, 20), NOBODY, NOW_S, CONFIG).admitted == ("a", "b")
    assert plan(requests, Budgets(9, 9, 20), NOBODY, NOW_S, CONFIG).blocked is None


def test_a_prefill_takes_what_is_left_of_the_tokens():
    requests = [dry("a"), first_audio("p", tokens_needed=500, is_prefill=True), u2("z", 1.0)]
    result = plan(requests, Budgets(64, None, None), NOBODY, NOW_S, CONFIG)
    assert (result.admitted, result.blocked) == (("a", "p"), "z")


def test_what_can_never_fit_stops_nobody():
    requests = [dry("a", kv_blocks_needed=99), dry("b", 0.2, tokens_needed=99), u2("z", 1.0)]
    result = plan(requests, Budgets(10, 5, 10), NOBODY, NOW_S, CONFIG)
    assert (result.admitted, result.blocked) == (("z",), None)


# ---- nobody starves --------------------------------------------------------------------------


def test_u0_goes_before_an_overdue_request_and_that_before_u1():
    requests = [first_audio("u", age_s=99.0), u2("old", 1.0, since_s=OVERDUE_S), dry("d")]
    assert plan(requests, ROOM, NOBODY, NOW_S, CONFIG).order == ("d", "old", "u")


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 12))
def test_no_request_starves_behind_an_endless_stream(seed, tokens, count):
    """Every round brings as many new U1 as the budget holds; everybody else still gets steps."""
    draw = random.Random(seed)
    step_s, config = 0.1, PolicyConfig(age_limit_s=1.0)
    since = {f"r{i}": draw.uniform(-1.0, 0.0) for i in range(count)}
    buffers = {name: draw.choice([None, 0.8, 5.0, 50.0]) for name in since}
    waiting = {name: draw.random() < 0.5 for name in since}
    held, longest_s = NOBODY, 0.0
    for step in range(120):
        now_s = step * step_s
        requests = [
            u2(name, buffers[name], waiting=waiting[name], since_s=since[name]) for name in since
        ]
        requests += [first_audio(f"u{step}-{i}", since_s=now_s) for i in range(tokens)]
        result = plan(requests, Budgets(tokens, 10, 10), held, now_s, config, barge_in_rate=0.5)
        held = result.held
        for name in result.admitted:
            if name in since:
                longest_s = max(longest_s, now_s - since[name])
                since[name] = now_s
        longest_s = max([longest_s, *(now_s - s for s in since.values())])
    drains_s = step_s * (count // tokens + 2)
    assert longest_s <= 2 * config.age_limit_s + 2 * drains_s


def test_running_requests_get_through_while_a_large_one_waits_for_their_blocks():
    """The large U1 stops everybody behind it; only age lets the others finish and free KV."""
    config = PolicyConfig(age_limit_s=0.5)
    steps_left = {f"r{i}": 5 for i in range(4)}
    since = dict.fromkeys([*steps_left, "big"], 0.0)
    admitted_at_s = None
    for step in range(400):
        now_s = step * 0.1
        free = 10 - 2 * len(steps_left)
        requests = [u2(n, None, blocks=2, since_s=since[n]) for n in steps_left]
        requests.append(first_audio("big", now_s, kv_blocks_needed=10, since_s=since["big"]))
        result = plan(requests, Budgets(8, free, 10), NOBODY, now_s, config)
        if "big" in result.admitted:
            admitted_at_s = now_s
            break
        for name in result.admitted:
            since[name] = now_s
            steps_left[name] -= 1
            if not steps_left[name]:
                del steps_left[name]
    assert admitted_at_s is not None
    assert admitted_at_s <= 5 * (2 * config.age_limit_s + 0.1) + 0.2


# ---- cost ------------------------------------------------------------------------------------


def test_a_round_of_256_is_cheap():
    """Bound with a wide margin for slow machines; the figure itself is in bench/results."""
    _, requests = planning.workload(256, seed=1)
    budgets = Budgets(2048, 512, 64 * 256)
    best = 1.0
    for _ in range(50):
        started = time.perf_counter()
        plan(requests, budgets, NOBODY, planning.NOW_S, CONFIG, barge_in_rate=0.5)
        best = min(best, time.perf_counter() - started)
    assert best < 0.002


def test_the_benchmark_measures_every_class_and_writes_its_result(tmp_path, monkeypatch):
    _, requests = planning.workload(256, seed=1)
    assert {r.rank.urgency for r in requests} == {U0, U1, U2}
    parser = ArgumentParser()
    planning.add_arguments(parser)
    path = tmp_path / "planning.json"
    monkeypatch.setattr(sys, "argv", ["liveserve", "bench", "planning"])
    args = parser.parse_args(["--sizes", "4", "256", "--rounds", "5", "--json", str(path)])
    assert planning.run(args) == 0
    result = json.loads(path.read_text())
    validate_result(result)
    assert result["ratios"]["planning_round_ms_256"]["value"] > 0
    assert [case["params"]["requests"] for case in result["cases"]] == [4, 256]
    assert planning.run(parser.parse_args(["--rounds", "0"])) == 2


@pytest.mark.parametrize("field", ["order", "pace", "utility"])
def test_every_switch_changes_something(field):
    requests = [u2("light", 3.0, age_s=9.0, blocks=1), u2("heavy", 3.0, blocks=50), dry("d")]
    budgets = Budgets(9, 0, 100)
    on = plan(requests, budgets, NOBODY, NOW_S, CONFIG)
    off = plan(requests, budgets, NOBODY, NOW_S, PolicyConfig(**{field: False}))
    assert on != off
