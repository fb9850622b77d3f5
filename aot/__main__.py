# SPDX-License-Identifier: Apache-2.0
"""`python -m aot`: says so and ends well where the front end cannot be had."""

import sys

from .front_end import missing

if reason := missing():
    print(f"aot skipped: {reason}")
    sys.exit(0)

from .run import main

sys.exit(main())
