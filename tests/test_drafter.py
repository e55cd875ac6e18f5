"""The drafter against z-lab's published code, and training's blocks against inference's.

The golden arrays were computed with z-lab's PyTorch drafter and SpecForge's trainer on the same weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tiny_models import GOLDEN, published_drafter, published_tables, random_drafter, seeded_tensor

from dflash_jax.batch import Batch
from dflash_jax.decode.drafting import draft_logits
from dflash_jax.models.block_attention import Context, attend_block
from dflash_jax.models.cache import KVRows
from dflash_jax.models.drafter import FULL, SLIDING
from dflash_jax.objective.objective import Frozen, block_states, embed_blocks
from dflash_jax.published.weights import names

FILES = {"full": "zlab_drafter.npz", "sliding": "zlab_drafter_swa.npz"}
states_of = jax.jit(block_states)


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=atol)


# Against z-lab.


@pytest.fixture(scope="module", params=["full", "sliding"])
def published(request):
    """(drafter, golden arrays) of one published kind."""
    return published_drafter(request.param), np.load(GOLDEN / FILES[request.param])


def test_the_seeded_weights_are_the_published_ones():
    for name, tensor in load_file(GOLDEN / "zlab_drafter.safetensors").items():
        close(seeded_tensor(name, tensor.shape, seed=11), tensor, atol=2e-7)


def test_parameter_names_are_those_of_the_published_files():
    published = load_file(GOLDEN / "zlab_drafter.safetensors")
    ours = names(nnx.state(published_drafter("full")))
    assert {name: variable.shape for name, variable in ours.items()} == {
        name: array.shape for name, array in published.items()
    }


def test_a_block_behind_its_whole_context(published):
    drafter, golden = published
    # Row 1 starts at position 37, as if its first 37 tokens had been forgotten.
    positions = jnp.asarray(golden["a_position_ids"])
    context_positions, block_positions = positions[:, :13], positions[:, None, 13:]
    output = jax.jit(lambda *arrays: drafter(arrays[0], arrays[1], arrays[2], **arrays[3]))(
        published_tables().embedding[golden["a_noise_ids"]][:, None],
        block_positions,
        drafter.context(jnp.asarray(golden["a_target_hidden"]), context_positions),
        {"visible": jnp.ones((2, 1, 13), bool), "context_positions": context_positions},
    )
    close(output[:, 0], golden["a_output"])


def test_rounds_of_decoding_with_a_context_cache(published):
    drafter, golden = published
    config, frozen, capacity = drafter.config, published_tables(), 40
    cache = (KVRows.empty((1, capacity, 2, 16), jnp.dtype("float32")),) * 3
    at = jnp.arange(capacity)[None]

    @jax.jit
    def remember(features, start, cache):
        added = drafter.context(features, start[:, None] + jnp.arange(16))
        return tuple(rows.write(*new, start) for rows, new in zip(cache, added, strict=True))

    @jax.jit
    def run(anchor, cache, token):
        block = embed_blocks(token, frozen, block_size=config.block_size, mask_token=config.mask_token)
        states = drafter(
            block[:, None],
            anchor + jnp.arange(8)[None, None],
            cache,
            visible=(at < anchor)[:, None],
            context_positions=at,
        )
        return states[:, 0], draft_logits(drafter, frozen, token, anchor, cache, width=8).argmax(-1)

    for index in range(4):
        ids, features = golden[f"b{index}_noise_ids"], golden[f"b{index}_target_hidden"]
        start = jnp.asarray(golden[f"b{index}_position_ids"][:, 0])
        count = features.shape[1]
        # A whole verify step is remembered, rejected tokens too; the next round writes over those.
        rejected = np.random.default_rng(index).standard_normal((1, 16 - count, 320)).astype(np.float32)
        cache = remember(jnp.asarray(np.concatenate([features, rejected], axis=1)), start, cache)
        np.testing.assert_array_equal(ids[0, 1:], 210)
        output, proposed = run(start + count, cache, jnp.asarray(ids[:, 0]))
        close(output, golden[f"b{index}_output"])
        logits = golden[f"b{index}_output"] @ np.asarray(frozen.head).T
        np.testing.assert_array_equal(proposed, logits[:, 1:].argmax(-1))


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_blocks_of_a_batch_equal_specforges(kind):
    golden = np.load(GOLDEN / "specforge_loss.npz")
    batch = specforge_batch(golden)
    kept = golden["block_keep_mask"]
    states = states_of(
        published_drafter(kind),
        batch,
        jnp.asarray(golden["target_hidden"]),
        published_tables(),
        anchors=jnp.asarray(golden["anchors"]),
        kept=jnp.asarray(kept),
    )
    close(np.asarray(states)[kept], golden[f"{kind}/draft_hidden"][kept], atol=2e-5)


def specforge_batch(golden) -> Batch:
    """Two rows of 40 tokens, the second padded from 29 on."""
    segments = np.ones((2, 40), np.int32)
    segments[1, 29:] = 0
    return Batch(
        tokens=jnp.asarray(golden["input_ids"]),
        positions=jnp.broadcast_to(jnp.arange(40), (2, 40)),
        segment_ids=jnp.asarray(segments),
        loss_mask=jnp.asarray(golden["loss_mask"] > 0),
        record_ids=jnp.arange(2)[:, None],
        epochs=jnp.zeros(2, jnp.int32),
    )


# Which keys a slot sees.


def seen_keys(*, anchor: int, length: int, width: int, causal: bool, window: int | None) -> list[set[int]]:
    """Positions that each slot of one block gives any weight: values are one-hot, all scores are equal."""
    total = length + width
    values = jnp.eye(total)[None, :, None, :]
    slots = anchor + np.arange(width)
    context = Context(
        keys=jnp.zeros((1, length, 1, total)),
        values=values[:, :length],
        visible=jnp.arange(length)[None, None] < anchor,
        distance=jnp.asarray(slots[:, None] - np.arange(length))[None, None],
    )
    shares = attend_block(
        jnp.zeros((1, 1, width, 1, total)),
        context,
        (jnp.zeros((1, 1, width, 1, total)), values[:, None, length:]),
        causal=causal,
        window=window,
    )[0, 0, :, 0]
    positions = np.concatenate([np.arange(length), slots])
    for row in np.asarray(shares):
        np.testing.assert_allclose(row[row > 0], 1 / (row > 0).sum(), rtol=1e-6)
    return [set(positions[row > 0].tolist()) for row in np.asarray(shares)]


def test_the_window_moves_with_the_slot():
    seen = seen_keys(anchor=6, length=9, width=4, causal=True, window=4)
    assert seen == [{3, 4, 5, 6}, {4, 5, 6, 7}, {5, 6, 7, 8}, {6, 7, 8, 9}]


def test_a_window_that_is_not_causal_reaches_both_ways():
    seen = seen_keys(anchor=6, length=9, width=5, causal=False, window=3)
    assert seen == [{4, 5, 6, 7, 8}, {5, 6, 7, 8, 9}, {6, 7, 8, 9, 10}, {7, 8, 9, 10}, {8, 9, 10}]


@pytest.mark.parametrize("window", [None, 50])
def test_without_a_reached_window_everything_before_the_anchor_is_seen(window):
    before = set(range(6))
    full = seen_keys(anchor=6, length=9, width=3, causal=False, window=window)
    assert full == [before | {6, 7, 8}] * 3
    causal = seen_keys(anchor=6, length=9, width=3, causal=True, window=window)
    assert causal == [before | {6}, before | {6, 7}, before | {6, 7, 8}]


# Training's blocks against one block at a time.

SEMANTICS = {
    "mixed": {},
    "full": {"layer_types": (FULL, FULL), "window": None},
    "full, causal": {"layer_types": (FULL, FULL), "window": None, "is_causal": True},
    "sliding, causal": {"layer_types": (SLIDING, SLIDING)},
    "sliding, both ways": {"layer_types": (SLIDING, SLIDING), "is_causal": False},
    "narrow window": {"layer_types": (SLIDING, FULL), "window": 3, "is_causal": False},
}
LENGTH = 24
# Overlapping blocks, the first token as anchor, and blocks that run over the end of the row.
ANCHORS = ((0, 3, 5, 6, 13, 20, 22, 23), (1, 2, 4, 8, 9, 15, 19, 21))


def make_batch(tokens, *, segment_ids=None, positions=None) -> Batch:
    rows, length = tokens.shape
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(length), (rows, length)) if positions is None else positions,
        segment_ids=jnp.ones((rows, length), jnp.int32) if segment_ids is None else segment_ids,
        loss_mask=jnp.ones((rows, length), bool),
        record_ids=jnp.arange(rows)[:, None],
        epochs=jnp.zeros(rows, jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: np.ndarray
    features: np.ndarray
    frozen: Frozen
    anchors: jax.Array
    kept: jax.Array

    def states(self, drafter, **changes):
        case = dataclasses.replace(self, **changes)
        batch = make_batch(case.tokens)
        return np.asarray(
            states_of(
                drafter, batch, jnp.asarray(case.features), case.frozen, anchors=case.anchors, kept=case.kept
            )
        )


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(5)
    embedding = jnp.asarray(random.standard_normal((30, 36)), jnp.float32)
    return Case(
        tokens=random.integers(7, 30, (2, LENGTH)).astype(np.int32),
        features=random.standard_normal((2, LENGTH, 72)).astype(np.float32),
        frozen=Frozen(embedding, embedding, None),
        anchors=jnp.asarray(ANCHORS),
        kept=jnp.ones((2, 8), bool),
    )


@functools.cache
def tiny_drafter(name="mixed"):
    return random_drafter(9, **SEMANTICS[name])


@pytest.mark.parametrize("name", SEMANTICS)
def test_every_block_of_a_batch_equals_inference_at_its_anchor(case, name):
    drafter = tiny_drafter(name)
    states = case.states(drafter)

    # Each of the 16 blocks alone in a row of its own, behind a context that is garbage from its anchor on.
    rows, anchors = np.repeat([0, 1], 8), np.ravel(ANCHORS)
    at = np.broadcast_to(np.arange(LENGTH), (16, LENGTH))
    features = np.where((at < anchors[:, None])[..., None], case.features[rows], 1e3)

    @jax.jit
    def alone(tokens, features, anchors):
        return drafter(
            embed_blocks(tokens, case.frozen, block_size=5, mask_token=6)[:, None],
            anchors[:, None, None] + jnp.arange(5),
            drafter.context(features, jnp.asarray(at)),
            visible=(at < anchors[:, None])[:, None],
            context_positions=jnp.asarray(at),
        )

    expected = alone(jnp.asarray(case.tokens[rows, anchors]), jnp.asarray(features), jnp.asarray(anchors))
    close(states.reshape(16, 1, 5, 36), expected)


def test_nothing_from_the_anchor_on_changes_a_block_but_the_anchor_token(case):
    drafter = tiny_drafter()
    states = case.states(drafter)
    random = np.random.default_rng(6)
    for index in (0, 3, 4, 7):
        tokens, features = case.tokens.copy(), case.features.copy()
        for row in range(2):
            anchor = ANCHORS[row][index]
            tokens[row, anchor + 1 :] = random.integers(7, 30, LENGTH - anchor - 1)
            features[row, anchor:] = random.standard_normal((LENGTH - anchor, 72))
        # Tokens before the anchor are known through their features alone.
        tokens[:, 0] = np.where(np.asarray(ANCHORS)[:, index] == 0, tokens[:, 0], 8)
        changed = case.states(drafter, tokens=tokens, features=features)
        np.testing.assert_array_equal(changed[:, index], states[:, index])


def test_every_feature_before_the_anchor_and_the_anchor_token_count(case):
    drafter = tiny_drafter("full")
    states = case.states(drafter)
    anchor, index = ANCHORS[0][4], 4
    for position in (0, anchor - 1):
        features = case.features.copy()
        features[0, position] += 1.0
        assert np.abs(case.states(drafter, features=features)[0, index] - states[0, index]).min() > 0
    tokens = case.tokens.copy()
    tokens[0, anchor] = 7 if tokens[0, anchor] != 7 else 8
    assert np.abs(case.states(drafter, tokens=tokens)[0, index] - states[0, index]).min() > 0


def test_another_blocks_anchor_token_does_not_matter(case):
    drafter = tiny_drafter()
    states = case.states(drafter)
    tokens = case.tokens.copy()
    tokens[0, ANCHORS[0][3]] = 7 if tokens[0, ANCHORS[0][3]] != 7 else 8
    changed = case.states(drafter, tokens=tokens)
    others = [index for index in range(8) if index != 3]
    np.testing.assert_array_equal(changed[0, others], states[0, others])
    np.testing.assert_array_equal(changed[1], states[1])
    assert np.abs(changed[0, 3] - states[0, 3]).min() > 0


def test_the_other_anchors_of_a_row_do_not_matter(case):
    drafter = tiny_drafter()
    moved = case.anchors.at[:, 1:].set(jnp.asarray([[10, 11, 12, 14, 16, 17, 18]] * 2))
    np.testing.assert_array_equal(case.states(drafter, anchors=moved)[:, 0], case.states(drafter)[:, 0])


def test_unused_blocks_are_finite_and_so_are_their_gradients(case):
    drafter = tiny_drafter()
    graph, params = nnx.split(drafter)
    batch = make_batch(case.tokens)
    kept = case.kept.at[0, 2:].set(False).at[1].set(False)
    anchors = jnp.where(kept, case.anchors, 0)

    @jax.jit
    def gradient(params, features):
        def total(params, features):
            states = block_states(
                nnx.merge(graph, params), batch, features, case.frozen, anchors=anchors, kept=kept
            )
            return (states**2).sum(), states

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, features)

    (_, states), gradients = gradient(params, jnp.asarray(case.features))
    assert np.isfinite(states).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    # Row 1 has no block in use, so nothing flows into its features.
    np.testing.assert_array_equal(gradients[1][1], 0)
    close(states[0, :2], case.states(drafter)[0, :2])


def test_a_packed_row_equals_its_documents_apart(case):
    drafter = tiny_drafter("mixed")
    split = 14  # document 1 has 14 tokens, document 2 has 7, the rest is padding
    segments = jnp.asarray([[1] * 14 + [2] * 7 + [0] * 3])
    positions = jnp.asarray([[*range(14), *range(7), *range(3)]])
    anchors = jnp.asarray([[0, 5, 11, 13, 14, 15, 19, 20]])
    kept = jnp.ones((1, 8), bool)
    packed = states_of(
        drafter,
        make_batch(case.tokens[:1], segment_ids=segments, positions=positions),
        jnp.asarray(case.features[:1]),
        case.frozen,
        anchors=anchors,
        kept=kept,
    )
    for start, stop, chosen in ((0, split, slice(0, 4)), (split, 21, slice(4, 8))):
        # The document alone at the start of a row; what follows it is padding.
        length, end = stop - start, LENGTH - (stop - start)
        apart = states_of(
            drafter,
            make_batch(
                np.pad(case.tokens[:1, start:stop], ((0, 0), (0, end))),
                segment_ids=jnp.asarray([[1] * length + [0] * end]),
            ),
            jnp.asarray(np.pad(case.features[:1, start:stop], ((0, 0), (0, end), (0, 0)))),
            case.frozen,
            anchors=jnp.tile(anchors[:, chosen] - start, 2),
            kept=kept,
        )
        close(packed[:, chosen], apart[:, :4])
