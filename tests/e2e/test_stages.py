# SPDX-License-Identifier: Apache-2.0
"""Drafts over pipeline stages and over ranks are accepted as those of one device.

Accepted tokens are right whatever was drafted, so the drafts are counted: equal counts
from every split, and those that follow from what the draft knows.
"""

import re

import pytest
from packaging.version import Version

from e2e import mtp
from e2e.checks import check_same_tokens
from e2e.drafts import check_drafts, successors
from e2e.serving import Engines, EngineStopped, Job, Prompt

MTP_OVER_STAGES = Version("0.30.0")
"""The first release that takes multi-token prediction over pipeline stages."""
REFUSED = r"Pipeline parallelism is not supported for this model"
WAVES = ((Prompt(40, 10, seed=1), Prompt(6, 8, seed=2)),)
NAME = "six layers"
PLAIN = Job("six layers", WAVES, checkpoint=NAME)
DRAFTING = (("speculative_config", {"method": "mtp", "num_speculative_tokens": 1}),)
KNOWING = f"{NAME} and a draft that knows"
ONE = Job("one device", WAVES, DRAFTING, checkpoint=KNOWING)


def split(name: str) -> Job:
    """The same job on two devices."""
    ranks = (("distributed_executor_backend", "mp"), (name, 2))
    return Job(name, WAVES, (*DRAFTING, *ranks), checkpoint=KNOWING)


@pytest.mark.newest
@pytest.mark.parametrize("name", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_drafts_of_two_devices(engines: Engines, release: str, name: str) -> None:
    engines.add_checkpoint(NAME, mtp.SixLayers(0, {}))
    plain = engines.serve(release, PLAIN)
    known = successors(plain)
    engines.add_checkpoint(KNOWING, mtp.SixLayers(0, known))
    one = engines.serve(release, ONE)
    check_same_tokens(one, plain)
    check_drafts(one, mtp.says_after(known), 1)
    early = Version(release.removeprefix("v")) < MTP_OVER_STAGES
    if early and name == "pipeline_parallel_size":
        with pytest.raises(EngineStopped) as stop:
            engines.serve(release, split(name))
        assert re.search(REFUSED, str(stop.value)), stop.value
        return
    two = engines.serve(release, split(name))
    check_same_tokens(two, plain)
    check_drafts(two, mtp.says_after(known), 1)
    if two.new_tokens() == one.new_tokens():
        assert two.answer["drafts"] == one.answer["drafts"]
