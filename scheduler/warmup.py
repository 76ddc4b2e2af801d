"""Warm-ups: history that is in no cache is prefilled while its user still speaks.

A warm-up is a request that nobody waits for. It computes the prefix of a session's next prompt, as
far as that is known, into the prefix cache, and is never in anybody's way: `may_run` says when it
may have a step's tokens, `Ledger` keeps what it computed until a turn has used it or it is wasted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from liveserve.scheduler.urgency import Urgency
from liveserve.scheduler.views import Phase, SessionView

# Owners (sessions, prefixes) that are remembered.
MAX_OWNERS = 4096


class WarmupReport(msgspec.Struct):
    """Warm-ups of one engine since its start, in prompt tokens where nothing else is said.

    Attributes:
        begun: warm-ups that were admitted.
        now: that are in the engine.
        found: of their prompts, in the prefix cache already.
        computed: prefilled by them. Each token of it ends as ``used`` or as ``wasted``.
        used: a turn found it in the prefix cache.
        wasted: the turn had no use for it, it was evicted before, or the session is over.
        ended: warm-ups by why they ended: "done", "turn" (it came before they were done), "there"
            (nothing was missing), "pressure" (others need the room), "off", "failed", "cancelled".
    """

    begun: int = 0
    now: int = 0
    found: int = 0
    computed: int = 0
    used: int = 0
    wasted: int = 0
    ended: dict[str, int] = {}


def may_run(
    urgent: Iterable[Urgency],
    *,
    first_audio_waits: bool,
    others_prefill: bool,
    trusted: bool,
) -> bool:
    """Whether a warm-up may take tokens of this round.

    Args:
        urgent: classes of the ordinary requests of this engine.
        first_audio_waits: a session waits for its first audio, in whichever stage.
        others_prefill: an ordinary request has more to compute than its next token, or waits.
        trusted: the engine's views are right; else nobody can tell who is urgent.
    """
    if first_audio_waits or others_prefill or not trusted:
        return False
    return all(one is Urgency.U2 for one in urgent)


def runs_dry(views: Iterable[SessionView], p_safe_s: float, now_s: float) -> bool:
    """Whether a listener is about to run out of audio that is yet to come, from any stage."""
    return any(
        view.phase is Phase.SPEAKING
        and view.wants_audio
        and not view.clock.complete
        and view.clock.buffer_s(now_s) <= p_safe_s
        for view in views
    )


def last_useful(num_prompt_tokens: int, block_tokens: int) -> int:
    """Tokens that a warm-up computes: whole blocks, and never the last token of its prompt, after
    which a token would be sampled.
    """
    return max(0, num_prompt_tokens - 1) // block_tokens * block_tokens


class Ledger:
    """What warm-ups computed, block by block, until it is used or wasted.

    Args:
        block_tokens: tokens of a block.
        max_owners: beyond that what was computed for the oldest one counts as wasted.
    """

    def __init__(self, block_tokens: int, max_owners: int = MAX_OWNERS) -> None:
        self._block_tokens = block_tokens
        self._max = max_owners
        self._owner_of: dict[Hashable, str] = {}
        self._unused: OrderedDict[str, set[Hashable]] = OrderedDict()
        self._report = WarmupReport()

    def begun(self, found: int) -> None:
        """A warm-up was admitted, ``found`` tokens of its prompt were in the cache."""
        self._report.begun += 1
        self._report.found += found

    def ended(self, owner: str, keys: Sequence[Hashable], reason: str) -> None:
        """A warm-up of ``owner`` is over; it computed the blocks ``keys``."""
        counts = self._report.ended
        counts[reason] = counts.get(reason, 0) + 1
        if not keys:
            return
        self._report.computed += len(keys) * self._block_tokens
        unused = self._unused.setdefault(owner, set())
        self._unused.move_to_end(owner)
        for key in keys:
            before = self._owner_of.get(key)
            if before is not None:  # it was evicted and is computed again
                self._unused[before].discard(key)
                self._report.wasted += self._block_tokens
            self._owner_of[key] = owner
            unused.add(key)
        while len(self._unused) > self._max:
            self.over(next(iter(self._unused)))

    def turn(self, owner: str, keys_found: Iterable[Hashable]) -> None:
        """An ordinary request of ``owner`` was admitted and found ``keys_found`` in the cache."""
        for key in keys_found:
            of = self._owner_of.pop(key, None)
            if of is not None:
                self._unused[of].discard(key)
                self._report.used += self._block_tokens
        self.over(owner)

    def over(self, owner: str) -> None:
        """Nobody will use what is left of what was computed for ``owner``."""
        unused = self._unused.pop(owner, None)
        for key in unused or ():
            del self._owner_of[key]
            self._report.wasted += self._block_tokens

    def report(self, now: int = 0) -> WarmupReport:
        """``now``: warm-ups in the engine."""
        return msgspec.structs.replace(self._report, now=now, ended=dict(self._report.ended))
