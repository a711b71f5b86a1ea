"""Compiles the attention kernel for TPUs that are not here, and reads the compiler's schedule.

    python -m bench.tpu_kernel             every case: about half an hour on two cores
    python -m bench.tpu_kernel v6e 256     those whose name has every word; the others keep their results
    python -m bench.tpu_kernel --to FOLDER  writes there, not to results/

Needs the extra fit-tpu. Writes results/tpu_kernel.json and results/tpu_kernel.md. A bundle is one instruction word,
which takes a cycle if nothing waits. The schedule shows no wait for memory, none for the matrix units, and no clock.
"""

import argparse
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.tpu_kernel_page import write_page
from sppo_jax.plan.parts import cache_head_dim

RESULTS = Path(__file__).parent / "results" / "tpu_kernel.json"
# A small topology of each chip.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
KERNELS = ("forward", "backward")
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel to compile.

    Args:
        chip: in `TOPOLOGIES`.
        kernel: in `KERNELS`.
        heads: key-value heads, query heads of each, elements of a head.
        tokens: queries of the chunk, and keys of the buffer.
        dtype: of queries and keys.
        sums: dtype of dK and dV.
    """

    chip: str
    kernel: str
    heads: tuple[int, int, int]
    tokens: tuple[int, int] = (8192, 65536)
    dtype: str = "bfloat16"
    sums: str = "float32"

    @property
    def name(self) -> str:
        """The words that tell the case from others."""
        return f"{self.chip} {self.kernel} heads {self.heads} tokens {self.tokens} {self.dtype} sums {self.sums}"


# Scores of the first cases come in blocks of 1024 queries and 1024 keys in a turn of the inner loop.
SCORES = [
    Case(chip=chip, kernel=kernel, heads=(1, 4, head_dim))
    for chip in TOPOLOGIES
    for head_dim in (64, 128, 256)
    for kernel in KERNELS
]
# Of a quarter as many scores: blocks are half as long, and half as wide.
FLOAT32 = [
    Case(chip=chip, kernel=kernel, heads=(1, 4, head_dim), dtype="float32")
    for chip in TOPOLOGIES
    for head_dim in (128, 256)
    for kernel in KERNELS
]
OTHERS = [
    Case(chip="v5p", kernel=kernel, **shape)
    for shape in (
        {"heads": (4, 8, 128), "tokens": (2048, 66560), "sums": "bfloat16"},
        {"heads": (2, 7, 128), "tokens": (4096, 36864)},
        {"heads": (1, 64, 128), "tokens": (2048, 16384)},
        {"heads": (2, 4, 128), "tokens": (384, 1536)},
        {"heads": (1, 8, 64), "tokens": (4096, 36864), "sums": "bfloat16"},
        {"heads": (2, 4, 96), "tokens": (4096, 36864)},
    )
    for kernel in KERNELS
]
CASES = SCORES + FLOAT32 + OTHERS


def prepare(folder: str, flags: str = "") -> None:
    """Has libtpu write its schedules to a folder; call it before jax is imported.

    Args:
        folder: where.
        flags: more of libtpu's.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {flags}"


