"""Where the time between end of speech and first text and audio goes, turn by turn.

Off unless asked for. `StageProfile`, in each engine, notes when a request first got somewhere; the
marks travel back in the replies of the exchange. `TurnProfiler`, in the API process, adds what only
that knows (when the user stopped, when something left for the client) and splits each turn:

    speech ends ─encode▶ submitted ─queue, match, load▶ scheduled ─prefill▶ first text token
      first text token ─text_route▶ text delta
      first text token ─talker▶ first codec chunk ─vocoder▶ its audio ─route▶ audio delta

Every part lies between two marks, so the parts of a turn add up to the whole. All times are on the
API process's monotonic clock; an engine on another machine converts its own (`StageProfile.take`).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from liveserve.events import Event, EventKind, StageMarks

# Parts that lead to the first text delta and to the first audio delta, in order.
TO_TOKEN = ("encode", "queue", "match", "load", "prefill")
TO_TEXT = (*TO_TOKEN, "text_route")
TO_AUDIO = (*TO_TOKEN, "talker", "vocoder", "route")
# Requests that an engine remembers; turns that wait for their marks; turns that can be asked for.
MAX_REQUESTS = 1024
MAX_TURNS = 1024
# An engine's marks come with its next reply, half a second later at most.
_MARKS_WAIT_S = 3.0


class StageProfile:
    """First times of every request in one engine. While off nobody calls it but `switch`.

    Attributes:
        on: whether to call it.
    """

    def __init__(self, clock: Callable[[], float], max_requests: int = MAX_REQUESTS) -> None:
        self.on = False
        self._clock = clock
        self._max = max_requests
        self._marks: OrderedDict[str, StageMarks] = OrderedDict()
        self._changed: dict[str, StageMarks] = {}

    def switch(self, on: bool) -> None:
        if on != self.on:
            self.on = on
            self._marks.clear()
            self._changed.clear()

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """The scheduler gives them compute in the step that begins."""
        for request_id in request_ids:
            if request_id not in self._marks:
                self._new(request_id).scheduled_s = self._clock()
            elif not self._marks[request_id].scheduled_s:
                self._change(request_id).scheduled_s = self._clock()

    def made(self, request_ids: Iterable[str]) -> None:
        """They have output. Counts for those that were seen to be scheduled."""
        for request_id in request_ids:
            marks = self._marks.get(request_id)
            if marks is not None and not marks.made_s:
                self._change(request_id).made_s = self._clock()

    def sent(self, request_id: str) -> None:
        """Something of it left for the next stage, past the orchestrator. From any thread."""
        marks = self._marks.get(request_id)
        if marks is not None and not marks.sent_s:
            self._change(request_id).sent_s = self._clock()

    def looked(self, request_id: str, took_s: float, *, waits: bool) -> None:
        """Its history was looked for, for ``took_s``; ``waits``: until some of it is loaded."""
        marks, now_s = self._change(request_id), self._clock()
        if not marks.scheduled_s:
            marks.match_s += took_s
            if waits:
                marks.loading_s = marks.loading_s or now_s
            elif marks.loading_s:
                marks.loaded_s = now_s

    def take(self, offset_s: float = 0.0) -> list[StageMarks]:
        """What changed since the last call, on a clock that is ``offset_s`` behind this one."""
        changed, self._changed = self._changed, {}
        return [marks.shifted(-offset_s) for marks in changed.values()]

    def _new(self, request_id: str) -> StageMarks:
        marks = self._marks[request_id] = self._changed[request_id] = StageMarks(request_id)
        if len(self._marks) > self._max:
            oldest, _ = self._marks.popitem(last=False)
            self._changed.pop(oldest, None)
        return marks

    def _change(self, request_id: str) -> StageMarks:
        marks = self._marks.get(request_id)
        if marks is None:
            return self._new(request_id)
        self._changed[request_id] = marks
        return marks


class Turn(msgspec.Struct):
    """One turn. Times are seconds on the API process's monotonic clock; None: not seen.

    Attributes:
        number: counts up in the order in which turns were done, marks and all; turns are asked for
            from one on. 0: not yet.
        submitted_s: its request left for the first engine.
        token_s, text_s, audio_s: first text token made, first text and first audio sent to the
            client.
        parts: seconds by part; what could not be told apart is not in it.
        stages: the engines' marks, by stage.
    """

    number: int
    session_id: str
    speech_end_s: float
    request_id: str = ""
    response_id: str = ""
    submitted_s: float | None = None
    token_s: float | None = None
    text_s: float | None = None
    audio_s: float | None = None
    outcome: str = ""
    parts: dict[str, float] = {}
    stages: dict[str, StageMarks] = {}

    @property
    def to_text_s(self) -> float | None:
        return None if self.text_s is None else self.text_s - self.speech_end_s

    @property
    def to_audio_s(self) -> float | None:
        return None if self.audio_s is None else self.audio_s - self.speech_end_s


class TurnProfiler:
    """The API process's half. One loop owns it.

    It is on for as long as somebody keeps asking (`ask`), so that nobody has to switch it off.
    """

    def __init__(self, clock: Callable[[], float], max_turns: int = MAX_TURNS) -> None:
        self._clock = clock
        self._max = max_turns
        self._until_s = -math.inf
        self._was_on = False
        self._numbers = 0
        self._ends: OrderedDict[str, float] = OrderedDict()  # speech ends, by session
        self._now: OrderedDict[str, Turn] = OrderedDict()  # by session
        self._waiting: list[tuple[float, Turn]] = []  # for marks; until when
        self._done: deque[Turn] = deque(maxlen=max_turns)

    @property
    def on(self) -> bool:
        return self._clock() < self._until_s

    def ask(self, seconds: float) -> None:
        """Profile for ``seconds`` from now."""
        self._until_s = max(self._until_s, self._clock() + seconds)

    @property
    def newest(self) -> int:
        """Number of the turn that finished last; 0: none."""
        return self._done[-1].number if self._done else 0

    def turns(self, after: int) -> list[Turn]:
        """Finished turns with a number above ``after``."""
        self._settle()
        return [turn for turn in self._done if turn.number > after]

    # ---- what happens in the API process ---------------------------------------------------

    def heard(self, event: Event) -> None:
        """A session event, as it was published."""
        if not self._watch():
            return
        kind, session_id = event.kind, event.session_id
        if kind is EventKind.SPEECH_STOPPED:
            self.speech_ended(session_id, event.at_s)
        elif kind is EventKind.COMMITTED:
            self._finish(session_id, "superseded")
            speech_end_s = self._ends.pop(session_id, event.at_s)
            self._now[session_id] = Turn(0, session_id, speech_end_s)
            if len(self._now) > self._max:
                self._now.popitem(last=False)
        elif kind is EventKind.BARGE_IN:
            self._finish(session_id, "interrupted")
        elif kind is EventKind.CLOSED:
            self._ends.pop(session_id, None)
            self._finish(session_id, "closed")
        else:
            self._answered(event)

    def speech_ended(self, session_id: str, at_s: float) -> None:
        """The turn that is committed next is counted from ``at_s``."""
        self._ends[session_id] = at_s
        if len(self._ends) > self._max:
            self._ends.popitem(last=False)

    def submitted(self, session_id: str, request_id: str) -> None:
        """The session's request left for the first engine."""
        turn = self._now.get(session_id)
        if turn is not None and turn.submitted_s is None:
            turn.request_id, turn.submitted_s = request_id, self._clock()

    def text_sent(self, session_id: str) -> None:
        """Text of the session's answer left for the client."""
        turn = self._now.get(session_id)
        if turn is not None and turn.text_s is None:
            turn.text_s = self._clock()

    # ---- what engines saw ------------------------------------------------------------------

    def marked(self, stage: str, marks: Iterable[StageMarks]) -> None:
        """An engine's newest marks. Its ids of requests may have a suffix of the host's."""
        turns = [*self._now.values(), *(turn for _, turn in self._waiting)]
        for one in marks:
            for turn in turns:
                name = turn.request_id
                if name and (one.request_id == name or one.request_id.startswith(name + "-")):
                    turn.stages[stage] = one
        self._settle()

    # ---- inside ----------------------------------------------------------------------------

    def _watch(self) -> bool:
        on = self.on
        if self._was_on and not on:
            self._ends.clear()
            self._now.clear()
        self._was_on = on
        return on

    def _answered(self, event: Event) -> None:
        turn, kind = self._now.get(event.session_id), event.kind
        if turn is None:
            return
        if kind is EventKind.RESPONSE_CREATED:
            turn.response_id = event.response_id
        elif event.response_id != turn.response_id:
            return  # late news of an answer before this turn
        elif kind is EventKind.AUDIO_ROUTED:
            turn.audio_s = event.at_s
            self._finish(event.session_id, "spoken")
        elif kind is EventKind.RESPONSE_DONE:
            self._finish(event.session_id, event.detail or "completed")

    def _finish(self, session_id: str, outcome: str) -> None:
        """What the client gets first of the turn has been sent, or will not be."""
        turn = self._now.pop(session_id, None)
        if turn is None or turn.submitted_s is None:
            return
        turn.outcome = outcome
        self._waiting.append((self._clock() + _MARKS_WAIT_S, turn))
        if len(self._waiting) > self._max:
            self._waiting.pop(0)

    def _settle(self) -> None:
        now_s, left = self._clock(), []
        for until_s, turn in self._waiting:
            split(turn)
            wanted = TO_AUDIO if turn.audio_s is not None else TO_TEXT
            if now_s >= until_s or all(part in turn.parts for part in wanted):
                self._numbers += 1
                turn.number = self._numbers
                self._done.append(turn)
            else:
                left.append((until_s, turn))
        self._waiting = left


