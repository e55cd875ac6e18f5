"""The known traps of DFlash training, a line each, by numbers worked by hand. Where each stands: docs/traps.md.

Examples have tokens 100, 101, .. and blocks of four slots, unless they say otherwise.
"""

import functools
import json
import math
import operator
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import quick, random_drafter

from dflash_jax import resolve
from dflash_jax.batch import Batch
from dflash_jax.config import DrafterSection, OptimSection
from dflash_jax.data.prepare import refuse_mask_token
from dflash_jax.decode.generate import Sequences
from dflash_jax.decode.ways import CHAIN, Way
from dflash_jax.errors import UserError
from dflash_jax.evaluation.measure import Answer, Measured
from dflash_jax.evaluation.report import summarise
from dflash_jax.models.drafter import FULL, SLIDING, Drafter
from dflash_jax.models.layers import RMSNorm
from dflash_jax.models.rope import Rope, rotate
from dflash_jax.models.taps import checked_taps, published_taps
from dflash_jax.objective.acceptance import acceptance
from dflash_jax.objective.anchors import block_labels, draw_anchors, valid_anchors
from dflash_jax.objective.head import Head, Rule, Slots, head_loss
from dflash_jax.objective.objective import Frozen, LossSums, block_states, embed_blocks, teacher_states
from dflash_jax.objective.slot_weights import Decay, Dpace
from dflash_jax.objective.terms import term_loss
from dflash_jax.prompts.prompt import Prompt
from dflash_jax.published.targets import TargetFiles
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.state import first_state
from dflash_jax.training.step import GradientSums, apply_gradients

ROOT = pathlib.Path(__file__).parents[1]


def case(name: str, *values):
    return pytest.param(*values, id=name)


# Anchors and labels.

TWO_ANSWERS = [0, 0, 1, 1, 1, 0, 0, 1, 1]
ALL, ONE = [1] * 20, [1] * 20
TWO_DOCUMENTS = [1] * 10 + [2] * 10


@pytest.mark.parametrize(
    ("loss_mask", "documents", "expected"),
    [
        case("T4-prompt-then-answer-unshifted", [0, 0, 0, 1, 1, 1], [1] * 6, [3, 4]),
        case("T7-last-token-of-a-document", ALL, TWO_DOCUMENTS, [*range(9), *range(10, 19)]),
        case("T11-anchors-of-the-example", TWO_ANSWERS, [1] * 9, [2, 3, 7]),
        case("T13-tail-anchors", [1] * 9, [1] * 9, list(range(8))),
    ],
)
def test_valid_anchors(loss_mask, documents, expected):
    valid = valid_anchors(jnp.asarray([loss_mask], bool), jnp.asarray([documents]))
    assert np.flatnonzero(valid).tolist() == expected


@pytest.mark.parametrize(
    ("loss_mask", "documents", "anchor", "expected"),
    [
        case("T1-slot-k-is-token-a-plus-k", ALL, ONE, 10, [None, 111, 112, 113]),
        case("T7-document-end", ALL, TWO_DOCUMENTS, 8, [None, 109, None, None]),
        case("T12-end-of-answer", TWO_ANSWERS, [1] * 9, 3, [None, 104, None, None]),
        case("T12-prefix-not-holes", TWO_ANSWERS, [1] * 9, 4, [None] * 4),
    ],
)
def test_labels(loss_mask, documents, anchor, expected):
    tokens = jnp.arange(100, 100 + len(loss_mask))[None]
    labels, mask = block_labels(
        tokens,
        jnp.asarray([loss_mask], bool),
        jnp.asarray([documents]),
        anchors=jnp.asarray([[anchor]]),
        kept=jnp.ones((1, 1), bool),
        width=4,
    )
    pairs = zip(labels[0, 0].tolist(), mask[0, 0].tolist(), strict=True)
    assert [label if known else None for label, known in pairs] == expected


@pytest.mark.parametrize(
    ("valid", "count"),
    [case("T6-one-valid-anchor", [5], 4), case("T6-as-many-as-asked-for", [1, 3, 4, 6, 7], 5)],
)
def test_no_valid_anchor_is_left_out(valid, count):
    where = jnp.zeros((1, 9), bool).at[0, jnp.asarray(valid)].set(True)
    anchors, kept = draw_anchors(jax.random.split(jax.random.key(0), (1, 9)), where, count)
    assert anchors[kept].tolist() == valid


# What a block sees: where its states have a slope.

LENGTH = 16


