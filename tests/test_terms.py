"""Every loss term against speculators' numbers and gradients, through the head that training uses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import GOLDEN

from dflash_jax.config import LOSS_TERMS, ObjectiveSection
from dflash_jax.errors import UserError
from dflash_jax.objective.head import Head, Rule, Slots, head_loss
from dflash_jax.objective.slot_weights import Decay, Dpace
from dflash_jax.objective.terms import TEACHER_TERMS, needs_teacher
from dflash_jax.resolve import rule

THEIRS = {"ce": "ce", "kl": "kl_div", "reverse_kl": "rkl", "tv": "tv", "lk_alpha": "nla", "lk_hybrid": "lk_hybrid"}
EVERY_TERM = tuple((name, 1.0) for name in THEIRS)


def identity(vocab: int) -> Head:
    """A head whose states are the logits themselves, exactly."""
    return Head(jnp.eye(vocab), jnp.zeros(vocab))


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "speculators_loss.npz")


@pytest.fixture(scope="module")
def blocks(golden) -> Slots:
    """Six blocks of seven slots; block 3 has a gap, block 5 no label. A label is the verifier's first choice."""
    logits, targets = (jnp.asarray(golden[name]).reshape(6, 8, 211)[:, 1:] for name in ("logits", "targets"))
    mask = golden["loss_mask"].reshape(6, 8)
    assert not mask[:, 0].any()
    return Slots(logits, targets.argmax(-1), jnp.asarray(mask[:, 1:] > 0), targets)


@dataclasses.dataclass(frozen=True)
class Given:
    """Slot weights that are known beforehand."""

    weights: tuple[tuple[float, ...], ...]

    def __call__(self, label_probability, mask):
        return jnp.asarray(self.weights, jnp.float32)


@jax.jit
def one_by_one(hidden, labels, teacher):
    """Every term of single slots [..], and the gradient of their sum with respect to the logits."""

    def terms(hidden, label, teacher):
        slots = Slots(hidden[None, None], label[None, None], jnp.ones((1, 1), bool), teacher[None, None])
        return head_loss(slots, identity(hidden.shape[-1]), Rule(EVERY_TERM, Decay(4.0)), 1).terms

    return jax.vmap(terms)(hidden, labels, teacher)


def test_terms_of_every_slot_equal_speculators(golden):
    logits, targets = jnp.asarray(golden["logits"][0]), jnp.asarray(golden["targets"][0])
    found = one_by_one(logits, targets.argmax(-1), targets)
    for ours, theirs in THEIRS.items():
        np.testing.assert_allclose(found[ours], golden[f"elementwise/{theirs}"][0], rtol=1e-5, err_msg=ours)


MIXTURE = "ce0.1+tv0.9"
CASES = [
    *[(theirs, ((ours, 1.0),), weights) for ours, theirs in THEIRS.items() for weights in ("g4", "g7", "dpace")],
    *[(MIXTURE, (("ce", 0.1), ("tv", 0.9)), weights) for weights in ("g4", "g7")],
]


