"""Readers of request traces: Mooncake, interaction and Azure format, into one kind of record.

- Mooncake (FAST'25), JSON lines: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens)
  and ``hash_ids``, one per started block of the input; equal ids mean equal prefixes up to there.
- Interaction, JSON lines: ``session_id``, ``timestamp`` (s), ``turn`` (from 0), ``query_length``,
  ``response_length`` (tokens), and ``gap`` (s from the end of the answer before to this query;
  null or left out in turn 0).
- Azure LLM inference, CSV: ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens``.

A trace that is damaged or makes no sense is refused with its file, line and field: a benchmark on
half a trace would look like a result.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

MOONCAKE_BLOCK_TOKENS = 512
FORMATS = ("mooncake", "interaction", "azure")
# Beyond these a value is a mistake, not a workload.
_MAX_TOKENS = 10_000_000
_MAX_SECONDS = 366 * 86400.0
_MAX_TURN = 1_000_000
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace that cannot be used; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        at_s: when it arrived, in seconds since the trace began.
        input_tokens: prompt, with the history where the format has it in there (Mooncake, Azure);
            the new query alone in an interaction trace.
        blocks: ids of the input's blocks, first one first; empty where the format has none.
        session: whose turn it is, or None where the format does not say.
        turn: number of the turn in its session, from 0.
        gap_s: from the end of the answer before to this turn; None where the format has none.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str | None = None
    turn: int = 0
    gap_s: float | None = None


def read_trace(path: Path, trace_format: str | None = None) -> list[TraceRequest]:
    """All requests of ``path``, in order of arrival. ``trace_format``: one of `FORMATS`, or None to
    tell it from the first line.

    Raises:
        TraceError: the file cannot be read, is damaged, or holds no request.
    """
    lines = _lines(path)
    trace_format = trace_format or _guess(path, lines[0])
    readers: dict[str, Callable[[Path, Sequence[str]], Iterator[TraceRequest]]] = {
        "mooncake": _read_mooncake,
        "interaction": _read_interaction,
        "azure": _read_azure,
    }
    if trace_format not in readers:
        raise TraceError(f"trace format {trace_format!r} is not one of {', '.join(FORMATS)}")
    requests = list(readers[trace_format](path, lines))
    if not requests:
        raise TraceError(f"{path}: holds no request")
    return requests


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    lines = []
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            lines.append(line.decode("utf-8").rstrip("\r"))
        except UnicodeDecodeError:
            raise TraceError(f"{path}:{number}: is not UTF-8 text") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise TraceError(f"{path}: is empty")
    return lines


def _guess(path: Path, first: str) -> str:
    if first.lstrip("\ufeff").startswith("TIMESTAMP"):
        return "azure"
    record = _object(path, 1, first)
    for name, field in (("mooncake", "hash_ids"), ("interaction", "session_id")):
        if field in record:
            return name
    raise TraceError(
        f"{path}:1: is in no format that is known: expected hash_ids (Mooncake), session_id "
        "(interaction) or a TIMESTAMP header (Azure)"
    )


def _read_mooncake(path: Path, lines: Sequence[str]) -> Iterator[TraceRequest]:
    clock = _Clock(_MAX_SECONDS * 1e3)
    for number, line in enumerate(lines, 1):
        at = _Line(path, number, _object(path, number, line))
        now_ms = at.seconds("timestamp", _MAX_SECONDS * 1e3, "milliseconds")
        at_ms = clock.since_first(at, "timestamp", now_ms)
        input_tokens = at.count("input_length", 1, _MAX_TOKENS)
        blocks = at.value("hash_ids")
        if not isinstance(blocks, list) or not all(type(b) is int and b >= 0 for b in blocks):
            at.wrong("hash_ids", "a list of integers, 0 or more")
        expected = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
        if len(blocks) != expected:
            raise TraceError(
                f"{path}:{number}: hash_ids: {len(blocks)} blocks for input_length {input_tokens}, "
                f"expected {expected} of {MOONCAKE_BLOCK_TOKENS} tokens"
            )
        if len(set(blocks)) != len(blocks):
            raise TraceError(f"{path}:{number}: hash_ids: one id stands twice in a prompt")
        yield TraceRequest(
            at_ms / 1e3,
            input_tokens,
            at.count("output_length", 0, _MAX_TOKENS),
            tuple(blocks),
        )


def _read_interaction(path: Path, lines: Sequence[str]) -> Iterator[TraceRequest]:
    clock = _Clock(_MAX_SECONDS)
    turns: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        at = _Line(path, number, _object(path, number, line))
        session = at.value("session_id")
        if type(session) not in (int, str) or session == "":
            at.wrong("session_id", "a name or an integer")
        session = str(session)
        at_s = clock.since_first(at, "timestamp", at.seconds("timestamp", 4e9, "seconds"))
        turn = at.count("turn", 0, _MAX_TURN)
        if turn <= turns.get(session, -1):
            at.wrong("turn", f"above {turns[session]}, the turn of session {session} before")
        turns[session] = turn
        gap_s = None
        if at.record.get("gap") is not None:
            gap_s = at.seconds("gap", _MAX_SECONDS, "seconds")
        yield TraceRequest(
            at_s,
            at.count("query_length", 1, _MAX_TOKENS),
            at.count("response_length", 0, _MAX_TOKENS),
            session=session,
            turn=turn,
            gap_s=gap_s,
        )


def _read_azure(path: Path, lines: Sequence[str]) -> Iterator[TraceRequest]:
    header = tuple(name.strip() for name in lines[0].lstrip("\ufeff").split(","))
    if header != _AZURE_FIELDS:
        raise TraceError(f"{path}:1: header: expected {','.join(_AZURE_FIELDS)}, got {lines[0]!r}")
    clock = _Clock(_MAX_SECONDS)
    for number, line in enumerate(lines[1:], 2):
        row = next(csv.reader([line]), [])
        if len(row) != len(_AZURE_FIELDS):
            raise TraceError(f"{path}:{number}: has {len(row)} fields, expected 3")
        record: dict[str, Any] = dict(zip(_AZURE_FIELDS, row, strict=True))
        for name in _AZURE_FIELDS[1:]:
            if record[name].strip().isascii() and record[name].strip().isdigit():
                record[name] = int(record[name])
        at = _Line(path, number, record)
        at_s = clock.since_first(at, "TIMESTAMP", _azure_time_s(at))
        yield TraceRequest(
            at_s,
            at.count("ContextTokens", 1, _MAX_TOKENS),
            at.count("GeneratedTokens", 0, _MAX_TOKENS),
        )


def _azure_time_s(at: _Line) -> float:
    text = at.record["TIMESTAMP"].strip()
    date, dot, rest = text.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    if dot:  # the traces have seven digits of a second, Python reads six
        text = f"{date}.{rest[:digits][:6].ljust(6, '0')}{rest[digits:]}"
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        at.wrong("TIMESTAMP", "a date and time like 2023-11-16 18:15:46.6805900")
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(f"{path}:{number}: is not a JSON object: {line[:60]!r}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{number}: is not a JSON object: {line[:60]!r}")
    return record


class _Line:
    """One line's fields, and errors that say where they stand."""

    def __init__(self, path: Path, number: int, record: dict[str, Any]) -> None:
        self.record = record
        self._where = f"{path}:{number}"

    def value(self, field: str) -> Any:
        if field not in self.record:
            raise TraceError(f"{self._where}: {field}: is missing")
        return self.record[field]

    def wrong(self, field: str, expected: str) -> NoReturn:
        got = repr(self.record[field])
        raise TraceError(f"{self._where}: {field}: expected {expected}, got {got[:60]}")

    def count(self, field: str, low: int, high: int) -> int:
        value = self.value(field)
        if type(value) is not int or not low <= value <= high:
            self.wrong(field, f"an integer from {low} to {high}")
        return value

    def seconds(self, field: str, high: float, unit: str) -> float:
        value = self.value(field)
        if type(value) not in (int, float) or not 0 <= value <= high:
            self.wrong(field, f"{unit} from 0 to {high:.0f}")
        return float(value)


class _Clock:
    """A trace's times. ``year``: what that is in the trace's unit."""

    def __init__(self, year: float) -> None:
        self._year = year
        self._first: float | None = None
        self._before = 0.0

    def since_first(self, at: _Line, field: str, now: float) -> float:
        """Time from the first line to ``now``, the time in ``field`` of the line ``at``."""
        if self._first is None:
            self._first = self._before = now
        if now < self._before:
            at.wrong(field, "no time before the line above")
        if now - self._first > self._year:
            at.wrong(field, "within a year of the first")
        self._before = now
        return now - self._first
