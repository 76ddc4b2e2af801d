"""Trace readers: what they read, and that damage is named by file, line and field."""

from __future__ import annotations

import json
import random

import pytest

from liveserve.bench.eviction import SLICE
from liveserve.bench.traces import TraceError, TraceRequest, read_trace

MOONCAKE = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
INTERACTION = {
    "session_id": "a", "timestamp": 10.0, "turn": 0, "query_length": 20, "response_length": 90,
    "gap": None,
}  # fmt: skip
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.fixture
def file(tmp_path):
    def write(*lines: object):
        path = tmp_path / "trace"
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text(text + "\n")
        return path

    return write


def test_mooncake_times_start_at_zero(file):
    path = file(MOONCAKE, MOONCAKE | {"timestamp": 4500, "input_length": 512, "hash_ids": [7]})
    assert read_trace(path) == [
        TraceRequest(0.0, 700, 5, (0, 1)),
        TraceRequest(1.5, 512, 5, (7,)),
    ]


def test_interaction_keeps_turns_and_gaps_of_each_session(file):
    path = file(
        INTERACTION,
        INTERACTION | {"session_id": 7, "timestamp": 11},
        INTERACTION | {"turn": 1, "timestamp": 40.5, "gap": 2.25},
    )
    first, other, second = read_trace(path)
    assert (first.session, first.turn, first.gap_s, first.at_s) == ("a", 0, None, 0.0)
    assert (other.session, other.at_s) == ("7", 1.0)
    assert (second.session, second.turn, second.gap_s, second.at_s) == ("a", 1, 2.25, 30.5)
    assert (second.input_tokens, second.output_tokens, second.blocks) == (20, 90, ())


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_seconds_have_seven_digits(file, zone):
    path = file(
        AZURE,
        f"2023-11-16 18:15:46.6805900{zone},374,44",
        f"2023-11-16 18:15:50.9951690{zone},396,0",
        f"2023-11-16 18:16:50{zone},1,1",
    )
    first, second, third = read_trace(path)
    assert first == TraceRequest(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    assert third.at_s == pytest.approx(63.31941, abs=1e-6)
    assert second.output_tokens == 0


def test_the_slice_in_the_repository_reads():
    requests = read_trace(SLICE)
    assert 500 < len(requests) < 1000
    assert SLICE.stat().st_size < 200_000
    assert requests[-1].at_s > 3000


def changed(record: dict, field: str, value: object) -> dict:
    return {k: v for k, v in (record | {field: value}).items() if v is not KeyError}


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (MOONCAKE, "timestamp", KeyError),
        (MOONCAKE, "timestamp", -1),
        (MOONCAKE, "timestamp", float("nan")),
        (MOONCAKE, "timestamp", float("inf")),
        (MOONCAKE, "timestamp", 10**400),
        (MOONCAKE, "timestamp", "3000"),
        (MOONCAKE, "timestamp", True),
        (MOONCAKE, "timestamp", 2999),
        (MOONCAKE, "input_length", 0),
        (MOONCAKE, "input_length", 700.0),
        (MOONCAKE, "input_length", 10**9),
        (MOONCAKE, "output_length", -5),
        (MOONCAKE, "output_length", None),
        (MOONCAKE, "hash_ids", KeyError),
        (MOONCAKE, "hash_ids", "0 1"),
        (MOONCAKE, "hash_ids", [0]),
        (MOONCAKE, "hash_ids", [0, 1, 2]),
        (MOONCAKE, "hash_ids", [0, 0]),
        (MOONCAKE, "hash_ids", [0, -1]),
        (MOONCAKE, "hash_ids", [0, 1.5]),
        (INTERACTION, "session_id", None),
        (INTERACTION, "session_id", ""),
        (INTERACTION, "turn", 0),
        (INTERACTION, "turn", 1.0),
        (INTERACTION, "gap", -0.1),
        (INTERACTION, "gap", "2"),
        (INTERACTION, "query_length", 0),
        (INTERACTION, "response_length", KeyError),
        (INTERACTION, "timestamp", 9.0),
        (INTERACTION, "timestamp", 10 + 400 * 86400),
    ],
)
def test_a_wrong_field_is_named_with_its_line(file, record, field, value):
    second = record | {"turn": 1} if record is INTERACTION else record
    path = file(record, changed(second, field, value))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: {field}: ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:46.1,374", ":3: has 2 fields"),
        ("2023-11-16 18:15:46.1,374,44,1", ":3: has 4 fields"),
        ("yesterday,374,44", ":3: TIMESTAMP: "),
        ("2023-11-16 18:15:45.0,374,44", ":3: TIMESTAMP: "),
        ("2025-11-16 18:15:45.0,374,44", ":3: TIMESTAMP: "),
        ("2023-11-16 18:15:46.1,0,44", ":3: ContextTokens: "),
        ("2023-11-16 18:15:46.1,374,-44", ":3: GeneratedTokens: "),
        ("2023-11-16 18:15:46.1,374,4e1", ":3: GeneratedTokens: "),
        ("", ":3: has 0 fields"),
    ],
)
def test_a_wrong_azure_row_is_named_with_its_line(file, row, message):
    path = file(AZURE, "2023-11-16 18:15:46.0,374,44", row, "2023-11-16 18:15:47.0,374,44")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "is empty"),
        (["{}"], ":1: is in no format"),
        (["[1]"], ":1: is not a JSON object"),
        (["{" * 100_000], ":1: is not a JSON object"),
        ([MOONCAKE, "", MOONCAKE], ":2: is not a JSON object"),
        ([MOONCAKE, '{"timestamp": 4'], ":2: is not a JSON object"),
        (["TIMESTAMP,Tokens", "x"], ":1: header"),
        ([AZURE], "holds no request"),
    ],
)
def test_what_is_no_trace_is_refused(file, lines, message):
    path = file(*lines)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(json.dumps(MOONCAKE).encode() + b"\n\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"binary:2: is not UTF-8"):
        read_trace(binary)
    with pytest.raises(TraceError, match="'csv' is not one of mooncake"):
        read_trace(SLICE, "csv")


def test_random_damage_is_an_error_or_a_readable_trace(tmp_path):
    draw = random.Random(5)
    lines = SLICE.read_bytes().splitlines()[:5]
    data = b"\n".join(lines)
    path = tmp_path / "damaged"
    messages: list[str] = []
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 2))
        path.write_bytes(damaged)
        try:
            requests = read_trace(path)
        except TraceError as error:
            messages.append(str(error))
        else:
            assert all(r.input_tokens > 0 and r.output_tokens >= 0 for r in requests)
    assert len(messages) > 200
    assert all(message.startswith(f"{path}:") for message in messages)
