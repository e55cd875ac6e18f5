"""Where in the tokens of a text each answer begins and ends.

A text is tokenised once, as a whole. A server sees only what stands before an answer: the boundary is where the
tokens of that part alone end, if they are also the first tokens of the whole. Special tokens cut a text before
anything else, so what stands before one is tokenised independently of what follows it, and it is enough to
tokenise again from the last special token before the boundary.
"""

import bisect
import dataclasses
import functools
import re
from collections.abc import Collection
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflash_jax.chat.rendering import REASONING_MODE
from dflash_jax.sources.unused import UnusedRow

# What is tokenised again is nearly always the same few characters ("<|im_start|>assistant\n"), unless it is more.
REMEMBERED_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Turn:
    """A trained answer: the characters begin:end of a text.

    message: its index in the conversation. truncated: the target did not write the token that ends it.
    """

    message: int
    begin: int
    end: int
    truncated: bool = False


class Vocabulary:
    """A tokenizer, and which of its tokens cut a text and which end an answer.

    longest: a text of n tokens has at most n times so many characters.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_tokens: Collection[int]) -> None:
        self.tokenizer = tokenizer
        vocab = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder()
        size = max([*vocab.values(), *stop_tokens]) + 1
        self.longest = max(map(len, vocab))
        self.stops, self.added, self.cuts = (np.zeros(size, bool) for _ in range(3))
        self.stops[list(stop_tokens)] = True
        self.added[list(added)] = True
        # Where the text is normalised first, a token that is matched after that may depend on what follows it.
        raw = tokenizer.normalizer is None
        self.cuts[[index for index, token in added.items() if raw or not token.normalized]] = True
        self.content = {index: token.content for index, token in added.items()}
        self.ids_of_short = functools.lru_cache(maxsize=4096)(self.ids)
        self.pattern = functools.lru_cache(maxsize=256)(self._pattern)

    def ids(self, text: str) -> list[int]:
        # A single text at a time has no fast way without offsets, which cost a fifth.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def names(self, ids: list[int]) -> str:
        return " ".join(repr(self.tokenizer.decode([index], skip_special_tokens=False)) for index in ids)

    def _pattern(self, ids: frozenset[int]) -> re.Pattern[str]:
        """What finds these added tokens in a text as the tokenizer does: the first, and of those the longest."""
        longest_first = sorted((self.content[index] for index in ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))


class TokenisedText:
    """A text and its tokens; `tokens`: [n] int32."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.text = text
        self._vocabulary = vocabulary
        self._ids = vocabulary.ids(text)
        self.tokens = np.array(self._ids, np.int32)
        added = np.flatnonzero(vocabulary.added[self.tokens]).tolist()
        self._cuts = [token for token in added if vocabulary.cuts[self._ids[token]]]
        # Characters of tokens. Those that cut the text are found in it; if that is not certain, they have offsets.
        self._spans: dict[int, tuple[int, int]] = {}
        if added and len(self._cuts) == len(added):
            ids = [self._ids[token] for token in added]
            found = list(vocabulary.pattern(frozenset(ids)).finditer(text))
            if [match.group() for match in found] == [vocabulary.content[index] for index in ids]:
                self._spans = {token: match.span() for token, match in zip(added, found, strict=True)}

    def count(self, end: int) -> int:
        """The number of tokens up to that character."""
        if end >= len(self.text):
            return len(self.tokens)
        return bisect.bisect_right(range(len(self.tokens)), end, key=self._end)

    def beginning(self, count: int) -> str | None:
        """The text of the first `count` tokens; None if there are fewer."""
        return self.text[: self._end(count - 1)] if count <= len(self.tokens) else None

    def trained(self, turn: Turn) -> slice:
        """The tokens that the target wrote for an answer.

        Raises UnusedRow("unverified") if no token ends it, or if a token lies on both sides of its beginning.
        """
        begin = self._boundary(turn)
        stops = np.flatnonzero(self._vocabulary.stops[self.tokens[begin:]])
        if not len(stops) or self._end(stop := begin + int(stops[0])) > turn.end:
            known = np.flatnonzero(self._vocabulary.stops).tolist()
            raise UnusedRow(
                "unverified",
                f"messages[{turn.message}]: the chat template closes the answer with no token that ends one "
                f"({self._vocabulary.names(known)}); set the template's own as eos_token in tokenizer_config.json",
            )
        return slice(begin, stop + (not turn.truncated))

    def _boundary(self, turn: Turn) -> int:
        """The number of tokens before the answer, which are exactly those of the text before it alone."""
        for first, start in (self._last_cut(turn.begin), (0, 0)):
            alone = self._ids_alone(start, turn.begin)
            if self._ids[first : first + len(alone)] == alone:
                return first + len(alone)
        pairs = enumerate(zip(alone, self._ids, strict=False))
        at = next((index for index, (one, other) in pairs if one != other), min(len(alone), len(self._ids)))
        shown = slice(max(at - 2, 0), at + 2)
        raise UnusedRow(
            "unverified",
            f"messages[{turn.message}]: the tokens of its prompt end with {self._vocabulary.names(alone[shown])}; "
            f"with the answer they are {self._vocabulary.names(self._ids[shown])}, which the target never saw; "
            f"{REASONING_MODE}, or take white space away from the answer's beginning",
        )

    def _ids_alone(self, start: int, end: int) -> list[int]:
        short = end - start <= REMEMBERED_LENGTH
        return (self._vocabulary.ids_of_short if short else self._vocabulary.ids)(self.text[start:end])

    def _last_cut(self, end: int) -> tuple[int, int]:
        """The last token up to that character that cuts the text, and its first character; zeros if none does."""
        cut = bisect.bisect_right(self._cuts, end, key=self._end) - 1
        if cut < 0:
            return 0, 0
        token = self._cuts[cut]
        start, stop = self._span(token)
        # Text that only becomes this token by the normaliser and merges is not cut by it; and where offsets leave
        # out white space, the token may reach further.
        return (token, start) if self._vocabulary.content[self._ids[token]] in self.text[start:stop] else (0, 0)

    def _end(self, token: int) -> int:
        return self._span(token)[1]

    def _span(self, token: int) -> tuple[int, int]:
        return self._spans.get(token) or self._offsets.token_to_chars(token)

    @functools.cached_property
    def _offsets(self) -> Any:
        return self._vocabulary.tokenizer.encode(self.text, add_special_tokens=False)
