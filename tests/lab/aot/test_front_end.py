# SPDX-License-Identifier: Apache-2.0
"""aot is skipped, with its reason, only where no front end exists."""

import pytest

from lab.aot.compiler.front_end import missing


@pytest.mark.parametrize("minor", [11, 12])
def test_pythons_with_a_front_end(minor: int) -> None:
    assert missing((3, minor)) is None


def test_a_python_without_one() -> None:
    reason = missing((3, 13))
    assert reason is not None and "3.13" in reason
