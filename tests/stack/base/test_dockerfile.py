# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles as upstream writes them, or may one day."""

import textwrap

import pytest

from stack.base.dockerfile import Stage, instructions, stages


def read(text: str) -> dict[str, Stage]:
    return stages(textwrap.dedent(text))


@pytest.mark.parametrize(
    ("lines", "image"),
    [
        (["FROM ubuntu:24.04 AS base"], "ubuntu:24.04"),
        (["from ubuntu:24.04 as Base"], "ubuntu:24.04"),
        (["FROM --platform=linux/amd64 ubuntu AS base"], "ubuntu"),
        (["FROM \\", "  ubuntu \\", "  AS base"], "ubuntu"),
        (["ARG TAG=24.04", "FROM ubuntu:${TAG} AS base"], "ubuntu:24.04"),
        (['ARG IMAGE="gpu/runtime:2"', "FROM $IMAGE AS base"], "gpu/runtime:2"),
        (["ARG IMAGE", "FROM ${IMAGE} AS base"], ""),
        (["FROM ubuntu AS first", "FROM First AS base"], "ubuntu"),
        (
            ["ARG KIND=a", "FROM x AS in_a", "FROM y AS in_b", "FROM in_$KIND AS base"],
            "x",
        ),
    ],
    ids=" / ".join,
)
def test_the_image_of_a_stage(lines: list[str], image: str) -> None:
    assert stages("\n".join([*lines, "RUN true", ""]))["base"].image == image


def test_a_stage_has_its_own_instructions_and_those_that_it_is_based_on() -> None:
    stages_by_name = read(
        """\
        ARG OUTSIDE=1
        FROM ubuntu AS one
        RUN one
        FROM debian
        RUN nameless
        FROM one AS two
        RUN two
        """
    )
    assert stages_by_name == {
        "one": Stage("ubuntu", "RUN one\n"),
        "two": Stage("ubuntu", "RUN one\nRUN two\n"),
    }


def test_comments_go_and_continued_lines_are_one() -> None:
    text = """\
        # FROM debian AS no
        FROM ubuntu AS one
        RUN apt-get update && \\
            # wget old.deb && \\
            wget \\
              new.deb
        RUN cut off \\"""
    assert instructions(textwrap.dedent(text)).splitlines() == [
        "FROM ubuntu AS one",
        "RUN apt-get update && wget new.deb",
        "RUN cut off",
    ]


def test_a_here_document_stays_in_its_stage() -> None:
    stages_by_name = read(
        """\
        FROM ubuntu AS one
        RUN python3 - <<EOF
        from os import path
        FROM
        EOF
        RUN wget new.deb
        FROM debian AS two
        """
    )
    lines = stages_by_name["one"].text.splitlines()
    assert lines[1:] == ["from os import path", "FROM", "EOF", "RUN wget new.deb"]
    assert stages_by_name["two"] == Stage("debian", "")
