# SPDX-License-Identifier: Apache-2.0
"""Executing a stage's sm_100a kernel on an sm_90 GPU, with tensor memory in software."""