@quick
def feature_slopes(drafter, documents, anchors, kept):
    """[A, S, T * E]: slopes of each block's summed states with respect to the features of one row."""
    random = np.random.default_rng(0)
    start = jnp.argmax(documents[:, None] == documents[None, :], axis=1)
    batch = Batch(
        tokens=jnp.asarray(random.integers(7, 30, (1, LENGTH))),
        positions=(jnp.arange(LENGTH) - start)[None],
        segment_ids=documents[None],
        loss_mask=jnp.ones((1, LENGTH), bool),
        record_ids=jnp.zeros((1, 1), int),
        epochs=jnp.zeros(1, int),
    )
    embedding = jnp.asarray(random.standard_normal((30, 36)), jnp.float32)

    def sums(features):
        frozen = Frozen(embedding, embedding, None)
        states = block_states(drafter, batch, features, frozen, anchors=anchors[None], kept=kept[None])
        return states[0].sum(axis=(1, 2))

    features = jnp.asarray(random.standard_normal((1, LENGTH, 72)), jnp.float32)
    return jax.jacrev(sums)(features)[:, 0]


@functools.cache
def full_drafter():
    return random_drafter(1, layer_types=(FULL,), window=None)


@pytest.mark.parametrize(
    ("anchors", "documents", "kept", "expected"),
    [
        case("T2-context-strictly-before", (10, 1), (16, 0), (1, 1), (range(10), range(1))),
        case("T3-positions-not-block-order", (10, 12), (16, 0), (1, 1), (range(10), range(12))),
        case("T3-in-any-order", (12, 10), (16, 0), (1, 1), (range(12), range(10))),
        case("T7-own-document-only", (5, 12), (8, 8), (1, 1), (range(5), range(8, 12))),
        case("T10-empty-blocks", (10, 0), (16, 0), (0, 0), ((), ())),
        case("T10-first-token-as-anchor", (0, 8), (8, 8), (1, 1), ((), ())),
    ],
)
def test_features_that_a_block_sees(anchors, documents, kept, expected):
    numbers = jnp.asarray(np.repeat([1, 2], documents))
    slopes = feature_slopes(full_drafter(), numbers, jnp.asarray(anchors), jnp.asarray(kept, bool))
    assert np.isfinite(slopes).all()
    assert [np.flatnonzero(np.abs(block).max(-1)).tolist() for block in slopes] == [
        list(seen) for seen in expected
    ]


EARLIER, WHOLE = [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}], [{0, 1, 2, 3}] * 4
BEFORE_6 = [set(range(6))] * 4


@pytest.mark.parametrize(
    ("changes", "context", "slots"),
    [
        case("T8-window-table", {"window": 4}, [{3, 4, 5}, {4, 5}, {5}, set()], EARLIER),
        case("T9-sliding-layers-causal", {"window": 6}, [set(range(k, 6)) for k in range(1, 5)], EARLIER),
        case(
            "T9-is-causal-false", {"window": 6, "is_causal": False}, [set(range(k, 6)) for k in range(1, 5)], WHOLE
        ),
        case("T9-full-layers-both-ways", {"layer_types": (FULL,), "window": 4}, BEFORE_6, WHOLE),
    ],
)
def test_keys_that_a_slot_sees(changes, context, slots):
    drafter = random_drafter(2, block_size=4, **({"layer_types": (SLIDING,)} | changes))
    at, random = jnp.arange(9)[None], np.random.default_rng(1)

    @quick
    def slopes(features, block):
        def sums(features, block):
            positions, visible = 6 + jnp.arange(4)[None, None], (at < 6)[:, None]
            keys_values = drafter.context(features, at)
            return drafter(block, positions, keys_values, visible=visible, context_positions=at).sum((0, 1, 3))

        return jax.jacrev(sums, argnums=(0, 1))(features, block)

    shapes = ((1, 9, 72), (1, 1, 4, 36))
    found = slopes(*(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes))
    for values, expected in zip(found, (context, slots), strict=True):
        seen = np.abs(np.asarray(values)).max(-1).reshape(4, -1) > 0
        assert [set(np.flatnonzero(row).tolist()) for row in seen] == expected


# Numbers by hand.

Q = jnp.asarray([0.9, 0.8, 0.3, 0.1])  # the drafter's probabilities of the labels in slots 1 to 4


def accept_length(right, mask):
    ranks, labelled = 1 - jnp.asarray(right), jnp.asarray(mask, bool)
    return acceptance(ranks, labelled, jnp.zeros(ranks.shape)).measures()["accept_len"]


def decoded_lengths():
    """Of one request with a round of four tokens and one with four rounds of one."""
    way, no_tokens = Way(CHAIN, "ours", slots=4), np.zeros(4, np.int32)
    rounds = (np.array(emitted) for emitted in ([4], [1, 1, 1, 1]))
    answers = [Answer(no_tokens, emitted - 1, emitted, 1.0) for emitted in rounds]
    made = [Measured(number, Prompt("", no_tokens), {way: answer}) for number, answer in enumerate(answers)]
    report = summarise(way, made, compared=False, simulated={})
    return report.accept_len, report.accept_len_by_request


