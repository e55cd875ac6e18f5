"""Simulated accept lengths by hand, against trees that are enumerated, and against real decoding."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import frozen_of, load_target, quick, random_drafter

from dflash_jax.batch import Batch
from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.simulate import Simulated, simulate
from dflash_jax.decode.tree_decoding import generate_tree
from dflash_jax.models.drafter import FULL, SLIDING
from dflash_jax.objective.anchors import valid_anchors
from dflash_jax.objective.objective import Frozen

NEVER = (10**6,)  # a stop token that no vocabulary has


class Spoken:
    """In place of a drafter: slot k of a block says what a table has in row k - 1 for its anchor's position."""

    def __init__(self, logits: np.ndarray):
        """logits: [S, W - 1, V], by the anchor's position."""
        self.table = jnp.asarray(logits)
        self.config = dataclasses.make_dataclass("Sizes", ["block_size", "mask_token"])(logits.shape[1] + 1, 0)

    def context(self, features, positions):
        return ()

    def __call__(self, block, positions, context, *, visible, context_positions):
        """The states are the logits themselves: the head is the unit matrix."""
        said = self.table[positions[..., 0]][:, :, : block.shape[2] - 1]
        return jnp.pad(said, ((0, 0), (0, 0), (1, 0), (0, 0)))


def unit_head(vocab: int) -> Frozen:
    return Frozen(jnp.eye(vocab), jnp.eye(vocab), None)


def one_answer(tokens, supervised, *, segments=None) -> Batch:
    tokens = jnp.asarray(tokens, jnp.int32)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
    rows = tokens.shape[0]
    return Batch(
        tokens=tokens,
        positions=at,
        segment_ids=segments,
        loss_mask=jnp.asarray(supervised, bool),
        record_ids=jnp.arange(rows)[:, None],
        epochs=jnp.zeros(rows, jnp.int32),
    )


