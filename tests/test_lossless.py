"""Speculative decoding changes no token, on every family, whatever is drafted, and a broken rollback shows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import drafter_sizes, frozen_of, load_target, quick, random_drafter
from tiny_targets import FAMILIES, VOCAB, save_target

from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate
from dflash_jax.decode.tree_decoding import generate_tree
from dflash_jax.models.cache import KVRows
from dflash_jax.models.delta_net import DeltaExtension
from dflash_jax.models.drafter import FULL
from dflash_jax.models.target_cache import CacheStep
from dflash_jax.objective.objective import Frozen

ROWS, LONGEST, NEW, WIDTH, BUDGET = 16, 9, 14, 5, 7
BATCHES = 13  # of 16 prompts, each batch with a drafter of its own: 208 for each family
SOME = 4
TAPS = (0, 1)
SIZES = {"width": 36, "target_width": 36, "feature_width": 72, "block_size": WIDTH, "mask_token": 6}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prophet:
    """Stands in for a drafter that is often right: logits are noise, and the true token is raised where `knows`.

    truth, knows: [B, T] by position; noise: [B, T, V]. Its states are logits: it goes with an identity for a head.
    """

    truth: jax.Array
    knows: jax.Array
    noise: jax.Array

    @property
    def config(self):
        return drafter_sizes(block_size=WIDTH, layer_types=(FULL,))

    def context(self, features, positions):
        shape = (*positions.shape, self.config.kv_heads, self.config.head_width)
        return ((jnp.zeros(shape), jnp.zeros(shape)),)

    def __call__(self, block, positions, context, *, visible, context_positions):
        at = positions[:, 0]
        right = jax.nn.one_hot(jnp.take_along_axis(self.truth, at, axis=1), VOCAB)
        knows = jnp.take_along_axis(self.knows, at, axis=1)[..., None]
        return (jnp.take_along_axis(self.noise, at[..., None], axis=1) + 5.0 * knows * right)[:, None]


def batch(seed):
    """Prompts [B, P] of ragged lengths [B], padded with an ordinary token."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, LONGEST + 1, ROWS)
    prompts = random.integers(0, VOCAB, (ROWS, LONGEST)).astype(np.int32)
    return jnp.asarray(np.where(np.arange(LONGEST) < lengths[:, None], prompts, 3)), jnp.asarray(lengths), random


def prophet(plain, random) -> Prophet:
    """One that knows the plain answers at eight positions of ten, and others in each row."""
    rows, room = plain.tokens.shape[0], LONGEST + NEW + BUDGET + 2
    truth = jnp.pad(plain.tokens, ((0, 0), (0, room - plain.tokens.shape[1])))
    noise = random.standard_normal((rows, room, VOCAB)).astype(np.float32)
    return Prophet(truth, jnp.asarray(random.random((rows, room)) < 0.8), jnp.asarray(noise))


def answers(rows):
    return [np.asarray(rows.tokens[row, : rows.lengths[row]]).tolist() for row in range(len(rows.lengths))]


def programs(stop):
    options = {"stop": stop, "max_new_tokens": NEW}
    speculative = options | {"taps": TAPS}
    return (
        quick(functools.partial(generate, **options)),
        quick(functools.partial(generate_chain, **speculative)),
        quick(functools.partial(generate_tree, **speculative, budget=BUDGET)),
    )


def stops_of(target) -> tuple[int, ...]:
    """Two tokens that this target writes often, but not at once."""
    prompts, lengths, _ = batch(BATCHES)
    plain = quick(functools.partial(generate, stop=(10**6,), max_new_tokens=NEW))(target, prompts, lengths)
    later = [row[int(length) + 4 :] for row, length in zip(answers(plain), lengths, strict=True)]
    return tuple(np.bincount(np.concatenate(later).astype(int), minlength=VOCAB).argsort()[-2:].tolist())


# A plain, a sparse and a hybrid one at once; what the others add to them takes minutes.
AT_ONCE = ("llama", "qwen3_moe", "qwen3_5")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.slow) for name in FAMILIES],
)
def target(request, tmp_path_factory):
    return load_target(save_target(tmp_path_factory.mktemp("family") / request.param, request.param).path)


