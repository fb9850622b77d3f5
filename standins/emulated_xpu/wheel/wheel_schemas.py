# SPDX-License-Identifier: Apache-2.0
"""Op schemas read out of the shared libraries of a vllm-xpu-kernels wheel.

An extension module registers its ops with schema strings, which lie NUL-terminated in
its read-only data. Nothing is loaded or run, so no Intel runtime is needed.
"""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

EXTENSION = ".abi3.so"
"""Only Python's extension modules register ops; the other libraries hold kernels."""

_ARROW = b"->"
_CANDIDATE = re.compile(rb"[A-Za-z_][\w.]*\([^\0]*\)\s*->\s*[^\0]{1,200}")


def schemas_by_library(wheel: Path) -> dict[str, frozenset[str]]:
    """Canonical schemas by extension module, `{"_moe_C": {"topk_softmax(...)"}}`.

    The strings hold no namespace: a module registers ops in the namespace of its own
    name, and `_C` also in `_C_cache_ops`. An extension without ops is left out.

    Raises:
        zipfile.BadZipFile: `wheel` is no archive, or a member is damaged.
    """
    libraries: dict[str, frozenset[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(EXTENSION):
                ops = frozenset(schemas_in(archive.read(name)))
                if ops:
                    libraries[PurePosixPath(name).name.removesuffix(EXTENSION)] = ops
    return libraries


def schemas_in(library: bytes) -> Iterator[str]:
    """Every string of `library` that torch reads as the schema of an op."""
    for text in _texts_with_arrow(library):
        if _CANDIDATE.fullmatch(text):
            try:
                yield canonical(text.decode("ascii"))
            except (UnicodeDecodeError, ValueError):
                continue


def _texts_with_arrow(library: bytes) -> Iterator[bytes]:
    """What lies between two NULs and has an arrow. A library of 100 MB has few, and an
    arrow is found a dozen times faster than what a pattern describes."""
    arrow = library.find(_ARROW)
    while arrow >= 0:
        start, end = library.rfind(b"\0", 0, arrow), library.find(b"\0", arrow)
        if end < 0:
            return
        if start >= 0:
            yield library[start + 1 : end]
        arrow = library.find(_ARROW, end)


def canonical(schema: str) -> str:
    """The schema as torch prints it.

    Raises:
        ValueError: torch cannot read it, or it returns a value of no known type (a
            message such as `desc() -> a_desc` is no schema).
    """
    try:
        parsed = torch._C.parse_schema(schema)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if any(value.type.kind() == "VarType" for value in parsed.returns):
        raise ValueError(f"no known type is returned: {schema}")
    return str(parsed)
