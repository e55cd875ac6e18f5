"""Which target layers feed the drafter.

A tap is a 0-based layer index and means the output of that layer: Hugging Face's ``hidden_states[index + 1]``,
vLLM's and speculators' auxiliary layer index + 1.
"""

import itertools
from collections.abc import Sequence

from dflash_jax.errors import UserError


def published_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers from the second to the last but two of `layers`, evenly spaced (z-lab's rule).

    published_taps(36, 5) == (1, 9, 17, 25, 33). Halves round to even, as in the published code.
    """
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def most_taps(layers: int) -> int:
    """The most taps that `published_taps` places in so many layers without one of them coming twice."""
    return max(1, layers - 3)


def checked_taps(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """The taps if they rise strictly within 0 .. layers - 2; raises UserError with a right list otherwise.

    The last layer is refused: engines disagree whether its output is taken before or after the final norm,
    and the teacher's logits come from it.
    """
    rising = all(a < b for a, b in itertools.pairwise(taps))
    if not taps or not rising or taps[0] < 0 or taps[-1] > layers - 2:
        raise UserError(
            f"drafter.taps: found {list(taps)}; allowed: rising layer indices from 0 to {layers - 2} "
            f"(the target has {layers} layers and the last is never a tap), "
            f"for example {list(published_taps(layers, max(1, min(5, layers - 3))))}"
        )
    return tuple(taps)
