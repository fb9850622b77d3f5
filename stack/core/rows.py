# SPDX-License-Identifier: Apache-2.0
"""Files of rows: CSV text with a line of heads, which other programs read."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows by their heads; none without the file."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def csv_text(rows: Sequence[Mapping[str, object]], heads: Sequence[str] = ()) -> str:
    """The rows as CSV; `heads`, then one for each other key, in the order in which keys
    first appear."""
    stream = io.StringIO()
    heads = list(dict.fromkeys([*heads, *(key for row in rows for key in row)]))
    writer = csv.DictWriter(stream, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
