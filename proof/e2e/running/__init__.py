# SPDX-License-Identifier: Apache-2.0
"""Trees, engines and servers, started and asked."""
