"""What is in a checkpoint: every tensor of it, optimizer moments included, and what two checkpoints differ in.

    python tools/inspect_checkpoint.py RUN [STEP] [STEP2]

STEP is latest, best or a number. Exit status 1 if a file is not as it was written or a tensor is not finite.
"""

import pathlib

import numpy as np

from dflash_jax.arguments import run_entry_point
from dflash_jax.errors import UserError
from dflash_jax.training import checkpoint_files
from dflash_jax.training.checkpoint import read_arrays

UNFILLED = "recent_norms"  # NaN where a run has not yet taken so many steps
HEADER = f"{'tensor':<60} {'shape':<18} {'dtype':<9} {'norm':>10} {'largest':>10} {'NaN':>6} {'Inf':>6}"


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 3:
        raise UserError("usage: python tools/inspect_checkpoint.py RUN [STEP] [STEP2]")
    folder = pathlib.Path(arguments[0]) / "checkpoints"
    steps = [saved_step(folder, wanted) for wanted in arguments[1:] or ["latest"]]
    faults = [show(folder, step) for step in steps]
    if len(steps) == 2:
        compare(folder, *steps)
    return int(any(faults))


def saved_step(folder: pathlib.Path, wanted: str) -> int:
    """The step that is meant, damaged or not. Raises UserError if there is none."""
    steps = checkpoint_files.saved(folder)
    if not steps:
        raise UserError(f"{folder} holds no checkpoint; name the directory of a run that has saved one")
    if wanted.isdecimal() and int(wanted) in steps:
        return int(wanted)
    if wanted == "latest":
        return steps[-1]
    return checkpoint_files.chosen_step(folder, wanted, key="STEP")


def show(folder: pathlib.Path, step: int) -> bool:
    """Print a step; whether something is wrong with it."""
    damage = checkpoint_files.damage(folder / str(step))
    print(f"step {step}: {f'DAMAGED, {damage}' if damage else 'every file is as it was written'}")
    if damage:
        return True
    belongs = checkpoint_files.position(folder, step)
    measured = (
        "not evaluated" if belongs.accept_len is None else f"held-out accept length {belongs.accept_len:.3f}"
    )
    print(f"{belongs.cursor} batches consumed, {measured}\n\n{HEADER}")
    broken = []
    for name, array in read_arrays(folder, step).items():
        values = np.asarray(array, np.float64)
        nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        finite = values[np.isfinite(values)]
        largest = float(np.abs(finite).max(initial=0.0))
        print(
            f"{name:<60} {'x'.join(map(str, array.shape)) or 'scalar':<18} {array.dtype!s:<9} "
            f"{np.linalg.norm(finite):>10.4g} {largest:>10.4g} {nan:>6} {inf:>6}"
        )
        if (nan or inf) and name != UNFILLED:
            broken.append(name)
    print(f"\nnot finite: {', '.join(broken) or 'nothing'}\n")
    return bool(broken)


def compare(folder: pathlib.Path, first: int, second: int) -> None:
    """Print how far each tensor of one step is from that of another."""
    before, after = read_arrays(folder, first), read_arrays(folder, second)
    print(f"{f'from step {first} to {second}':<60} {'change':>10} {'of norm':>10}")
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after or before[name].shape != after[name].shape:
            print(f"{name:<60} not in both, or of another shape")
            continue
        values = np.asarray(before[name], np.float64)
        change = np.linalg.norm(np.asarray(after[name], np.float64) - values)
        norm = np.linalg.norm(values)
        print(f"{name:<60} {change:>10.4g} {change / norm if norm else np.inf:>10.3g}")


if __name__ == "__main__":
    run_entry_point(main)
