"""``liveserve tiny-model``: real ids and formats, one seed one checkpoint, lengths that count."""

import argparse
import hashlib
import json
from pathlib import Path

import pytest

from liveserve.host.cpu import adapt, tiny_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
adapt.stub_cuda_wheels()

SMALL = {"hidden_size": 64, "thinker_layers": 2, "talker_layers": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_model.write_tiny_model(path, seed=3, **SMALL)


@pytest.fixture(scope="module")
def model(checkpoint: Path):
    from transformers import Qwen3OmniMoeForConditionalGeneration

    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint).eval()


def hashes(path: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.iterdir()}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tiny_model.add_arguments(parser)
    return parser.parse_args(argv)


def test_same_seed_same_bytes_other_seed_other_weights(checkpoint, tmp_path):
    again = tiny_model.write_tiny_model(tmp_path / "again", seed=3, **SMALL)
    assert hashes(again) == hashes(checkpoint)
    other = hashes(tiny_model.write_tiny_model(again, seed=4, force=True, **SMALL))
    changed = {name for name, digest in other.items() if digest != hashes(checkpoint)[name]}
    assert changed == {"model.safetensors"}


def test_writing_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    tiny_model.write_tiny_model(tmp_path / "m", **SMALL)
    assert torch.equal(torch.rand(1), expected)


def test_tokenizer_has_the_ids_that_the_host_hard_codes(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for token_id, token in tiny_model.SPECIAL_TOKENS.items():
        assert tokenizer.convert_tokens_to_ids(token) == token_id
    for role, token_id in {"system": 8948, "user": 872, "assistant": 77091}.items():
        ids = tokenizer(f"<|im_start|>{role}\n")["input_ids"]
        assert ids == [151644, token_id, 198]
    text = "How are you? 12:30 – naïve"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Hi"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert chat == (
        "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>Hi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_config_is_that_of_the_full_model_in_what_the_host_relies_on(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["Qwen3OmniMoeForConditionalGeneration"]
    assert config["thinker_config"]["text_config"]["vocab_size"] == 151936
    assert config["talker_config"]["codec_eos_token_id"] == 2150
    assert config["talker_config"]["num_code_groups"] == 16
    assert config["code2wav_config"]["num_quantizers"] == 16


def test_thinker_can_only_say_printable_text(checkpoint, model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    said = model.thinker.lm_head.weight.any(dim=1).nonzero()[:, 0].tolist()
    text = {tokenizer.decode([token_id]) for token_id in said}
    assert text == {chr(code) for code in range(ord(" "), ord("~") + 1)}


@pytest.mark.parametrize("text_tokens", [2, 5, 40])
def test_talker_ends_after_four_frames_per_text_token(model, text_tokens):
    frames = 4 * text_tokens
    logits = talker_logits(model, text_tokens, frames + 20)
    codes = logits.argmax(-1)
    first_end = int((codes == 2150).nonzero()[0, 0])
    assert abs(first_end - frames) <= 1
    assert (codes[:first_end] < 2048).all()
    assert (codes[first_end:] == 2150).all()


@torch.no_grad()
def talker_logits(model, text_tokens: int, frames: int) -> "torch.Tensor":
    """Talker logits [1 + frames, 3072] for an answer with ``text_tokens`` text tokens.

    The inputs are what the host's qwen3_omni.py builds: a user part with audio, the assistant
    part that ends with the first text token, then one frame per position. The last text token
    is never embedded.
    """
    generator = torch.Generator().manual_seed(5)
    talker, embed = model.talker, model.thinker.model.embed_tokens.weight
    pad, end = (talker.text_projection(embed[[i]]) for i in (151671, 151673))
    text = talker.text_projection(embed[torch.randint(33, 90, (text_tokens,), generator=generator)])
    codec = talker.model.codec_embedding.weight
    audio = talker.hidden_projection(torch.randn(50, embed.shape[1], generator=generator))
    assistant = torch.cat([pad.expand(8, -1), text[:1]])
    assistant[3:] += codec[[2155, 2156, 2157, 2301, 2148, 2149]]
    codes = torch.randint(2048, (frames, 16), generator=generator)
    spoken = codec[codes[:, 0]]
    for group, table in enumerate(talker.code_predictor.model.codec_embedding):
        spoken = spoken + table.weight[codes[:, group + 1]]
    heard = torch.cat([text[1:-1], end, pad.expand(frames, -1)])[:frames]
    inputs = torch.cat([audio, assistant, spoken + heard])[None]
    hidden = talker.model(inputs_embeds=inputs).last_hidden_state
    return talker.codec_head(hidden)[0, audio.shape[0] + assistant.shape[0] - 1 :]


def test_without_an_end_the_talker_never_stops(tmp_path):
    from safetensors import safe_open

    path = tiny_model.write_tiny_model(tmp_path / "m", frames_per_token=0, **SMALL)
    with safe_open(path / "model.safetensors", "pt") as file:
        head = file.get_tensor("talker.codec_head.weight")
    assert not head[2048:].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 100}, "--hidden-size 100: use a multiple of 32"),
        ({"hidden_size": 32}, "--hidden-size 32: use 64 to 2048"),
        ({"thinker_layers": 1}, "--thinker-layers 1: use 2 to 64"),
        ({"talker_layers": 0}, "--talker-layers 0: use 1 to 64"),
        ({"seed": -1}, "--seed -1: use 0 to"),
        ({"frames_per_token": 0.5}, "--frames-per-token 0.5: use 0, or 1 to 100"),
        ({"frames_per_token": float("nan")}, "--frames-per-token nan"),
        ({"dtype": "float8"}, "--dtype float8: use one of float32, bfloat16"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(tiny_model.TinyModelError, match=message.replace(".", r"\.")):
        tiny_model.write_tiny_model(tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


def test_command_refuses_a_folder_with_files_unless_forced(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("keep")
    argv = [str(tmp_path), "--hidden-size", "64", "--thinker-layers", "2", "--talker-layers", "1"]
    assert tiny_model.run(parse(*argv)) == 2
    error = capsys.readouterr().err
    assert error == f"liveserve tiny-model: {tmp_path}: not empty; give another folder or --force\n"
    assert tiny_model.run(parse(*argv, "--force", "--dtype", "bfloat16")) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: ")
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_command_refuses_a_file(tmp_path, capsys):
    target = tmp_path / "file"
    target.write_text("x")
    assert tiny_model.run(parse(str(target))) == 2
    assert "is a file; give a folder" in capsys.readouterr().err
