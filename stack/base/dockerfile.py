# SPDX-License-Identifier: Apache-2.0
"""Reads where a release names its dependencies: its requirements, and the stages of its
Dockerfile, their images and instructions.

dockerfile-parse does not support here-documents and reads each of their lines as an
instruction. Here such lines stay in the text of their stage.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

REQUIREMENTS = "requirements/xpu.txt"
DOCKERFILE = "docker/Dockerfile.xpu"
"""The files of a base that name its dependencies."""
_FROM = re.compile(r"FROM (?:--\S+ )*\S+(?: AS (\S+))?", re.IGNORECASE)
_CONTINUED = re.compile(r"\\\s*\n")


class Stage(NamedTuple):
    """A stage together with the stages that it is based on.

    `image` is the image of the first of them, with the defaults of the build
    arguments filled in; `text` is the `instructions` of all of them.
    """

    image: str
    text: str


def requirements(text: str) -> Iterator[Requirement]:
    """The requirements in a file of them, in its order."""
    for line in text.splitlines():
        with contextlib.suppress(InvalidRequirement):
            yield Requirement(line.partition(" #")[0].strip())


def instructions(dockerfile: str) -> str:
    """The Dockerfile without comments: one instruction per line, single blanks."""
    return "".join(line for _, line in _lines(_parser(dockerfile)))


def stages(dockerfile: str) -> dict[str, Stage]:
    """Each stage that has a name, by its name in lower case."""
    parser = _parser(dockerfile)
    images: Iterator[str] = iter(parser.parent_images)
    stages_by_name: dict[str, Stage] = {}
    name = ""
    for word, line in _lines(parser):
        # The parser lists an image for every FROM, also for one in Python code.
        image = next(images) if word == "FROM" and " " in line else None
        start = _FROM.fullmatch(line.rstrip("\n"))
        if image is not None and start is not None:
            name = (start[1] or "").lower()
            stage = stages_by_name.get(image.lower(), Stage(image, ""))
        elif name:
            stage = Stage(stage.image, stage.text + line)
        if name:
            stages_by_name[name] = stage
    return stages_by_name


def _parser(dockerfile: str) -> Any:
    """dockerfile-parse's own object, which has no types."""
    # Imported here because most commands read no Dockerfile and start faster so.
    from dockerfile_parse import DockerfileParser

    # Without the line feeds it drops an instruction that ends in a backslash.
    return DockerfileParser(fileobj=io.BytesIO(f"{dockerfile}\n\n".encode()))


def _lines(parser: Any) -> Iterator[tuple[str, str]]:
    """Each instruction's first word, in capitals, and its whole text on one line."""
    for instruction in parser.structure:
        word = instruction["instruction"]
        if word != "COMMENT":
            text = _CONTINUED.sub(" ", instruction["content"])
            yield word, " ".join(text.split()) + "\n"
