# SPDX-License-Identifier: Apache-2.0
"""Threads may ask for syntax trees at the same time."""

import ast
import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stack.core.files import parse_python

NESTED = b"x = " + b"(1 + " * 60 + b"1" + b")" * 60 + b"\n"


@pytest.fixture
def collections_switch_threads() -> Iterator[None]:
    """Collect garbage often, and switch threads during each collection."""

    def switch(*_: Any) -> None:
        time.sleep(1e-4)

    before = gc.get_threshold()
    gc.callbacks.append(switch)
    gc.set_threshold(20)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(switch)


@pytest.mark.usefixtures("collections_switch_threads")
def test_threads_parse_at_once() -> None:
    alone = ast.dump(parse_python(NESTED))
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(parse_python, [NESTED] * 24))
    assert {ast.dump(tree) for tree in trees} == {alone}
