# SPDX-License-Identifier: Apache-2.0
"""What all stages share: the oracle, the SM model, compiling, compiled facts, contract suite."""
