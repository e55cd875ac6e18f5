"""The house rules: who imports whom, how long files are, what names say, and that no option goes unread.

Every checker is a function of file contents that returns complaints, so that each can be shown to complain.
"""

import ast
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import pytest

from dflash_jax.config import (
    EvaluateConfig,
    ExportConfig,
    MeshLayout,
    PlanConfig,
    PrepareConfig,
    Recipe,
    RegenerateConfig,
)

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "dflash_jax"

# From the ground up: a folder or top-level module -> what it may import besides `errors` and its own folder.
FLOORS = {
    "errors": "",
    "batch": "",
    "config": "",
    "arguments": "config",
    "sharding": "",
    "mesh": "config sharding",
    "models": "",
    "published": "models",
    "objective": "batch models",
    "target_path": "",
    "sources": "",
    "chat": "sources published.gguf",
    "data": "sources chat",
    "batches": "batch data",
    "prompts": "sources chat data",
    "decode": "batch sharding models objective",
    "monitor": "",
    "diagnosis": "monitor",
    "answering": "sharding models published sources chat decode",
    "resolve": "config models objective",
    "initial": "config models published",
    "experiment": "config sharding models published objective target_path chat data batches resolve initial",
    "dataset": "sharding mesh sources data batches experiment",
    "training": "batch config sharding mesh models objective batches decode monitor resolve experiment dataset",
    "drafters": "config arguments sharding models published objective data experiment dataset training.checkpoint "
    "training.checkpoint_files",
    "evaluation": "batch config sharding models published objective prompts decode monitor drafters",
}
ENTRY_POINTS = ("train", "evaluate", "export", "regenerate", "prepare", "plan")
FLOORS |= dict.fromkeys(ENTRY_POINTS, " ".join(FLOORS))

# A library -> the only modules or folders that may import it; those in LAZY only inside a function.
LIBRARIES = {
    "torch": "",
    "transformers": "chat.tokenizer published.folder_check",
    "gguf": "published.gguf",
    "safetensors": "published.hub_folder published.reference_drafter",
    "array_record": "data.records training.feature_shards",
    "pyarrow": "sources.arrow",
    "grain": "batches.loader",
    "omegaconf": "arguments train",
    "optax": "training",
    "orbax": "training.checkpoint",
    "tensorboardX": "monitor.board",
    "matplotlib": "monitor.picture monitor.decoding_picture monitor.looks diagnosis.charts",
    "tqdm": "monitor.progress",
}
LAZY = ("transformers", "gguf", "pyarrow")
WITHOUT_JAX = (
    "errors config arguments sources chat data prompts target_path prepare plan monitor.board monitor.json_lines "
    "monitor.picture monitor.decoding_picture monitor.looks monitor.progress diagnosis"
)

MAX_LINES = 400
BANNED = "util utils helper helpers common misc lib base manager processor handler v2 new my"
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E)\b")
# The name under which the code holds each configuration, and the module that reads it (None: any).
CONFIGURATIONS = (
    (Recipe, "recipe", None),
    (EvaluateConfig, "config", "evaluate"),
    (ExportConfig, "config", "export"),
    (RegenerateConfig, "config", "regenerate"),
    (PrepareConfig, "config", "prepare"),
    (PlanConfig, "config", "plan"),
    (MeshLayout, "layout", None),
)
GROUP_PARAMETERS = ("section", "part")  # what functions call a single group that they are given

Sources = Mapping[str, str]  # a module's name inside the package -> its text


def package_sources() -> dict[str, str]:
    folder = ROOT / PACKAGE
    files = (file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py")
    return {".".join(file.relative_to(folder).with_suffix("").parts): file.read_text() for file in files}


def python_files() -> dict[str, str]:
    files = [file for folder in (PACKAGE, "tests", "tools") for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def text_files() -> dict[str, str]:
    """Every text file of the repository but data, which may quote anything."""
    generated = {"runs", "build", "dist", "__pycache__"}
    found = {}
    for file in sorted(ROOT.rglob("*")):
        folders = file.relative_to(ROOT).parts[:-1]
        hidden = any(part.startswith(".") and part != ".ci" for part in folders)
        if hidden or generated & set(folders) or not file.is_file() or file.suffix == ".jsonl":
            continue
        try:
            found[str(file.relative_to(ROOT))] = file.read_text()
        except UnicodeDecodeError:
            continue
    return found


def within(module: str, places: str) -> bool:
    """Whether the module is one of the places (separated by blanks) or lies in one of them."""
    return any(module == place or module.startswith(f"{place}.") for place in places.split())


def imports(text: str) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it runs when the module is imported) of every import; names as `from` spells them."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from ((start + alias.name, at_import) for alias in node.names)
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        at_import = at_import and not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import)

    return visit(ast.parse(text), True)


