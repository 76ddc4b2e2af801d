"""What is installed: editable, as a wheel, and beside the PyPI package `kernels`."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "kvtier", "scheduler", "bench")
# Who may import whom: arrows point one way.
LAYERS = {"kernels": 0, "kvtier": 1, "scheduler": 2, "liveserve": 3, "bench": 4}


@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_is_a_relative_link_without_init(name):
    link = ROOT / "liveserve" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert not (ROOT / name / "__init__.py").exists()


def python(code: str, cwd: Path, path: str | None = None) -> str:
    env = {"PATH": "/usr/bin:/bin"} | ({"PYTHONPATH": path} if path else {})
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_kernels_from_the_repo_root_finds_the_pypi_package():
    where = python("import kernels; print(kernels.__file__)", ROOT)
    assert "site-packages" in where


def test_editable_install_imports_the_linked_packages(tmp_path):
    where = python("import liveserve.kernels.layout as m; print(m.__file__)", tmp_path)
    assert Path(where).resolve() == ROOT / "kernels" / "layout.py"


def test_wheel_holds_every_module_and_imports(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    done = subprocess.run([*build, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(target)
    for name in (*LINKED, "host"):
        for module in (ROOT / "liveserve" / name).rglob("*.py"):
            assert str(module.relative_to(ROOT)) in names
    assert any(n.endswith(".wav") for n in names)
    assert {"liveserve/host/cpu/deploy_turn.yaml", "liveserve/host/cpu/deploy_duplex.yaml"} <= names
    assert not any(n.startswith(("kernels/", "kvtier/", "scheduler/", "bench/")) for n in names)
    code = (
        "import liveserve, liveserve.kernels.layout, liveserve.kvtier.next_use;"
        "import liveserve.scheduler.urgency, liveserve.bench.workload; print(liveserve.__file__)"
    )
    # In front of the editable install; the folder alone decides what is found.
    assert str(target) in python(code, tmp_path, path=str(target))


def imports_of(path: Path) -> set[str]:
    pattern = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
    return set(pattern.findall(path.read_text()))


@pytest.mark.parametrize("package", ["kernels", "kvtier", "scheduler"])
def test_lower_layers_import_neither_the_host_nor_what_is_above(package):
    for path in (ROOT / package).rglob("*.py"):
        for name in imports_of(path):
            assert name.partition(".")[0] not in {"vllm", "vllm_omni"}, path
            if name.startswith("liveserve."):
                other = name.split(".")[1]
                assert LAYERS.get(other, LAYERS["liveserve"]) <= LAYERS[package], (path, name)


def test_only_host_knows_the_host():
    for path in (ROOT / "liveserve").glob("*.py"):
        roots = {name.partition(".")[0] for name in imports_of(path)}
        assert not roots & {"vllm", "vllm_omni"}, path


def test_the_policies_load_without_torch_or_a_host():
    code = (
        "import sys; import liveserve.runtime, liveserve.monitor, liveserve.session;"
        "print(sorted({'torch', 'vllm', 'triton'} & sys.modules.keys()))"
    )
    assert python(code, ROOT) == "[]"


def test_caches_are_described_without_torch_and_copy_methods_load_without_triton_or_cupy():
    code = (
        "import sys; import liveserve.kernels.layout, liveserve.kernels.base;"
        "print(sorted({'torch', 'vllm', 'triton', 'cupy'} & sys.modules.keys()));"
        # As on a machine that has neither.
        "sys.modules['triton'] = sys.modules['cupy'] = None;"
        "import liveserve.kernels.methods as m; print(sorted(m.available_methods()))"
    )
    empty, methods = python(code, ROOT).splitlines()
    assert empty == "[]"
    assert "reference" in methods
