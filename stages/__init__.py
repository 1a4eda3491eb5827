# SPDX-License-Identifier: Apache-2.0
"""FlashLadder: FlashAttention-4 for Blackwell, taught by building it."""
