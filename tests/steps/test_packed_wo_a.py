# SPDX-License-Identifier: Apache-2.0
"""A packed wo_a, which its owner multiplies group by group, is loaded unpacked."""

import pytest
from helpers import packed_formats
from helpers.packed_formats import SERVED, SERVED_BEFORE


def require_packed(name: str) -> None:
    """Require that another layer keeps four bits a weight."""
    built, _ = packed_formats.projection(SERVED[name], "wo_b")
    bits = [p.numel() * p.element_size() * 8 for p in built.parameters()]
    assert max(bits) == 4 * built.output_size * built.input_size


@pytest.mark.parametrize("name", SERVED)
def test_it_is_loaded_in_bf16(name: str) -> None:
    packed_formats.check_wo_a(SERVED[name])
    require_packed(name)


@pytest.mark.unchanged
@pytest.mark.parametrize("name", SERVED_BEFORE)
def test_other_layers_stay_packed(name: str) -> None:
    require_packed(name)
