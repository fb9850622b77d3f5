# SPDX-License-Identifier: Apache-2.0
"""Swaps two directories atomically, where the system can do that."""

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP})
"""The errors of file systems and kernels that cannot exchange two names."""


def exchange(left: Path, right: Path) -> bool:
    """Swap the names of two directories.

    Returns:
        False where the system cannot do this atomically; then nothing has changed.

    Raises:
        OSError: the system denies it.
    """
    rename = _renameat2()
    if rename is None:
        return False
    names = (os.fsencode(left), os.fsencode(right))
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(right))


@cache
def _renameat2() -> Any:
    """The C library's `renameat2`; None where it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        place = (ctypes.c_int, ctypes.c_char_p)
        function.argtypes = (*place, *place, ctypes.c_uint)
    return function
