# SPDX-License-Identifier: Apache-2.0
"""Which devices a function of a vllm-xpu-kernels wheel asks for, from its machine code.

The wheels of later pins have no published sources. A function that asks for the device
compares SYCL's number of it with constants. Nothing is loaded or run.
"""

import struct
from collections.abc import Iterator, Mapping

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNSYM = 11
_FUNCTION = 2
_SMALLEST = 1 << 16
"""Smaller differences occur in code as sizes and offsets."""


def functions_in(library: bytes) -> Iterator[tuple[str, bytes]]:
    """The exported functions of a shared library: mangled name and machine code.

    Raises:
        ValueError: it is no 64-bit ELF file.
    """
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    header = _HEADER.unpack_from(library)
    start, count = header[6], header[12]
    sections = [
        _SECTION.unpack_from(library, start + number * _SECTION.size)
        for number in range(count)
    ]
    for section in sections:
        if section[1] != _DYNSYM:
            continue
        offset, size, names = section[4], section[5], sections[section[6]][4]
        for at in range(offset, offset + size, _SYMBOL.size):
            name, info, _, home, address, length = _SYMBOL.unpack_from(library, at)
            if info & 0xF == _FUNCTION and 0 < home < count and length:
                first = address - sections[home][3] + sections[home][4]
                end = library.index(b"\0", names + name)
                yield (
                    library[names + name : end].decode(),
                    library[first : first + length],
                )


def numbers_in(code: bytes, numbers: Mapping[str, int]) -> frozenset[str]:
    """The names of the 64-bit `numbers` that the code has as constants.

    A compiler loads one of them, and may make others by adding a 32-bit difference.
    """
    loaded = {
        name for name, number in numbers.items() if struct.pack("<q", number) in code
    }
    added = {
        name
        for name, number in numbers.items()
        for difference in (number - numbers[other] for other in loaded)
        if _SMALLEST <= abs(difference) < 1 << 31
        and struct.pack("<i", difference) in code
    }
    return frozenset(loaded | added)
