# SPDX-License-Identifier: Apache-2.0
"""Execution of sm_100a kernels on Hopper: rewritten PTX and a tensor core in software."""
