# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.aot`: run it, or say why this Python cannot, and exit with 0."""

import sys

from lab.aot.compiler.front_end import missing

if reason := missing():
    print(f"aot skipped: {reason}")
    sys.exit(0)

from lab.aot.run import main

sys.exit(main())
