"""``liveserve tiny-model DIR``: a tiny random Qwen3-Omni checkpoint that real hosts load.

Configuration classes, file formats, vocabulary size and special-token ids are those of
Qwen3-Omni-30B-A3B; width and depth are small, weights are random and a function of the seed.
No network is used.

The thinker emits printable bytes only and never an end-of-sequence token, so a request's
``max_tokens`` sets the length of its text; the talker ends after ``frames_per_token`` codec
frames per text token, so the text sets the length of the audio.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCAB_SIZE = 151936
DTYPES = ("float32", "bfloat16")
HEAD_DIM = 64
SPECIAL_TOKENS = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151646: "<|object_ref_start|>",
    151647: "<|object_ref_end|>",
    151648: "<|box_start|>",
    151649: "<|box_end|>",
    151650: "<|quad_start|>",
    151651: "<|quad_end|>",
    151652: "<|vision_start|>",
    151653: "<|vision_end|>",
    151654: "<|vision_pad|>",
    151655: "<|image_pad|>",
    151656: "<|video_pad|>",
    151669: "<|audio_start|>",
    151670: "<|audio_end|>",
    151671: "<tts_pad>",
    151672: "<tts_text_bos>",
    151673: "<tts_text_eod>",
    151674: "<tts_text_bos_single>",
    151675: "<|audio_pad|>",
}
# Words whose ids the host hard-codes (stage_input_processors/qwen3_omni.py).
ROLE_TOKENS = {"system": 8948, "user": 872, "assistant": 77091}
NEWLINE_ID = 198
ID = {name: token_id for token_id, name in SPECIAL_TOKENS.items()}
TEXT, FRAME, COUNT = range(3)  # residual dimensions of the talker, see _shape_talker

CHAT_TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if 'audio' in c or 'audio_url' in c or 'input_audio' in c or c.type == 'audio' %}"
    "<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif 'image' in c or 'image_url' in c or c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TinyModelError(ValueError):
    """A size or a target directory that cannot work; the message names it and the fix."""


def write_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    thinker_layers: int = 4,
    talker_layers: int = 3,
    frames_per_token: float = 4.0,
    dtype: str = "float32",
    force: bool = False,
) -> Path:
    """Write a checkpoint to the folder ``path`` and return it.

    Args:
        path: created if missing; must be empty unless ``force``.
        seed: of all weights; the same arguments give the same bytes.
        hidden_size: width of thinker, talker and code predictor; a multiple of 32.
        thinker_layers: at least 2 (the talker reads the output of an inner layer).
        talker_layers: at least 1.
        frames_per_token: codec frames (12.5 a second) that the talker speaks per text token,
            at least 1; 0: the talker never ends and its ``max_tokens`` sets the length.
        dtype: of the weights, ``float32`` or ``bfloat16``.
        force: replace the checkpoint's files in a folder that is not empty.

    Raises:
        TinyModelError: a size or the folder cannot work.
    """
    path = Path(path)
    _check(path, seed, hidden_size, thinker_layers, talker_layers, frames_per_token, dtype, force)
    from liveserve.host.cpu.adapt import stub_cuda_wheels

    stub_cuda_wheels()  # transformers imports torchvision
    path.mkdir(parents=True, exist_ok=True)
    printable = _write_tokenizer(path)
    _write_processor(path)
    with _quiet_transformers():
        config = _config(hidden_size, thinker_layers, talker_layers)
        model = _model(config, seed, frames_per_token, dtype, printable)
        model.save_pretrained(path)
    _write_json(
        path / "generation_config.json",
        {
            "eos_token_id": [ID["<|im_end|>"]],
            "pad_token_id": ID["<|endoftext|>"],
            "do_sample": False,
        },
    )
    return path


def _check(
    path: Path,
    seed: int,
    hidden_size: int,
    thinker_layers: int,
    talker_layers: int,
    frames_per_token: float,
    dtype: str,
    force: bool,
) -> None:
    for name, value, low, high in (
        ("seed", seed, 0, 2**63 - 1),
        ("hidden-size", hidden_size, 64, 2048),
        ("thinker-layers", thinker_layers, 2, 64),
        ("talker-layers", talker_layers, 1, 64),
    ):
        if not low <= value <= high:
            raise TinyModelError(f"--{name} {value}: use {low} to {high}")
    if hidden_size % 32:
        raise TinyModelError(
            f"--hidden-size {hidden_size}: use a multiple of 32 (CPU kernels), "
            f"such as {max(64, round(hidden_size / 32) * 32)}"
        )
    if frames_per_token != 0 and not 1 <= frames_per_token <= 100:
        raise TinyModelError(f"--frames-per-token {frames_per_token}: use 0, or 1 to 100")
    if dtype not in DTYPES:
        raise TinyModelError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    if path.exists() and not path.is_dir():
        raise TinyModelError(f"{path}: is a file; give a folder")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise TinyModelError(f"{path}: not empty; give another folder or --force")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar for one file, and no warning about the rotary keys that Qwen's files have."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_tokenizer(path: Path) -> list[int]:
    """Byte-level BPE with Qwen's ids for its special tokens; returns the printable ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    newline = "Ċ"  # the byte-level alphabet's character for "\n"
    vocab[alphabet[NEWLINE_ID]], vocab[newline] = vocab[newline], NEWLINE_ID
    merges: dict[tuple[str, str], None] = {}
    for word, word_id in ROLE_TOKENS.items():
        for end in range(2, len(word) + 1):
            merges[(word[: end - 1], word[end - 1])] = None
            if end == len(word):
                vocab[word] = word_id
            else:
                vocab.setdefault(word[:end], len(vocab))
    vocab |= {name: token_id for token_id, name in SPECIAL_TOKENS.items()}
    # A gap in the ids makes `tokenizers` print a warning of a megabyte at each load.
    used = set(vocab.values())
    vocab |= {f"<unused{i}>": i for i in range(max(SPECIAL_TOKENS) + 1) if i not in used}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS.values()]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    roles = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "unk_token": None,
            "additional_special_tokens": list(SPECIAL_TOKENS.values()),
            "extra_special_tokens": roles,
            **roles,
            "model_max_length": 32768,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    # Printable ASCII only: other single bytes are not text by themselves.
    return [vocab[char] for char in alphabet if " " < char <= "~" or char == "Ġ"]