def arrows(sources: Sources) -> Iterator[tuple[str, str]]:
    """(importing module, imported module) of every import inside the package, lazy ones included."""
    for module, text in sources.items():
        for name, _ in imports(text):
            if name.startswith("."):
                yield module, name  # a relative import; it stands on no floor
            elif name.split(".")[0] == PACKAGE:
                inside = name.removeprefix(PACKAGE).removeprefix(".")
                # `from a.b import c` names either the module a.b.c or something in the module a.b.
                yield module, inside if inside in sources else inside.rpartition(".")[0] or inside


def floor_faults(sources: Sources) -> list[str]:
    faults = [f"{module} stands on no floor" for module in sources if module.split(".")[0] not in FLOORS]
    for module, imported in arrows(sources):
        unit = module.split(".")[0]
        if not within(imported, f"errors {FLOORS.get(unit, '')}") and imported.split(".")[0] != unit:
            faults.append(f"{module} imports {imported}; {unit} may import: errors {FLOORS.get(unit, '')}")
    return faults


def table_faults(floors: Mapping[str, str]) -> list[str]:
    """A floor may lean only on floors that stand before it in the table."""
    return [
        f"{unit} leans on {place}, which is not below it"
        for index, (unit, places) in enumerate(floors.items())
        for place in places.split()
        if place.split(".")[0] not in list(floors)[:index]
    ]


def cycle_faults(sources: Sources) -> list[str]:
    """Modules that remain when those whose imports are all gone are taken away again and again."""
    left: dict[str, set[str]] = {module: set() for module in sources}
    for module, imported in arrows(sources):
        left[module].add(imported)
    while free := [module for module, used in left.items() if not used & left.keys()]:
        for module in free:
            del left[module]
    return [
        f"{module} is in or above a cycle: it imports {sorted(used & left.keys())}"
        for module, used in left.items()
    ]


def library_faults(sources: Sources) -> list[str]:
    faults = []
    for module, text in sources.items():
        for name, at_import in imports(text):
            library = name.split(".")[0]
            if library in LIBRARIES and not within(module, LIBRARIES[library]):
                faults.append(f"{module} imports {library}; allowed in: {LIBRARIES[library] or 'tests only'}")
            if library in LAZY and at_import:
                faults.append(f"{module} imports {library} at its top; import it in the function that needs it")
            if library in ("jax", "flax", "chex") and within(module, WITHOUT_JAX):
                faults.append(f"{module} imports {library}; it works without jax")
    return faults


def length_faults(files: Mapping[str, str]) -> list[str]:
    lengths = {file: len(text.splitlines()) for file, text in files.items()}
    return [
        f"{file} has {lines} lines, at most {MAX_LINES}" for file, lines in lengths.items() if lines > MAX_LINES
    ]


