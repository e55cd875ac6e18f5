"""Where two answers to a prompt part, and whether the target could have told their tokens apart there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax.decode.sampling import Sampling, answer_keys, filtered, noise
from dflash_jax.models.target import Target
from dflash_jax.sharding import replicated

# Logit gaps that rounding alone makes between one-token and block passes of a target, by its dtype.
TIE = {"float32": 1e-3, "bfloat16": 0.25}


@dataclasses.dataclass(frozen=True)
class Difference:
    """position: of the first token that differs, in the answer; logit_gap: between the two tokens there, in the
    target's logits; infinite where one answer is the beginning of the other, or where top_k or top_p leave one of
    the tokens out. At a temperature the noise that both decodings add is in it. tie: the gap is of rounding size,
    so that either token may win."""

    position: int
    logit_gap: float
    tie: bool


class Judge:
    """Compares answers with plain decoding's, on one mesh; compiled when the first difference comes."""

    def __init__(self, target: Target, mesh: Mesh, *, sampling: Sampling, seed: int, dtype: str, room: int):
        """dtype: the target's; room: tokens of the longest prompt with its answer."""
        self._target, self._room, self._tie = target, room, TIE[dtype]
        self._place = replicated(mesh)
        self._scores = jax.jit(functools.partial(_scores, sampling=sampling, seed=seed), out_shardings=self._place)

    def difference(
        self, prompt: np.ndarray, plain: np.ndarray, other: np.ndarray, index: int
    ) -> Difference | None:
        """None where both answers are the same. prompt, plain, other: [n] tokens; index: the prompt's."""
        if np.array_equal(plain, other):
            return None
        shared = min(len(plain), len(other))
        apart = np.flatnonzero(plain[:shared] != other[:shared])
        if not len(apart):
            return Difference(shared, float("inf"), tie=False)
        at = int(apart[0])
        known = np.concatenate([prompt, plain[:at]])
        row = np.zeros((1, self._room), np.int32)
        row[0, : len(known)] = known
        where = np.array([len(known), at, index], np.int32)
        scores = jax.device_get(self._scores(self._target, *jax.device_put((row, where), self._place)))
        gap = abs(float(scores[plain[at]]) - float(scores[other[at]]))
        gap = gap if np.isfinite(gap) else float("inf")
        return Difference(at, gap, tie=gap <= self._tie)


def _scores(target: Target, tokens: jax.Array, where: jax.Array, *, sampling: Sampling, seed: int) -> jax.Array:
    """[V] what the next token is the largest of, in logits. tokens: [1, S]; where: length, place and prompt."""
    length, place, index = where
    positions = jnp.arange(tokens.shape[1])[None]
    segments = (positions < length).astype(jnp.int32)
    _, last = target.hidden(tokens, positions, segment_ids=segments, taps=())
    logits = target.logits(last[0, length - 1])
    if sampling.temperature == 0:
        return logits
    keys = answer_keys(seed, index[None], jnp.zeros(1, jnp.int32))
    added = noise(keys, place[None], vocab=logits.shape[0])[0]
    return sampling.temperature * (filtered(logits, sampling) + added)
