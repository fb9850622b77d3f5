# SPDX-License-Identifier: Apache-2.0
"""Texts that are made of a template, a file beside the code that knows its values."""

from collections.abc import Mapping


def rendered(package: str, name: str, values: Mapping[str, object]) -> str:
    """The text of the template `name.jinja` of a package, with one line feed at its
    end. A line that holds a statement alone leaves none."""
    # Most commands write no text, so they need not import the library.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    text = environment.get_template(f"{name}.jinja").render(values)
    return text.rstrip("\n") + "\n"
