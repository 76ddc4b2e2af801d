"""Deploy files for vLLM-Omni on a CPU, rendered for this machine.

The packaged ``deploy_turn.yaml`` and ``deploy_duplex.yaml`` are valid deploy files by
themselves; rendering sets sizes and the path of the server VAD's model, which depends on the
machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from liveserve.host.cpu.adapt import CpuConfigError

Mode = Literal["turn", "duplex"]
MODES: tuple[Mode, ...] = ("turn", "duplex")


def deploy_path(
    mode: Mode,
    *,
    model: str | Path | None = None,
    max_sessions: int = 16,
    max_model_len: int = 8192,
    kv_cache_bytes: int | None = None,
    text_max_tokens: int = 64,
    audio_max_tokens: int = 800,
    history_turns: int | None = None,
    server_vad: bool = True,
    folder: Path | None = None,
) -> Path:
    """Write the deploy file for ``mode`` and return its path.

    Args:
        mode: ``turn`` (chat, turn-mode realtime) or ``duplex`` (live sessions).
        model: the checkpoint's folder, to size the KV caches by; None or a name on a hub: by the
            default tiny model.
        max_sessions: live sessions, and requests at a time in each stage.
        max_model_len: tokens of context in thinker and talker.
        kv_cache_bytes: KV cache of the thinker and of the talker, each. Default: room for
            ``max_sessions`` full contexts in float32, so that nothing is ever preempted
            (memory is touched only as it is used).
        text_max_tokens: default length limit of an answer's text.
        audio_max_tokens: limit of an answer's audio in codec frames (12.5 a second).
        history_turns: spoken inputs in a prompt of the thinker, where a longer window than the
            host's four is wanted.
        server_vad: in duplex mode, Silero VAD from the package ``silero_vad``.
        folder: where to write; default ``$XDG_CACHE_HOME/liveserve/deploy``, or the temporary
            folder where that is not writable.

    Raises:
        CpuConfigError: an option is out of range, or the VAD's model is not installed.
    """
    if mode not in MODES:
        raise CpuConfigError(f"mode {mode!r}: use one of {', '.join(MODES)}")
    for name, value, low, high in (
        ("max_sessions", max_sessions, 1, 1024),
        ("max_model_len", max_model_len, 256, 32768),
        ("text_max_tokens", text_max_tokens, 1, max_model_len - 1),
        ("audio_max_tokens", audio_max_tokens, 1, max_model_len - 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise CpuConfigError(f"{name} {value!r}: use an integer from {low} to {high}")
    per_token = _kv_bytes_per_token(model)
    least = max(per_token) * max_model_len
    if kv_cache_bytes is not None and kv_cache_bytes < least:
        raise CpuConfigError(
            f"kv_cache_bytes {kv_cache_bytes}: use at least {least}, "
            f"one context of max_model_len {max_model_len}"
        )

    config = _packaged(mode)
    for stage in config["stages"]:
        stage["max_num_seqs"] = max_sessions
        if stage["stage_id"] == 2:  # code2wav has no KV cache to size
            continue
        stage["max_model_len"] = stage["max_num_batched_tokens"] = max_model_len
        full = per_token[stage["stage_id"]] * max_model_len * max_sessions
        stage["kv_cache_memory_bytes"] = kv_cache_bytes or full
        if stage["stage_id"] == 0 and history_turns is not None:
            inputs = stage["limit_mm_per_prompt"]
            inputs["audio"] = max(inputs["audio"], history_turns)
        limit = text_max_tokens if stage["stage_id"] == 0 else audio_max_tokens
        stage["default_sampling_params"]["max_tokens"] = limit
    if mode == "duplex":
        config["duplex_session"]["max_sessions"] = max_sessions
        if server_vad:
            config["duplex_session"]["server_vad_model_path"] = str(vad_model_path())
    text = yaml.safe_dump(config, sort_keys=False)
    name = f"{mode}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"
    return _write(folder, name, text)


def vad_model_path() -> Path:
    """Silero VAD's ONNX file in the installed package ``silero_vad``.

    Raises:
        CpuConfigError: the package or the file is missing.
    """
    spec = importlib.util.find_spec("silero_vad")  # does not import it (it would import torch)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    for root in roots:
        path = Path(root) / "data" / "silero_vad.onnx"
        if path.is_file():
            return path
    raise CpuConfigError(
        "server VAD: the package silero-vad is not installed; "
        "run `pip install liveserve[cpu]`, or turn server_vad off"
    )


def _kv_bytes_per_token(model: str | Path | None) -> tuple[int, int]:
    """KV cache bytes of one token in float32: (thinker, talker)."""
    config: dict[str, Any] = {}
    if model is not None and (Path(model) / "config.json").is_file():
        config = json.loads((Path(model) / "config.json").read_text())
    sizes = []
    for stage, layers in (("thinker_config", 4), ("talker_config", 3)):
        text = config.get(stage, {}).get("text_config", {})
        heads = text.get("num_key_value_heads", 2) * text.get("head_dim", 64)
        sizes.append(2 * 4 * heads * text.get("num_hidden_layers", layers))
    return sizes[0], sizes[1]


def _packaged(mode: Mode) -> dict[str, Any]:
    """The packaged deploy file with ``base_config`` merged in.

    Mirrors ``resolve_deploy_yaml`` of ``vllm_omni/config/stage_config.py`` for the keys that
    our files use, so that rendering does not import the host.
    """
    config = yaml.safe_load(Path(__file__).with_name(f"deploy_{mode}.yaml").read_text())
    base_name = config.pop("base_config", None)
    if base_name is None:
        return config
    return {**yaml.safe_load(Path(__file__).with_name(base_name).read_text()), **config}


def _write(folder: Path | None, name: str, text: str) -> Path:
    """Write atomically: another process may be reading the same file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = (
        [folder]
        if folder
        else [cache / "liveserve" / "deploy", Path(tempfile.gettempdir()) / "liveserve-deploy"]
    )
    for target in folders:
        try:
            target.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=target, suffix=".tmp", delete=False) as file:
                file.write(text)
            os.replace(file.name, target / name)
        except OSError as error:
            failure = error
            continue
        return target / name
    raise CpuConfigError(f"cannot write the deploy file to {folders[-1]}: {failure}")
