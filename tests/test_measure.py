"""Decoding prompts in all ways: batches change nothing, differences are found and weighed, replays agree."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from tiny_models import NO_RULES, frozen_of, load_target, random_drafter

from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.decode.ways import CHAIN, PLAIN, TREE, Decoding, Limits, Speculator, Way
from dflash_jax.evaluation.difference import Judge
from dflash_jax.evaluation.measure import measure
from dflash_jax.evaluation.replay import replay
from dflash_jax.prompts.prompt import Prompt
from dflash_jax.sharding import replicated

NEW, TAPS = 14, (0, 1)
STOP, NEVER = 5, 10**6  # NEVER: a token that no vocabulary has
PLAINLY, IN_CHAIN, IN_TREE = Way(PLAIN), Way(CHAIN, "random", slots=4), Way(TREE, "random", 5, 4)


def two_rows() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), ("data",))


def prompts_of(vocab):
    """Five prompts in two sets."""
    rng = np.random.default_rng(0)
    lengths = (("a", 4), ("b", 27), ("a", 9), ("b", 3), ("a", 1))
    return [Prompt(name, rng.integers(0, vocab, length).astype(np.int32)) for name, length in lengths]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A target of seven tokens with a random drafter, on a mesh that splits rows in two."""

    hub: object
    target: object
    speculators: dict
    mesh: Mesh
    prompts: list[Prompt]

    def decoding(self, sampling=GREEDY, seed=0):
        limits = Limits((STOP, NEVER), NEW, sampling=sampling, seed=seed, batch_size=3)
        return Decoding(self.target, self.speculators, self.mesh, limits=limits)

    def judge(self, sampling=GREEDY, seed=0):
        return Judge(self.target, self.mesh, sampling=sampling, seed=seed, dtype="float32", room=64)


@pytest.fixture(scope="module")
def setting(few_tokens_llama) -> Setting:
    mesh = two_rows()
    target = load_target(few_tokens_llama.path, mesh, NO_RULES)
    place = replicated(mesh)
    drafter = jax.device_put(random_drafter(4), place)
    speculator = Speculator(drafter, jax.device_put(frozen_of(target), place), TAPS)
    return Setting(few_tokens_llama, target, {"random": speculator}, mesh, prompts_of(7))


@pytest.fixture(scope="module")
def decoding(setting) -> Decoding:
    return setting.decoding()


@pytest.fixture(scope="module")
def greedy(setting, decoding):
    """Everything measured greedily, in the order in which it came."""
    return list(measure(decoding, setting.prompts, [PLAINLY, IN_CHAIN, IN_TREE], setting.judge()))


def torch_logits(setting, tokens):
    with torch.no_grad():
        return setting.hub.torch_model(torch.tensor(np.asarray(tokens)[None])).logits[0, -1].numpy()


def torch_answer(setting, prompt):
    """The greedy answer to one prompt, without a cache."""
    known = prompt.tokens.tolist()
    while len(known) < len(prompt.tokens) + NEW:
        known.append(int(torch_logits(setting, known).argmax()))
        if known[-1] == STOP:
            break
    return known[len(prompt.tokens) :]


def test_every_prompt_is_answered_as_if_it_were_alone(setting, decoding, greedy):
    assert decoding.size == 4  # three rows do not split in two
    assert [item.index for item in greedy] == [2, 0, 4, 1, 3]
    for item in greedy:
        assert item.prompt is setting.prompts[item.index]
        expected = torch_answer(setting, item.prompt)
        for way in (PLAINLY, IN_CHAIN, IN_TREE):
            assert item.answers[way].tokens.tolist() == expected, way
            assert item.answers[way].difference is None


def test_rounds_add_up_to_the_answers(greedy):
    for item in greedy:
        assert not len(item.answers[PLAINLY].emitted)
        for way in (IN_CHAIN, IN_TREE):
            found = item.answers[way]
            assert 1 + found.emitted.sum() == len(found.tokens)
            assert (found.emitted >= 1).all()
            assert (found.emitted <= found.accepted + 1).all()
            assert found.seconds > 0
    rounds = np.concatenate([item.answers[IN_TREE].accepted for item in greedy])
    assert 0 < rounds.mean() < 3  # neither a drafter that knows nothing nor one that knows all


