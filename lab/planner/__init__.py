# SPDX-License-Identifier: Apache-2.0
"""What a model takes on devices that somebody thinks of buying: splits, memory, speed
and the command, from the release's own start."""