@pytest.mark.parametrize("count", [SOME, pytest.param(BATCHES, marks=pytest.mark.slow)])
def test_no_token_changes(target, count):
    plain, chain, tree = programs(stop=stops_of(target))
    identity, frozen = Frozen(jnp.eye(VOCAB), jnp.eye(VOCAB), None), frozen_of(target)
    lengths_seen, ended = set(), 0
    for seed in range(count):
        prompts, lengths, random = batch(seed)
        wanted = plain(target, prompts, lengths)
        # Every third drafter is a real one with random weights, which is nearly always wrong.
        real = seed % 3 == 2
        drafter, ends = (random_drafter(seed, **SIZES), frozen) if real else (prophet(wanted, random), identity)
        for way in (chain, tree):
            found = way(target, drafter, ends, prompts, lengths)
            assert answers(found.rows) == answers(wanted)
            assert found.rows.done.all()
            assert found.emitted.sum(axis=1).tolist() == (wanted.lengths - lengths - 1).tolist()
            lengths_seen |= set(np.asarray(found.emitted).ravel().tolist())
        ended += int((wanted.lengths - lengths < NEW).sum())
    assert lengths_seen == set(range(WIDTH + 1))  # every accept length occurred, so every rollback did
    assert ended > 2 * count  # and answers that end with a stop token


def all_of_the_step(extension: DeltaExtension, count, *, path=None):
    return keep_state(extension, jnp.full_like(count, extension.conv.shape[1]))


def where_it_was_written(rows: KVRows, path, starts):
    return rows


def one_more(step: CacheStep, count, *, path=None):
    return keep_step(step, count + 1, path=path)


keep_state, keep_step = DeltaExtension.keep, CacheStep.keep
BROKEN = {
    "the state keeps rejected tokens": ("qwen3_5", DeltaExtension, all_of_the_step, "chain"),
    "the path's keys are not moved": ("llama", KVRows, where_it_was_written, "tree"),
    "a rejected token stays": ("llama", CacheStep, one_more, "chain"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_rollback_is_caught(tmp_path, monkeypatch, fault):
    family, owner, broken, way = BROKEN[fault]
    target = load_target(save_target(tmp_path / family, family).path)
    plain, chain, tree = programs(stop=(10**6,))
    prompts, lengths, random = batch(1)
    wanted = plain(target, prompts, lengths)
    arguments = (target, prophet(wanted, random), Frozen(jnp.eye(VOCAB), jnp.eye(VOCAB), None), prompts, lengths)
    monkeypatch.setattr(owner, "keep", broken)
    found = {"chain": chain, "tree": tree}[way](*arguments)
    assert answers(found.rows) != answers(wanted)


@pytest.mark.parametrize("way", ["chain", "tree"])
@pytest.mark.parametrize("least", [2.0, *(pytest.param(c, marks=pytest.mark.slow) for c in (3.0, 99.0))])
def test_leaving_out_what_is_unlikely_changes_no_token_either(tmp_path, least, way):
    target = load_target(save_target(tmp_path / "qwen3_5", "qwen3_5").path)
    options = {"stop": (5, 11), "max_new_tokens": NEW}
    plain = quick(functools.partial(generate, **options))
    program = {"chain": generate_chain, "tree": functools.partial(generate_tree, budget=BUDGET)}[way]
    whole, early = (
        quick(functools.partial(program, **options, taps=TAPS, min_accept=value)) for value in (0.0, least)
    )
    rounds = []
    for seed in range(3):
        prompts, lengths, random = batch(seed)
        wanted = plain(target, prompts, lengths)
        arguments = (
            target,
            prophet(wanted, random),
            Frozen(jnp.eye(VOCAB), jnp.eye(VOCAB), None),
            prompts,
            lengths,
        )
        found = [way(*arguments) for way in (whole, early)]
        for decoded in found:
            assert answers(decoded.rows) == answers(wanted)
        rounds.append([int((decoded.emitted > 0).sum()) for decoded in found])
    fewest, most = np.array(rounds).sum(axis=0)
    if least == 99.0:  # nothing promises that much: plain decoding
        assert most == sum_of_tokens(target, plain)
    else:
        assert fewest < most


def sum_of_tokens(target, plain):
    """Tokens after the first of each answer in the batches above."""
    total = 0
    for seed in range(3):
        prompts, lengths, _ = batch(seed)
        total += int((plain(target, prompts, lengths).lengths - lengths - 1).sum())
    return total
