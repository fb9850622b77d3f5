# SPDX-License-Identifier: Apache-2.0
"""Which releases share the patch of a step: those on which it has the same text.

A step has one file for each text, `patches/<slug>/<release>.patch`, called after the
first release that uses it.
"""

from collections.abc import Iterable
from pathlib import Path

from xpustack.core.project import Project
from xpustack.series.order import ORDER, SUFFIX, format_order, read_patches

Texts = dict[str, dict[str, bytes]]
"""The text of each step's patch by release and slug; releases from oldest to newest,
slugs in the order of the series. It is empty where the file is missing."""


def read_texts(project: Project, releases: Iterable[str]) -> Texts:
    """The patches of the given releases as they are, well formed or not.

    Raises:
        SeriesError: an order file is malformed.
    """
    return {
        release: {
            slug: path.read_bytes() if path.is_file() else b""
            for slug, path in read_patches(project, release).items()
        }
        for release in releases
    }


def write_texts(project: Project, texts: Texts) -> None:
    """Write the patches and the order files of the releases in `texts`. Patches that
    their series named before and do not name any more are removed, other files stay."""
    before: set[Path] = set()
    for release in texts:
        before.update(read_patches(project, release).values())
    files: dict[Path, bytes] = {}
    names: dict[tuple[str, bytes], Path] = {}
    for release, steps in texts.items():
        for slug, text in steps.items():
            own = project.patches / slug / (release + SUFFIX)
            files[names.setdefault((slug, text), own)] = text
    for path in before - files.keys():
        path.unlink(missing_ok=True)
        if path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
    for path, text in files.items():
        if text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    for release, steps in texts.items():
        order = project.series_dir(release) / ORDER
        if not steps and not order.exists():
            continue
        order.parent.mkdir(parents=True, exist_ok=True)
        noted = order.read_bytes() if order.exists() else b""
        paths = (names[slug, text] for slug, text in steps.items())
        order.write_bytes(format_order(paths, noted))


def head(text: bytes) -> bytes:
    """The message and the trailers of a patch."""
    return text.partition(b"\n---\n")[0]
