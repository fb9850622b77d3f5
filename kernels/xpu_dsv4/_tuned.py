# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configurations that were measured on a device: its file is read once.

The file is `tuned/<device>.json` beside this module, or what `XPU_DSV4_TUNED` names:

    {"schema": 1, "device": "Intel(R) Arc(TM) Pro B60 Graphics",
     "rows": {"sparse_decode": [{"least_heads": 1, ...}]}}

Without a file every kernel keeps its own choice. A file that does not fit gives one
warning and is ignored, and so are the rows of a kernel that does not take them.
"""

import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

SCHEMA = 1
VARIABLE = "XPU_DSV4_TUNED"
"""Environment variable that names another file."""
FOLDER = Path(__file__).with_name("tuned")

Row = TypeVar("Row", bound=tuple[Any, ...])


def file_name(device_name: str) -> str:
    """The name of a device's file: `intel-r-arc-tm-pro-b60-graphics.json`."""
    plain = (c if c.isascii() and c.isalnum() else " " for c in device_name.lower())
    return "-".join("".join(plain).split()) + ".json"


@functools.cache
def tuned_rows(
    kernel: str, device_type: str, row: type[Row], fits: Callable[[Row], bool]
) -> tuple[Row, ...]:
    """The measured configurations of a kernel, in the file's order.

    Args:
        kernel (str):
            Key of the file's `rows`.
        device_type (str):
            `torch.device.type` of the launch. Only an XPU or a GPU has a file.
        row (type[Row]):
            What a row must have, each field an int or a bool.
        fits (Callable[[Row], bool]):
            Whether the kernel takes a row.

    Returns:
        The rows; none where there is no file, or where one of the kernel's does not
        fit.

    """
    entries = _rows_by_kernel(device_type).get(kernel, [])
    try:
        rows = tuple(_row(entry, row) for entry in entries)
        gone = next((str(r) for r in rows if not fits(r)), "")
    except (TypeError, ValueError) as error:
        gone = str(error)
    if gone:
        logger.warning(
            "%s: the default configuration is used, because a tuned one is gone (%s); "
            "tune this device again",
            kernel,
            gone,
        )
        return ()
    return rows


def _row(entry: Any, row: type[Row]) -> Row:
    """One entry of the file as a row.

    Raises:
        TypeError, ValueError: its fields are not those of the row.

    """
    if not isinstance(entry, dict):
        raise TypeError(f"{entry!r} is no row")
    kinds = row.__annotations__
    if entry.keys() != kinds.keys():
        raise ValueError(f"fields {sorted(entry)} instead of {sorted(kinds)}")
    for name, value in entry.items():
        if type(value) is not kinds[name]:
            raise TypeError(f"{name} = {value!r}")
    make: Callable[..., Row] = row
    return make(**entry)


@functools.cache
def _rows_by_kernel(device_type: str) -> dict[str, list[Any]]:
    """The `rows` of the device's file; empty where there is none that fits."""
    device = _device_name(device_type)
    if device is None:
        return {}
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else FOLDER / file_name(device)
    if not named and not path.exists():
        return {}
    try:
        return _read(path, device)
    except (OSError, ValueError) as error:
        logger.warning("default configurations are used: %s: %s", path, error)
        return {}


def _device_name(device_type: str) -> str | None:
    if device_type not in ("xpu", "cuda"):
        return None
    module = getattr(torch, device_type)
    return module.get_device_name() if module.is_available() else None


def _read(path: Path, device: str) -> dict[str, list[Any]]:
    """The `rows` of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or one of another device.

    """
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"no tuned configurations of schema {SCHEMA}")
    if content.get("device") != device:
        raise ValueError(f"tuned for {content.get('device')}, this is {device}")
    rows = content.get("rows")
    if not isinstance(rows, dict) or not all(
        isinstance(entries, list) for entries in rows.values()
    ):
        raise ValueError("`rows` is no table of lists")
    return rows