def split(turn: Turn) -> None:
    """Fill in ``turn.parts`` from its marks, as far as they are there."""
    text = turn.stages.get("thinker") or turn.stages.get("llm")
    if turn.submitted_s is None or text is None or not (text.scheduled_s and text.made_s):
        return
    parts = {"encode": turn.submitted_s - turn.speech_end_s}
    waited_s = text.scheduled_s - turn.submitted_s
    parts["load"] = max(0.0, text.loaded_s - text.loading_s) if text.loaded_s else 0.0
    parts["match"] = text.match_s
    parts["queue"] = waited_s - parts["load"] - parts["match"]
    parts["prefill"] = text.made_s - text.scheduled_s
    turn.token_s = text.made_s
    if turn.text_s is not None:
        parts["text_route"] = turn.text_s - text.made_s
    talker, vocoder = turn.stages.get("talker"), turn.stages.get("code2wav")
    if turn.audio_s is not None and talker and vocoder and talker.sent_s and vocoder.made_s:
        parts["talker"] = talker.sent_s - text.made_s
        parts["vocoder"] = vocoder.made_s - talker.sent_s
        parts["route"] = turn.audio_s - vocoder.made_s
    turn.parts = parts


def as_json(turn: Turn) -> dict[str, Any]:
    """A turn as a JSON object, with its totals."""
    plain = msgspec.to_builtins(turn)
    plain["stages"] = {
        stage: {name: getattr(marks, name) for name in marks.__struct_fields__}
        for stage, marks in turn.stages.items()
    }
    return plain | {"to_text_s": turn.to_text_s, "to_audio_s": turn.to_audio_s}
