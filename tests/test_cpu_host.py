"""vLLM-Omni on a CPU: platform, adaptations of the host, deploy files, one real pipeline."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from liveserve.host.cpu import adapt, deploy

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni", exc_type=ImportError)

import vllm.platforms  # noqa: E402
import yaml  # noqa: E402

from liveserve.host import cpu  # noqa: E402

if not vllm.platforms.current_platform.is_cpu():
    pytest.skip("vLLM is not a CPU build", allow_module_level=True)


@pytest.fixture
def log():
    """Records of LiveServe's CPU logger (vLLM's loggers do not propagate to pytest's handler)."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    adapt.logger.addHandler(handler)
    yield lambda: [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    adapt.logger.removeHandler(handler)


# --- platform ----------------------------------------------------------------------------------


def test_entry_points_are_installed():
    def value(group: str, name: str) -> str:
        (point,) = importlib.metadata.entry_points(group=group, name=name)
        return point.value

    assert value("vllm_omni.platform_plugins", "liveserve_cpu") == "liveserve.host.cpu:register"
    assert value("vllm.platform_plugins", "liveserve_cpu") == "liveserve.host.cpu:prepare"


def test_registers_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(cpu, "gpu_count", lambda: 0)
    assert cpu.register() == cpu.PLATFORM_CLS
    from vllm.utils.import_utils import resolve_obj_by_qualname

    platform = resolve_obj_by_qualname(cpu.PLATFORM_CLS)()
    assert platform.is_out_of_tree()
    assert platform.device_type == "cpu"
    for name in (platform.get_omni_ar_worker_cls(), platform.get_omni_generation_worker_cls()):
        assert issubclass(
            resolve_obj_by_qualname(name),
            resolve_obj_by_qualname("vllm.v1.worker.cpu_worker.CPUWorker"),
        )
    free, total = platform.get_device_memory()
    assert 0 < free <= total


def test_does_not_register_next_to_a_gpu(monkeypatch, log):
    monkeypatch.setattr(cpu, "gpu_count", lambda: 1)
    assert cpu.register() is None
    assert len(log()) == 1
    assert "liveserve[gpu]" in log()[0]


def test_does_not_register_where_vllm_runs_on_something_else(monkeypatch):
    monkeypatch.setattr(
        vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: False), raising=True
    )
    assert cpu.register() is None


def test_runner_order_reaches_cpu_overrides_before_gpu_ones():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

    from liveserve.host.cpu import worker

    for runner in (worker.CpuARModelRunner, worker.CpuGenerationModelRunner):
        order = runner.__mro__
        assert order.index(OmniGPUModelRunner) < order.index(CPUModelRunner)
        assert order.index(CPUModelRunner) < order.index(GPUModelRunner)


# --- environment -------------------------------------------------------------------------------


def test_default_env_comes_without_importing_the_host():
    script = (
        "import sys, json; from liveserve.host.cpu import adapt; print(json.dumps("
        "[adapt.default_env(), [m for m in ('vllm', 'torch') if m in sys.modules]]))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    env, loaded = json.loads(out.stdout)
    assert loaded == []
    assert env == {
        "LIVESERVE_CPU_START_METHOD": "fork",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8192",
    }


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        (adapt.FAST_CODES_ENV, "yes", adapt.fast_codes_wanted),
        (adapt.WARM_CHUNKS_ENV, "2", adapt.warm_chunks_wanted),
        (adapt.SEED_CODES_ENV, "-1", adapt.codes_seed),
        (adapt.SEED_CODES_ENV, "1.5", adapt.codes_seed),
        (adapt.START_METHOD_ENV, "thread", adapt.apply),
    ],
)
def test_bad_environment_is_one_clear_error(monkeypatch, name, value, read):
    monkeypatch.setenv(name, value)
    with pytest.raises(adapt.CpuConfigError, match=f"{name}='{value}': use "):
        read()


# --- adaptations -------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a native library that cannot load and the submodule that loads it."""
    name = "liveserve_fake_vision"
    root = tmp_path / name
    root.mkdir()
    (root / "__init__.py").write_text(f"from {name} import _native\n")
    (root / "_native.py").write_text("raise RuntimeError('operator does not exist')\n")
    (root / "_C.so").write_text("not a library")
    monkeypatch.syspath_prepend(tmp_path)
    yield root
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


