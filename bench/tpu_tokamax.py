"""Compiles tokamax's attention kernel for TPUs that are not here, as `tpu_kernel.py` compiles ours.

    python -m bench.tpu_tokamax FOLDER            every case: ten minutes on two cores
    python -m bench.tpu_tokamax FOLDER v5p 128    those whose name has every word; the others keep their results

FOLDER has tokamax 0.0.17 without what it depends on: pip install --no-deps --target FOLDER tokamax==0.0.17. Needs the
extra fit-tpu and a jax that tokamax takes (0.11.1 or newer). Of the package only the kernel's own modules are imported.
Writes results/tpu_tokamax.json, and results/tpu_kernel.md again.
"""

import argparse
import importlib
import importlib.metadata
import json
import sys
import tempfile
import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.tpu_kernel import KERNELS, RESULTS, TOPOLOGIES, inner_loops, prepare
from bench.tpu_kernel_page import write_page
from sppo_jax.hardware.tpu_chips import TPU_CHIPS

PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"
# Memory for blocks as our kernel asks for it. With libtpu's own limit a backward for v5p with heads of 256 fails.
FLAGS = "--xla_tpu_scoped_vmem_limit_kib=57344"
HEADS, QUERIES, KEYS = (1, 4), 8192, 65536
BLOCKS = dict(block_q=1024, block_kv=1024, block_kv_compute=512)
BLOCKS |= dict(block_q_dkv=1024, block_kv_dkv=1024, block_kv_dkv_compute=512, dq_reduction_steps=3)
CASES = [(chip, head_dim, kernel) for chip in ("v5p", "v6e", "tpu7x") for head_dim in (128, 256) for kernel in KERNELS]


class SegmentIds(NamedTuple):
    """What tokamax's kernel module wants of its package."""

    q: Any
    kv: Any


def load(folder: Path) -> tuple[Any, Any]:
    """Imports tokamax's modules of the kernel and of masks; its package would import all that it depends on."""
    import jax.extend.core  # noqa: F401
    import numpy as np

    name = ""
    for part in PACKAGE.split("."):
        name = f"{name}.{part}".strip(".")
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    base: Any = types.ModuleType(f"{PACKAGE}.base")
    base.SegmentIds, base.DEFAULT_MASK_VALUE = SegmentIds, -0.7 * float(np.finfo(np.float32).max)
    base.SplashCustomReturnType = base.SplashResidualsType = Any
    sys.modules[base.__name__] = base
    vars(sys.modules[PACKAGE])["base"] = base
    kernel, mask = (importlib.import_module(f"{PACKAGE}.splash_attention_{name}") for name in ("kernel", "mask"))
    return kernel, mask


def measure(chip: str, head_dim: int, kernel: str, modules: tuple[Any, Any], dump: Path) -> dict[str, Any]:
    """Compiles a case, and returns its figures; of several loops those of the shortest."""
    for old in dump.iterdir():
        old.unlink()
    _compile(chip, head_dim, kernel, modules)
    name = "splash_mha_fwd" if kernel == "forward" else "splash_mha_dkv"
    is_alone = any("(PrimaryCoreRegion)" in path.read_text() for path in dump.glob(f"*-{name}*"))
    cores = TPU_CHIPS[chip].cores
    return {
        "chip": chip,
        "head_dim": head_dim,
        "kernel": kernel,
        "bundles": min(loop["bundles"] for loop in inner_loops(dump, name)),
        "cores": 1 if is_alone else cores,
        "cores_of_chip": cores,
        "tokamax": "0.0.17",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **{name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
    }


def _compile(chip: str, head_dim: int, kernel: str, modules: tuple[Any, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    splash, masks = modules
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    mask = masks.CausalMask((QUERIES, KEYS), offset=KEYS - QUERIES)
    made = splash._make_splash_attention(mask, config=splash.SplashConfig(**BLOCKS), is_mqa=False, q_seq_shards=1)
    attend = jax.tree.map(np.asarray, made)

    def array(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))

    def forward(q, k, v):
        return attend(q, k, v, None)

    def backward(q, k, v, dout):
        return jax.vjp(forward, q, k, v)[1](dout)

    num_kv_heads, num_groups = HEADS
    q, k = array(num_kv_heads * num_groups, QUERIES, head_dim), array(num_kv_heads, KEYS, head_dim)
    if kernel == "forward":
        jax.jit(forward).lower(q, k, k).compile()
    else:
        jax.jit(backward).lower(q, k, k, q).compile()


def main(arguments: list[str] | None = None) -> None:
    """Compiles the cases that are asked for, and writes the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="that has tokamax")
    parser.add_argument("words", nargs="*", help="compile the cases whose name has every word")
    given = parser.parse_args(arguments)
    path = RESULTS.with_name("tpu_tokamax.json")
    rows = {tuple(row[key] for key in ("chip", "head_dim", "kernel")): row for row in _stored(path)}
    with tempfile.TemporaryDirectory() as dump:
        prepare(dump, FLAGS)
        modules = load(given.folder.resolve())
        for case in CASES:
            if all(word in map(str, case) for word in given.words):
                rows[case] = measure(*case, modules, Path(dump))
                print(json.dumps(rows[case]), flush=True)
                path.write_text(json.dumps([rows[case] for case in CASES if case in rows], indent=1) + "\n")
                write_page(path.parent)


def _stored(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


if __name__ == "__main__":
    main()
