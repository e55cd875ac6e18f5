"""Every family against transformers, live: whole, padded and packed rows, cached steps, trees, and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import drafter_sizes, frozen_of, load_target, quick, random_drafter
from tiny_targets import FAMILIES, VOCAB, save_target

from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate, prefill

TAPS = (0, 1)
LENGTHS = (17, 11)


@pytest.fixture(scope="module", params=FAMILIES)
def hub(request, tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module")
def target(hub):
    return load_target(hub.path)


@quick
def hidden(target, tokens, positions, segments):
    return target.hidden(tokens, positions, segment_ids=segments, taps=TAPS)


@quick
def step(target, tokens, cache, parents=None):
    return target.step(tokens, cache, taps=TAPS, parents=parents)


@quick
def keep(after, count, path=None):
    return after.keep(count, path=path)


def random_tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)


def expected(hub, tokens):
    """Features [S, T * E], last states [S, E] and logits [S, V] of one row by transformers."""
    with torch.no_grad():
        out = hub.torch_model(torch.tensor(np.asarray(tokens)[None]).long(), output_hidden_states=True)
    states = [states[0].numpy() for states in out.hidden_states]
    return np.concatenate([states[tap + 1] for tap in TAPS], axis=-1), states[-1], out.logits[0].numpy()


def close(found, wanted, atol=5e-5):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=atol)


def test_padded_rows_equal_transformers(hub, target):
    rows = [random_tokens(row, length) for row, length in enumerate(LENGTHS)]
    tokens, segments = np.full((2, 20), 5, np.int32), np.zeros((2, 20), np.int32)
    for row, text in enumerate(rows):
        tokens[row, : len(text)], segments[row, : len(text)] = text, 1
    features, last = hidden(target, tokens, jnp.broadcast_to(jnp.arange(20), (2, 20)), segments)
    logits = target.logits(last)
    for row, text in enumerate(rows):
        wanted = expected(hub, text)
        for found, by_torch, atol in zip((features, last, logits), wanted, (5e-5, 5e-5, 1e-4), strict=True):
            close(found[row, : len(text)], by_torch, atol)


def test_packed_documents_equal_documents_apart(hub, target):
    rows = [random_tokens(row, length) for row, length in enumerate(LENGTHS)]
    positions = np.concatenate([np.arange(length) for length in LENGTHS])[None]
    segments = np.repeat([1, 2], LENGTHS)[None]
    features, last = hidden(target, np.concatenate(rows)[None], positions, segments)
    for text, start in zip(rows, (0, LENGTHS[0]), strict=True):
        wanted = expected(hub, text)
        close(features[0, start : start + len(text)], wanted[0])
        close(last[0, start : start + len(text)], wanted[1])


def test_steps_in_uneven_pieces_equal_the_whole_row(hub, target):
    rows = [random_tokens(7, 14), random_tokens(8, 10)]
    wanted = [expected(hub, text) for text in rows]
    # How many of each piece's tokens count, by row; what does not count is fed again with the next piece.
    pieces = [(7, (6, 3)), (4, (4, 4)), (4, (1, 0)), (4, (3, 3))]
    cache, seen = target.empty_cache(2, capacity=20), [0, 0]
    for width, counts in pieces:
        fed = random_tokens(width, 2, width)  # what is rejected is never a token of the text
        for row, text in enumerate(rows):
            piece = text[seen[row] : seen[row] + min(width, counts[row])]
            fed[row, : len(piece)] = piece
        features, last, after = step(target, fed, cache)
        cache = keep(after, jnp.asarray(counts))
        for row, count in enumerate(counts):
            part = slice(seen[row], seen[row] + count)
            close(features[row, :count], wanted[row][0][part])
            close(last[row, :count], wanted[row][1][part])
            seen[row] += count
    assert seen == [14, 10]
    np.testing.assert_array_equal(cache.lengths, seen)


def test_rejected_tokens_leave_no_trace(target):
    prompt, first, second, after = (random_tokens(seed, 2, width) for seed, width in enumerate((7, 5, 5, 4)))
    start = keep(step(target, prompt, target.empty_cache(2, capacity=24))[2], jnp.array([6, 4]))
    counts = jnp.array([3, 1])
    others = np.where(np.arange(5) < np.asarray(counts)[:, None], first, second)
    found = [step(target, after, keep(step(target, tokens, start)[2], counts)) for tokens in (first, others)]
    assert (first != others).any()
    for one, other in zip(jax.tree.leaves(found[0][:2]), jax.tree.leaves(found[1][:2]), strict=True):
        np.testing.assert_array_equal(one, other)
    # A step of which nothing stays is as if it had never been.
    untouched = step(target, after, keep(step(target, first, start)[2], jnp.array([0, 0])))
    for one, other in zip(untouched[:2], step(target, after, start)[:2], strict=True):
        np.testing.assert_array_equal(one, other)


PARENTS = np.array([-1, 0, 0, 1, 2, 2, 5], np.int32)  # paths 0 1 3, 0 2 4 and 0 2 5 6


def test_nodes_of_a_tree_see_their_ancestors_only(hub, target):
    prompts, nodes, later = random_tokens(1, 2, 6), random_tokens(2, 2, 7), random_tokens(3, 2, 3)
    lengths = np.array([6, 4])
    cache = keep(step(target, prompts, target.empty_cache(2, capacity=20))[2], jnp.asarray(lengths))
    features, last, after = step(target, nodes, cache, jnp.asarray(np.stack([PARENTS, PARENTS])))
    for row, length in enumerate(lengths):
        for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5, 6]):
            text = np.concatenate([prompts[row, :length], nodes[row, path]])
            wanted = expected(hub, text)
            close(features[row, path], wanted[0][length:])
            close(last[row, path], wanted[1][length:])
    # Row 0 keeps its longest path, row 1 two nodes of another; then both go on.
    paths, counts = np.array([[0, 2, 5, 6], [0, 1, 3, 3]]), np.array([4, 2])
    _, last, _ = step(target, later, keep(after, jnp.asarray(counts), jnp.asarray(paths)))
    for row, length in enumerate(lengths):
        kept = nodes[row, paths[row, : counts[row]]]
        text = np.concatenate([prompts[row, :length], kept, later[row]])
        close(last[row], expected(hub, text)[1][length + counts[row] :])


def test_a_long_prompt_is_run_in_pieces(hub, target):
    lengths = np.array([83, 64, 20])
    prompts = random_tokens(4, 3, 83)
    run = quick(functools.partial(prefill, capacity=90, taps=TAPS, chunk=32))
    token, features, cache = run(target, prompts, lengths)
    np.testing.assert_array_equal(cache.lengths, lengths)
    after = step(target, random_tokens(5, 3, 2), cache)
    for row, length in enumerate(lengths):
        text = prompts[row, :length]
        wanted = expected(hub, text)
        close(features[row, :length], wanted[0], 1e-4)
        assert int(token[row]) == wanted[2][-1].argmax()
        close(after[1][row], expected(hub, np.concatenate([text, random_tokens(5, 3, 2)[row]]))[1][length:], 1e-4)


def test_greedy_and_speculative_tokens_are_transformers(hub, target):
    lengths, added = np.array([9, 4]), 16
    prompts = random_tokens(6, 2, 9)
    options = {"stop": (VOCAB,), "max_new_tokens": added}
    plain = quick(functools.partial(generate, **options))(target, prompts, lengths)
    sizes = {"width": 36, "target_width": 36, "feature_width": 72, "block_size": 5, "mask_token": 6}
    drafter = random_drafter(3, **(dict(drafter_sizes().__dict__) | sizes))
    chain = quick(functools.partial(generate_chain, taps=TAPS, **options))
    speculative = chain(target, drafter, frozen_of(target), prompts, lengths)
    for row, length in enumerate(lengths):
        tokens = torch.tensor(prompts[row : row + 1, :length]).long()
        with torch.no_grad():
            wanted = hub.torch_model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=added,
                do_sample=False,
                pad_token_id=0,
            )[0].numpy()
        np.testing.assert_array_equal(plain.tokens[row, : length + added], wanted)
        np.testing.assert_array_equal(speculative.rows.tokens[row, : length + added], wanted)
    # Some drafts were rejected, so that there was something to roll back.
    assert ((speculative.emitted > 0) & (speculative.emitted < 5)).any()
