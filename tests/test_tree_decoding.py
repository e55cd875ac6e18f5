"""Chain and tree decoding against recorded runs of z-lab's and the DDTree authors' code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import GOLDEN, frozen_of, load_target, one_device, quick

from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate, prefill
from dflash_jax.decode.sampling import Sampling, answer_keys
from dflash_jax.decode.tree import best_tree, candidates
from dflash_jax.decode.tree_decoding import generate_tree
from dflash_jax.models.drafter import Drafter
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.weights import fill
from dflash_jax.sharding import replicated

NEW, BLOCK = 48, 8
NEVER = (10**6,)
DRAFTERS = ("trained", "trained_swa")


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "zlab_generate.npz")


@pytest.fixture(scope="module")
def target():
    return load_target(GOLDEN / "generate" / "target")


@pytest.fixture(scope="module")
def prompts(golden):
    """The three prompts, right-padded, and their lengths."""
    texts = [golden[f"prompt{index}"][0] for index in range(3)]
    rows = np.zeros((3, max(map(len, texts))), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return jnp.asarray(rows), np.array([len(text) for text in texts])


@functools.cache
def published(name):
    folder = DrafterFolder.open(GOLDEN / "generate" / name)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Drafter(folder.config, nnx.Rngs(0))))
    places = jax.tree.map(lambda _: replicated(one_device()), abstract)
    return nnx.merge(graph, fill(abstract, folder.tensors(), shardings=places, source=name)), folder.taps


def decode(way, target, drafter, prompts, lengths, **options):
    model, taps = published(drafter)
    options = {"stop": NEVER, "max_new_tokens": NEW, "taps": taps} | options
    found = quick(functools.partial(way, **options))(target, model, frozen_of(target), prompts, lengths)
    texts = [found.rows.tokens[row, :end].tolist() for row, end in enumerate(found.rows.lengths)]
    accepted, played = np.asarray(found.accepted), np.asarray(found.emitted) > 0
    return texts, [(accepted[row, played[row]] + 1).tolist() for row in range(len(texts))]


def equal_while_blocks_are_whole(ours, theirs, *, width):
    """Compare rounds as far as their block fits into the text that was asked for.

    Their last blocks are shorter, and with fewer slots a drafter says something else.
    """
    start, compared = 0, 0
    for mine, other in zip(ours, theirs, strict=False):
        if start + width > NEW - 1:
            break
        assert mine == other
        start, compared = start + mine, compared + 1
    assert compared > 4


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_equal_zlabs_runs(golden, target, prompts, drafter, width):
    texts, rounds = decode(generate_chain, target, drafter, *prompts, width=width)
    prefix = f"{drafter}/" if width == BLOCK else f"{drafter}/bs4_"
    for row in range(3):
        assert texts[row] == golden[f"{prefix}ids{row}"][0].tolist()
        equal_while_blocks_are_whole(rounds[row], golden[f"{prefix}accept{row}"].tolist(), width=width)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_end_at_a_stop_token_as_zlabs_do(golden, target, prompts, drafter):
    tokens, lengths = prompts
    for row in range(3):
        stop = (int(golden[f"{drafter}/stop_token{row}"]),)
        texts, rounds = decode(
            generate_chain, target, drafter, tokens[row : row + 1], lengths[row : row + 1], stop=stop
        )
        assert texts[0] == golden[f"{drafter}/stop_ids{row}"][0].tolist()
        # Their last round is cut at the stop token, as `emitted` is.
        theirs = golden[f"{drafter}/stop_accept{row}"].tolist()
        assert len(rounds[0]) == len(theirs)
        assert rounds[0][:-1] == theirs[:-1]


@pytest.mark.parametrize("budget", [1, 4, 15, 32])
def test_trees_equal_the_authors_runs(golden, target, prompts, budget):
    known = np.load(GOLDEN / "ddtree_generate.npz")
    texts, rounds = decode(generate_tree, target, "trained", *prompts, budget=budget)
    for row, start in enumerate(prompts[1]):
        key = f"trained/b{budget}/{row}"
        assert texts[row] == known[f"{key}/ids"][0, : start + NEW].tolist()
        assert texts[row] == golden[f"greedy{row}"][0, : start + NEW].tolist()
        equal_while_blocks_are_whole(rounds[row], known[f"{key}/accept"].tolist(), width=BLOCK)


def test_the_first_tree_of_a_run_is_the_authors(golden, target, prompts):
    logits = jnp.asarray(golden["trained/prompt1_draft_logits"][0])
    tree = best_tree(*candidates(logits, 15), budget=15)
    known = np.load(GOLDEN / "ddtree_generate.npz")
    assert tree.tokens.tolist() == known["trained/b15/1/tree0_tokens"].tolist()
    assert [-1, *tree.parents.tolist()] == known["trained/b15/1/tree0_parents"].tolist()
    # And these logits are those of the block after this prompt's first token.
    tokens, lengths = prompts
    _, taps = published("trained")
    token, features, _ = prefill(target, tokens[1:2], jnp.asarray(lengths[1:2]), capacity=64, taps=taps)
    assert int(token[0]) == golden["trained/prompt1_block_ids"][0, 0]
    expected = golden["trained/prompt1_target_hidden"]
    np.testing.assert_allclose(features[:, : expected.shape[1]], expected, atol=1e-4)


@pytest.mark.parametrize(
    "sampling", [pytest.param(Sampling(0.7), marks=pytest.mark.slow), Sampling(1.0, 0.9, 20)], ids=str
)
def test_a_sampled_tree_emits_what_plain_sampling_emits(target, prompts, sampling):
    """The same noise at the same place: token for token, whatever the drafter proposes."""
    tokens, lengths = prompts
    keys = answer_keys(7, jnp.arange(3), jnp.zeros(3, jnp.int32))
    options = {"sampling": sampling, "keys": keys}
    plain = jax.jit(functools.partial(generate, stop=NEVER, max_new_tokens=NEW, sampling=sampling))(
        target, tokens, lengths, keys=keys
    )
    expected = [plain.tokens[row, :end].tolist() for row, end in enumerate(plain.lengths)]
    texts, rounds = decode(generate_tree, target, "trained", *prompts, budget=12, **options)
    assert texts == expected
    assert any(length > 1 for row in rounds for length in row)
