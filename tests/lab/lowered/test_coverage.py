# SPDX-License-Identifier: Apache-2.0
"""After all others: the shipped kernels were executed in a configuration of an XPU."""

import pytest
from device_choice import RAN

from lab.aot.calls.cases import cases
from lab.aot.calls.record import record_cases
from lab.aot.calls.shapes import Sizes

SMALL = Sizes(heads=(("H8", 8),), tokens=(2,), chunks=(17,), requests=(1,))


def test_every_shipped_kernel_ran(request: pytest.FixtureRequest) -> None:
    ran = {launch.kernel for launch in request.config.stash[RAN]}
    shipped = {record.launch.name for record in record_cases("ours", cases(SMALL))}
    assert not shipped - ran