def stub(root: Path) -> str:
    """Call the adaptation as for torchvision; returns the submodule's name."""
    module = f"{root.name}._native"
    adapt._stub(root.name, "_C.so", module, lambda: type(sys)(module))
    return module


def test_stub_makes_a_package_with_an_unloadable_library_importable(package):
    with pytest.raises(RuntimeError, match="operator does not exist"):
        __import__(package.name)
    for module in [m for m in sys.modules if m.split(".")[0] == package.name]:
        del sys.modules[module]
    stub(package)
    __import__(package.name)


def test_stub_leaves_a_loadable_library_alone(package):
    import _ctypes

    shutil.copy(_ctypes.__file__, package / "_C.so")
    assert stub(package) not in sys.modules


def test_stub_leaves_a_package_with_another_layout_alone(package, log):
    (package / "_native.py").unlink()
    assert stub(package) not in sys.modules
    assert len(log()) == 1
    assert "stays stock" in log()[0]


def test_stub_leaves_a_package_without_native_code_alone(package):
    (package / "_C.so").unlink()
    assert stub(package) not in sys.modules


def test_torchvision_and_torchaudio_import_here():
    script = "import vllm, torchvision.transforms, torchaudio.functional"
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)


@pytest.fixture
def manager(monkeypatch):
    from vllm_omni.engine import stage_engine_core_proc_manager as manager

    monkeypatch.setattr(manager, "get_mp_context", manager.get_mp_context)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return manager


def test_start_method_is_what_was_asked_for(manager):
    adapt.set_start_method("fork")
    assert manager.get_mp_context().get_start_method() == "fork"
    adapt.set_start_method("fork")
    assert manager.get_mp_context().get_start_method() == "fork"


def test_start_method_stays_stock_when_not_asked_for(manager):
    stock = manager.get_mp_context
    adapt.set_start_method(None)
    adapt.set_start_method("")
    assert manager.get_mp_context is stock


def test_fork_is_refused_while_openmp_may_have_threads(manager, monkeypatch, log):
    stock = manager.get_mp_context
    monkeypatch.delenv("OMP_NUM_THREADS")
    adapt.set_start_method("fork")
    assert manager.get_mp_context is stock
    assert "OMP_NUM_THREADS=1" in log()[0]


def test_start_method_notices_a_changed_host(manager, monkeypatch, log):
    monkeypatch.delattr(manager, "get_mp_context")
    adapt.set_start_method("fork")
    assert not hasattr(manager, "get_mp_context")
    assert len(log()) == 1
    assert "the host stays stock" in log()[0]


@pytest.fixture
def talker_module(monkeypatch):
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni

    monkeypatch.setattr(qwen3_omni, "torch", torch)
    return qwen3_omni


def test_talker_builds_its_inputs_in_the_models_dtype(talker_module):
    adapt.follow_talker_dtype(torch.bfloat16)
    assert talker_module.torch is torch
    adapt.follow_talker_dtype(torch.float32)
    assert talker_module.torch.bfloat16 is torch.float32
    assert talker_module.torch.cat is torch.cat
    adapt.follow_talker_dtype(torch.float16)
    assert talker_module.torch.bfloat16 is torch.float16


def test_talker_dtype_notices_a_changed_host(talker_module, monkeypatch, log):
    other = SimpleNamespace()
    monkeypatch.setattr(talker_module, "torch", other)
    adapt.follow_talker_dtype(torch.float32)
    assert talker_module.torch is other
    assert len(log()) == 1
    assert "the host stays stock" in log()[0]


# --- code predictor ----------------------------------------------------------------------------

HIDDEN, CODES, GROUPS = 64, 2048, 16


