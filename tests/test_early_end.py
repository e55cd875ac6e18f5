"""What is verified of a draft with a confidence, and how often there is a draft at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decode.early_end import draft_unless, verify_promising
from dflash_jax.decode.speculate import Anchors, Outcome, Pace
from dflash_jax.models.target_cache import TargetCache

CACHE = TargetCache((), jnp.array([5, 7]), capacity=32)
YES, NO = jnp.array(True), jnp.array(False)


def verified(probability: np.ndarray, min_accept: float, *, active: tuple[bool, bool] = (True, True)) -> int:
    """Tokens that are verified together, the anchor among them."""
    most = probability.shape[1] + 1

    def verify(at: Anchors, *, length: int) -> Outcome:
        tokens = jnp.full((2, most), length)
        return Outcome(tokens, jnp.zeros(2, jnp.int32), at.cache, at.context)

    at = Anchors(jnp.zeros(2, jnp.int32), CACHE, (), jnp.zeros(2, jnp.int32), jnp.array(active), NO)
    out = jax.jit(lambda at, rows: verify_promising(verify, at, rows, min_accept=min_accept))(at, probability)
    length = int(out.tokens[0, 0])
    assert out.cache.lengths.tolist() == [5, 7]
    return length


@pytest.mark.parametrize(
    ("probability", "length"),
    [
        ([0.3, 0.1, 0.05, 0.0, 0.0], 1),  # 0.45 drafts to expect
        ([0.3, 0.1, 0.05, 0.04, 0.03], 6),  # 0.52, though no draft is likely
        ([0.9, 0.0, 0.0, 0.0, 0.0], 6),
        ([0.06] * 20, 1),
        ([0.4] + [0.05] * 19, 8),  # 0.7 to expect of 7 drafts, 0.4 of the next 8
        ([0.4] + [0.07] * 18 + [0.0], 16),  # 0.56 of the next 8, 0.28 of the last 5
        ([0.4] + [0.11] * 19, 21),
        ([0.04] * 15 + [0.0] * 25, 1),  # what 15 promise does not help the first 7
        ([0.4] + [0.02] * 39, 8),  # nor what many more promise the next 8
        ([0.4] + [0.07] * 39, 41),  # in eights: 8, 16, 32, and all
    ],
)
def test_what_is_promising_in_any_row_is_verified(probability, length):
    most = len(probability)
    rows = np.array([np.linspace(0.1, 0, most) / most, probability], np.float32)
    assert verified(rows, 0.5) == length
    assert verified(rows[::-1], 0.5) == length
    assert verified(rows, 0.0) == most + 1
    assert verified(rows, 0.5, active=(True, False)) == 1


@pytest.mark.parametrize(
    ("accepted", "drafts"),
    [
        ((), [0, 1, 2, 3, 5, 9, 17, 25, 33]),  # with 1, 3, and then always 7 steps between them
        ((5, 6), [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32]),  # an accepted one: as at the start
    ],
)
def test_after_drafts_in_vain_some_rounds_are_plain_steps(accepted, drafts):
    pace, found = Pace.start(), []
    for number in range(40):
        found += [number] if pace.rest == 0 else []
        pace = pace.after(jnp.array(number in accepted))
    assert found == drafts


def test_a_round_without_a_draft_finds_nothing_promising():
    find = jax.jit(lambda resting: draft_unless(resting, lambda: jnp.ones((2, 5)), min_accept=0.5))
    assert find(YES).tolist() == np.zeros((2, 5)).tolist()
    assert find(NO).tolist() == np.ones((2, 5)).tolist()
    assert verified(np.zeros((2, 5), np.float32), 0.5) == 1
