# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names the file and the tensor where a safetensors shard is cut off."""

import json
import os
from collections.abc import Iterable

from safetensors import SafetensorError, safe_open


def cut_shard(files: Iterable[str], error: SafetensorError) -> str:
    """The message of an error of safetensors, with the file that cannot be opened, and
    the first tensor that the file does not hold to its end."""
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as found:
            cut = _first_cut(file)
            ending = f"; the file ends before the end of {cut}" if cut else ""
            return f"{file}: {found}{ending}"
    return str(error)


def _first_cut(st_file: str) -> str:
    """The first tensor that a truncated safetensors file does not hold to its end;
    empty if it holds all, or if its header is damaged.

    The format: eight bytes with the length of the header, the header in JSON with the
    range of each tensor behind it, and the tensors.
    """
    with open(st_file, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < size else b""
    try:
        ends = {
            name: entry["data_offsets"][1]
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (AttributeError, LookupError, TypeError, ValueError):
        return ""
    cut = [name for name, end in ends.items() if 8 + length + end > size]
    return min(cut, key=lambda name: ends[name], default="")
