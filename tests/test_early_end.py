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


def verified(probability: np.ndarray, confidence: float, *, active: tuple[bool, bool] = (True, True)) -> int:
    """Slots of the block that is verified, the anchor's included."""

    def verify(at: Anchors, *, length: int) -> Outcome:
        tokens = jnp.full((2, 6), length)
        return Outcome(tokens, jnp.zeros(2, jnp.int32), at.cache, at.context)

    at = Anchors(jnp.zeros(2, jnp.int32), CACHE, (), jnp.zeros(2, jnp.int32), jnp.array(active), NO)
    out = jax.jit(lambda at, rows: verify_promising(verify, at, rows, confidence=confidence))(at, probability)
    length = int(out.tokens[0, 0])
    assert out.cache.lengths.tolist() == [5, 7]
    return length


@pytest.mark.parametrize(
    ("probability", "length"),
    [
        ([0.4, 0.3, 0.2, 0.1, 0.0], 1),
        ([0.5, 0.4, 0.2, 0.1, 0.0], 2),
        ([0.9, 0.5, 0.2, 0.1, 0.0], 4),  # three slots are worth it, and four the next length
        ([0.9, 0.8, 0.7, 0.1, 0.0], 4),
        ([0.9, 0.8, 0.7, 0.5, 0.0], 6),
        ([0.9, 0.8, 0.7, 0.6, 0.5], 6),
    ],
)
def test_what_is_promising_in_any_row_is_verified(probability, length):
    rows = np.array([[0.1, 0.0, 0.0, 0.0, 0.0], probability], np.float32)
    assert verified(rows, 0.5) == length
    assert verified(rows[::-1], 0.5) == length
    assert verified(rows, 0.0) == 6
    assert verified(rows, 0.5, active=(True, False)) == 1


@pytest.mark.parametrize(
    ("accepted", "drafts"),
    [
        ((), [0, 1, 3, 7, 15, 31, 63, 95]),  # with 1, 3, 7, 15, and then always 31 steps between them
        ((7, 8), [0, 1, 3, 7, 8, 9, 10, 12, 16, 24, 40, 72]),  # an accepted one, and all is as at the start
    ],
)
def test_after_drafts_in_vain_some_rounds_are_plain_steps(accepted, drafts):
    pace, found = Pace.start(), []
    for number in range(100):
        found += [number] if pace.rest == 0 else []
        pace = pace.after(jnp.array(number in accepted))
    assert found == drafts


def test_a_round_without_a_draft_finds_nothing_promising():
    find = jax.jit(lambda resting: draft_unless(resting, lambda: jnp.ones((2, 5)), confidence=0.5))
    assert find(YES).tolist() == np.zeros((2, 5)).tolist()
    assert find(NO).tolist() == np.ones((2, 5)).tolist()
    assert verified(np.zeros((2, 5), np.float32), 0.5) == 1
