"""How answers are generated, whoever generates them."""

import dataclasses
import hashlib
from typing import Any

from dflash_jax.decode.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Generation:
    """max_new_tokens: of an answer; template: arguments of the chat template; others: see decode/sampling.py."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_new_tokens: int
    template: dict[str, Any]

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k)

    def answer_seed(self, index: int, turn: int) -> int:
        """The seed of one answer, below 2^31: answers to equal prompts shall not be equal."""
        return int.from_bytes(hashlib.sha256(f"{self.seed} {index} {turn}".encode()).digest()[:4]) >> 1