def name_faults(files: Mapping[str, str]) -> list[str]:
    faults = []
    for file, text in files.items():
        nodes = ast.walk(ast.parse(text))
        defined = [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        for name in [*pathlib.PurePath(file).with_suffix("").parts, *defined]:
            words = re.findall(r"[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*", name)
            faults += [f"{file}: {name} says {word!r}" for word in words if word.lower() in BANNED.split()]
    return faults


def attributes(text: str) -> set[str]:
    """Every attribute in the text with the one or two names before it: {"recipe.eval", "recipe.eval.every"}."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            found |= {".".join(parts[-2:]), ".".join(parts[-3:])}
    return found


def unread_faults(schema: type, sources: Sources, *, name: str, reader: str | None) -> list[str]:
    """Options of a configuration that no module (or not `reader`) reads as NAME.key or NAME.group.key.

    A group's keys may also be read from a parameter that holds the group alone.
    """
    texts = [text for module, text in sources.items() if module == reader or (not reader and module != "config")]
    read = set().union(*map(attributes, texts))

    def unread(owner: Any, prefixes: tuple[str, ...]) -> Iterator[str]:
        hints = get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if dataclasses.is_dataclass(hints[field.name]):
                yield from unread(hints[field.name], (f"{name}.{field.name}", *GROUP_PARAMETERS))
            elif not any(f"{prefix}.{field.name}" in read for prefix in prefixes):
                yield f"{owner.__name__}.{field.name} is read nowhere as {' or '.join(prefixes)}.{field.name}"

    return list(unread(schema, (name,)))


def unfinished_faults(files: Mapping[str, str]) -> list[str]:
    lines = ((file, *line) for file, text in files.items() for line in enumerate(text.splitlines(), start=1))
    return [f"{file}, line {number}: {line.strip()}" for file, number, line in lines if UNFINISHED.search(line)]


def refuse(faults: list[str]) -> None:
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_every_floor_leans_on_lower_floors_only():
    refuse(table_faults(FLOORS))
    assert table_faults({"a": "b", "b": "a"}) == ["a leans on b, which is not below it"]


def test_modules_import_only_from_lower_floors():
    refuse(floor_faults(package_sources()))


@pytest.mark.parametrize(
    ("module", "line", "arrow"),
    [
        ("models.decoder", "from dflash_jax.mesh import Meshes", "models.decoder imports mesh;"),
        ("models.decoder", "from dflash_jax import config", "models.decoder imports config;"),
        ("config", "import dflash_jax.mesh", "config imports mesh;"),
        ("chat.chat", "from dflash_jax.models import decoder", "chat.chat imports models.decoder;"),
        ("training.loop", "def f():\n    from dflash_jax.train import main", "training.loop imports train;"),
        ("train", "from dflash_jax.evaluate import main", "train imports evaluate;"),
        ("mesh", "from . import config", "mesh imports .config;"),
        ("extra", "", "extra stands on no floor"),
    ],
)
def test_an_arrow_that_points_up_is_named(module, line, arrow):
    empty = {"config": "", "mesh": "", "models.decoder": "", "train": "", "evaluate": ""}
    (fault,) = floor_faults(empty | {module: line})
    assert fault.startswith(arrow)


def test_a_permitted_arrow_is_not_named():
    line = "from dflash_jax.published import gguf\nfrom dflash_jax.chat.chat import x\nimport dflash_jax.errors"
    sources = {"errors": "", "published.gguf": "", "chat.chat": "", "chat.tokenizer": line}
    assert floor_faults(sources) == []


def test_no_modules_import_each_other():
    refuse(cycle_faults(package_sources()))
    circle = {"models.a": "from dflash_jax.models.b import x", "models.b": "from dflash_jax.models import a"}
    assert len(cycle_faults(circle | {"models.c": ""})) == 2


def test_each_library_is_imported_where_it_belongs():
    refuse(library_faults(package_sources()))


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("models.decoder", "def f():\n    import torch", "models.decoder imports torch; allowed in: tests only"),
        ("chat.chat", "def f():\n    import transformers", "chat.chat imports transformers; allowed in:"),
        ("published.gguf", "from gguf import GGUFReader", "published.gguf imports gguf at its top"),
        ("config", "import jax.numpy as jnp", "config imports jax; it works without jax"),
        ("monitor.progress", "from flax import nnx", "monitor.progress imports flax; it works without jax"),
    ],
)
def test_a_misplaced_library_is_named(module, line, fault):
    (found,) = library_faults({module: line})
    assert found.startswith(fault)


def test_a_lazy_import_or_one_for_types_is_not_named():
    lazy = "def f():\n    import gguf\nif TYPE_CHECKING:\n    from gguf import GGUFReader"
    assert library_faults({"published.gguf": lazy}) == []


def test_folders_of_the_package_hold_no_code_of_their_own():
    assert [str(file) for file in (ROOT / PACKAGE).rglob("__init__.py") if file.read_text()] == []


def test_files_are_short():
    refuse(length_faults(python_files()))
    assert length_faults({"long.py": "\n" * 401, "short.py": "\n" * 400}) == ["long.py has 401 lines, at most 400"]


def test_names_say_something():
    # Names of tests are sentences, in which any word may be right.
    named = {file: text for file, text in python_files().items() if not file.startswith("tests/")}
    refuse(name_faults(named))


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("data/utils.py", "", "utils"),
        ("lib/mesh.py", "", "lib"),
        ("a.py", "class RunManager: ...", "Manager"),
        ("a.py", "class KVBase: ...", "Base"),
        ("a.py", "class DrafterV2: ...", "V2"),
        ("a.py", "class A:\n    def get_new_key(self): ...", "new"),
    ],
)
def test_a_name_that_says_nothing_is_named(file, text, word):
    (fault,) = name_faults({file: text})
    assert fault.startswith(f"{file}: ")
    assert fault.endswith(f"says {word!r}")


def test_a_word_inside_another_is_no_fault():
    assert name_faults({"library.py": "class Newton: ...\ndef rebased_dflash2(): ..."}) == []


@pytest.mark.parametrize(("schema", "name", "reader"), CONFIGURATIONS)
def test_every_option_is_read(schema, name, reader):
    refuse(unread_faults(schema, package_sources(), name=name, reader=reader))


Group = dataclasses.make_dataclass("Group", [("depth", int), ("height", int)])
Whole = dataclasses.make_dataclass("Whole", [("group", Group), ("out", str)])


def test_an_option_that_nobody_reads_is_named():
    def unread(text: str, *, reader: str | None = None) -> list[str]:
        faults = unread_faults(Whole, {"config": "recipe.out", "loop": text}, name="recipe", reader=reader)
        return [fault.split()[0] for fault in faults]

    assert unread("self.recipe.group.depth + section.height + len(recipe.out)") == []
    assert unread("other.depth + group.height + out") == ["Group.depth", "Group.height", "Whole.out"]
    assert "Whole.out" in unread("recipe.out", reader="train")


def test_nothing_is_left_unfinished():
    files = text_files()
    assert {"README.md", "Makefile", "pyproject.toml", ".ci/run", "dflash_jax/train.py"} <= files.keys()
    refuse(unfinished_faults(files))
    marks = ("TO" + "DO", "FIX" + "ME")
    faults = itertools.chain(*(unfinished_faults({"a.py": f"x = 1\n# {mark}: y"}) for mark in marks))
    assert [fault[:13] for fault in faults] == ["a.py, line 2:"] * 2
