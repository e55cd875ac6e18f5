"""The scripts of tools/, imported as modules."""

import importlib.util
import pathlib
import sys
import types

TOOLS = pathlib.Path(__file__).parents[1] / "tools"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