@pytest.fixture
def predictor():
    """The host's own code predictor, tiny and random."""
    from transformers import Qwen3OmniMoeConfig
    from vllm_omni.model_executor.models.common import qwen3_code_predictor as host

    config = Qwen3OmniMoeConfig(
        talker_config={
            "code_predictor_config": {
                "vocab_size": CODES,
                "hidden_size": HIDDEN,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "num_code_groups": GROUPS,
                "layer_types": ["full_attention"],
            }
        }
    ).talker_config.code_predictor_config
    torch.manual_seed(0)
    return host.CodePredictorWrapper(
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            model_config=SimpleNamespace(stage_connector_config=None),
        ),
        cp_config=config,
        wrapper_config=host.CodePredictorWrapperConfig(
            use_parallel_embedding=False, return_proj_buf=True, sampling_mode="stored"
        ),
        talker_hidden_size=HIDDEN,
    )


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(CODES, (batch, 1), generator=generator),
        torch.randn(batch, 1, HIDDEN, generator=generator),
        torch.randn(batch, 1, HIDDEN, generator=generator),
    )


def install(predictor, monkeypatch, *, fast: bool, seed: int | None) -> None:
    monkeypatch.setenv(adapt.FAST_CODES_ENV, "1" if fast else "0")
    monkeypatch.setenv(adapt.SEED_CODES_ENV, "" if seed is None else str(seed))
    vars(predictor).pop("forward", None)
    adapt.install_code_predictor(SimpleNamespace(talker=SimpleNamespace(code_predictor=predictor)))


def test_predictor_is_stock_by_default(predictor, monkeypatch):
    monkeypatch.delenv(adapt.FAST_CODES_ENV, raising=False)
    monkeypatch.delenv(adapt.SEED_CODES_ENV, raising=False)
    adapt.install_code_predictor(SimpleNamespace(talker=SimpleNamespace(code_predictor=predictor)))
    assert "forward" not in vars(predictor)
    codes = [predictor(*inputs(3))[0] for _ in range(2)]
    assert not torch.equal(*codes)


@pytest.mark.parametrize("fast", [False, True])
def test_seed_makes_codes_a_function_of_the_inputs(predictor, monkeypatch, fast):
    install(predictor, monkeypatch, fast=fast, seed=7)
    first = predictor(*inputs(3))
    torch.rand(5)  # the global generator must not matter
    again = predictor(*inputs(3))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    # Nor may the neighbours in the batch.
    alone = predictor(*(tensor[1:2] for tensor in inputs(3)))
    assert torch.equal(alone[0], first[0][1:2])
    install(predictor, monkeypatch, fast=fast, seed=8)
    assert not torch.equal(predictor(*inputs(3))[0], first[0])


@torch.no_grad()
def test_fast_codes_have_the_predictors_shapes_and_own_distribution(predictor, monkeypatch):
    stock = predictor(*inputs(2))
    install(predictor, monkeypatch, fast=True, seed=None)
    fast = predictor(*inputs(2))
    for ours, theirs in zip(fast, stock, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
    codes, rows = fast
    layer0, embed0, hidden = inputs(2)
    assert torch.equal(codes[:, 0], layer0)
    assert torch.equal(rows[:, 0], hidden[:, 0])
    assert torch.equal(rows[:, 1], embed0[:, 0])
    for group in range(1, GROUPS):
        table = predictor.model.codec_embedding[group - 1].weight
        assert torch.equal(rows[:, group + 1], table[codes[:, group, 0]])
    # A head that prefers one code by far must get it.
    predictor.lm_head[0].weight[1234] = 100 * (hidden + embed0)[0, 0]
    install(predictor, monkeypatch, fast=True, seed=None)
    assert int(predictor(*inputs(2))[0][0, 1, 0]) == 1234


def test_predictor_notices_a_changed_host(monkeypatch, log):
    class Other:
        def forward(self, codes):
            return codes

    other = Other()
    install(other, monkeypatch, fast=True, seed=7)
    assert "forward" not in vars(other)
    assert len(log()) == 1
    assert "the host stays stock" in log()[0]


# --- vocoder -----------------------------------------------------------------------------------


class Vocoder(torch.nn.Module):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_quantizers=GROUPS)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, codes):
        self.shapes.append(tuple(codes.shape))


