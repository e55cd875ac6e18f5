"""A model folder read tensor by tensor: one file or many, what is wrong with a folder, and host memory."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save_file

from dflash_jax.errors import UserError
from dflash_jax.published import hub_folder
from dflash_jax.published.weights import Place, fill, names
from dflash_jax.sharding import shardings

INDEX = "model.safetensors.index.json"
MAPS = pathlib.Path("/proc/self/maps")
needs_proc = pytest.mark.skipif(not MAPS.exists(), reason="what is in memory is read from /proc")


def arrays(dtype: type) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shapes = {"embed": (24, 4), "norm": (8,), **{f"expert{n}": (8, 4) for n in range(4)}}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def save(folder: pathlib.Path, tensors: dict[str, np.ndarray], *, files: int) -> pathlib.Path:
    """One file, or several that hold every n-th tensor, and their index."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(list(tensors.items())[number::files])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_come_in_the_dtype_they_are_stored_in(tmp_path, files, dtype):
    tensors = arrays(dtype)
    found = dict(hub_folder.tensors(save(tmp_path, tensors, files=files)))
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        stored = found[name]
        assert (stored.shape, stored.read(()).dtype) == (array.shape, array.dtype)
        assert stored.size_bytes == array.nbytes
        np.testing.assert_array_equal(stored.read(()), array)
        part = (slice(2, 7), slice(1, 3))[: array.ndim]
        np.testing.assert_array_equal(stored.read(part), array[part])


@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_fills_a_mesh_with_experts_from_several_files(tmp_path, files):
    tensors = arrays(ml_dtypes.bfloat16)
    shapes = {"embed": (24, 4), "norm": (8,), "experts": (4, 8, 4)}
    axes = {"embed": ("a", "b"), "norm": ("a",), "experts": ("b", "a", "c")}
    abstract = nnx.from_flat_state(
        [((n,), nnx.Param(jax.ShapeDtypeStruct(s, jnp.float32), axes=axes[n])) for n, s in shapes.items()]
    )
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def place(name: str) -> Place:
        return Place("experts", (int(name[-1]),)) if name.startswith("expert") else Place(name)

    where = shardings(abstract, mesh, {"a": "model", "b": None, "c": None})
    folder = save(tmp_path, tensors, files=files)
    state = fill(abstract, hub_folder.tensors(folder), shardings=where, source="folder", place=place)
    found = {name: variable.get_value() for name, variable in names(state).items()}
    for name in ("embed", "norm"):
        np.testing.assert_array_equal(found[name], tensors[name].astype(np.float32))
    for number, part in enumerate(found["experts"]):
        np.testing.assert_array_equal(part, tensors[f"expert{number}"].astype(np.float32))
    assert {len(value.addressable_shards) for value in found.values()} == {8}
    assert {shard.data.shape for shard in found["experts"].addressable_shards} == {(4, 2, 4)}


def test_a_tensor_without_dimensions_is_read(tmp_path):
    ((_, stored),) = hub_folder.tensors(save(tmp_path, {"x": np.array(3.5, np.float32)}, files=1))
    assert stored.shape == ()
    assert stored.read(()).tolist() == 3.5


def test_quantised_dtypes_are_told_as_the_file_spells_them(tmp_path):
    tensors = {"x": np.zeros(3, np.uint8), "y": np.zeros(3, ml_dtypes.float8_e4m3fn)}
    found = dict(hub_folder.tensors(save(tmp_path, tensors, files=1)))
    assert {name: stored.dtype for name, stored in found.items()} == {"x": "U8", "y": "F8_E4M3"}


@needs_proc
def test_one_file_is_open_at_a_time_and_none_at_the_end(tmp_path):
    def mapped() -> set[str]:
        lines = MAPS.read_text().splitlines()
        return {line.rpartition("/")[2] for line in lines if str(tmp_path) in line}

    found = dict(hub_folder.tensors(save(tmp_path, arrays(np.float32), files=3)))
    for name, number in (("embed", 1), ("norm", 2), ("expert1", 1)):
        found[name].read(())
        assert mapped() == {f"model-0000{number}-of-00003.safetensors"}
    del found
    assert mapped() == set()


# What is wrong with a folder.


def refused(folder: pathlib.Path) -> str:
    with pytest.raises(UserError) as raised:
        hub_folder.tensors(folder)
    return str(raised.value)


