"""Rows that hold token ids already: the ids, and which of them the drafter learns."""

import dataclasses
from typing import Any

import numpy as np

from dflash_jax.sources.unused import UnusedRow, shown

UNTRAINED = -100  # what labels say of a token that is not trained
LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRow:
    """tokens: [n] int32; loss_mask: [n] bool, True on tokens that the target produced; set: the row's source."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    set: str = ""


def read_token_row(row: dict[str, Any], *, key: str, source: str) -> TokenRow:
    """A row with token ids under `key`, and under loss_mask a 0 or 1 for each, or labels that are -100 or the id.

    Raises UnusedRow.
    """
    tokens = _integers(row[key], key=key, lowest=0)
    if not len(tokens):
        raise _bad(f"{key} is empty")
    if "attention_mask" in row and not np.all(_of_length(row, "attention_mask", lowest=0, tokens=tokens)):
        raise _bad("attention_mask leaves tokens out; give the row without padding")
    kinds = [mask for mask in ("loss_mask", "labels") if mask in row]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "neither"
        raise _bad(
            f"{key} needs one of loss_mask (0 or 1 for each token) and labels (-100 or the token); found {found}"
        )
    if kinds == ["loss_mask"]:
        mask = _of_length(row, "loss_mask", lowest=0, tokens=tokens)
        if len(wrong := np.flatnonzero(mask > 1)):
            raise _bad(f"loss_mask[{wrong[0]}] is {mask[wrong[0]]}; it must be 0 or 1")
        return TokenRow(tokens.astype(np.int32), mask.astype(bool), source)
    labels = _of_length(row, "labels", lowest=UNTRAINED, tokens=tokens)
    trained = labels != UNTRAINED
    if len(wrong := np.flatnonzero(trained & (labels != tokens))):
        at = wrong[0]
        wanted = f"-100 or the token itself, {tokens[at]}, not the next one"
        raise _bad(f"labels[{at}] is {labels[at]}; it must be {wanted}")
    return TokenRow(tokens.astype(np.int32), trained, source)


def _of_length(row: dict[str, Any], key: str, *, lowest: int, tokens: np.ndarray) -> np.ndarray:
    values = row[key]
    if key != "labels" and isinstance(values, list):  # masks may be true and false
        values = [int(value) if isinstance(value, bool) else value for value in values]
    numbers = _integers(values, key=key, lowest=lowest)
    if len(numbers) != len(tokens):
        raise _bad(f"{key} has {len(numbers)} entries for {len(tokens)} tokens")
    return numbers


def _integers(values: Any, *, key: str, lowest: int) -> np.ndarray:
    if not isinstance(values, list):
        raise _bad(f"{key} must be a list of integers; found {shown(values)}")
    if set(map(type, values)) - {int}:
        at = next(index for index, value in enumerate(values) if type(value) is not int)
        raise _bad(f"{key}[{at}] is {shown(values[at])}; it must be an integer")
    if values and not (lowest <= min(values) and max(values) <= LARGEST):
        at = next(index for index, value in enumerate(values) if not lowest <= value <= LARGEST)
        raise _bad(f"{key}[{at}] is {shown(values[at])}; it must lie between {lowest} and {LARGEST}")
    return np.array(values, np.int64)


def _bad(detail: str) -> UnusedRow:
    return UnusedRow("bad tokens", detail)
