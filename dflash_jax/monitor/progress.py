"""What a person sees of a running training: a bar on a terminal, a plain line now and then elsewhere.

    step 120/2000  epoch 0.52/6  loss 3.21  accept 1.42  12.3 ktok/s  eta 5:31

Both are made from completed lines of train_log.jsonl and go to standard error, as do the bar over a target's
weights while they are loaded, the one over source files while they are tokenised, and the one over answers.
"""

import math
import sys
import time
from typing import Any, Self

import tqdm

PREFIXES = ((1e6, "M"), (1e3, "k"))


def describe(line: dict) -> str:
    """The figures of a log line worth watching; those that it lacks are left out.

    Read are epoch and epochs (passes), loss, accept_len (tokens), drafter_tok_s (trained tokens a second) and
    eta_s (seconds to the end of the last pass).
    """
    parts = []
    if "epoch" in line:
        passes = f"/{line['epochs']}" if "epochs" in line else ""
        parts.append(f"epoch {float(line['epoch']):.2f}{passes}")
    if "loss" in line:
        parts.append(f"loss {float(line['loss']):.3g}")
    if "accept_len" in line:
        parts.append(f"accept {float(line['accept_len']):.2f}")
    if "drafter_tok_s" in line:
        parts.append(_rate(float(line["drafter_tok_s"])))
    if "eta_s" in line:
        parts.append(f"eta {_duration(float(line['eta_s']))}")
    return "  ".join(parts)


class Progress:
    """Shows steps `start` + 1 to `total_steps`; give `show` to a RunLog as its observer.

    interval_s: seconds between plain lines; the first and the last step shown always have theirs.
    """

    def __init__(self, total_steps: int, *, start: int, interval_s: float = 15.0):
        self._total = total_steps
        self._interval_s = interval_s
        self._next_s = -math.inf
        self._unprinted: dict | None = None
        self._bar = _bar("step {n_fmt}/{total_fmt} {bar} {percentage:.0f}%{postfix}", total_steps, initial=start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, line: dict) -> None:
        """Take in the log line of one step."""
        if self._bar is not None:
            self._bar.set_postfix_str(describe(line), refresh=False)
            self._bar.update(line["step"] - self._bar.n)
            return
        self._unprinted = line
        if line["step"] >= self._total or time.monotonic() >= self._next_s:
            self._print()

    def note(self, text: str) -> None:
        """Print a line of text above the bar."""
        tqdm.tqdm.write(text, file=sys.stderr)

    def warn(self, text: str) -> None:
        """Print what a person should know, though the run goes on."""
        self.note(f"warning: {text}")

    def close(self) -> None:
        """Print the last step if it was not yet, and end the bar."""
        if self._bar is not None:
            self._bar.close()
        elif self._unprinted is not None:
            self._print()

    def _print(self) -> None:
        line, self._unprinted = self._unprinted, None
        assert line is not None
        print(f"step {line['step']}/{self._total}  {describe(line)}", file=sys.stderr, flush=True)
        self._next_s = time.monotonic() + self._interval_s


class Loading:
    """Shows how many of a target's bytes are on its devices; give `add` to `TargetFiles.load`."""

    def __init__(self, name: str, total_bytes: int):
        self._name, self._total_bytes = name, total_bytes
        self._start_s = time.monotonic()
        look = "{desc}  {n_fmt}B/{total_fmt}B {bar} {percentage:.0f}%"
        self._bar = _bar(look, total_bytes, desc=f"loading {name}", unit_scale=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            seconds = time.monotonic() - self._start_s
            print(f"loaded {self._name}: {self._total_bytes / 1e9:.2f} GB in {seconds:.1f} s", file=sys.stderr)

    def add(self, loaded_bytes: int) -> None:
        """Take in that more bytes were loaded."""
        if self._bar is not None:
            self._bar.update(loaded_bytes)


class Preparing:
    """Shows how much of the source files is tokenised; give `add` to `prepare_records`.

    Speeds are counted from the first bytes on: these come after the workers' start, and with them those that an
    earlier run has done. interval_s: seconds between plain lines.
    """

    def __init__(self, total_bytes: int, *, interval_s: float = 15.0):
        self._total_bytes, self._interval_s = total_bytes, interval_s
        self._bytes, self._tokens = 0, 0
        self._first: tuple[float, int, int] | None = None  # seconds, bytes and tokens at the first call
        self._next_s = time.monotonic() + interval_s
        look = "{desc}  {n_fmt}B/{total_fmt}B {bar} {percentage:.0f}%{postfix}"
        self._bar = _bar(look, total_bytes, desc="tokenised", unit_scale=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, done_bytes: int, tokens: int) -> None:
        """Take in that so many more bytes are done, and how many tokens they gave."""
        self._bytes, self._tokens = self._bytes + done_bytes, self._tokens + tokens
        now_s = time.monotonic()
        if self._first is None:
            self._first = (now_s, self._bytes, self._tokens)
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed(now_s), refresh=False)
            self._bar.update(done_bytes)
        elif now_s >= self._next_s:
            done, total = (tqdm.tqdm.format_sizeof(count, "B") for count in (self._bytes, self._total_bytes))
            percent = 100 * self._bytes / self._total_bytes
            print(f"tokenised {done}/{total}  {percent:.0f}%  {self._speed(now_s)}", file=sys.stderr, flush=True)
            self._next_s = now_s + self._interval_s

    def _speed(self, now_s: float) -> str:
        assert self._first is not None
        first_s, first_bytes, first_tokens = self._first
        seconds, read = now_s - first_s, self._bytes - first_bytes
        if not seconds or not read:
            return "eta -"
        eta_s = (self._total_bytes - self._bytes) * seconds / read
        return f"{_rate((self._tokens - first_tokens) / seconds)}  eta {_duration(eta_s)}"