def measure(case: Case, folder: str) -> dict[str, Any]:
    """Compiles a case, and returns its figures."""
    from sppo_jax.compat import allocated_bytes  # imports jax

    for old in Path(folder).iterdir():
        old.unlink()
    compiled = _compile(case)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    allocated = allocated_bytes(memory)
    loops = list(inner_loops(Path(folder), f"prefix_attention_{case.kernel}"))
    full, edge = loops[0], loops[len(loops) // 2]
    return {
        "name": case.name,
        **asdict(case),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **{name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        "bundles": full["bundles"],
        "matrix_share": full["matrix_share"],
        "edge_bundles": edge["bundles"],
        "vmem_mib": round(_vmem_bytes(text, case.kernel) / MIB, 1),
        "alias_mib": round(memory.alias_size_in_bytes / MIB, 1),
        "allocated_mib": allocated and round(allocated / MIB, 1),
        "cache_copies": _copies_of_cache(text, case),
    }


def _compile(case: Case):
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from sppo_jax.attention.intervals import Intervals
    from sppo_jax.attention.pallas_blocks import Target, choose_blocks
    from sppo_jax.attention.tpu.backward import QueryRows, backward
    from sppo_jax.attention.tpu.forward import Partial, forward
    from sppo_jax.attention.tpu.pallas import with_blocks
    from sppo_jax.hardware.tpu_chips import TPU_CHIPS

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.chip]).devices[0]
    (num_kv_heads, num_groups, head_dim), (num_queries, num_keys) = case.heads, case.tokens
    dtype, float32 = jnp.dtype(case.dtype), jnp.float32
    target = Target(TPU_CHIPS[case.chip], num_groups, dtype.itemsize)
    blocks = choose_blocks(target, num_queries, num_keys)
    rows, cache = (num_kv_heads, num_groups, num_queries), _cache_shape(case)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def run_forward(q, k, v, at, interval, state):
        return forward(q, (k, v, at), with_blocks(Intervals(*interval), num_keys, blocks), state)

    def run_backward(q, k, v, at, interval, rows, sums):
        return backward(q, (k, v, at), with_blocks(Intervals(*interval), num_keys, blocks), rows, sums, at)

    q = array((*rows, head_dim), dtype)
    integers = [(array(shape, jnp.int32),) * 2 for shape in ((), (num_queries,))]
    given = (q, array(cache, dtype), array(cache, dtype), *integers)
    if case.kernel == "forward":
        state = Partial(array((*rows, head_dim), float32), array(rows, float32))
        return jax.jit(run_forward, donate_argnums=5).lower(*given, state).compile()
    of_queries = QueryRows(q, array(rows, float32), array(rows, float32))
    sums = (array((blocks.cores, *rows, head_dim), float32), *(array(cache, jnp.dtype(case.sums)),) * 2)
    return jax.jit(run_backward, donate_argnums=6).lower(*given, of_queries, sums).compile()


def _cache_shape(case: Case) -> tuple[int, ...]:
    num_kv_heads, _, head_dim = case.heads
    return 2, 2, num_kv_heads, case.tokens[1], cache_head_dim("pallas", head_dim)  # slots, layers


def _copies_of_cache(text: str, case: Case) -> int:
    """Counts the instructions of a program that copy an array of the shape of the cache."""
    shape = ",".join(map(str, _cache_shape(case)))
    return len(re.findall(rf"= \w+\[{shape}\]\S* (?:copy|fusion|transpose)\(", text))


def _vmem_bytes(text: str, kernel: str) -> int:
    line = next(line for line in text.splitlines() if f"%prefix_attention_{kernel}" in line and "custom-call(" in line)
    found = re.search(r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', line)
    assert found, "libtpu names the memory for blocks"
    return int(found[1])


def inner_loops(folder: Path, kernel: str) -> Iterator[dict[str, Any]]:
    """Yields the turns of the inner loops of a kernel: of blocks that are all visible, then of blocks that are not.

    A loop whose turns do not divide its parts is followed by what is left of it.

    Args:
        folder: of `prepare`.
        kernel: its name.
    """
    (bundles,) = (path for path in folder.glob(f"*-{kernel}*final_bundles.txt") if "schedule-analysis" not in path.name)
    (used,) = folder.glob(f"*-{kernel}*final_hlo-static-per-bundle-utilization.txt")
    _, names, capacity, _, *rows = used.read_text().splitlines()
    columns = [name.strip() for name in names.split(",")]
    matrix = next(number for number, name in enumerate(columns) if name in ("MXU", "MATMUL"))
    counts = [int(row.split()[matrix]) for row in rows if row.strip()]
    lines = [line for line in bundles.read_text().splitlines() if re.match(r"\s*0(x[0-9a-f]+)?\s.*:\s.*\{", line)]
    cuts = [0]
    for number, line in enumerate(lines[: len(counts)]):
        if "sbr.rel" in line:
            cuts.append(number + 1)
        if re.match(r"\s*\S+\s+(LB|LH|LE|PF|CT)", line):
            cuts.append(number)
    cuts = [*sorted(set(cuts)), len(counts)]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        products = sum(counts[begin:end])
        if products:
            share = products / (end - begin) / int(capacity.split()[matrix])
            yield {"bundles": end - begin, "matrix_share": round(share, 2)}


def main(arguments: list[str] | None = None) -> None:
    """Compiles the cases that are asked for, and writes the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="compile the cases whose name has every word")
    parser.add_argument("--to", type=Path, default=RESULTS.parent, help="folder of the results")
    given = parser.parse_args(arguments)
    path = given.to / RESULTS.name
    rows = {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for case in CASES:
            if all(word in case.name for word in given.words):
                rows[case.name] = measure(case, folder)
                print(json.dumps(rows[case.name]), flush=True)
                kept = [rows[case.name] for case in CASES if case.name in rows]
                path.write_text(json.dumps(kept, indent=1) + "\n")
                write_page(given.to)


if __name__ == "__main__":
    main()
