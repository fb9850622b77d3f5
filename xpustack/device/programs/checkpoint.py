# SPDX-License-Identifier: Apache-2.0
"""`checkpoint.py E2E FOLDER`: write the tiny checkpoint of `tests/e2e`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import checkpoint as writer

    print(*writer.write(Path(sys.argv[2])), sep="\n")
