"""What a training uses of its machine: memory in GiB, and the share of its devices' arithmetic (MFU)."""

import functools
import pathlib
from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.models.flops import drafter_flops, peak_flops, target_flops
from dflash_jax.training.described import Arrived

GIB = 2**30
STATM = pathlib.Path("/proc/self/statm")  # Linux; its second number counts pages in memory
PAGE = 4096

Flops = Callable[..., float]  # (rows=, length=) -> floating-point operations of a batch


class Usage:
    """Of the devices of both meshes, and of this process. head_rows: of the head that a step looks at."""

    def __init__(self, experiment: Experiment, meshes: Meshes, *, head_rows: int):
        teacher, taps = experiment.needs_teacher, experiment.taps
        self._meshes = meshes
        self._target: Flops = functools.partial(
            target_flops, experiment.files.config, last_tap=None if teacher else taps[-1]
        )
        self._drafter: Flops = functools.partial(
            drafter_flops,
            experiment.drafter,
            anchors=experiment.recipe.objective.anchors,
            head_rows=head_rows,
            teacher=teacher,
        )
        self._peaks = peak(meshes.target), peak(meshes.drafter)

    def measures(self, group: Sequence[Arrived], *, step_s: float) -> dict[str, float]:
        """Under the names of the log: GiB in use where devices or system say it, MFU where a peak is known.

        A target whose features were recalled has done nothing for the step.
        """
        computed = [item for item in group if not item.featured.recalled]
        found = {
            "target_mfu": _share(self._target, computed, self._peaks[0], step_s),
            "drafter_mfu": _share(self._drafter, group, self._peaks[1], step_s),
            "target_memory_gib": device_memory(self._meshes.target),
            "drafter_memory_gib": device_memory(self._meshes.drafter),
            "host_memory_gib": process_memory(),
        }
        return {name: value for name, value in found.items() if value is not None}


def peak(mesh: Mesh) -> float | None:
    """Floating-point operations a second that all devices of a mesh can do at most; None where it is not known."""
    each = peak_flops(mesh.devices.flat[0].device_kind)
    return None if each is None else each * mesh.devices.size


def device_memory(mesh: Mesh) -> float | None:
    """Memory in use on the fullest device of this process's part of a mesh; None where none says it (CPU)."""
    found = [stats["bytes_in_use"] for device in mesh.local_devices if (stats := device.memory_stats())]
    return max(found) / GIB if found else None


def process_memory() -> float | None:
    """Memory of this process that is resident; None where the system does not say."""
    try:
        return int(STATM.read_text().split()[1]) * PAGE / GIB
    except OSError:
        return None


def _share(flops: Flops, batches: Sequence[Arrived], most: float | None, seconds: float) -> float | None:
    if most is None:
        return None
    shapes = (item.host.tokens.shape for item in batches)
    return sum(flops(rows=rows, length=length) for rows, length in shapes) / (seconds * most)