def everywhere(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Anchors at all positions where a block may start."""
    kept = valid_anchors(batch.loss_mask, batch.segment_ids)
    return jnp.where(kept, jnp.arange(kept.shape[1]), 0), kept


def simulated(spoken, batch, *, budgets, frozen, anchors=None, kept=None, chunk=4, width=None) -> Simulated:
    """Of blocks at the given anchors, or at all positions where one may start. spoken: logits, as of Spoken."""
    if anchors is None:
        anchors, kept = everywhere(batch)
    return compiled(spoken, batch, frozen, anchors, kept, budgets=budgets, chunk=chunk, width=width)


@functools.partial(quick, static_argnames=("budgets", "chunk", "width"))
def compiled(spoken, batch, frozen, anchors, kept, *, budgets, chunk, width) -> Simulated:
    features = jnp.zeros((*batch.tokens.shape, 1))
    return simulate(
        Spoken(spoken),  # pyright: ignore[reportArgumentType]
        batch,
        features,
        frozen,
        anchors=anchors,
        kept=kept,
        budgets=budgets,
        head_chunk=chunk,
        width=width,
    )


# By hand.


def the_text() -> tuple[np.ndarray, Batch]:
    """The text 1 | 0 3 6 0 of vocabulary a .. i = 0 .. 8, of which the last four tokens are an answer.

    After position 1 the slots say a .6 b .3 c .1, d .5 e .4 f .1, g .9 h .05 i .05 and after 2 the same.
    """
    probabilities = np.full((5, 3, 9), 1e-9)
    probabilities[:, 0, 0:3] = 0.6, 0.3, 0.1
    probabilities[:, 1, 3:6] = 0.5, 0.4, 0.1
    probabilities[:, 2, 6:9] = 0.9, 0.05, 0.05
    return np.log(probabilities).astype(np.float32), one_answer([[1, 8, 1, 4, 6]], [[0, 1, 1, 1, 1]])


def test_streaks_by_hand():
    # The best tree of six nodes: a, ad, b, adg, ae, aeg. After position 1 the text goes on b e g: of that b is in
    # the tree. After position 2 it goes on e g, and after position 3 g; neither starts with a, b or c.
    spoken, batch = the_text()
    found = simulated(spoken, batch, budgets=(2, 6, 8), frozen=unit_head(9))
    # a, ad | a, ad, b, adg, ae, aeg | two more: bd .15 and bdg .135, so b e g is still cut after b.
    assert found.budgets == (2, 6, 8)
    assert found.blocks == 3
    assert found.accepted.tolist() == [0, 0, 1, 1]
    assert found.full_blocks == 1
    assert found.full_accepted.tolist() == [0, 0, 1, 1]
    # Three tokens after the first: one by one, or two by the first step of the walk.
    assert found.walk_tokens.tolist() == [3, 3, 3, 3]
    assert found.walk_rounds.tolist() == [3, 3, 2, 2]
    named = found.measures()
    assert named["sim_accept_len"] == 1
    assert named["walk_tau"] == 1
    assert named["tree6_accept_len"] == pytest.approx(1 + 1 / 3)
    assert named["tree6_full_accept_len"] == 2
    assert named["tree6_walk_tau"] == 1.5
    assert named.keys() - found.tree_measures().keys() == {"sim_accept_len", "sim_full_accept_len", "walk_tau"}


def test_the_chain_by_hand():
    spoken, batch = the_text()
    batch = dataclasses.replace(batch, tokens=jnp.array([[1, 8, 0, 3, 7]]))
    # a d h: the chain a d g is right twice, six nodes hold a d too, and nine a d h (.015).
    found = simulated(spoken, batch, budgets=(1, 6, 30), frozen=unit_head(9))
    assert found.accepted.tolist() == [2, 1, 2, 3]
    assert found.walk_rounds.tolist() == [1, 2, 1, 1]


def test_a_slot_without_label_ends_a_streak_and_its_block_is_not_full():
    spoken, batch = the_text()
    whole = dataclasses.replace(batch, tokens=jnp.array([[1, 8, 0, 4, 6]]))
    cut = dataclasses.replace(whole, loss_mask=jnp.array([[False, True, True, False, True]]))
    assert simulated(spoken, whole, budgets=(6,), frozen=unit_head(9)).accepted.tolist() == [1, 3]
    found = simulated(spoken, cut, budgets=(6,), frozen=unit_head(9))
    assert (found.blocks, found.full_blocks) == (1, 0)
    assert found.accepted.tolist() == [1, 1]
    other = dataclasses.replace(whole, segment_ids=jnp.array([[1, 1, 1, 2, 2]]))
    found = simulated(spoken, other, budgets=(6,), frozen=unit_head(9))
    assert (found.blocks, found.full_blocks) == (2, 0)  # the second is token 6, the last of the second document
    assert found.accepted.tolist() == [1, 1]


def test_nothing_to_measure_is_the_targets_own_token():
    spoken, batch = the_text()
    batch = dataclasses.replace(batch, loss_mask=jnp.zeros((1, 5), bool))
    named = simulated(spoken, batch, budgets=(6,), frozen=unit_head(9)).measures()
    assert all(value == (0 if "walk" in name else 1) for name, value in named.items())


def test_labels_outside_a_draft_vocabulary_are_never_accepted():
    spoken, batch = the_text()
    batch = dataclasses.replace(batch, tokens=jnp.array([[1, 8, 0, 4, 6]]))
    known = jnp.array([0, 1, 2, 3, 5, 6, 7, 8])  # not 4
    frozen = dataclasses.replace(unit_head(9), head=jnp.eye(9)[known], draft_tokens=known)
    # Of the last block, whose only label is 6, the tree of all prefixes has that.
    assert simulated(spoken, batch, budgets=(6, 600), frozen=frozen).accepted.tolist() == [1, 1, 2]
    batch = dataclasses.replace(batch, tokens=jnp.array([[1, 8, 0, 3, 6]]))
    assert simulated(spoken, batch, budgets=(6,), frozen=frozen).accepted.tolist() == [3, 3]


# Trees by enumeration.


def enumerated(logits: np.ndarray, budget: int) -> set[tuple[int, ...]]:
    """The `budget` most probable prefixes [D, V], of all there are; those of equal probability by their tokens."""
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    prefixes = itertools.chain.from_iterable(
        itertools.product(range(logits.shape[1]), repeat=depth + 1) for depth in range(logits.shape[0])
    )
    scored = sorted(prefixes, key=lambda prefix: (-sum(log_probs[d, t] for d, t in enumerate(prefix)), prefix))
    return set(scored[:budget])


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("seed", range(4))
def test_streaks_in_trees_are_those_in_enumerated_trees(seed, width):
    random = np.random.default_rng(seed)
    rows, length, vocab, depth = 3, 11, 4, width - 1
    logits = random.normal(scale=1.5, size=(length, 3, vocab)).astype(np.float32)
    tokens = random.integers(0, vocab, (rows, length))
    supervised = random.random((rows, length)) < 0.85
    valid = supervised & np.roll(supervised, -1, axis=1)
    valid[:, -1] = False
    kept = valid & (random.random((rows, length)) < 0.8)
    kept[0] = valid[0]
    anchors = np.where(kept, np.arange(length), 0)
    budgets = (1, 6, 100)
    batch = one_answer(tokens, supervised)
    found = simulated(
        logits, batch, budgets=budgets, frozen=unit_head(vocab), anchors=anchors, kept=kept, width=width
    )
    accepted, full_accepted = np.zeros(len(budgets) + 1), np.zeros(len(budgets) + 1)
    full_blocks = 0
    for row, anchor in np.argwhere(kept):
        block = logits[anchor, :depth].astype(np.float64)
        wanted = []
        while len(wanted) < depth and anchor + len(wanted) + 1 < length:
            at = anchor + len(wanted) + 1
            if not supervised[row, at]:
                break
            wanted.append(int(tokens[row, at]))
        chain = [tuple(block.argmax(axis=-1)[: d + 1]) for d in range(depth)]
        trees = [set(chain), *(enumerated(block, budget) for budget in budgets)]
        depths = [max(d for d in range(len(wanted) + 1) if not d or tuple(wanted[:d]) in t) for t in trees]
        accepted += depths
        if len(wanted) == depth:
            full_blocks += 1
            full_accepted += depths
    assert found.blocks == kept.sum()
    assert found.full_blocks == full_blocks
    assert found.accepted.tolist() == accepted.tolist()
    assert found.full_accepted.tolist() == full_accepted.tolist()
    assert accepted[3] > accepted[2] > accepted[0]  # the budgets matter


def test_chunks_and_sums_change_nothing():
    random = np.random.default_rng(0)
    spoken = random.normal(size=(9, 3, 5)).astype(np.float32)
    batch = one_answer(random.integers(0, 5, (4, 9)), np.ones((4, 9), bool))
    anchors, kept = everywhere(batch)

    def of(kept, chunk):
        arrays = {"anchors": anchors, "kept": kept}
        return simulated(spoken, batch, budgets=(4,), frozen=unit_head(5), chunk=chunk, **arrays)

    whole, first = of(kept, 1000), jnp.arange(4)[:, None] < 1
    jax.tree.map(np.testing.assert_array_equal, whole, of(kept, 5))
    # A row without blocks has an unknown way.
    jax.tree.map(np.testing.assert_array_equal, whole, of(kept & first, 1000) + of(kept & ~first, 1000))
    assert whole.walk_tokens.tolist() == [32, 32]


# Against real decoding.


def over_text(target, drafter, frozen, rows, lengths, *, new, budgets, width, taps) -> Simulated:
    tokens = rows.tokens
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    known = at < lengths[:, None] + new
    batch = one_answer(tokens, known & (at >= lengths[:, None]), segments=known)
    features, _ = target.hidden(tokens, batch.positions, segment_ids=batch.segment_ids, taps=taps)
    anchors, kept = everywhere(batch)
    options = {"anchors": anchors, "kept": kept, "budgets": budgets, "head_chunk": 32, "width": width}
    return simulate(drafter, batch, features, frozen, **options)


@pytest.mark.parametrize(
    ("kind", "width"), [pytest.param((FULL, FULL), None, marks=pytest.mark.slow), ((SLIDING, FULL), 3)]
)
def test_the_walk_over_greedy_text_is_what_chain_and_tree_decoding_do(few_tokens_llama, kind, width):
    """Five drafters and eight prompts each: the same rounds from one teacher-forced pass over the text."""
    target, taps, new, budgets = load_target(few_tokens_llama.path), (0, 1), 20, (4, 16)
    frozen, count = frozen_of(target), 8
    options = {"taps": taps, "stop": NEVER, "max_new_tokens": new, "width": width}
    chain = quick(functools.partial(generate_chain, **options))
    trees = [quick(functools.partial(generate_tree, budget=budget, **options)) for budget in budgets]
    measure = quick(functools.partial(over_text, new=new, budgets=budgets, width=width, taps=taps))
    taken = np.zeros(3)
    for seed in range(5):
        drafter = random_drafter(seed, layer_types=kind, window=None if SLIDING not in kind else 6)
        random = np.random.default_rng(seed)
        prompts = jnp.asarray(random.integers(0, 7, (count, 9)), jnp.int32)
        lengths = jnp.asarray(random.integers(1, 10, count), jnp.int32)
        decoded = [decode(target, drafter, frozen, prompts, lengths) for decode in (chain, *trees)]
        found = measure(target, drafter, frozen, decoded[0].rows, lengths)
        emitted = np.stack([item.emitted for item in decoded])
        rounds = (emitted > 0).sum(axis=(1, 2))
        assert found.walk_rounds.tolist() == rounds.tolist()
        assert found.walk_tokens.tolist() == emitted.sum(axis=(1, 2)).tolist() == [count * (new - 1)] * 3
        assert found.measures()["tree16_walk_tau"] == pytest.approx(count * (new - 1) / rounds[-1])
        taken += rounds
    assert taken[2] < taken[1] < taken[0] < 5 * count * (new - 1)