def test_a_measured_vocoder_has_run_every_size_of_chunk(monkeypatch, log):
    model = SimpleNamespace(code2wav=Vocoder(), _get_codec_frame_config=lambda: (4, 3))
    adapt.warm_vocoder(model)
    assert model.code2wav.shapes == []  # nobody asked for it
    monkeypatch.setenv(adapt.WARM_CHUNKS_ENV, "1")
    adapt.warm_vocoder(model)
    assert model.code2wav.shapes == [(1, GROUPS, frames) for frames in range(1, 8)]
    adapt.warm_vocoder(SimpleNamespace(code2wav=None))  # a stage without one
    del model._get_codec_frame_config
    model.code2wav.shapes.clear()
    adapt.warm_vocoder(model)
    assert model.code2wav.shapes == []
    assert any("the host stays stock" in line for line in log())


# --- deploy files ------------------------------------------------------------------------------


def test_deploy_files_are_valid_for_the_host(tmp_path):
    from vllm_omni.config.stage_config import load_deploy_config

    turn = load_deploy_config(deploy.deploy_path("turn", folder=tmp_path))
    assert turn.session_mode == "turn"
    duplex = load_deploy_config(deploy.deploy_path("duplex", folder=tmp_path))
    assert duplex.session_mode == "duplex"
    assert duplex.duplex_session.max_sessions == 16
    assert Path(duplex.duplex_session.server_vad_model_path).is_file()
    assert [stage.max_num_seqs for stage in duplex.stages] == [16, 16, 16]


def test_packaged_duplex_file_is_what_rendering_starts_from():
    from vllm_omni.config.stage_config import resolve_deploy_yaml

    packaged = Path(deploy.__file__).with_name("deploy_duplex.yaml")
    assert resolve_deploy_yaml(packaged) == deploy._packaged("duplex")


def test_deploy_options(tmp_path):
    path = deploy.deploy_path(
        "duplex",
        max_sessions=3,
        max_model_len=1024,
        text_max_tokens=10,
        audio_max_tokens=100,
        server_vad=False,
        folder=tmp_path,
    )
    config = yaml.safe_load(path.read_text())
    thinker, talker, code2wav = config["stages"]
    assert config["duplex_session"]["max_sessions"] == 3
    assert "server_vad_model_path" not in config["duplex_session"]
    assert [stage["max_num_seqs"] for stage in config["stages"]] == [3, 3, 3]
    assert thinker["max_model_len"] == talker["max_model_len"] == 1024
    assert thinker["default_sampling_params"]["max_tokens"] == 10
    assert talker["default_sampling_params"]["max_tokens"] == 100
    assert code2wav["max_model_len"] == 16384