def _write_processor(path: Path) -> None:
    _write_json(
        path / "preprocessor_config.json",
        {
            "processor_class": "Qwen3OmniMoeProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "sampling_rate": 16000,
            "hop_length": 160,
            "chunk_length": 30,
            "n_fft": 400,
            "n_samples": 480000,
            "nb_max_frames": 3000,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": True,
            "dither": 0.0,
            "image_processor_type": "Qwen2VLImageProcessor",
            "video_processor_type": "Qwen2VLVideoProcessor",
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 3136,
            "max_pixels": 262144,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    )


def _config(hidden_size: int, thinker_layers: int, talker_layers: int) -> Any:
    from transformers import Qwen3OmniMoeConfig

    rope = {
        "rope_theta": 1e6,
        "rope_type": "default",
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
        "interleaved": True,
    }
    decoder = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_parameters": rope,
        "rope_scaling": rope,
        "initializer_range": 0.08,
    }
    media = {
        "audio_token_id": ID["<|audio_pad|>"],
        "image_token_id": ID["<|image_pad|>"],
        "video_token_id": ID["<|video_pad|>"],
        "audio_start_token_id": ID["<|audio_start|>"],
        "vision_start_token_id": ID["<|vision_start|>"],
        "position_id_per_seconds": 13,
    }
    thinker = {
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "output_dim": hidden_size,
            "downsample_hidden_size": 32,
            "num_mel_bins": 128,
            "n_window": 50,
            "n_window_infer": 800,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": hidden_size,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 2304,
            "patch_size": 16,
            "image_size": 768,
            "tokens_per_second": 2,
            "apply_vit_abs_pos_embed": True,
        },
        "text_config": {
            **decoder,
            "vocab_size": VOCAB_SIZE,
            "num_hidden_layers": thinker_layers,
            "bos_token_id": ID["<|endoftext|>"],
            "eos_token_id": ID["<|im_end|>"],
            "pad_token_id": ID["<|endoftext|>"],
        },
        **media,
        "audio_end_token_id": ID["<|audio_end|>"],
        "vision_end_token_id": ID["<|vision_end|>"],
        "user_token_id": ROLE_TOKENS["user"],
        "seconds_per_chunk": 2,
    }
    talker = {
        "text_config": {
            **decoder,
            "vocab_size": 3072,
            "num_hidden_layers": talker_layers,
            "num_local_experts": 4,
            "shared_expert_intermediate_size": 64,
        },
        "code_predictor_config": {
            "vocab_size": 2048,
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_code_groups": 16,
            "max_position_embeddings": 4096,
            "layer_types": ["full_attention"],
            "initializer_range": 0.08,
        },
        **media,
        "num_code_groups": 16,
        "spatial_merge_size": 2,
        "thinker_hidden_size": hidden_size,
        "accept_hidden_layer": min(2, thinker_layers - 1),
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
    }
    code2wav = {
        "codebook_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_quantizers": 16,
        "decoder_dim": 64,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "sliding_window": 72,
        "max_position_embeddings": 8000,
        "initializer_range": 0.1,
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=code2wav,
        enable_audio_output=True,
        im_start_token_id=ID["<|im_start|>"],
        im_end_token_id=ID["<|im_end|>"],
        tts_pad_token_id=ID["<tts_pad>"],
        tts_bos_token_id=ID["<tts_text_bos>"],
        tts_eos_token_id=ID["<tts_text_eod>"],
        system_token_id=ROLE_TOKENS["system"],
        user_token_id=ROLE_TOKENS["user"],
        assistant_token_id=ROLE_TOKENS["assistant"],
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config


def _model(
    config: Any, seed: int, frames_per_token: float, dtype: str, printable: list[int]
) -> Any:
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3OmniMoeForConditionalGeneration(config)
        _shape_thinker(model.thinker, printable)
        _shape_talker(model.talker, frames_per_token)
    return model.to(getattr(torch, dtype))


def _shape_thinker(thinker: Any, printable: list[int]) -> None:
    """Greedy text that is printable, never ends, and depends on the whole context."""
    import torch

    head = thinker.lm_head.weight  # [vocab, hidden]
    keep = torch.zeros(head.shape[0], dtype=torch.bool)
    keep[printable] = True
    head.normal_(0, 0.3)
    head[~keep] = 0
    for parameter in thinker.model.layers.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(4)
    embedding = thinker.model.embed_tokens.weight
    embedding.normal_(0, 1)
    # What the talker counts, see _shape_talker.
    embedding[:, TEXT] = 0
    embedding[printable, TEXT] = 1
    embedding[[ID["<tts_pad>"], ID["<tts_text_eod>"]], TEXT] = -1


def _shape_talker(talker: Any, frames_per_token: float) -> None:
    """Codes that have audio, and an end of speech that follows the length of the text.

    A trained talker hears the text tokens one per codec frame, then padding, and stops when it
    has spoken them. Random weights never stop, so three residual dimensions are taken out of
    the random part and used to count (everything else stays random):

    * ``TEXT`` is +1 where the frame carries a text token and -1 where it carries padding;
    * ``FRAME`` is 1 on generated frames and on the prompt's last position, which carries the
      first text token; 0 on the rest of the prompt;
    * ``COUNT`` gets, from one attention head of layer 0 that looks at all these frames alike,
      the mean of ``frames_per_token - 1`` per text frame and -1 per padding frame.

    The mean turns negative when there are ``frames_per_token`` frames per text token, and
    then the end-of-speech row of the codec head, which reads ``COUNT`` alone, wins.
    """
    for name, parameter in talker.model.named_parameters():
        if ".experts." in name:  # transformers 5.14 leaves these uninitialised
            parameter.normal_(0, talker.config.text_config.initializer_range)
    head = talker.codec_head.weight  # [3072, hidden]
    head.normal_(0, 0.3)
    head[2048:] = 0
    if not frames_per_token:
        return
    reserved = [TEXT, FRAME, COUNT]
    head[:, reserved] = 0
    head[talker.config.codec_eos_token_id, COUNT] = -20000.0

    for name, parameter in talker.named_parameters():
        if name.endswith("codec_embedding.weight") or ".codec_embedding." in name:
            parameter[:, reserved] = 0
        elif name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            parameter[..., reserved, :] = 0  # [hidden, in] or [experts, hidden, in]
        elif name.endswith(("linear_fc2.weight", "linear_fc2.bias")):
            parameter[reserved] = 0
    embedding = talker.model.codec_embedding.weight
    embedding[:2048, FRAME] = 1
    # The position of the first text token has one code where frames have 16: give it the length
    # of theirs, since the norm divides by it. It counts twice, because the host never
    # embeds the last token of a text.
    first = talker.config.codec_bos_id
    tables = [embedding, *(t.weight for t in talker.code_predictor.model.codec_embedding)]
    frame = sum(float(table[:2048].square().sum(1).mean()) for table in tables) + 1
    embedding[first] *= max(frame - 9, 0) ** 0.5 / float(embedding[first].norm())
    embedding[first, TEXT] = 2
    embedding[first, FRAME] = 1

    # silu(x) - silu(-x) = x: two hidden units carry TEXT through the projection's MLP.
    projection = talker.text_projection
    projection.linear_fc1.weight[:2] = 0
    projection.linear_fc1.bias[:2] = 0
    projection.linear_fc2.weight[:, :2] = 0
    for unit, sign in ((0, 1), (1, -1)):
        projection.linear_fc1.weight[unit, TEXT] = sign
        projection.linear_fc2.weight[TEXT, unit] = sign

    # Head 0 of layer 0. The dimension of the lowest rotary frequency does not turn noticeably
    # over a talker's context, and the per-head norm makes every generated frame score alike.
    attention = talker.model.layers[0].self_attn
    still = HEAD_DIM // 2 - 1
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[:HEAD_DIM] = 0
        projection.weight[still, FRAME] = 1
    attention.q_norm.weight[still] = 4
    attention.v_proj.weight[0] = 0
    attention.v_proj.weight[0, TEXT] = frames_per_token / 2
    attention.v_proj.weight[0, FRAME] = frames_per_token / 2 - 1
    attention.o_proj.weight[COUNT, 0] = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``liveserve tiny-model``."""
    parser.add_argument("dir", metavar="DIR", help="folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=0, help="of all weights (default %(default)s)")
    parser.add_argument(
        "--hidden-size", type=int, default=128, help="multiple of 32 (default %(default)s)"
    )
    parser.add_argument("--thinker-layers", type=int, default=4, help="default %(default)s")
    parser.add_argument("--talker-layers", type=int, default=3, help="default %(default)s")
    parser.add_argument(
        "--frames-per-token",
        type=float,
        default=4.0,
        help="codec frames (12.5/s) spoken per text token; 0: until max_tokens "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder with files in it")


def run(args: argparse.Namespace) -> int:
    """Run ``liveserve tiny-model``; returns the exit status."""
    try:
        path = write_tiny_model(
            args.dir,
            seed=args.seed,
            hidden_size=args.hidden_size,
            thinker_layers=args.thinker_layers,
            talker_layers=args.talker_layers,
            frames_per_token=args.frames_per_token,
            dtype=args.dtype,
            force=args.force,
        )
    except (TinyModelError, OSError) as error:
        print(f"liveserve tiny-model: {error}", file=sys.stderr)
        return 2
    size_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    print(f"{path}: {size_bytes / 1e6:.0f} MB")
    return 0