def lost(term: str):
    p, q = (jnp.log(jnp.asarray(shares)) for shares in ((0.6, 0.3, 0.1), (0.4, 0.4, 0.2)))
    return term_loss(term, ce=-q[0], log_q=q, log_p=p)


def sums(loss: float, weight: float) -> LossSums:
    nothing = acceptance(jnp.zeros((1, 3), int), jnp.zeros((1, 3), bool), jnp.zeros((1, 3)))
    return LossSums(jnp.float32(loss), jnp.float32(weight), {}, nothing)


def step_of(*parts: LossSums):
    """(parameter, measures) after the first step, at lr 6e-4 from 1; a part's gradient is its loss."""
    optimizer = make_optimizer(OptimSection(), lambda count: jnp.float32(6e-4))
    params = nnx.State({"w": nnx.Param(jnp.ones(1))})
    state = first_state(params, optimizer)
    grads = [GradientSums(nnx.State({"w": nnx.Param(part.loss[None])}), part) for part in parts]
    state, measures = apply_gradients(state, functools.reduce(operator.add, grads), optimizer=optimizer)
    return state.params["w"][...], measures


def capped_terms():
    """kl and ce of a drafter that equals its teacher, logits 100 and 1 capped at 2."""
    head = Head(jnp.asarray([[100.0, 0.0], [0.0, 1.0]]), jnp.zeros(2), jnp.float32(2.0))
    states = jnp.ones((1, 1, 2))
    slots = Slots(states, jnp.zeros((1, 1), int), jnp.ones((1, 1), bool), states)
    terms = head_loss(slots, head, Rule((("kl", 1.0), ("ce", 1.0)), Decay(7.0)), 1).terms
    return terms["kl"], terms["ce"]


def embedded_block():
    table = jnp.asarray([[3.0, 0.0], [0.0, 1.0]], jnp.bfloat16)
    frozen = Frozen(table, table, None, embedding_scale=jnp.float32(6.0))
    return embed_blocks(jnp.asarray([0]), frozen, block_size=3, mask_token=1)[0]


def decoded_with_mask():
    """A round that says MASK (6) twice, after a prompt that ends with it."""
    rows = Sequences.start(jnp.asarray([[3, 6]]), jnp.asarray([2]), capacity=8)
    rows = rows.append(jnp.asarray([[6, 5, 6]]), jnp.asarray([3]), stop=jnp.asarray([9]), limit=5)
    return rows.tokens[0, : rows.lengths[0]]


def norm_of_one_plus_w():
    """A weight of 0.1 on a vector whose root mean square is 1."""
    norm = RMSNorm(nnx.Rngs(0), "embed", 2, eps=0.0, unit_offset=True)
    norm.weight[...] = jnp.full(2, 0.1)
    return norm(jnp.asarray([1.0, -1.0]))


def turned_pair():
    """Channel pair 1 of 64 at position 3000 and theta 1e6, (1, 0) before it turns."""
    turned = rotate(jnp.zeros((1, 1, 128)).at[..., 1].set(1), Rope(1e6, 128).table(jnp.asarray([3000])))
    return turned[0, 0, jnp.asarray([1, 65])]


class Tokens(SimpleNamespace):
    def __len__(self):
        return 10


def mask_of(chosen: int | None, *, vocab: int = 12) -> int:
    tokenizer = Tokens(eos_token_id=2, pad_token_id=3)
    return resolve.mask_token(DrafterSection(mask_token=chosen), tokenizer, SimpleNamespace(vocab=vocab))


def in_data(mask: int) -> None:
    counts = np.array([3, 0, 1, 0])
    refuse_mask_token(SimpleNamespace(token_counts=lambda: (counts, counts), directory="data"), mask)


