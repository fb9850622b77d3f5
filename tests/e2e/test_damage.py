# SPDX-License-Identifier: Apache-2.0
"""A damaged checkpoint stops the start, and the message names what is damaged."""

import pytest

from e2e.damage import DAMAGES
from e2e.serving import EngineStopped, Job, Kitchen, Prompt

WAVES = ((Prompt(5, 1),),)


def job_of(fault: str) -> Job:
    return Job(fault, WAVES, checkpoint=fault)


@pytest.mark.full
@pytest.mark.parametrize("fault", DAMAGES)
def test_the_message_names_it(served: Kitchen, release: str, fault: str) -> None:
    served.add_damaged(fault)
    with pytest.raises(EngineStopped) as stop:
        served.serve(release, job_of(fault))
    print(stop.value)
    assert DAMAGES[fault][1] in str(stop.value)
