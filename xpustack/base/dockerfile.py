# SPDX-License-Identifier: Apache-2.0
"""What a release's own Dockerfile says: its stages, their images and instructions.

dockerfile-parse knows no here-documents and takes each of their lines for an
instruction. Here such lines stay in the text of their stage.
"""

import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_FROM = re.compile(r"FROM (?:--\S+ )*\S+(?: AS (\S+))?", re.IGNORECASE)
_CONTINUED = re.compile(r"\\\s*\n")


class Stage(NamedTuple):
    """A stage together with the stages that it is based on.

    `image` is the one that the first of them starts from, with the defaults of the
    build arguments filled in; `text` is the `instructions` of all of them.
    """

    image: str
    text: str


def instructions(dockerfile: str) -> str:
    """The Dockerfile without comments, one instruction a line, blanks as one."""
    return "".join(line for _, line in _lines(_parser(dockerfile)))


def stages(dockerfile: str) -> dict[str, Stage]:
    """Each stage that has a name, by its name in lower case."""
    parser = _parser(dockerfile)
    images: Iterator[str] = iter(parser.parent_images)
    found: dict[str, Stage] = {}
    name = ""
    for word, line in _lines(parser):
        # The parser has an image for whatever follows the word, also in Python code.
        image = next(images) if word == "FROM" and " " in line else None
        start = _FROM.fullmatch(line.rstrip("\n"))
        if image is not None and start is not None:
            name = (start[1] or "").lower()
            stage = found.get(image.lower(), Stage(image, ""))
        elif name:
            stage = Stage(stage.image, stage.text + line)
        if name:
            found[name] = stage
    return found


def _parser(dockerfile: str) -> Any:
    """dockerfile-parse's own object, which has no types."""
    # Most commands read no Dockerfile, and start without the parser.
    from dockerfile_parse import DockerfileParser

    # It drops an instruction that the end of the file cuts off.
    return DockerfileParser(fileobj=io.BytesIO(f"{dockerfile}\n\n".encode()))


def _lines(parser: Any) -> Iterator[tuple[str, str]]:
    """The first word of each instruction, in capitals, and all of it on one line."""
    for each in parser.structure:
        if each["instruction"] != "COMMENT":
            joined = _CONTINUED.sub(" ", each["content"])
            yield each["instruction"], " ".join(joined.split()) + "\n"