class Answering:
    """Shows how many answers a target has given; those that an earlier run got are there from the start.

    conversations, answers: wanted in all; done, settled: how many of each are there, or not wanted any more.
    interval_s: seconds between plain lines.
    """

    def __init__(self, conversations: int, answers: int, *, done: int, settled: int, interval_s: float = 15.0):
        self._conversations, self._answers, self._interval_s = conversations, answers, interval_s
        self._done, self._settled, self._before, self._tokens = done, settled, settled, 0
        self._start_s = time.monotonic()
        self._next_s = self._start_s + interval_s
        look = "answered {n_fmt}/{total_fmt} {bar} {percentage:.0f}%{postfix}"
        self._bar = _bar(look, answers, initial=settled)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self._print()

    def add(self, *, conversations: int, answers: int, tokens: int) -> None:
        """Take in how many more of each are settled, and how many tokens were generated."""
        self._done, self._settled = self._done + conversations, self._settled + answers
        self._tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures(), refresh=False)
            self._bar.update(answers)
        elif time.monotonic() >= self._next_s:
            self._print()
            self._next_s = time.monotonic() + self._interval_s

    def _print(self) -> None:
        print(f"answered {self._settled}/{self._answers}  {self._figures()}", file=sys.stderr, flush=True)

    def _figures(self) -> str:
        seconds, fresh = max(time.monotonic() - self._start_s, 1e-9), self._settled - self._before
        eta_s = (self._answers - self._settled) * seconds / fresh if fresh else math.inf
        conversations = f"conversations {self._done}/{self._conversations}"
        return f"{conversations}  {_rate(self._tokens / seconds)}  eta {_duration(eta_s)}"


class Decoded:
    """Shows how many prompts of an evaluation are decoded. interval_s: seconds between plain lines."""

    def __init__(self, prompts: int, *, interval_s: float = 15.0):
        self._prompts, self._interval_s = prompts, interval_s
        self._done = 0
        self._start_s = time.monotonic()
        self._next_s = self._start_s + interval_s
        self._bar = _bar("decoded {n_fmt}/{total_fmt} prompts {bar} {percentage:.0f}%{postfix}", prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self) -> None:
        """Take in that one more prompt is decoded in all ways."""
        self._done += 1
        seconds = max(time.monotonic() - self._start_s, 1e-9)
        eta = _duration((self._prompts - self._done) * seconds / self._done)
        if self._bar is not None:
            self._bar.set_postfix_str(f"eta {eta}", refresh=False)
            self._bar.update(1)
        elif time.monotonic() >= self._next_s:
            print(f"decoded {self._done}/{self._prompts} prompts  eta {eta}", file=sys.stderr, flush=True)
            self._next_s = time.monotonic() + self._interval_s


def _bar(look: str, total: int, **options: Any) -> tqdm.tqdm | None:
    """A bar on a terminal, in tqdm's format language; None elsewhere."""
    if not sys.stderr.isatty():
        return None
    return tqdm.tqdm(total=total, bar_format=look, dynamic_ncols=True, file=sys.stderr, **options)


def _rate(tokens_s: float) -> str:
    for size, prefix in PREFIXES:
        if tokens_s >= size:
            return f"{tokens_s / size:.1f} {prefix}tok/s"
    return f"{tokens_s:.0f} tok/s"


def _duration(seconds: float) -> str:
    """5:31 or 3:05:31, with days as 2d 3:05:31; a dash while unknown."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02d}"
    return (f"{days}d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"
