# SPDX-License-Identifier: Apache-2.0
"""What the table of checkpoints says about a start that ended with an error."""

import pytest

from proof.e2e.judging.endings import LONGEST, ended, short


def test_the_last_error_counts_and_only_its_first_sentence() -> None:
    trace = (
        "KeyError: 'vision'\n"
        "The above exception was the direct cause of the following exception:\n"
        "[rank0]: ValueError: there is no module 'vision' in V4. The available ones"
        " are: {'b', 'a'}\n"
        "[rank0]: and the log went on"
    )
    found = ended(trace)
    assert found.kind == "refuses"
    assert found.why == "ValueError: there is no module 'vision' in V4."


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "method\n  Input should be 'ngram' or 'mtp' [type=literal_error,"
            " input_value='dspark', input_type=str]",
            "method: Input should be 'ngram' or 'mtp'",
        ),
        (
            "  Value error, V4.1 is not known. Update it. [type=value_error,"
            " input_value=ArgsKwargs(()), input_type=ArgsKwargs]",
            "V4.1 is not known.",
        ),
    ],
)
def test_a_field_that_pydantic_refuses(body: str, why: str) -> None:
    head = "pydantic_core._pydantic_core.ValidationError: 1 validation error for A\n"
    tail = "\n    For further information visit errors/literal_error"
    found = ended(head + body + tail)
    assert (found.kind, found.why) == ("refuses", f"ValidationError: {why}")


def test_another_error_is_wrong() -> None:
    assert ended("KeyError: 'scale_fmt'").kind == "wrong"


def test_a_message_on_the_next_line() -> None:
    assert ended("ValueError: \n\n  no such field").why == "ValueError: no such field"


def test_what_the_emulation_lacks_is_no_verdict() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        ended("NotImplementedError: XpuFusedMoe on the emulated XPU: MXFP4 only")


def test_no_error_at_all() -> None:
    with pytest.raises(AssertionError, match="no error in"):
        ended("all was well")


def test_a_long_sentence_ends_in_an_ellipsis() -> None:
    found = short("word " * LONGEST)
    assert len(found) <= LONGEST and found.endswith("word…")
    assert short("0.1.9 takes e.g. v0.23.0, and no more") == (
        "0.1.9 takes e.g. v0.23.0, and no more"
    )
