"""The cubin: refused unless it is a whole CUDA ELF file for the architecture asked."""

import contextlib
import struct
from collections.abc import Callable

import pytest
from cache.samples import synthetic_cubin
from hypothesis import given
from hypothesis import strategies as st

from mlaprep.kernels_cache.elf import check_cubin, complete_cubin
from mlaprep.kernels_cache.errors import ArtifactError

# e_flags as NVRTC 12.9.86 writes them.
FLAGS = {
    "sm_89": 0x590559,
    "sm_90": 0x5A055A,
    "sm_90a": 0x5A0D5A,
    "sm_100": 0x6006402,
    "sm_100a": 0x600640A,
    "sm_100f": 0x6006402,
    "sm_103": 0x6006702,
    "sm_103a": 0x600670A,
    "sm_103f": 0x6006702,
    "sm_120": 0x6007802,
    "sm_120a": 0x600780A,
    "sm_120f": 0x6007802,
    "sm_121": 0x6007902,
    "sm_121a": 0x600790A,
    "sm_121f": 0x6007902,
}
NVRTC_13 = {
    # e_flags as NVRTC 13.0, 13.1 and 13.2 write them: no mark of the suffix.
    "sm_89": 0x6005904,
    "sm_90": 0x6005A04,
    "sm_90a": 0x6005A04,
    "sm_100a": 0x6006402,
    "sm_103a": 0x6006702,
    "sm_120a": 0x6007802,
    "sm_121a": 0x6007902,
}
WHOLE = synthetic_cubin()


def reason(cubin: bytes, arch: str = "sm_90a") -> str | None:
    try:
        check_cubin(cubin, arch)
    except ArtifactError as error:
        return error.reason
    return None


@pytest.mark.parametrize("arch", FLAGS)
def test_real_cubins_pass_for_their_architecture_only(arch: str, compile_raw: Callable[[str], bytes]) -> None:
    cubin = complete_cubin(compile_raw(arch))
    assert struct.unpack_from("<I", cubin, 48)[0] == FLAGS[arch]
    accepted = {asked for asked in FLAGS if reason(cubin, asked) is None}
    unmarked = cubin[8] == 8 and not arch.endswith("a")
    assert accepted == ({asked for asked in FLAGS if asked.rstrip("af") == arch.rstrip("f")} if unmarked else {arch})


@pytest.mark.parametrize("arch", NVRTC_13)
def test_cubins_of_nvrtc_13_pass_for_their_capability_only(arch: str) -> None:
    cubin = bytearray(WHOLE)
    cubin[8] = 8
    struct.pack_into("<I", cubin, 48, NVRTC_13[arch])
    assert {asked for asked in FLAGS if reason(bytes(cubin), asked) is None} == {
        asked for asked in FLAGS if asked.rstrip("af") == arch.rstrip("af")
    }


def test_cupy_drops_the_last_byte(compile_raw: Callable[[str], bytes]) -> None:
    # When this fails CuPy hands cubins out whole: complete_cubin then does nothing, and may go.
    raw = compile_raw("sm_90a")
    assert reason(raw) == "truncated"
    assert complete_cubin(raw) == raw + b"\0"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_whole_cubin_is_left_as_it_is(arch: str, compile_raw: Callable[[str], bytes]) -> None:
    whole = complete_cubin(compile_raw(arch))
    assert complete_cubin(whole) == whole


def test_only_the_one_dropped_byte_is_completed(compile_raw: Callable[[str], bytes]) -> None:
    whole = complete_cubin(compile_raw("sm_90a"))
    for length in [0, 1, 63, 64, len(whole) // 2, *range(len(whole) - 60, len(whole) - 1)]:
        with pytest.raises(ArtifactError):
            complete_cubin(whole[:length])
    with pytest.raises(ArtifactError, match="ends at"):
        complete_cubin(whole + b"\0")


def test_every_truncation_is_refused(compile_raw: Callable[[str], bytes]) -> None:
    whole = complete_cubin(compile_raw("sm_90a"))
    assert {reason(whole[:length]) for length in range(len(whole))} == {"not-elf", "truncated"}
    assert reason(whole + b"\0") == "trailing-bytes"


def test_B046_a_valid_elf_that_is_not_cuda() -> None:
    assert reason(synthetic_cubin(machine=62)) == "wrong-machine"
    with open("/proc/self/exe", "rb") as program:
        assert reason(program.read()) in {"wrong-machine", "malformed-elf"}


def test_B046_a_cubin_for_another_architecture() -> None:
    assert reason(synthetic_cubin("sm_100a"), "sm_90a") == "wrong-arch"
    assert reason(synthetic_cubin("sm_90"), "sm_90a") == "wrong-arch"
    assert reason(synthetic_cubin("sm_103a"), "sm_100a") == "wrong-arch"
    with pytest.raises(ArtifactError, match="sm_90a was asked for, this one is for sm_100a"):
        check_cubin(synthetic_cubin("sm_100a"), "sm_90a")


def patched(offset: int, form: str, value: int) -> bytes:
    damaged = bytearray(WHOLE)
    struct.pack_into(form, damaged, offset, value)
    return bytes(damaged)


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        (b"", "not-elf"),
        (b"\x7fELF", "not-elf"),
        (b"PK\x03\x04" + WHOLE[4:], "not-elf"),
        (patched(4, "<B", 1), "malformed-elf"),
        (patched(5, "<B", 2), "malformed-elf"),
        (patched(8, "<B", 9), "unknown-abi"),
        (patched(16, "<H", 1), "malformed-elf"),
        (patched(32, "<Q", 2**64 - 1), "truncated"),
        (patched(40, "<Q", 2**63), "truncated"),
        (patched(54, "<H", 0), "malformed-elf"),
        (patched(56, "<H", 0), "malformed-elf"),
        (patched(56, "<H", 0xFFFF), "truncated"),
        (patched(60, "<H", 0), "malformed-elf"),
        (patched(62, "<H", 2), "malformed-elf"),
        (WHOLE + bytes(16 * 2**20), "malformed-elf"),
    ],
)
def test_headers_that_lie(damaged: bytes, expected: str) -> None:
    assert reason(WHOLE) is None
    assert reason(damaged) == expected


def test_sections_and_segments_must_lie_inside() -> None:
    section = struct.unpack_from("<Q", WHOLE, 40)[0] + 64
    program = struct.unpack_from("<Q", WHOLE, 32)[0]
    for offset in (section + 24, section + 32, program + 8, program + 32):
        assert reason(patched(offset, "<Q", len(WHOLE))) == "truncated"
        assert reason(patched(offset, "<Q", 2**64 - 1)) == "truncated"


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_with_our_error(data: bytes) -> None:
    assert reason(data) is not None
    assert reason(b"\x7fELF" + data) is not None


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(WHOLE)))
def test_mutations_never_raise_anything_else(changes: list[tuple[int, int]], length: int) -> None:
    mutated = bytearray(WHOLE)
    for offset, value in changes:
        mutated[offset] = value
    reason(bytes(mutated[:length]))
    with contextlib.suppress(ArtifactError):
        complete_cubin(bytes(mutated[:length]))
