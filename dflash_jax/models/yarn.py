"""YaRN: the rotary frequencies of a stretched context from those of the original one.

    f'_i = f_i (1 - ramp_i + ramp_i / factor)          i: channel pair, from the fastest to the slowest
    ramp_i rises from 0 to 1 between the pair that turns beta_fast times over the original length
    and the pair that turns beta_slow times; sin and cos are multiplied by attention_factor

The computation is that of transformers' rope type "yarn", which serves the result.
"""

import dataclasses
import math
from typing import Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Yarn:
    """factor: how often the original length fits the context; truncate: ramp between whole pairs."""

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def usual(cls, factor: float, original_length: int) -> Self:
        """With the published borders and attention factor."""
        return cls(factor, original_length, attention_factor(factor))

    def ramp(self, head_width: int, *, theta: float) -> np.ndarray:
        """[H / 2] float32 from 0 (frequency kept) to 1 (divided by the factor)."""

        def pair_that_turns(times: float) -> float:
            return head_width * math.log(self.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_width - 1)
        if low == high:
            high += 0.001
        pairs = np.arange(head_width // 2, dtype=np.float32)
        return np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)


def attention_factor(factor: float, *, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor of sin and cos where a configuration leaves it out."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