TURNED = [f(3000 * 1e6 ** (-1 / 64)) for f in (math.cos, math.sin)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        case("T5-tap-indices", lambda: checked_taps(published_taps(36, 5), 36), [1, 9, 17, 25, 33]),
        case("T5-halves-to-even", lambda: checked_taps(published_taps(30, 5), 30), [1, 8, 14, 20, 27]),
        case("T14-exact-normalisation", lambda: step_of(sums(200, 100), sums(60, 10))[1]["loss"], 260 / 110),
        case("T14-gradient-too", lambda: step_of(sums(200, 100), sums(60, 10))[1]["grad_norm"], 260 / 110),
        case("T15-dpace", lambda: Dpace(0.5)(Q, jnp.ones(4)), [2.666, 1.716, 0.861, 0.306]),
        case("T15-hole", lambda: Dpace(0.5)(Q, jnp.asarray([1, 0, 1, 1])), [1.907, 0, 0.957, 0.340]),
        case("T16-accept-length", lambda: accept_length([[1, 1, 1], [0, 0, 0]], [[1, 1, 1]] * 2), 2.5),
        case("T16-hole", lambda: accept_length([[1, 1, 1]], [[1, 0, 1]]), 2.0),
        case("T16-pooled-and-by-request", decoded_lengths, [8 / 5, (4 + 1) / 2]),
        case(
            "T17-teacher-row",
            lambda: teacher_states(jnp.arange(20.0)[None, :, None], jnp.asarray([[10]]), width=4)[0, 0, :, 0],
            [10, 11, 12],
        ),
        case("T18-cap-on-both-sides", capped_terms, [0, math.log1p(math.exp(0.9242 - 2))]),
        case("T18-one-plus-w", norm_of_one_plus_w, [1.1, -1.1]),
        case("T19-embedding-scale", embedded_block, [[18, 0], [0, 6], [0, 6]]),
        case("T20-mask-token", lambda: [mask_of(None), mask_of(4)], [10, 4]),
        case("T21-mask-token-decoded", decoded_with_mask, [3, 6, 6, 5, 6]),
        case("T22-rope-tables-float32", turned_pair, TURNED),
        case("T22-float32-weights-move", lambda: (1.0 - step_of(sums(3, 1))[0]) / 6e-4, [1.0]),
        case("T23-total-variation", lambda: lost("tv"), 0.2),
        case("T23-lk-alpha", lambda: lost("lk_alpha"), 0.2231),
        case("T23-kl", lambda: lost("kl"), 0.0877),
        case("T23-hybrid-share", lambda: lost("lk_hybrid"), math.exp(-2.4) * 0.0877 + (1 - math.exp(-2.4)) * 0.2),
        case("T35-ends-at-the-last-step", lambda: learning_rate(OptimSection(lr=1.0, warmup=0.5), 8)(8), 0.0),
    ],
)
def test_worked_numbers(found, expected):
    value = found()
    np.testing.assert_allclose(np.asarray(value, np.float64), expected, rtol=0, atol=6e-4)


# What is refused, and what a drafter takes from its target.


@pytest.mark.parametrize(
    ("attempt", "named"),
    [
        case("T18-last-layer-as-tap", lambda: checked_taps([1, 35], 36), r"from 0 to 34"),
        case("T20-mask-token-without-a-row", lambda: mask_of(None, vocab=10), "row past the tokenizer"),
        case("T20-mask-token-past-the-table", lambda: mask_of(12), "found 12, allowed: 0 to 11"),
        case("T20-mask-token-ends-texts", lambda: mask_of(2), "2 is the tokenizer's eos_token_id"),
        case("T20-mask-token-pads", lambda: mask_of(3), "3 is the tokenizer's pad_token_id"),
        case("T20-mask-token-in-the-data", lambda: in_data(2), "token 2 occurs 1 times"),
        case("T20-mask-token-is-zero", lambda: resolve.refuse_zero_row(jnp.eye(3, 2), 2), "token 2 is all zeros"),
    ],
)
def test_refused(attempt, named):
    with pytest.raises(UserError, match=named):
        attempt()


@pytest.mark.parametrize("family", [case("T18-gemma", "gemma3_text"), case("T34-other-hybrids", "qwen3_next")])
def test_other_target_families_are_refused(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UserError, match=f"model_type '{family}' .* is not supported; supported: "):
        TargetFiles.open(tmp_path)


def test_a_drafters_heads_and_rotation_are_its_own():
    """T26: of the target's RoPE only the base is taken, and every channel turns. T27: heads differ from its."""
    sizes = {"width": 96, "mlp_width": 64, "heads": 24, "kv_heads": 4, "head_width": 256, "norm_eps": 1e-6}
    target = SimpleNamespace(rope_theta=5e5, partial_rotary_factor=0.25, layers=9, **sizes)
    section = DrafterSection(layers=1, heads=32, kv_heads=8, head_width=128)
    config = resolve.drafter_config(section, target, taps=(1, 4), mask_token=7)
    assert (config.heads, config.kv_heads, config.head_width, config.width) == (32, 8, 128, 96)
    assert (config.rope_theta, config.yarn) == (5e5, None)
    attention = nnx.eval_shape(lambda: Drafter(config, nnx.Rngs(0))).layers[0].self_attn
    assert (attention.q_proj.weight.shape, attention.k_proj.weight.shape) == ((4096, 96), (1024, 96))
    table = Rope(config.rope_theta, config.head_width).table(jnp.asarray([3]))
    assert (rotate(jnp.ones((1, 1, 128)), table) != 1).all()
