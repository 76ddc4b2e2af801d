"""What the kernels become on sm_90, without a GPU: 16-byte accesses, no spills, few registers."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kernel_tools import load_module

from liveserve.kernels import raw_copy, triton_copy
from liveserve.kernels.raw_copy import RawCopy

triton = pytest.importorskip("triton")
nvidia = Path(triton.__file__).parent / "backends" / "nvidia"
KERNEL = Path(triton_copy.__file__).with_name("triton_kernel.py")
WARPS = triton_copy.DEFAULT_WARPS
TILE_BYTES = triton_copy.DEFAULT_TILE_BYTES
ACCESSES = TILE_BYTES // (16 * 32 * WARPS)  # of a thread, for its part of a tile
# What one program of 8 warps may use without keeping other work off its SM: half of the 65,536.
MAX_REGISTERS = 65536 // 2 // (32 * WARPS)


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def compiled(source: Path = KERNEL, *, load=True, align=16, tail=False, row_bytes=TILE_BYTES):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_module(source, source.stem).copy_kernel
    constants = {
        "LOAD": load,
        "ALIGN": align,
        "TAIL": tail,
        "ROWS": TILE_BYTES // row_bytes,
        "COLS": row_bytes // min(align, 8),
    }
    types = {
        **dict.fromkeys(("table", "block_ids", "slot_ids"), "*i64"),
        **dict.fromkeys(("num_rows", "num_fragments", "num_chunks"), "i32"),
        **dict.fromkeys(("pool_base", "slot_stride"), "i64"),
        **dict.fromkeys(constants, "constexpr"),
    }
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": WARPS}
    return triton.compile(ASTSource(kernel, types, constants), target=target, options=options)


def accesses(sass: str, kind: str) -> Counter[int]:
    """Global loads (LDG) or stores (STG) in SASS, by width in bits."""
    found = re.findall(rf"\b{kind}\.E((?:\.\w+)*)", sass)
    return Counter(
        next((int(bits) for bits in re.findall(r"\.(\d+)", suffix)), 32) for suffix in found
    )


def is_vectorised(sass: str) -> bool:
    """Every byte of the payload moves in accesses of 16 bytes; the table is read in 8."""
    loads, stores = accesses(sass, "LDG"), accesses(sass, "STG")
    return loads[128] == ACCESSES and stores == {128: ACCESSES} and set(loads) == {64, 128}


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """REG, STACK, LOCAL, … of the one kernel in a cubin."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = [str(nvidia / "bin" / "cuobjdump"), "--dump-resource-usage", str(file)]
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}


@pytest.mark.parametrize("row_bytes", [4096, 16384, TILE_BYTES])
@pytest.mark.parametrize("load", [True, False])
def test_triton_kernel_moves_16_bytes_at_once(load, row_bytes, tmp_path, record_property):
    kernel = compiled(load=load, row_bytes=row_bytes)
    ptx, sass = kernel.asm["ptx"], kernel.asm["sass"]
    assert len(re.findall(r"ld\.global\S*\.v(?:2\.b64|4\.b32)", ptx)) == ACCESSES
    assert len(re.findall(r"st\.global\S*\.v(?:2\.b64|4\.b32)", ptx)) == ACCESSES
    assert is_vectorised(sass), (accesses(sass, "LDG"), accesses(sass, "STG"))
    # All loads of a tile are under way before the first store waits for one.
    order = [kind for kind, _ in re.findall(r"\b(LDG|STG)\.E\S*?(\.128)", sass)]
    assert order == ["LDG"] * ACCESSES + ["STG"] * ACCESSES
    assert not re.search(r"\b(LDL|STL)\b", sass)
    used = resources(kernel.asm["cubin"], tmp_path)
    record_property("registers", used["REG"])
    print(f"triton {triton.__version__}, rows of {row_bytes} bytes: {used}")
    assert used["STACK"] == used["LOCAL"] == 0
    assert 0 < used["REG"] <= MAX_REGISTERS


@pytest.mark.parametrize("tail", [True, False])
def test_narrow_and_ragged_variants_do_not_spill(tail, tmp_path):
    for align in (1, 4, 16):
        used = resources(compiled(align=align, tail=tail).asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0, (align, used)


@pytest.mark.parametrize("lost", ["hint", "alignment", "mask"])
def test_the_check_notices_lost_vectorisation(lost, tmp_path):
    """Three ways to lose it: addresses without the hint, 8-byte words, a mask of odd lengths."""
    text = KERNEL.read_text()
    if lost == "alignment":
        kernel = compiled(align=8)
    else:
        old, new = {
            "hint": (r"tl\.multiple_of\((.*), ALIGN\)", r"\1"),
            "mask": (r"nbytes // ALIGN \* PER_ACCESS", "nbytes // WORD"),
        }[lost]
        changed, count = re.subn(old, new, text)
        assert count
        source = tmp_path / "scalar_kernel.py"
        source.write_text(changed)
        kernel = compiled(source)
    assert not is_vectorised(kernel.asm["sass"])


def nvrtc() -> ctypes.CDLL:
    """NVRTC of the system, or of an nvidia-cuda-nvrtc wheel on the path."""
    wheels = [
        str(file)
        for folder in map(Path, sys.path)
        for pattern in ("nvidia/*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
        for file in sorted(folder.glob(pattern))
        if "alt" not in file.name
    ]
    for name in (*wheels, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.mark.parametrize("sizes", [{}, {"warps": 8, "stages": 3, "lag": 2}])
def test_raw_kernel_compiles_to_bulk_copies(sizes, tmp_path, record_property):
    library = nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [b"--gpu-architecture=sm_90", *(o.encode() for o in RawCopy(**sizes).options)]
    array = (ctypes.c_char_p * len(options))(*options)
    source = raw_copy.SOURCE.encode()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), source, None, 0, None, None)
    failed = library.nvrtcCompileProgram(program, len(options), array)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    assert not library.nvrtcGetCUBIN(program, cubin)
    used = resources(cubin.raw, tmp_path)
    record_property("registers", used["REG"])
    print(f"raw kernel {sizes}: {used}")
    assert used["STACK"] == used["LOCAL"] == 0
    disassembler = [str(nvidia / "bin" / "nvdisasm"), str(tmp_path / "kernel.cubin")]
    sass = subprocess.run(disassembler, capture_output=True, text=True, check=True).stdout
    assert "UBLKCP.S.G" in sass, "no bulk load"
    assert "UBLKCP.G.S" in sass, "no bulk store"
    assert not re.search(r"\b(LDL|STL)\b", sass)
