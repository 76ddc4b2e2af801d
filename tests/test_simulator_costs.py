"""Cost models: presets whose every figure has a source, files, and what is refused."""

from __future__ import annotations

import json

import msgspec
import pytest

from liveserve.bench.simulator.costs import (
    PRESETS,
    load_costs,
    save_costs,
    spreads,
    varied,
)
from liveserve.bench.simulator.model import CostModel, ModelError


def figures(costs: CostModel, above: str = "", of: object = None) -> dict[str, float]:
    """Every number of a cost model by its path."""
    found: dict[str, float] = {}
    for field in msgspec.structs.fields(type(of or costs)):
        value = getattr(of or costs, field.name)
        if isinstance(value, msgspec.Struct):
            found |= figures(costs, f"{above}{field.name}.", value)
        elif field.name not in ("name", "sources"):
            found[above + field.name] = value
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_that_is_not_zero_has_a_source(name):
    costs = load_costs(name)
    known = {path for path, value in figures(costs).items() if value}
    assert known - costs.sources.keys() == set()
    assert costs.sources.keys() <= figures(costs).keys()
    assert all(len(source) > 5 for source in costs.sources.values())


@pytest.mark.parametrize("name", PRESETS)
def test_measured_and_derived_step_times_say_how_sure_they_are(name):
    costs = load_costs(name)
    uncertain = spreads(costs)
    steps = {path for path, value in figures(costs).items() if ".step." in path and value}
    assert steps <= uncertain.keys()
    assert all(1 < spread <= 3 for spread in uncertain.values())


def test_qwen3_omni_speaks_as_fast_as_the_paper_says():
    """65.9 s of audio in 8.2 s, alone on the machine."""
    costs = load_costs("qwen3-omni-h200")
    frames = round(65.9 * costs.frame_rate_hz)
    made_s = sum(costs.talker.step.seconds(1, 200 + n) for n in range(frames))
    assert made_s == pytest.approx(8.2, rel=0.03)


def test_qwen3_omni_first_audio_without_load_is_near_the_published():
    """c=1..8 in vLLM-Omni's benchmark: 325 to 400 ms."""
    costs = load_costs("qwen3-omni-h200")
    prompt = 2500
    first_s = (
        costs.encode_s
        + costs.thinker.step.seconds(0, 0, prompt, prompt**2 / 2)
        + costs.handover_s
        + costs.talker.step.seconds(0, 0, prompt, prompt**2 / 2)
        + costs.first_chunk_frames * costs.talker.step.seconds(4, 4 * prompt)
        + costs.handover_s
        + costs.code2wav.seconds(1, costs.first_chunk_frames)
        + costs.deliver_s
    )
    assert 0.2 < first_s < 0.4


def test_blocks_are_as_large_as_measured():
    """1.5 MiB for 16 tokens of Qwen3-30B-A3B."""
    thinker = load_costs("qwen3-omni-h200").thinker
    assert thinker.block_tokens * thinker.kv_bytes_per_token == 1.5 * 2**20


@pytest.mark.parametrize("name", PRESETS)
def test_a_saved_model_loads_as_it_was(name, tmp_path):
    path = tmp_path / "sub" / "costs.json"
    save_costs(path, load_costs(name))
    assert load_costs(str(path)) == load_costs(name)


def test_changes_win_and_are_named_in_the_sources():
    costs = load_costs("qwen3-omni-h200", {"thinker.replicas": "8", "link.gbps": 6.3})
    assert (costs.thinker.replicas, costs.link.gbps) == (8, 6.3)
    assert costs.sources["link.gbps"] == "set by hand"
    assert "link.gbps" not in spreads(costs)
    assert costs.talker == load_costs("qwen3-omni-h200").talker


def test_varied_models_stay_within_the_spreads_and_differ():
    costs = load_costs("qwen3-omni-h200")
    before, within = figures(costs), spreads(costs)
    drawn = [figures(varied(costs, seed)) for seed in range(40)]
    for path, value in before.items():
        values = [d[path] for d in drawn]
        if path not in within:
            assert set(values) == {value}, path
            continue
        ratios = [v / value for v in values]
        assert min(ratios) >= 0.99 / within[path], path
        assert max(ratios) <= 1.01 * within[path], path
        assert max(ratios) / min(ratios) > within[path], path
    assert varied(costs, 3) == varied(costs, 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"thinker.step.fixed_s": 0.0}, "thinker.step.fixed_s"),
        ({"thinker.step.fixed_s": -1.0}, "fixed_s"),
        ({"thinker.step.fixed_s": float("nan")}, "fixed_s"),
        ({"thinker.step.fixed_s": "fast"}, "fixed_s"),
        ({"talker.replicas": 0}, "replicas"),
        ({"link.gbps": 0}, "gbps"),
        ({"thinker.steps": 1}, "steps"),
        ({"name.length": 1}, "name.length"),
    ],
)
def test_a_figure_that_makes_no_sense_is_named(changes, named):
    with pytest.raises(ModelError, match=named):
        load_costs("qwen3-omni-h200", changes)


def test_a_file_that_is_no_cost_model_is_named(tmp_path):
    path = tmp_path / "costs.json"
    with pytest.raises(ModelError, match=r"costs\.json: cannot be read"):
        load_costs(str(path))
    path.write_text('{"name": "x"')
    with pytest.raises(ModelError, match=r"costs\.json"):
        load_costs(str(path))
    fields = msgspec.to_builtins(load_costs("qwen3-omni-h200"))
    path.write_text(json.dumps(fields | {"speed": 1}))
    with pytest.raises(ModelError, match="speed"):
        load_costs(str(path))
    with pytest.raises(ModelError, match="qwen3-omni-h200"):
        load_costs("qwen4")


def test_what_makes_no_sense_is_not_saved(tmp_path):
    costs = load_costs("qwen3-omni-h200")
    bad = msgspec.structs.replace(costs, deliver_s=float("inf"))
    with pytest.raises(ModelError, match="deliver_s"):
        save_costs(tmp_path / "costs.json", bad)
    assert not list(tmp_path.iterdir())
