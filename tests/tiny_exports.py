"""Finished drafters small enough for tests, exported; and the speculators package without its training."""

import contextlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx

from dflash_jax import export
from dflash_jax.arguments import build
from dflash_jax.config import ExportConfig
from dflash_jax.models.drafter import FULL, SLIDING, Drafter
from dflash_jax.models.yarn import Yarn
from dflash_jax.published.drafter_card import History
from dflash_jax.published.finished_drafter import FinishedDrafter, TargetEnds
from dflash_jax.published.stored import Stored
from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.weights import names

TAPS = (0, 1)
# Of `random_drafter`, for the default target of `save_llama`.
KINDS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": (FULL, FULL), "window": None},
    "full, causal": {"layer_types": (FULL, FULL), "window": None, "is_causal": True},
    "sliding": {"layer_types": (SLIDING, FULL), "window": 9},
    "sliding, both ways": {"layer_types": (SLIDING, SLIDING), "window": 9, "is_causal": False},
    "sliding, all": {"layer_types": (SLIDING, SLIDING), "window": 9},
    "YaRN": {"layer_types": (FULL, FULL), "window": None, "yarn": Yarn(4.0, 16, 1.3, beta_fast=4.0)},
}


def finished(
    drafter: Drafter, target: pathlib.Path, *, draft_tokens: Sequence[int] | None = None
) -> FinishedDrafter:
    """A drafter as a run would have left it."""
    params = names(nnx.state(drafter))
    return FinishedDrafter(
        drafter.config,
        TAPS,
        {name: Stored.of(np.asarray(variable[...])) for name, variable in params.items()},
        TargetEnds.of(TargetFiles.open(target)),
        draft_tokens=None if draft_tokens is None else np.array(draft_tokens, np.int32),
    )


def exported(drafter: FinishedDrafter, to: pathlib.Path, **options: str) -> pathlib.Path:
    """The folder of a finished drafter."""
    config = build(ExportConfig, [("test", {"to": str(to), **options})])
    export.export(drafter, History("a target", ("made up",)), config=config, identity="one")
    return to


def converted(folder: pathlib.Path, target: pathlib.Path, to: pathlib.Path, **options: str) -> pathlib.Path:
    """The folder that `export drafter=FOLDER` writes."""
    more = [f"{key}={value}" for key, value in options.items()]
    assert export.main([f"drafter={folder}", f"target={target}", f"to={to}", *more]) == 0
    return to


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for what speculators imports for its training alone."""

    names = ("openai", "datasets", "hs_connectors")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = fullname.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _nothing(name)  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _nothing(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


@contextlib.contextmanager
def speculators_alone() -> Iterator[None]:
    """In it, speculators' models can be imported, and warnings of the packages below it are no errors."""
    finder = _Absent()
    sys.meta_path.append(finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.meta_path.remove(finder)
