"""Decode prompts plainly and with a drafter, one after the other, and say how the two compare.

One prompt at a time and both ways in turn, so that a machine whose speed drifts hurts both alike. The first
prompt is decoded once more beforehand, so that compiling is not timed.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import Frozen

PROMPT_MULTIPLE = 32  # prompts are padded to this, so that few shapes are compiled


@dataclasses.dataclass(frozen=True)
class Prompt:
    """tokens: [n] int32, ready for the target to answer; set: the prompt set that it belongs to."""

    set: str
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two decodings of a prompt part: position in the answer, and how much plain decoding's token led
    there in the target's logits. A lead of rounding size is a tie that either may win."""

    position: int
    logit_gap: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways. plain, chain: answers' tokens; rounds: [W] verify rounds by tokens emitted,
    minus one; seconds with the prompt's prefill in them; difference: None where the answers are identical."""

    prompt: Prompt
    plain: np.ndarray
    chain: np.ndarray
    rounds: np.ndarray
    plain_s: float
    chain_s: float
    difference: Difference | None


def compare(
    target: Target,
    drafter: Drafter,
    frozen: Frozen,
    prompts: Sequence[Prompt],
    *,
    taps: tuple[int, ...],
    stop: tuple[int, ...],
    max_new_tokens: int,
) -> Iterator[Comparison]:
    """Yield one Comparison per prompt, in order."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    room = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    options = {"stop": stop, "max_new_tokens": max_new_tokens}
    plain = jax.jit(functools.partial(generate, **options))
    chain = jax.jit(functools.partial(generate_chain, taps=taps, **options))

    def padded(prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
        row = np.zeros((1, room), np.int32)
        row[0, : len(prompt.tokens)] = prompt.tokens
        return row, np.array([len(prompt.tokens)], np.int32)

    first = padded(prompts[0])
    jax.block_until_ready((plain(target, *first), chain(target, drafter, frozen, *first)))
    for prompt in prompts:
        start = time.perf_counter()
        rows = jax.device_get(plain(target, *padded(prompt)))
        middle = time.perf_counter()
        result = jax.device_get(chain(target, drafter, frozen, *padded(prompt)))
        end = time.perf_counter()
        said, chained = (found.tokens[0, found.prompts[0] : found.lengths[0]] for found in (rows, result.rows))
        yield Comparison(
            prompt,
            said,
            chained,
            result.rounds[0],
            plain_s=middle - start,
            chain_s=end - middle,
            difference=_difference(target, prompt, said, chained),
        )


def _difference(target: Target, prompt: Prompt, plain: np.ndarray, chain: np.ndarray) -> Difference | None:
    if np.array_equal(plain, chain):
        return None
    shared = min(len(plain), len(chain))
    apart = np.flatnonzero(plain[:shared] != chain[:shared])
    at = int(apart[0]) if len(apart) else shared
    if at == shared:  # one answer is the beginning of the other
        return Difference(at, float("inf"))
    before = jnp.concatenate([prompt.tokens, plain[:at]])[None]
    positions = jnp.arange(before.shape[1])[None]
    _, last = target.hidden(before, positions, segment_ids=jnp.ones_like(before), taps=())
    logits = target.logits(last[0, -1])
    return Difference(at, float(logits[plain[at]] - logits[chain[at]]))
