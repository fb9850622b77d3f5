# SPDX-License-Identifier: Apache-2.0
"""`checkpoint.py FOLDER`: write the tiny checkpoint of `e2e`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    from e2e import checkpoint

    print(*checkpoint.write(Path(sys.argv[1])), sep="\n")
