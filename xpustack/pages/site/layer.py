# SPDX-License-Identifier: Apache-2.0
"""A decoder layer from top to bottom, and which steps change which part of it."""

import html
from collections.abc import Sequence

from xpustack.pages.parts import layer_steps
from xpustack.pages.status import StepStatus


def layer_page(statuses: Sequence[StepStatus]) -> tuple[str, dict[str, str]]:
    """The page of the layer: its text, and no further files."""
    releases: dict[str, list[str]] = {}
    subjects: dict[str, str] = {}
    for status in statuses:
        releases.setdefault(status.step, []).append(status.release)
        subjects[status.step] = status.subject
    boxes = []
    for name, does, slugs in layer_steps(releases):
        steps = []
        for slug in slugs:
            names = releases[slug]
            span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            steps.append(
                f'<li title="{html.escape(subjects[slug])}"><code>{slug}</code>'
                f" <small>{len(names)} releases, {span}</small></li>"
            )
        boxes.append(
            f"<li><strong>{html.escape(name)}</strong>: {html.escape(does)}"
            f"<ul>{''.join(steps)}</ul></li>"
        )
    text = "\n\n".join(
        [
            "# A decoder layer and its steps",
            "From top to bottom as a token passes it. Point at a step for its subject;"
            " [Steps](steps.md) says which release has it, and"
            " [launches](docs/layers.md) what the device runs.",
            f'<ol class="layer">\n{chr(10).join(boxes)}\n</ol>',
        ]
    )
    return text + "\n", {}
