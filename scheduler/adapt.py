"""α and β that follow what a stage sees, instead of one choice for every load.

Of eq (1) only the ratio α/β decides, both who comes first in U2 and whether U is negative, so one
number moves: the *level*, with α = α₀ · 2^level and β = β₀ · 2^-level. Up is for users who
interrupt (what runs ahead is lost), down for KV that others wait for (what runs ahead finishes and
gives it back). Users feel a wait more than the operator feels waste: where both are high, it goes
down.

It is a bounded controller with hysteresis. A signal is high above one bound and low only below a
smaller one; a move is one step, and may ask for several such windows in a row and be followed by
a rest; and every time the direction turns the level
moves more reluctantly, up to a limit, until it has kept its direction for a while. Without signals
it goes back to the configured α and β. Pure: a state and an observation give the next state.
"""

from __future__ import annotations

from typing import NamedTuple

from liveserve.scheduler.pacing import may_hold
from liveserve.scheduler.policy_config import PolicyConfig


class Bounds(NamedTuple):
    """How an adaptation may move.

    Attributes:
        most: largest level, up and down; α and β stay within 2^most of what is configured.
        wait_high, wait_low: share of the time that somebody waits for KV.
        waste_high, waste_low: share of what was made that nobody heard.
        patience: windows in a row that ask for the same before the level moves.
        rest: windows after a move without another one.
        calm: windows in a row without any signal before a step back.
        reluctance: most that ``patience`` is multiplied with after turns.
    """

    most: int = 3
    wait_high: float = 0.05
    wait_low: float = 0.01
    waste_high: float = 0.04
    waste_low: float = 0.02
    patience: int = 1
    rest: int = 0
    calm: int = 24
    reluctance: int = 4

    def check(self) -> None:
        """Raises:
        ValueError: a bound makes no sense; names it.
        """
        for name in ("wait", "waste"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if not 0 <= low < high <= 1:
                raise ValueError(
                    f"{name}_low ({low}) and {name}_high ({high}): 0 <= low < high <= 1"
                )
        for name, least in (("most", 0), ("patience", 1), ("rest", 0), ("calm", 1),
                            ("reluctance", 1)):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")


class Observation(NamedTuple):
    """One window of a stage. None: unknown, which is no signal.

    Attributes:
        responses: that ended in it; a window without any says nothing about waste.
        barge_in_rate: share of responses that users interrupt.
        wait_fraction: share of the window in which a request that could run had no KV or slot.
        waste_fraction: share of what ended responses were made of that nobody heard.
        kv_usage: share of the pool in use.
    """

    responses: int
    barge_in_rate: float | None
    wait_fraction: float | None
    waste_fraction: float | None
    kv_usage: float | None = None


class State(NamedTuple):
    """An adaptation between two windows; begin with ``State()``.

    Attributes:
        level: see the module.
        asked: windows in a row that asked for the same direction; negative: down.
        resting, quiet, steady: windows of rest left; without a signal; since one asked for the
            direction that is not ``last``, or since the last move.
        last: direction of the last move that a signal caused.
        doubt: ``patience`` is multiplied with this.
        moves: so far.
    """

    level: int = 0
    asked: int = 0
    resting: int = 0
    quiet: int = 0
    steady: int = 0
    last: int = 0
    doubt: int = 1
    moves: int = 0


def wanted(state: State, seen: Observation, bounds: Bounds) -> int:
    """What a window asks for: 1 up, -1 down, 0 nothing.

    A signal that has moved the level holds until it is below its lower bound.
    """
    wait, waste = seen.wait_fraction or 0.0, seen.waste_fraction or 0.0
    wait_bound = bounds.wait_low if state.asked < 0 else bounds.wait_high
    if wait > wait_bound:
        # Nothing to give back early in a pool that is nearly empty: they wait for something else.
        return -1 if seen.kv_usage is None or seen.kv_usage > 0.1 else 0
    interrupts = seen.barge_in_rate is None or may_hold(False, seen.barge_in_rate)
    waste_bound = bounds.waste_low if state.asked > 0 else bounds.waste_high
    if seen.responses and interrupts and waste > waste_bound:
        return 1
    return 0


def adapt(state: State, seen: Observation, bounds: Bounds) -> State:
    """The state after a window."""
    direction = wanted(state, seen, bounds)
    if direction:
        asked = direction if direction * state.asked <= 0 else state.asked + direction
        quiet = 0
    else:
        asked, quiet = 0, state.quiet + 1
    against = direction and direction == -state.last
    steady = 0 if against else state.steady + 1
    # A direction that nothing spoke against for a while takes back the doubt.
    doubt = (
        max(1, state.doubt // 2) if steady and steady % (4 * bounds.patience) == 0 else state.doubt
    )
    after = state._replace(
        asked=asked, quiet=quiet, steady=steady, doubt=doubt, resting=max(0, state.resting - 1)
    )
    if state.resting:
        return after
    if direction and abs(asked) >= bounds.patience * doubt:
        return _move(after, direction, bounds)
    if not direction and quiet >= bounds.calm and after.level:
        step = -1 if after.level > 0 else 1
        return after._replace(
            level=after.level + step, quiet=0, resting=bounds.rest, moves=after.moves + 1
        )
    return after


def _move(state: State, direction: int, bounds: Bounds) -> State:
    level = max(-bounds.most, min(bounds.most, state.level + direction))
    if level == state.level:
        return state
    turned = state.last == -direction
    doubt = min(bounds.reluctance, 2 * state.doubt) if turned else state.doubt
    return state._replace(
        level=level,
        resting=bounds.rest,
        steady=0,
        last=direction,
        doubt=doubt,
        moves=state.moves + 1,
    )


def weights_at(level: int, base: PolicyConfig) -> tuple[float, float]:
    """α and β at ``level``."""
    return base.alpha * 2.0**level, base.beta * 2.0**-level
