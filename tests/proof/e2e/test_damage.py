# SPDX-License-Identifier: Apache-2.0
"""A damaged checkpoint stops the start, and the message names what is damaged."""

import pytest

from proof.e2e.checkpoints.damage import DAMAGES
from proof.e2e.running.serving import Engines, EngineStopped, Job, Prompt

WAVES = ((Prompt(5, 1),),)


def job_of(fault: str) -> Job:
    return Job(fault, WAVES, checkpoint=fault)


@pytest.mark.full
@pytest.mark.parametrize("fault", DAMAGES)
def test_the_message_names_it(engines: Engines, release: str, fault: str) -> None:
    engines.add_damaged(fault)
    with pytest.raises(EngineStopped) as stop:
        engines.serve(release, job_of(fault))
    print(stop.value)
    assert DAMAGES[fault][1] in str(stop.value)
