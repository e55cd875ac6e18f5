"""Greedy decoding against transformers, and chain decoding against greedy decoding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import drafter_sizes, frozen_of, load_target, random_drafter

from dflash_jax.batch import Batch
from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import Sequences, generate
from dflash_jax.decode.speculate import Decoded
from dflash_jax.models.drafter import FULL
from dflash_jax.objective.objective import Frozen, block_states

LENGTHS = (9, 4, 1, 6)
NEW = 24
TAPS = (0, 1)
NEVER = 10**6  # a token that no vocabulary has
NO_STOP = (NEVER, NEVER)


def right_padded(vocab):
    """Prompts [4, 9] and their texts; the padding is an ordinary token, so that it would show if it were read."""
    texts = [np.random.default_rng(row).integers(0, vocab, length) for row, length in enumerate(LENGTHS)]
    prompts = np.full((len(texts), max(LENGTHS)), 3, np.int32)
    for row, text in enumerate(texts):
        prompts[row, : len(text)] = text
    return jnp.asarray(prompts), texts


def transformers_greedy(hub, text, *, stop):
    """The tokens that transformers adds to one prompt."""
    tokens = torch.tensor(np.asarray(text)[None])
    out = hub.torch_model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=0,
    )
    return out[0, len(text) :].tolist()


def generated(rows: Sequences) -> list[list[int]]:
    tokens, starts, ends = np.asarray(rows.tokens), np.asarray(rows.prompts), np.asarray(rows.lengths)
    return [tokens[row, starts[row] : ends[row]].tolist() for row in range(len(tokens))]


greedy = jax.jit(generate, static_argnames="max_new_tokens")
chain = jax.jit(generate_chain, static_argnames=("taps", "max_new_tokens"))


@dataclasses.dataclass(frozen=True)
class Answered:
    """A target, its prompts, and transformers' continuations with and without a stop token."""

    hub: object
    target: object
    prompts: jax.Array
    texts: list
    whole: list[list[int]]
    stop: int
    stopped: list[list[int]]


@pytest.fixture(scope="module")
def decoded(plain_llama):
    prompts, texts = right_padded(66)
    whole = [transformers_greedy(plain_llama, text, stop=None) for text in texts]
    # A token that some row reaches after a few others, and that not all rows reach at once.
    firsts = {token: [row.index(token) for row in whole if token in row] for token in set(itertools.chain(*whole))}
    stop = max(firsts, key=lambda token: (len({0, *firsts[token]}), -min(firsts[token])))
    stopped = [transformers_greedy(plain_llama, text, stop=stop) for text in texts]
    return Answered(plain_llama, load_target(plain_llama.path), prompts, texts, whole, stop, stopped)


def test_the_prompts_exercise_stopping(decoded):
    lengths = [len(row) for row in decoded.stopped]
    assert min(lengths) < NEW
    assert len(set(lengths)) > 1
    assert min(lengths) > 0


def test_greedy_rows_equal_transformers_to_the_limit(decoded):
    rows = greedy(decoded.target, decoded.prompts, jnp.asarray(LENGTHS), stop=NO_STOP, max_new_tokens=NEW)
    assert generated(rows) == decoded.whole
    assert rows.done.all()
    assert rows.lengths.tolist() == [length + NEW for length in LENGTHS]
    for row, text in enumerate(decoded.texts):
        assert rows.tokens[row, : len(text)].tolist() == text.tolist()


def test_a_row_ends_with_its_stop_token_while_others_go_on(decoded):
    stop = (NEVER, decoded.stop)
    rows = greedy(decoded.target, decoded.prompts, jnp.asarray(LENGTHS), stop=stop, max_new_tokens=NEW)
    assert generated(rows) == decoded.stopped


