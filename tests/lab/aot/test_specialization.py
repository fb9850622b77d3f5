# SPDX-License-Identifier: Apache-2.0
"""What changes from step to step compiles nothing anew."""

from collections import defaultdict

from lab.aot.calls.record import record_cases
from lab.aot.coverage import configuration, specialization
from lab.aot.trace import FLASH, steps

STEPS = 1000
MOST_FORMS = 5
"""Experts have one for each size of tile, and more where few programs share K."""


def test_a_thousand_steps_compile_few_forms_of_each_kernel() -> None:
    compiled: dict[tuple[str, str], set[tuple[str, frozenset[str]]]] = defaultdict(set)
    for record in record_cases("ours", steps(STEPS, FLASH.heads)):
        launch = record.launch
        compiled[record.op, launch.name].add(
            (configuration(launch), specialization(launch))
        )
    assert len(compiled) >= 18
    most = {
        name: len(found) for name, found in compiled.items() if len(found) > MOST_FORMS
    }
    assert not most
