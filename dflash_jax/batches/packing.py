"""Several records in one row: first fit, over windows of a shuffled order.

Each record goes into the first open row that has room for it. Rows stay open for a window of records, so that the
search is short and neighbours in a row are a random choice; a window leaves a few rows half empty at its end.
"""

import numpy as np

WINDOW = 4096  # records


def pack(lengths: np.ndarray, row_length: int, *, seed: int) -> np.ndarray:
    """[rows, R] int32: indices of the records of each row, -1 behind the last; R is the most that a row has.

    lengths: [records] int, each between 1 and row_length. Every record is in exactly one row.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    row_of = np.zeros(len(order), np.int64)
    rows = 0
    for start in range(0, len(order), WINDOW):
        window = lengths[order[start : start + WINDOW]]
        row_of[start : start + WINDOW] = rows + _first_fit(window, row_length)
        rows = int(row_of[start : start + WINDOW].max()) + 1
    by_row = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=rows)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    packed = np.full((rows, int(counts.max(initial=1))), -1, np.int32)
    packed[row_of[by_row], place] = order[by_row]
    return packed


def _first_fit(lengths: np.ndarray, row_length: int) -> np.ndarray:
    """[records]: the row of each record."""
    room = np.full(len(lengths), row_length, np.int64)  # as many rows as records: never too few
    rows = np.empty(len(lengths), np.int64)
    opened = 1  # rows that are looked at; the last of them is always empty
    for index, length in enumerate(lengths.tolist()):
        row = int((room[:opened] >= length).argmax())
        opened = max(opened, row + 2)
        room[row] -= length
        rows[index] = row
    return rows