def test_append_cuts_behind_a_stop_token_and_at_the_limit():
    rows = Sequences.start(jnp.asarray([[7, 7], [7, 0], [7, 7], [7, 7]]), jnp.array([2, 1, 2, 2]), capacity=7)
    rows = dataclasses.replace(rows, done=jnp.array([False, False, False, True]))
    new = jnp.asarray([[1, 9, 2, 3], [1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 4]])
    rows = rows.append(new, jnp.array([4, 2, 4, 4]), stop=jnp.array([9]), limit=3)
    assert generated(rows) == [[1, 9], [1, 2], [1, 2, 3], []]
    assert rows.done.tolist() == [True, False, True, True]
    rows = rows.append(new, jnp.array([4, 4, 4, 4]), stop=jnp.array([9]), limit=3)
    assert generated(rows) == [[1, 9], [1, 2, 1], [1, 2, 3], []]
    assert rows.done.all()


# Chain decoding.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Oracle:
    """Stands in for a drafter: proposes the known continuation, except at positions where `wrong` holds.

    truth, wrong: [B, T] by position. Its states are one-hot, so it goes with an identity for a head.
    """

    truth: jax.Array
    wrong: jax.Array
    vocab: int = dataclasses.field(metadata={"static": True})

    @property
    def config(self):
        return drafter_sizes(block_size=6, layer_types=(FULL,))

    def context(self, features, positions):
        shape = (*positions.shape, self.config.kv_heads, self.config.head_width)
        return ((jnp.zeros(shape), jnp.zeros(shape)),)

    def __call__(self, block, positions, context, *, visible, context_positions):
        at = positions[:, 0]
        right = jnp.take_along_axis(self.truth, at, axis=1)
        shift = jnp.take_along_axis(self.wrong, at, axis=1)
        return jax.nn.one_hot((right + shift) % self.vocab, self.vocab)[:, None]


def oracle(decoded, wrong_every):
    """An oracle that is wrong at every `wrong_every`-th position, at others in each row."""
    capacity = max(LENGTHS) + NEW + 6
    truth = np.zeros((len(LENGTHS), capacity), np.int32)
    for row, (text, added) in enumerate(zip(decoded.texts, decoded.whole, strict=True)):
        known = np.concatenate([text, added])
        truth[row, : len(known)] = known
    at = np.arange(capacity) + 2 * np.arange(len(LENGTHS))[:, None]
    return Oracle(jnp.asarray(truth), jnp.asarray(at % wrong_every == 0, jnp.int32), 66)


def expected_rounds(lengths, *, width, wrong, starts):
    """Of each row, (drafts accepted, tokens emitted) of its rounds, from the rule alone.

    lengths: tokens a row gets in all; wrong: [B, T] positions of wrong drafts; starts: prompt lengths.
    """
    rounds = [[] for _ in lengths]
    for row, (count, start) in enumerate(zip(lengths, starts, strict=True)):
        anchor, end = start, start + count - 1  # the first token came with the prompt; the last is at `end`
        while anchor < end:
            accepted = 0
            while accepted < width - 1 and not wrong[row, anchor + 1 + accepted]:
                accepted += 1
            emitted = min(accepted + 1, end - anchor)
            rounds[row].append((min(accepted, emitted), emitted))
            anchor += accepted + 1
    return rounds


def rounds_of(decoded: Decoded) -> list[list[tuple[int, int]]]:
    """Of each row, (drafts accepted, tokens emitted) of its rounds; no more drafts than tokens."""
    accepted, emitted = np.asarray(decoded.accepted), np.asarray(decoded.emitted)
    counts = (emitted > 0).sum(axis=1)
    for row, count in enumerate(counts):
        assert (emitted[row, :count] > 0).all()
        assert not emitted[row, count:].any()
        assert not accepted[row, count:].any()
    assert (accepted >= emitted - 1).all()
    accepted = np.minimum(accepted, emitted)
    return [
        list(zip(accepted[row, :count].tolist(), emitted[row, :count].tolist(), strict=True))
        for row, count in enumerate(counts)
    ]