@pytest.mark.parametrize(("theirs", "terms", "weights"), CASES)
def test_weighted_losses_and_gradients_equal_speculators(golden, blocks, theirs, terms, weights):
    if weights == "dpace" and theirs != "ce":
        # They weigh each term by exp(-loss) of itself, we by the label's probability: their weights are given.
        losses = golden[f"elementwise/{theirs}"].reshape(6, 8)[:, 1:]
        chosen = Given(tuple(map(tuple, Dpace(0.5)(jnp.exp(-losses), blocks.mask.astype(float)).tolist())))
    else:
        chosen = {"g4": Decay(4.0), "g7": Decay(7.0), "dpace": Dpace(0.5)}[weights]
    count = golden["loss_mask"].sum() + 1e-5  # their denominator, which no weight enters

    def loss(hidden):
        # All blocks at once, as `Given` has a weight for each of them.
        return head_loss(blocks._replace(hidden=hidden), identity(211), Rule(terms, chosen), 6).total / count

    total, slope = jax.jit(jax.value_and_grad(loss))(blocks.hidden)
    key = f"{theirs}/{weights}"
    assert total == pytest.approx(golden[f"{key}/loss"], rel=1e-5)
    assert jnp.linalg.norm(slope) == pytest.approx(golden[f"{key}/gradnorm"], rel=1e-5)
    if f"{key}/grad_logits" in golden:
        expected = golden[f"{key}/grad_logits"].reshape(6, 8, 211)
        np.testing.assert_array_equal(expected[:, 0], 0)
        np.testing.assert_allclose(slope, expected[:, 1:], rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_their_gradients_are_among_the_cases(golden):
    stored = {key.removesuffix("/grad_logits") for key in golden if key.endswith("/grad_logits")}
    assert stored == {"ce/g7", "ce/dpace", "kl_div/g4", "tv/g4", "lk_hybrid/g4"}
    assert stored <= {f"{theirs}/{weights}" for theirs, _, weights in CASES}


def probabilities(p, q, label=0) -> Slots:
    hidden, teacher = (jnp.log(jnp.asarray(values, jnp.float32))[None, None] for values in (q, p))
    return Slots(hidden, jnp.asarray([[label]]), jnp.ones((1, 1), bool), teacher)


def test_terms_by_hand():
    slots = probabilities((0.6, 0.3, 0.1), (0.4, 0.4, 0.2), label=1)
    found = head_loss(slots, identity(3), Rule(EVERY_TERM, Decay(7.0)), 1)
    assert found.overlaps[0, 0] == pytest.approx(0.8)
    assert found.terms["ce"] == pytest.approx(0.9163, abs=1e-4)
    assert found.terms["kl"] == pytest.approx(0.0877, abs=1e-4)
    assert found.terms["reverse_kl"] == pytest.approx(0.0915, abs=1e-4)
    assert found.terms["tv"] == pytest.approx(0.2)  # half of sum |p - q| = 0.4
    assert found.terms["lk_alpha"] == pytest.approx(0.2231, abs=1e-4)
    # The share of kl is exp(-3 * 0.8) = 0.0907.
    assert found.terms["lk_hybrid"] == pytest.approx(0.0907 * 0.0877 + 0.9093 * 0.2, abs=1e-4)


def test_a_mixture_is_the_sum_of_its_terms_by_their_factors(blocks):
    factors = {"lk_alpha": 0.25, "ce": 0.5, "reverse_kl": 2.0}

    def of(terms):
        def total(hidden):
            found = head_loss(blocks._replace(hidden=hidden), identity(211), Rule(terms, Dpace(0.5)), 4)
            return found.total, found

        (_, found), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(blocks.hidden)
        return found, slope

    mixed, slope = of(tuple(factors.items()))
    alone = {name: of(((name, 1.0),)) for name in factors}
    total = sum(factors[name] * alone[name][0].total for name in factors)
    np.testing.assert_allclose(mixed.total, total, rtol=1e-6)
    expected = sum(factors[name] * alone[name][1] for name in factors)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-7)
    for name, (found, _) in alone.items():
        # A term is logged as it is, whatever its factor.
        np.testing.assert_allclose(mixed.terms[name], found.total, rtol=1e-6)
        np.testing.assert_allclose(mixed.weight, found.weight, rtol=1e-6)


def test_distributions_far_apart_stay_finite():
    slots = probabilities((1.0, 1e-30, 1e-30), (1e-30, 1.0, 1e-30))
    slots = slots._replace(hidden=slots.hidden * 4)  # logits 276 apart: the drafter's probabilities underflow

    def total(hidden):
        found = head_loss(slots._replace(hidden=hidden), identity(3), Rule(EVERY_TERM, Decay(7.0)), 1)
        return found.total, found.terms

    (_, terms), slope = jax.value_and_grad(total, has_aux=True)(slots.hidden)
    assert all(np.isfinite(value) for value in terms.values())
    assert np.isfinite(slope).all()
    assert terms["lk_alpha"] == pytest.approx(-np.log(1e-5))
    assert terms["tv"] == pytest.approx(1.0)


def test_recipes_and_code_know_the_same_terms():
    assert set(LOSS_TERMS) == {"ce", *TEACHER_TERMS} == set(THEIRS)
    assert not needs_teacher(["ce"])
    assert all(needs_teacher(["ce", name]) for name in TEACHER_TERMS)


# From a recipe.


def test_a_recipe_names_terms_and_weights():
    assert rule(ObjectiveSection(), 16) == Rule((("ce", 1.0),), Decay(7.0))
    assert rule(ObjectiveSection(), 8) == Rule((("ce", 1.0),), Decay(4.0))
    section = ObjectiveSection(terms={"ce": 0.5, "tv": 0.25}, slot_weights="dpace", dpace_alpha=0.25)
    assert rule(section, 16) == Rule((("ce", 0.5), ("tv", 0.25)), Dpace(0.25))
    assert rule(ObjectiveSection(gamma=3.0, slot_weights="uniform"), 16).weights == Decay(float("inf"))


@pytest.mark.parametrize("name", sorted(TEACHER_TERMS))
def test_a_sampled_head_refuses_terms_that_compare_whole_distributions(name):
    with pytest.raises(UserError, match=rf"^objective\.head_sample: found 100, but the terms ce, {name} compare"):
        rule(ObjectiveSection(terms={"ce": 1.0, name: 1.0}, head_sample=100), 16)
    assert rule(ObjectiveSection(terms={"ce": 1.0}, head_sample=100), 16).terms == (("ce", 1.0),)