def test_files_that_are_missing_are_named(tmp_path):
    assert f"{tmp_path}: weight file model.safetensors is missing" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "read from safetensors files, and there is only pytorch_model.bin" in refused(tmp_path)
    save(tmp_path, arrays(np.float32), files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "weight file model-00002-of-00003.safetensors is missing (1 in all)" in refused(tmp_path)
    (tmp_path / INDEX).unlink()
    assert f"{INDEX} is missing, which lists model-00001-of-00003.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_a_damaged_file_is_named(tmp_path, kept):
    file = save(tmp_path, arrays(np.float32), files=3) / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file}: damaged or not a safetensors file" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '{"weights": {}}', '{"weight_map": ["a"]}'])
def test_a_damaged_index_is_named(tmp_path, text):
    save(tmp_path, arrays(np.float32), files=3)
    (tmp_path / INDEX).write_text(text)
    assert f"{tmp_path / INDEX}: not the index of a model" in refused(tmp_path)


def test_an_index_of_other_files_is_named(tmp_path):
    save(tmp_path, arrays(np.float32), files=3)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] |= {
        "norm": "model-00001-of-00003.safetensors",
        "other": "model-00002-of-00003.safetensors",
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert f"{INDEX}: norm is not in model-00001-of-00003.safetensors (2 such" in refused(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    save(tmp_path, {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}, files=2)
    save_file(
        {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}, tmp_path / "model-00002-of-00002.safetensors"
    )
    abstract = nnx.from_flat_state(
        [((name,), nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32))) for name in "xy"]
    )
    where = shardings(abstract, Mesh(np.array(jax.devices()[:1]), ("data",)), {})
    with pytest.raises(UserError, match="folder: 1 tensors do not fit the model: x is given more than once"):
        fill(abstract, hub_folder.tensors(tmp_path), shardings=where, source="folder")


# Host memory: in a process of its own, what is there before and at most while a folder is loaded on CPU devices.

MEASURE = """
import pathlib, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from dflash_jax.published import hub_folder
from dflash_jax.published.stored import Stored
from dflash_jax.published.weights import fill
from dflash_jax.sharding import shardings

def kib(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

def abstract(name, stored):
    leaf = jax.ShapeDtypeStruct(stored.shape, jnp.bfloat16)
    return tuple(name.split(".")), nnx.Param(leaf, axes=("rows", "columns"))

folder = pathlib.Path(sys.argv[1])
state = nnx.from_flat_state([abstract(*item) for item in hub_folder.tensors(folder)])
mesh = Mesh(np.array(jax.devices()), ("model",))
rules = {"rows": sys.argv[2] or None, "columns": sys.argv[3] or None}
places = shardings(state, mesh, rules)
tensors = [("x", Stored.of(np.zeros((8, 8), np.float32)))]
small = nnx.from_flat_state([abstract(*item) for item in tensors])
fill(small, tensors, shardings=shardings(small, mesh, rules), source="warm-up")
before = kib("VmRSS")
loaded = fill(state, hub_folder.tensors(folder), shardings=places, source="folder")
print(before, kib("VmHWM"), kib("VmRSS"))
"""


def peak_bytes(folder: pathlib.Path, *, axis: int) -> int:
    """By how much the process grows at most; axis: which one of every tensor is split over the devices."""
    rules = ["model", ""] if axis == 0 else ["", "model"]
    # VmHWM, not ru_maxrss: the latter starts with the size of the process that started this one.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), *rules], capture_output=True, text=True, check=True
    )
    before, most, after = (1024 * int(word) for word in done.stdout.split())
    print(f"before {before / 1e9:.3f} GB, at most {most / 1e9:.3f}, after {after / 1e9:.3f}")
    return most - before


def save_blocks(folder: pathlib.Path, *, files: int, blocks: int, rows: int) -> tuple[int, int]:
    """(bytes of all tensors, bytes of the largest file) of a folder with an index; blocks: tensors in a file."""
    block = np.random.default_rng(0).integers(0, 2**15, (rows, 4096), np.uint16).view(ml_dtypes.bfloat16)
    places = {}
    for number in range(files):
        file = folder / f"model-{number + 1:05}-of-{files:05}.safetensors"
        tensors = {f"x{number}_{n}.weight": block for n in range(blocks)}
        save_file(tensors, file)
        places |= dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return files * blocks * block.nbytes, max(sizes)


@needs_proc
@pytest.mark.parametrize("axis", [0, 1])
def test_host_memory_stays_near_one_file_beyond_the_model(tmp_path, axis):
    total, largest = save_blocks(tmp_path, files=3, blocks=16, rows=512)
    assert peak_bytes(tmp_path, axis=axis) < total + 1.3 * largest


@needs_proc
@pytest.mark.slow
def test_host_memory_with_two_gigabytes(tmp_path):
    total, largest = save_blocks(tmp_path, files=4, blocks=8, rows=8192)
    assert total > 2e9
    assert peak_bytes(tmp_path, axis=0) < total + 1.3 * largest