@pytest.mark.parametrize("wrong_every", [1, 3, 4, 7, 1000])
@pytest.mark.parametrize("stops", [False, True], ids=["to the limit", "with a stop token"])
def test_chain_decoding_with_a_drafter_that_is_often_right(decoded, wrong_every, stops):
    drafter = oracle(decoded, wrong_every)
    identity = Frozen(jnp.eye(66), jnp.eye(66), None)
    result = chain(
        decoded.target,
        drafter,
        identity,
        decoded.prompts,
        jnp.asarray(LENGTHS),
        taps=TAPS,
        stop=(NEVER, decoded.stop) if stops else NO_STOP,
        max_new_tokens=NEW,
    )
    expected = decoded.stopped if stops else decoded.whole
    assert generated(result.rows) == expected
    counts = [len(row) for row in expected]
    assert result.emitted.sum(axis=1).tolist() == [count - 1 for count in counts]
    expected = expected_rounds(counts, width=6, wrong=np.asarray(drafter.wrong), starts=LENGTHS)
    assert rounds_of(result) == expected


def test_chain_decoding_with_a_random_drafter(decoded):
    result = chain(
        decoded.target,
        random_drafter(1),
        frozen_of(decoded.target),
        decoded.prompts,
        jnp.asarray(LENGTHS),
        taps=TAPS,
        stop=(NEVER, decoded.stop),
        max_new_tokens=NEW,
    )
    assert generated(result.rows) == decoded.stopped


def test_a_limit_of_one_token_needs_no_round(decoded):
    result = chain(
        decoded.target,
        random_drafter(1),
        frozen_of(decoded.target),
        decoded.prompts,
        jnp.asarray(LENGTHS),
        taps=TAPS,
        stop=NO_STOP,
        max_new_tokens=1,
    )
    assert generated(result.rows) == [row[:1] for row in decoded.whole]
    assert not result.emitted.any()


def test_cached_rounds_draft_what_whole_rows_say(few_tokens_llama):
    """The accepted run of every round, recomputed from features of the finished row without any cache."""
    target, drafter = load_target(few_tokens_llama.path), random_drafter(4)
    prompts, texts = right_padded(7)
    frozen, lengths = frozen_of(target), jnp.asarray(LENGTHS)
    result = chain(target, drafter, frozen, prompts, lengths, taps=TAPS, stop=NO_STOP, max_new_tokens=NEW)
    expected = [transformers_greedy(few_tokens_llama, text, stop=None) for text in texts]
    assert generated(result.rows) == expected

    tokens = result.rows.tokens
    rows, total = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(total), (rows, total))
    ones = jnp.ones((rows, total), jnp.int32)
    features, _ = jax.jit(lambda: target.hidden(tokens, positions, segment_ids=ones, taps=TAPS))()
    batch = Batch(tokens, positions, ones, ones > 0, jnp.arange(rows), jnp.arange(rows))
    states = jax.jit(block_states)(
        drafter, batch, features, frozen, anchors=positions, kept=jnp.ones((rows, total), bool)
    )
    drafts = np.asarray(frozen.logits(states).argmax(-1))
    known = np.asarray(tokens)
    rounds = [[] for _ in range(rows)]
    for row, start in enumerate(LENGTHS):
        anchor, end = start, start + NEW - 1
        while anchor < end:
            accepted = 0
            while accepted < min(4, end - anchor) and (
                drafts[row, anchor, accepted + 1] == known[row, anchor + 1 + accepted]
            ):
                accepted += 1
            rounds[row].append(min(accepted + 1, end - anchor))
            anchor += accepted + 1
    assert [[emitted for _, emitted in row] for row in rounds_of(result)] == rounds
    assert len(set(itertools.chain(*rounds))) > 1  # some drafts were accepted, some were not


def test_a_draft_vocabulary_proposes_its_tokens_only(decoded):
    target, full = decoded.target, frozen_of(decoded.target)
    draft_tokens = np.unique(decoded.whole)
    small = Frozen(full.embedding, full.head[draft_tokens], jnp.asarray(draft_tokens, jnp.int32))
    result = chain(
        target,
        random_drafter(1),
        small,
        decoded.prompts,
        jnp.asarray(LENGTHS),
        taps=TAPS,
        stop=NO_STOP,
        max_new_tokens=NEW,
    )
    assert generated(result.rows) == decoded.whole
