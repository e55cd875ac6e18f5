"""A prompt, ready for a target to answer."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """tokens: [n] int32, everything before the answer; set: the prompt set that it belongs to."""

    set: str
    tokens: np.ndarray
