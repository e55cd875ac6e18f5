"""The plan of a pass over lengths as in a real run: how long it takes, how the buckets take turns, what it wastes.

    python tools/bench_plan.py [key=value of dflash_jax.plan ...]

902,087 lengths of 64 to 8,192 tokens: 17.3 % up to 770, 20.2 % over 3,296 with a falling tail, the rest between.
"""

import pathlib
import resource
import sys
import tempfile

import numpy as np

from dflash_jax import plan
from dflash_jax.arguments import run_entry_point
from dflash_jax.config import PlanConfig

RECORDS = 902_087
BORDERS = (63, 770, 1216, 1728, 2432, 3296, 8192)
SHARES = (0.173, 0.15625, 0.15625, 0.15625, 0.15625, 0.202)
TAIL = 1500.0  # mean tokens over 3,296


def real_lengths(records: int, *, seed: int = 0) -> np.ndarray:
    """[records] int32, in random order."""
    rng = np.random.default_rng(seed)
    buckets = rng.choice(len(SHARES), records, p=SHARES)
    low, high = np.array(BORDERS)[buckets] + 1, np.array(BORDERS)[buckets + 1]
    even = rng.integers(low, high + 1)
    tail = np.minimum(low + rng.exponential(TAIL, records).astype(int), high)
    return np.where(buckets == len(SHARES) - 1, tail, even).astype(np.int32)


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "lengths.npy"
        np.save(file, real_lengths(RECORDS))
        status = plan.main([f"data={file}", *arguments])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"peak memory {peak / 2**30:.2f} GiB")
    return status


if __name__ == "__main__":
    run_entry_point(main, usage=__doc__, schema=PlanConfig)