def test_kv_cache_holds_every_session_in_full(tmp_path):
    """Preemption is unsafe in the host's omni stages, so the sizes must rule it out."""
    model = tmp_path / "model"
    model.mkdir()
    text = {"num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 6}
    (model / "config.json").write_text(json.dumps({"thinker_config": {"text_config": text}}))
    path = deploy.deploy_path("turn", model=model, max_sessions=2, folder=tmp_path)
    thinker, talker, _ = yaml.safe_load(path.read_text())["stages"]
    assert thinker["kv_cache_memory_bytes"] == 2 * 8192 * (2 * 4 * 4 * 64 * 6)
    assert talker["kv_cache_memory_bytes"] == 2 * 8192 * (2 * 4 * 2 * 64 * 3)


def test_deploy_copies_do_not_overwrite_each_other(tmp_path):
    paths = {deploy.deploy_path("turn", max_sessions=n, folder=tmp_path) for n in (1, 2, 1)}
    assert len(paths) == 2
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "video"}, "mode 'video': use one of turn, duplex"),
        ({"max_sessions": 0}, "max_sessions 0: use an integer from 1 to 1024"),
        ({"max_sessions": True}, "max_sessions True: use an integer"),
        ({"max_sessions": 2.5}, "max_sessions 2.5: use an integer"),
        ({"max_model_len": 10}, "max_model_len 10: use an integer from 256"),
        ({"text_max_tokens": 9000}, "text_max_tokens 9000: use an integer from 1 to 8191"),
        ({"audio_max_tokens": -1}, "audio_max_tokens -1: use an integer"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes 1: use at least 33554432"),
    ],
)
def test_impossible_deploy_options_are_refused(tmp_path, options, message):
    with pytest.raises(adapt.CpuConfigError, match=message):
        deploy.deploy_path(**{"mode": "turn", **options}, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_vad_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(deploy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(adapt.CpuConfigError, match="silero-vad is not installed"):
        deploy.deploy_path("duplex", folder=tmp_path)
    deploy.deploy_path("duplex", server_vad=False, folder=tmp_path)


def test_unwritable_cache_falls_back_to_the_temporary_folder(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(deploy.tempfile, "gettempdir", lambda: str(tmp_path))
    assert deploy.deploy_path("turn").parent == tmp_path / "liveserve-deploy"


# --- the real pipeline -------------------------------------------------------------------------

PIPELINE = """
import hashlib, json, sys

def main():
    from vllm_omni import Omni
    model, deploy_config = sys.argv[1:]
    omni = Omni(model=model, deploy_config=deploy_config, stage_init_timeout=300, init_timeout=300)
    params = omni.default_sampling_params_list
    answers = []
    for texts in (["Hello"], ["Hello"], ["Hello", "Good evening"]):
        for text_tokens in (3, 6):
            params[0].max_tokens = text_tokens
            prompts = [
                {"prompt": f"<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n",
                 "modalities": ["audio"]}
                for text in texts
            ]
            batch = {}
            for output in omni.generate(prompts, params, use_tqdm=False):
                answer = batch.setdefault(output.request_id, {"n": text_tokens})
                done = output.outputs[0]
                if output.final_output_type == "text":
                    answer["text"] = done.text
                else:
                    import torch
                    audio = done.multimodal_output["audio"]
                    parts = audio if isinstance(audio, list) else [audio]
                    wave = torch.cat([part.reshape(-1) for part in parts]).float()
                    answer["audio_s"] = wave.numel() / 24000
                    answer["level"] = wave.abs().mean().item()
                    answer["sha"] = hashlib.sha256(wave.numpy().tobytes()).hexdigest()
            answers.append(list(batch.values()))
    omni.close()
    print("ANSWERS " + json.dumps(answers))

if __name__ == "__main__":
    main()
"""


@pytest.mark.host
def test_pipeline_speaks_and_a_seed_makes_it_reproducible(tmp_path):
    from liveserve.host.cpu.tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "model", hidden_size=64)
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE)
    config = deploy.deploy_path("turn", model=model, max_sessions=2, folder=tmp_path)
    run = subprocess.run(
        [sys.executable, str(script), str(model), str(config)],
        env={**os.environ, **adapt.default_env(), adapt.SEED_CODES_ENV: "7"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("ANSWERS ")]
    answers = json.loads(line.removeprefix("ANSWERS "))
    assert [len(batch) for batch in answers] == [1, 1, 1, 1, 2, 2]
    for answer in (answer for batch in answers for answer in batch):
        assert len(answer["text"]) == answer["n"]
        assert answer["text"].isprintable()
        # Four codec frames of 80 ms per text token.
        assert answer["audio_s"] == pytest.approx(0.32 * answer["n"], abs=0.2)
        assert answer["level"] > 1e-3
    assert answers[0] == answers[2]
    assert answers[1] == answers[3]
    assert answers[0][0]["sha"] != answers[1][0]["sha"]


def test_a_package_whose_library_does_not_load_looks_absent(tmp_path, monkeypatch):
    package = tmp_path / "brokencodec"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('native library')")
    monkeypatch.syspath_prepend(str(tmp_path))
    adapt._hide("brokencodec", "core.so")  # there is no such library: nothing to judge by
    with pytest.raises(OSError, match="native library"):
        importlib.import_module("brokencodec")
    (package / "core.so").write_bytes(b"not a library")
    monkeypatch.setitem(sys.modules, "brokencodec", None)
    del sys.modules["brokencodec"]
    adapt._hide("brokencodec", "core.so")
    with pytest.raises(ImportError):
        importlib.import_module("brokencodec")
    assert importlib.util.find_spec("brokencodec") is None
