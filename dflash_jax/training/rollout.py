"""Real decoding of held-out prompts while training: what the drafter as it is now accepts, and how fast that is.

The target stays where it is; drafter and head are copied to its devices for as long as a decoding takes. Plain
decoding does not change while training, so it happens once, at the first time.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.config import Recipe
from dflash_jax.dataset import Dataset
from dflash_jax.decode.ways import CHAIN, PLAIN, Decoding, Limits, PromptBatch, Rounds, Speculator, Way
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import Frozen
from dflash_jax.sharding import replicated

NAME = "drafter"


def check_evaluation(recipe: Recipe) -> None:
    """Raise UserError where the recipe's `eval` group asks for what the rest of the recipe rules out."""
    section = recipe.eval
    every, budgets = section.decode_every, section.budgets
    if every and recipe.data.heldout is None:
        raise UserError(
            f"eval.decode_every: found {every}, but there are no prompts to decode: data.heldout is null; name "
            "held-out conversations, or set eval.decode_every=0"
        )
    if every and recipe.data.features == "cached":
        raise UserError(
            f"eval.decode_every: found {every}, but with data.features=cached the target is not loaded; set "
            "data.features=hybrid, or eval.decode_every=0"
        )
    if section.every and recipe.data.heldout is None:
        raise UserError(
            f"eval.every: found {section.every}, but data.heldout is null; name held-out conversations, or set "
            "eval.every=0"
        )
    if budgets and not section.every:
        raise UserError(
            f"eval.budgets: found {budgets}, but eval.every is 0, so that they are never measured; set "
            "eval.every, or eval.budgets=[]"
        )
    if twice := [budget for budget in budgets if budgets.count(budget) > 1]:
        raise UserError(f"eval.budgets: found {budgets}, which names {twice[0]} twice; name each budget once")


def heldout_prompts(data: Dataset, count: int) -> list[np.ndarray]:
    """The tokens [n] before the first supervised one, of the first `count` records that have such tokens."""
    prompts = list[np.ndarray]()
    for record_id in data.record_ids:
        row = data.records[int(record_id)]
        answers = np.flatnonzero(row.loss_mask)
        if len(answers) and answers[0] > 0:
            prompts.append(row.tokens[: answers[0]])
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError(f"eval.decode_every: no record of {data.records.directory} begins with a prompt")
    return prompts


class Rollout:
    """Held-out prompts, decoded in one batch on the target's mesh: plainly once, with the drafter at each call."""

    def __init__(
        self,
        target: Target,
        frozen: Frozen,
        mesh: Mesh,
        prompts: Sequence[np.ndarray],
        *,
        structure: nnx.GraphDef[Drafter],
        taps: tuple[int, ...],
        limits: Limits,
    ):
        """frozen: what the drafter uses of the target, on any mesh; prompts: tokens [n] of each, at least one."""
        self._frozen, self._mesh, self._structure, self._taps = frozen, mesh, structure, taps
        # `measure` puts the drafter of its step here.
        self._speculators: dict[str, Speculator] = {}
        self._decoding = Decoding(target, self._speculators, mesh, limits=limits)
        tokens = np.zeros((self._decoding.size, max(map(len, prompts))), np.int32)
        lengths = np.zeros(self._decoding.size, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        self._prompts = PromptBatch(tokens, lengths, np.arange(self._decoding.size, dtype=np.int32))
        self._plain: Rounds | None = None

    def measure(self, params: nnx.State) -> dict[str, float]:
        """Figures of chain decoding with these parameters.

        decode_accept_len: tokens of a verify round, pooled over all rounds; decode_accept_len_by_request: mean
        over prompts of each one's own; decode_lossless: share of answers that are plain decoding's;
        decode_tokens_s: of answers, prefill included; decode_ratio: of that to plain decoding's.
        """
        if self._plain is None:
            self._plain = self._decoded(Way(PLAIN))
        drafter: Drafter = nnx.merge(self._structure, jax.device_put(params, replicated(self._mesh)))
        frozen = jax.device_put(self._frozen, replicated(self._mesh))
        self._speculators[NAME] = Speculator(drafter, frozen, self._taps)
        found, plain = self._decoded(Way(CHAIN, NAME, slots=drafter.config.block_size)), self._plain
        self._speculators.clear()
        pairs = zip(found.answers, plain.answers, strict=True)
        # An answer of one token takes no round.
        own = [emitted.mean() for emitted in found.emitted if len(emitted)]
        return {
            "decode_accept_len": float(np.concatenate(found.emitted).mean()) if own else 1.0,
            "decode_accept_len_by_request": float(np.mean(own)) if own else 1.0,
            "decode_lossless": float(np.mean([np.array_equal(answer, said) for answer, said in pairs])),
            "decode_tokens_s": _rate(found),
            "decode_ratio": _rate(found) / _rate(plain),
        }

    def _decoded(self, way: Way) -> Rounds:
        # A device works in the order of requests: it is idle, and the clock fair, once this last one is done.
        jax.block_until_ready(jax.jit(jnp.zeros, static_argnums=0, out_shardings=replicated(self._mesh))(1))
        try:
            return self._decoding(way, self._prompts)
        except UserError as fault:
            raise UserError(
                f"eval.decode_every: {fault}; here: eval.decode_prompts, eval.decode_tokens"
            ) from fault


def make_rollout(
    experiment: Experiment, meshes: Meshes, *, target: Target | None, frozen: Frozen, prompts: Sequence[np.ndarray]
) -> Rollout | None:
    """The decoding that the recipe's `eval` group asks for; None without prompts or target."""
    if target is None or not prompts:
        return None
    return Rollout(
        target,
        frozen,
        meshes.target,
        prompts,
        structure=nnx.graphdef(nnx.eval_shape(experiment.initial_drafter)),
        taps=experiment.taps,
        limits=Limits(experiment.stop_tokens, experiment.recipe.eval.decode_tokens, batch_size=len(prompts)),
    )


def _rate(found: Rounds) -> float:
    return sum(map(len, found.answers)) / found.seconds