def test_a_replay_takes_the_rounds_that_decoding_took(setting, greedy):
    ways = [PLAINLY, IN_CHAIN, IN_TREE]
    found = replay(setting.target, setting.speculators, setting.mesh, greedy, ways, size=4, max_new_tokens=NEW)
    assert list(found) == ["a", "b"]
    for name, sums in found.items():
        answers = [item.answers for item in greedy if item.prompt.set == name]
        for number, way in enumerate((IN_CHAIN, IN_TREE)):
            emitted = np.concatenate([each[way].emitted for each in answers])
            assert sums["random"].walk_tokens[number] == emitted.sum()
            assert sums["random"].walk_rounds[number] == len(emitted)


def test_trees_keep_the_text_at_a_temperature(setting):
    sampling = Sampling(0.8, top_p=0.95)
    decoding, judge = setting.decoding(sampling, seed=3), setting.judge(sampling, seed=3)
    for item in measure(decoding, setting.prompts, [PLAINLY, IN_TREE], judge):
        assert item.answers[IN_TREE].difference is None
    assert not IN_CHAIN.keeps_text(sampling)
    assert IN_CHAIN.keeps_text(GREEDY)
    assert IN_TREE.keeps_text(sampling)


@dataclasses.dataclass(frozen=True)
class Broken:
    """Decodes as `right` does, but for the first token of the first row of a chain's batch."""

    right: Decoding
    size: int = 4
    sampling: Sampling = GREEDY

    def __call__(self, way, batch):
        found = self.right(way, batch)
        if way == IN_CHAIN:
            found.answers[0] = np.concatenate([(found.answers[0][:1] + 1) % 7, found.answers[0][1:]])
        return found


def test_a_changed_token_is_found(setting, decoding):
    broken = Broken(decoding)
    first, *others = measure(broken, setting.prompts, [PLAINLY, IN_CHAIN], setting.judge())
    assert first.answers[IN_CHAIN].difference.position == 0
    assert not first.answers[IN_CHAIN].difference.tie
    assert [item.answers[IN_CHAIN].difference is None for item in others] == [True, True, False, True]


def test_what_is_not_compared_has_no_difference(setting, decoding):
    for item in measure(Broken(decoding), setting.prompts, [IN_CHAIN], None):
        assert item.answers[IN_CHAIN].difference is None


def test_a_difference_is_weighed_by_the_targets_logits(setting):
    prompt, plain, other = np.array([1, 2, 3]), np.array([4, 0, 6, 1]), np.array([4, 0, 2, 1, 1])
    logits = torch_logits(setting, [1, 2, 3, 4, 0])
    found = setting.judge().difference(prompt, plain, other, 0)
    assert found.position == 2
    assert found.logit_gap == pytest.approx(abs(logits[6] - logits[2]), abs=1e-4)
    assert not found.tie
    assert setting.judge().difference(prompt, plain, plain.copy(), 0) is None


def test_an_answer_that_only_ends_elsewhere_is_no_tie(setting):
    found = setting.judge().difference(np.array([1]), np.array([2, 3]), np.array([2, 3, 4]), 0)
    assert (found.position, found.logit_gap, found.tie) == (2, float("inf"), False)


def test_at_a_temperature_the_noise_is_weighed_too(setting):
    prompt, plain, other = np.array([1, 2, 3]), np.array([4, 0, 6]), np.array([4, 0, 2])
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), 7), 0)
    noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, 2), (7,)))
    scores = torch_logits(setting, [1, 2, 3, 4, 0]) + 0.5 * noise
    found = setting.judge(Sampling(0.5), seed=9).difference(prompt, plain, other, 7)
    assert found.logit_gap == pytest.approx(abs(scores[6] - scores[2]), abs=1e-4)
    only_one = setting.judge(Sampling(0.5, top_k=1), seed=9).difference(prompt, plain, other, 7)
    assert (only_one.logit_gap, only_one.tie) == (float("inf"), False)


def test_tokens_of_equal_logits_tie(setting):
    """Rows of the head that are equal make two tokens that the target cannot tell apart."""
    head = setting.target.head
    kept = head[...]
    head.set_value(kept.at[2].set(kept[6]))
    try:
        found = setting.judge().difference(np.array([1, 2, 3]), np.array([4, 6]), np.array([4, 2]), 0)
    finally:
        head.set_value(kept)
    assert found.tie
    assert found.logit_gap == pytest.approx(0, abs=1e-5)
