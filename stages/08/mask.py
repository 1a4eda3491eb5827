# SPDX-License-Identifier: Apache-2.0
"""Which key tiles a query tile visits, which of them need a mask, and the mask; for the backward
pass, which query tiles a key tile visits.

Query i of len_q stands at key position i + len_k - len_q: the last query at the last key. It sees
the keys from position - left to position + right, where they exist.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

TILE_M = 128  # queries of a tile
TILE_N = 128  # keys of a tile


@cute.jit
def visible_keys(query: Int32, lengths, window):
    """(first, last) key that a query sees, before the ends of the sequence. Runs: any thread.

    Args: lengths, (len_q, len_k); window, (left, right), at most 2**30 each.
    """
    position = query + lengths[1] - lengths[0]
    return position - window[0], position + window[1]


@cute.jit
def visited_tiles(first_row: Int32, rows: Int32, lengths, window):
    """(n_min, n_max): the key tiles that some query of `rows` rows from `first_row` on sees.

    Runs: any thread. n_min = n_max where there are none. left + right >= 0: the host starts nothing
    for other windows.
    """
    last_row = cutlass.min(first_row + rows, lengths[0]) - 1
    first_key, _ = visible_keys(first_row, lengths, window)
    _, last_key = visible_keys(last_row, lengths, window)
    start, stop = cutlass.max(first_key, 0), cutlass.min(last_key + 1, lengths[1])
    n_min, n_max = start // TILE_N, cute.ceil_div(cutlass.max(stop, 0), TILE_N)
    if last_row < first_row or start >= stop:
        n_max = n_min
    return n_min, n_max


@cute.jit
def unmasked_tiles(first_row: Int32, rows: Int32, lengths, window, n_min: Int32, n_max: Int32):
    """(n_low, n_high): those of the tiles n_min to n_max of which every query sees every key.

    Runs: any thread. n_low = n_high where there are none; then both are at most n_max.
    """
    first_key, _ = visible_keys(first_row + rows - 1, lengths, window)
    _, last_key = visible_keys(first_row, lengths, window)
    stop = cutlass.max(cutlass.min(last_key + 1, lengths[1]), 0)
    n_high = cutlass.max(cutlass.min(stop // TILE_N, n_max), n_min)
    n_low = cutlass.max(cute.ceil_div(cutlass.max(first_key, 0), TILE_N), n_min)
    return cutlass.min(n_low, n_high), n_high


@cute.jit
def visible_queries(key: Int32, lengths, window):
    """(first, last) query that sees a key, before the ends of the sequence. Runs: any thread.

    Args: as visible_keys.
    """
    position = key + lengths[0] - lengths[1]
    return position - window[1], position + window[0]


@cute.jit
def visited_queries(first_key: Int32, keys: Int32, lengths, window):
    """(m_min, m_max): the query tiles that see some key of `keys` keys from `first_key` on.

    Runs: any thread. m_min = m_max where there are none. left + right >= 0.
    """
    last_key = cutlass.min(first_key + keys, lengths[1]) - 1
    first_query, _ = visible_queries(first_key, lengths, window)
    _, last_query = visible_queries(last_key, lengths, window)
    start, stop = cutlass.max(first_query, 0), cutlass.min(last_query + 1, lengths[0])
    m_min, m_max = start // TILE_M, cute.ceil_div(cutlass.max(stop, 0), TILE_M)
    if last_key < first_key or start >= stop:
        m_max = m_min
    return m_min, m_max


@cute.jit
def unmasked_queries(first_key: Int32, keys: Int32, lengths, window, m_min: Int32, m_max: Int32):
    """(m_low, m_high): those of the tiles m_min to m_max whose queries all see every key.

    Runs: any thread. m_low = m_high where there are none, as with keys beyond the sequence. Queries
    beyond it do not count: their LSE is +inf, so that P is 0.
    """
    first_query, _ = visible_queries(first_key + keys - 1, lengths, window)
    _, last_query = visible_queries(first_key, lengths, window)
    m_high = cutlass.max(cutlass.min(cutlass.max(last_query + 1, 0) // TILE_M, m_max), m_min)
    if last_query >= lengths[0] - 1:
        m_high = m_max
    m_low = cutlass.max(cute.ceil_div(cutlass.max(first_query, 0), TILE_M), m_min)
    if first_key + keys > lengths[1]:
        m_low = m_high
    return cutlass.min(m_low, m_high), m_high


@cute.jit
def hide(row: cute.Tensor, first: Int32, last: Int32):
    """Set what of a row is not at first ... last to -inf. Runs: any thread, on its registers.

    Args: row (n,) Float32; first, last may lie outside. Cost: 2 comparisons and 2 selections each.
    """
    for i in cutlass.range_constexpr(cute.size(row)):
        row[i] = row[i] if i >= first and i <= last else -Float32.inf
