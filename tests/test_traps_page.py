"""The page of traps names all of them, and only code and tests that exist."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "traps.md"
REFERENCE = re.compile(r"`([\w/]+\.py)(?:::([\w.]+)(?:\[([^\]]+)\])?)?`")


def page_faults(page: str, root: pathlib.Path) -> list[str]:
    """Traps that the page's table leaves out, and files, functions and test ids that do not exist."""
    lines = re.findall(r"^\| T(\d+) (.*)$", page, flags=re.MULTILINE)
    numbers = [int(number) for number, _ in lines]
    faults = [f"T{number}: {numbers.count(number)} lines" for number in range(1, 37) if numbers.count(number) != 1]
    for number, text in lines:
        found = REFERENCE.findall(text)
        faults += [f"T{number}: {fault}" for reference in found if (fault := missing(*reference, root))]
        if "not built" not in text and not any(file.startswith("tests/") for file, *_ in found):
            faults.append(f"T{number}: no test")
    return faults


def missing(file: str, name: str, test_id: str, root: pathlib.Path) -> str:
    if not (root / file).is_file():
        return f"no file {file}"
    text = (root / file).read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    inner = {
        f"{node.name}.{part.name}" for node in nodes for part in node.body if isinstance(part, ast.FunctionDef)
    }
    if name and name not in {node.name for node in nodes} | inner:
        return f"no {name} in {file}"
    return f"no {test_id} in {file}" if test_id and f'"{test_id}"' not in text else ""


def test_the_page_names_every_trap_and_nothing_that_is_missing():
    assert page_faults(PAGE.read_text(), ROOT) == []


def test_a_wrong_page_is_found_out():
    good, here = "\n".join(f"| T{number} | not built |" for number in range(1, 36)), "tests/test_traps.py"
    for line, fault in [
        ("", "T36: 0 lines"),
        ("| T36 | `dflash_jax/none.py::f` not built |", "T36: no file dflash_jax/none.py"),
        (f"| T36 | `{here}::nothing` |", f"T36: no nothing in {here}"),
        (f"| T36 | `{here}::case[T0-{0}]` |", f"T36: no T0-0 in {here}"),
        ("| T36 | `dflash_jax/batch.py::Batch` |", "T36: no test"),
        (f"| T36 | `{here}::Tokens.__len__` |", None),
    ]:
        assert page_faults(f"{good}\n{line}", ROOT) == ([fault] if fault else [])
