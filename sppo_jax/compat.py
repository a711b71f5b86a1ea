"""Differences between jax versions, in one place."""

import contextlib
import ctypes
import functools
import inspect
import json
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.interpreters.mlir
import jax.numpy as jnp
from jax._src import config as jax_config

from sppo_jax.hardware.machine import driver_text
from sppo_jax.version import jaxlib_version

# openxla/xla#46231: jaxlib 0.11.0 reads reversed host slices wrongly on GPUs; fixed in 0.11.1, older ones are unproven.
MIN_JAXLIB_FOR_GPU_OFFLOAD = (0, 11, 1)


def running_platform() -> str | None:
    """Returns the platform of the default backend ("cpu", "gpu", "tpu"); None if no backend has started."""
    from jax._src import xla_bridge

    return jax.default_backend() if xla_bridge.backends_are_initialized() else None


def backend_problem(error: BaseException) -> str | None:
    """Returns why jax found no devices, in one line; None if an error has another cause."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).name != "xla_bridge.py":
        return None
    return " ".join(str(error).split()) or "no plugin of this platform is installed"


def device_pool_bytes() -> int | None:
    """Returns the bytes that XLA may take of a device's memory; None if the allocator has no limit."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def check_offload(backend: str, uses_host: bool, version: tuple[int, ...] | None = None) -> None:
    """Refuses to run host offload on versions whose gradients are wrong or were not checked.

    Args:
        backend: platform name the step runs on ("cpu", "gpu", "cuda", "rocm", "tpu").
        uses_host: whether the plan sends any activation to host memory.
        version: jaxlib version to judge; the installed one by default.

    Raises:
        ValueError: on a GPU with a jaxlib older than 0.11.1.
    """
    version = jaxlib_version() if version is None else version
    if uses_host and backend in ("gpu", "cuda", "rocm") and version < MIN_JAXLIB_FOR_GPU_OFFLOAD:
        got = ".".join(map(str, version))
        raise ValueError(
            "offload on a GPU needs jaxlib >= 0.11.1 (0.11.0 returns wrong gradients, openxla/xla#46231), got "
            f"{got}; "
            "install jax >= 0.11.1 (with Python >= 3.12), or set stash.inputs=keep stash.attention=keep "
            "stash.rest=recompute"
        )


def installed_text(version: tuple[int, ...] | None = None) -> str:
    """Returns a line on the jaxlib that is installed, and on what it cannot do.

    Args:
        version: jaxlib version; the installed one by default.
    """
    version = jaxlib_version() if version is None else version
    text = f"jaxlib {'.'.join(map(str, version))} on Python {sys.version_info.major}.{sys.version_info.minor}"
    if version < MIN_JAXLIB_FOR_GPU_OFFLOAD:
        return f"{text}: on GPUs it cannot offload to the host, which needs jax 0.11.1 or newer on Python 3.12 or newer"
    return text


# cuDNN 9.10.0 and 9.10.1: cudnn-frontend refuses attention. 9.13 and 9.14: illegal access to memory with CUDA graphs,
# more than 1024 keys and a mask that is not causal (NVIDIA/TransformerEngine#2344), as of tiles of the past. Before
# 9.18: the backward on Hopper may read a workspace that nobody has written (TransformerEngine#2186, #2448).
FAILING_CUDNN = (((9, 10, 0), (9, 10, 2)), ((9, 13, 0), (9, 15, 0)))
PROVEN_CUDNN = (9, 18, 0)
_NCCL = "libnccl.so.2"


def cudnn_version() -> tuple[int, ...] | None:
    """Returns the version of the cuDNN that jax has loaded; None if jax has no CUDA.

    Raises:
        ValueError: there is no cuDNN.
    """
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return None
    try:
        number = cuda_versions.cudnn_get_version()
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"attention by cuDNN must find cuDNN, got: {reason}; {another_cudnn()}, or plan with model.kernel=blockwise"
        ) from None
    return number // 10000, number // 100 % 100, number % 100


def nccl_version() -> tuple[int, ...] | None:
    """Returns the version of NCCL that a process of jax for CUDA loads, by NCCL's own call; None without it."""
    from importlib.util import find_spec

    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    folders = [Path(folder) / "lib" for folder in (spec and spec.submodule_search_locations) or ()]
    for path in (*(str(folder / _NCCL) for folder in folders), _NCCL):
        try:
            library, number = ctypes.CDLL(path), ctypes.c_int(0)
            library.ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        return number.value // 10000, number.value // 100 % 100, number.value % 100
    return None


def driver_version() -> str:
    """Returns the version of NVIDIA's driver; what CUDA says of the driver if the system does not tell its version."""
    from jax._src.lib import cuda_versions

    if (text := driver_text()) or cuda_versions is None:
        return text
    return f"CUDA {cuda_versions.cuda_driver_get_version()}"


def check_cudnn(device: jax.Device, version: tuple[int, ...] | None = None) -> None:
    """Refuses versions of cuDNN whose attention is known to fail, and warns of those that may fail.

    Args:
        device: one of those that run attention by cuDNN; nothing is refused for devices that one can only compile for.
        version: of cuDNN; the loaded one by default.

    Raises:
        ValueError: the version is known to fail, or there is no cuDNN.
    """
    if device.platform not in ("gpu", "cuda") or device.client.runtime_type == "compile_only_runtime":
        return
    version = cudnn_version() if version is None else version
    if version is None:
        return
    got = ".".join(map(str, version))
    if any(first <= version < end for first, end in FAILING_CUDNN):
        raise ValueError(
            "attention by cuDNN must not run on cuDNN 9.10.0, 9.10.1, 9.13 or 9.14 (refused by cudnn-frontend, or "
            f"illegal access to memory: NVIDIA/TransformerEngine#2344), got {got}; {another_cudnn()}, or plan with "
            "model.kernel=blockwise"
        )
    if version < PROVEN_CUDNN:
        warnings.warn(
            "attention by cuDNN should run on cuDNN 9.18 or newer (the backward of older ones may read "
            f"uninitialized memory, NVIDIA/TransformerEngine#2186), got {got}; {another_cudnn()}",
            stacklevel=3,
        )


def another_cudnn() -> str:
    """Returns what to do about a wrong cuDNN."""
    from jax._src.lib import cuda_versions

    found = re.search(r"cuda(\d+)", getattr(cuda_versions, "__name__", ""))
    return f"run pip install 'nvidia-cudnn-cu{found[1] if found else 13}>=9.18'"


# Made at once: with a state that is new, jax traces all functions again.
_HOST_IS_DEVICE = jax_config.bool_state(
    name="sppo_host_is_device",
    default=False,
    help="Whether buffers in pinned host memory are in device memory instead.",
    include_in_jit_key=True,
    include_in_trace_context=True,
)


def host_is_device() -> contextlib.AbstractContextManager:
    """Returns a context in which programs are traced with device memory in the place of pinned host memory.

    Such a program is the same but for its copies, down to XLA's fusions: what it computes must be the same bit for bit.
    """
    return _HOST_IS_DEVICE(True)


def to_host(x: jax.Array) -> jax.Array:
    """Moves an array to pinned host memory; `src` is named so that the type is known on both sides."""
    return jax.device_put(x, _host_space(), src=jax.memory.Space.Device)


def to_device(x: jax.Array) -> jax.Array:
    """Moves an array from pinned host memory to device memory."""
    return jax.device_put(x, jax.memory.Space.Device, src=_host_space())


def _host_space() -> jax.memory.Space:
    return jax.memory.Space.Device if _HOST_IS_DEVICE.value else jax.memory.Space.Host


def is_on_host(x: jax.Array) -> bool:
    """Returns whether the type of an array says that the array is in pinned host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def in_host_memory(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """Returns a sharding over the pinned host memory of the same devices.

    Raises:
        ValueError: the devices have no such memory.
    """
    device = sharding.mesh.devices.flat[0]
    if device.client.runtime_type == "compile_only_runtime":
        return _CompileOnlyHost(sharding.mesh, sharding.spec)
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _PINNED not in kinds:
        raise ValueError(
            f"optimizer.place=host must have devices with {_PINNED} memory, got {device.platform} with "
            f"{', '.join(kinds) or 'none'}; use optimizer.place=device"
        )
    return sharding.with_memory_kind(_PINNED)


def in_device_memory(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """Returns a sharding over the own memory of the same devices."""
    return jax.sharding.NamedSharding(sharding.mesh, sharding.spec)


def is_host(sharding: jax.sharding.Sharding) -> bool:
    """Returns whether a sharding is one over pinned host memory."""
    return sharding.memory_kind == _PINNED


_PINNED = "pinned_host"


class _PinnedHost(str):
    """The kind of pinned host memory, equal to None too: what the compiler returns for devices that are not here."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _CompileOnlyHost(jax.sharding.NamedSharding):
    """A sharding over host memory for devices that one can only compile for, whose memories jax does not know.

    jax drops the memory kind of their shardings. The compiler takes it.
    """

    @property
    def memory_kind(self) -> str:
        return _PinnedHost(_PINNED)

    _memory_kind = memory_kind


# The option that says what XLA puts into CUDA graphs.
_GRAPHS = "xla_gpu_enable_command_buffer"
# What XLA puts there by itself: read from what jaxlib 0.11.2 and 0.12.0.1 dump of their options.
_GRAPHED = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION", "CONDITIONAL")
_GRAPHED_SINCE_0_12 = ("COLLECTIVES_KERNEL",)

# Host copies by kernels that may be under way at once. A tick has at most about 20.
_MOST_COPIES = 32


# The first jaxlib whose DMA engines copy a row that is any function of a loop's counter, and not only an affine one.
MIN_JAXLIB_FOR_TABLES = (0, 12)


def writes_tables(version: tuple[int, ...] | None = None) -> bool:
    """Returns whether XLA for GPUs can write the rows that a loop's iterations copy into a lookup table.

    Args:
        version: jaxlib version; the installed one by default.
    """
    return (jaxlib_version() if version is None else version) >= MIN_JAXLIB_FOR_TABLES


def compiler_options(
    backend: str,
    uses_host: bool,
    num_devices: int,
    many_copies: bool = False,
    tables: bool = False,
    version: tuple[int, ...] | None = None,
) -> dict[str, bool | int | str] | None:
    """Returns the compiler options that overlap exchanges and host copies with compute; None if none is needed.

    On GPUs the latency-hiding scheduler is off by default. Its memory estimate counts host buffers, so that it starts
    a host copy late to save memory that is not short: with any, the limit is lifted so that it never binds. What the
    program really takes is in `memory_analysis()`. In compiled programs the scheduler has at most two copies by kernels
    under way at once, and ends any further one where it begins: that copy is exposed. Since jaxlib 0.12 XLA can write
    the rows of a loop's iterations into a lookup table, so that DMA engines copy a row that is not affine in the loop's
    counter. Other slices are copied by DMA engines then too, which took 4% more memory in a program that needs no
    table. A program of several devices has no CUDA graphs, because collectives in graphs may never end; what the user's
    XLA_FLAGS says of graphs wins.

    Args:
        backend: "cpu", "gpu", "cuda" or "tpu".
        uses_host: whether the program copies to host memory and back.
        num_devices: of the program.
        many_copies: whether more than two such copies may be under way at once.
        tables: whether rows on the host are not affine in the loops' counters.
        version: jaxlib version that compiles; the installed one by default.
    """
    if backend not in ("gpu", "cuda"):
        return None
    options: dict[str, bool | int | str] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if num_devices > 1 and _given_graphs() is None:
        options[_GRAPHS] = ""  # nothing; XLA refuses "NONE"
    if uses_host:
        options["xla_gpu_memory_limit_slop_factor"] = 2000
    if tables and writes_tables(version):
        options["xla_gpu_experimental_enable_dynamic_slice_table_offsets"] = True
    if many_copies:
        options["xla_gpu_experimental_parallel_async_compute_limit"] = _MOST_COPIES
    return options


def graph_loops(version: tuple[int, ...] | None = None) -> dict[str, str]:
    """Returns the compiler option with which XLA puts loops into CUDA graphs, beside what it puts there by itself.

    Args:
        version: jaxlib version that compiles; the installed one by default.
    """
    version = jaxlib_version() if version is None else version
    kinds = (*_GRAPHED, *(_GRAPHED_SINCE_0_12 if version >= (0, 12) else ()), "WHILE")
    return {_GRAPHS: ",".join(kinds)}


def warn_of_graphs(backend: str, num_devices: int) -> None:
    """Warns where the user's XLA_FLAGS has XLA make CUDA graphs in a program of several GPUs.

    Args:
        backend: "cpu", "gpu", "cuda" or "tpu".
        num_devices: of the program.
    """
    if backend in ("gpu", "cuda") and num_devices > 1 and (given := _given_graphs()):
        warnings.warn(
            f"a program of {num_devices} GPUs should have no CUDA graphs, in which collectives may never end, got "
            f"--{_GRAPHS}={given} in XLA_FLAGS, which is taken; remove the flag from XLA_FLAGS",
            stacklevel=3,
        )


def _given_graphs() -> str | None:
    """Returns what XLA_FLAGS has XLA put into CUDA graphs; None if XLA_FLAGS does not say."""
    words = [word.partition("=") for word in os.environ.get("XLA_FLAGS", "").split()]
    return next((value for name, _, value in reversed(words) if name == f"--{_GRAPHS}"), None)


def allocated_bytes(sizes) -> int | None:
    """Returns the device memory that XLA allocates for a program; None with jaxlib 0.10, which does not tell.

    It is what XLA:TPU compares with a device's memory. libtpu 0.0.50 says up to 46% more in `temp_size_in_bytes`.

    Args:
        sizes: from `jax.stages.Compiled.memory_analysis`.
    """
    return getattr(sizes, "total_allocation_bytes", None)


def deviceless_flags(version: tuple[int, ...] | None = None) -> dict[str, int | str]:
    """Returns the XLA flags with which programs compile for a GPU that this machine lacks.

    Args:
        version: jaxlib version that compiles; the installed one by default.
    """
    version = jaxlib_version() if version is None else version
    flags: dict[str, int | str] = {"--xla_gpu_autotune_level": 0}  # there is no GPU to try kernels on
    # Without a GPU jaxlib 0.11.1 and 0.11.2 refuse some matrix products with the operations fused into them
    # ("No supported config found"). They accept those that the newer pass fuses, which 0.12 has on by itself.
    if (0, 11, 1) <= version < (0, 12):
        flags["--xla_gpu_experimental_gemm_fusion_v2"] = "true"
    return flags


def one_at_a_time(platform: str) -> bool:
    """Returns whether a step must end before the next is dispatched.

    Simulated devices share a pool of threads: with several steps in flight those of a later one can hold the threads
    for which an earlier one waits, without end (seen with 8 devices on 2 cores, jaxlib 0.10.2). PJRT_NPROC, twice the
    number of devices or more, is another way out.
    """
    return platform == "cpu"


def keeps_order(platform: str) -> bool:
    """Returns whether the collectives of a program run in one order on all devices; see `collectives.py`."""
    return platform != "cpu"


def neighbours_keep_order() -> bool:
    """Returns whether XLA:CPU starts the collectives of one computation, without those in loops, in program order."""
    return jax.__version_info__ < (0, 11)


def scan_counts(params: dict) -> tuple[int, int]:
    """Returns how many inputs of a scan's equation are constants, and how many are carried; the rest is sliced."""
    if "ft_in" in params:  # since 0.12
        constants, carried, _ = params["ft_in"].unpack()
        return len(constants), len(carried)
    return params["num_consts"], params["num_carry"]


def cudnn_forward(operands: tuple, *, causal: bool, scale: float, window: int = 0):
    """Binds cuDNN's attention of (q_NTH, k_KSH, v_KSH, num_queries, num_keys).

    cuDNN takes a window together with the causal mask alone; 0: none.

    Returns:
        out_NTH in the dtype of q, and lse_NT in float32.
    """
    out, lse = _cudnn_bind("fwd", _cudnn_operands(*operands), causal, window, scale, is_training=True)
    return out[0], lse[0]


def cudnn_backward(operands: tuple, results: tuple, *, causal: bool, scale: float, window: int = 0):
    """Binds the backward of `cudnn_forward`, given (out_NTH, lse_NT, dout_NTH).

    Returns:
        dq_NTH, dk_KSH, dv_KSH in the dtype of q.
    """
    out_NTH, lse_NT, dout_NTH = results
    given = (*_cudnn_operands(*operands), lse_NT[None], out_NTH[None], dout_NTH[None])
    return tuple(grad[0] for grad in _cudnn_bind("bwd", given, causal, window, scale)[:3])


_FIXED_ORDER = jax_config.bool_state(
    name="sppo_deterministic_attention",
    default=False,
    help="Whether the backward of cuDNN's attention adds in a fixed order.",
    include_in_jit_key=True,
    include_in_trace_context=True,
)


def deterministic_attention() -> contextlib.AbstractContextManager:
    """Returns a context in which programs are traced with a backward of cuDNN's attention that adds in a fixed order.

    Put it around the first call of a jitted function, or around `trace` or `lower`. The context belongs to the key of
    jax's caches, so a function that was jitted before is traced again. Give XLA's flag
    `xla_gpu_exclude_nondeterministic_ops` for programs with cuDNN's backward only together with this context: else XLA
    marks the first of several equal calls alone, and does not find the others when the program starts
    (openxla/xla#46500).
    """
    return _FIXED_ORDER(True)


def sums_whole_stages(platform: str) -> bool:
    """Returns whether the compiler takes a reduce-scatter of the stacked gradients of a stage's layers.

    XLA:TPU fails on some, and on all-reduces whose sums are cut behind them: among four v5p those of [4, 14336, 4096]
    along the middle dim (libtpu 0.0.50.1: "No feasible span count for single input all reduce scatter fusion"). It
    compiles those of one layer.
    """
    return platform != "tpu"


def _cudnn_operands(q_NTH, k_KSH, v_KSH, num_queries, num_keys) -> tuple:
    """Adds the batch dim, the two lengths, and an empty array for each of bias, offsets and page tables."""
    none = jnp.zeros((0,), q_NTH.dtype)
    lengths = [jnp.asarray(count, jnp.int32).reshape(1) for count in (num_queries, num_keys)]
    return (q_NTH[None], k_KSH[None], v_KSH[None], none, *lengths, none, none, none, none)


def _cudnn_bind(way: str, operands: tuple, causal: bool, window: int, scale: float, **settings):
    """Binds cuDNN's call: the public function takes no LSE in its backward, and asks for a GPU at hand."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lowering = getattr(cudnn, f"_dot_product_attention_{way}_cuda_lowering")
    # Since 0.11 a function of the scores can be fused in; None for none.
    newer = [name for name in ("score_mod_name", "score_mod_jaxpr") if name in inspect.signature(lowering).parameters]
    return _cudnn_primitive(way, way == "bwd" and _FIXED_ORDER.value).bind(
        *operands,
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, no gradient of a bias
        mask_type=cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING,
        layout=cudnn.AttentionLayout.BNTH.value,
        sliding_window_length=window or None,
        **{name: None for name in newer},
        **settings,
    )


@functools.cache
def _cudnn_primitive(way: str, deterministic: bool) -> jax.extend.core.Primitive:
    """Makes a primitive with jax's types and lowering of cuDNN's call.

    A program with jax's own primitive must have all of its arrays on one mesh. State and batch of a training step are
    on other axes than the step's shard_map, within which this call has no mesh at all.

    Args:
        way: "fwd" or "bwd".
        deterministic: whether the call adds in a fixed order.
    """
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    primitive = jax.extend.core.Primitive(f"cudnn_attention_{way}" + "_deterministic" * deterministic)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(getattr(cudnn, f"_dot_product_attention_{way}_abstract"))
    lowering = getattr(cudnn, f"_dot_product_attention_{way}_cuda_lowering")
    if deterministic:
        lowering = functools.partial(_lower_in_fixed_order, lowering)
    jax.interpreters.mlir.register_lowering(primitive, lowering, platform="cuda")
    return primitive


def _lower_in_fixed_order(lowering, context, *operands, **settings):
    """Lowers by jax's rule, and writes into the call's configuration that the call adds in a fixed order."""
    from jax._src.lib.mlir import ir

    results = lowering(context, *operands, **settings)
    call = results[0].owner
    while call.name != "stablehlo.custom_call":  # jax transposes the results
        call = call.operands[0].owner
    backend_config = json.loads(ir.StringAttr(call.attributes["backend_config"]).value)
    backend_config["cudnn_fmha_backend_config"]["force_deterministic"] = True
    call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(backend_config))
    return results


def detect_cluster(timeout_s: int) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """Returns coordinator, number of processes, process id and local device ids as jax detects them; None for unknown.

    Args:
        timeout_s: seconds to wait for the coordinator's name to be known.
    """
    from jax._src import clusters

    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout_s)
    coordinator, num_processes, process_id, local_ids = found
    return coordinator, num_processes, process_id, None if local_ids is None else list(local_ids)


def start_distributed(host: str, address: str, *, timeout_s: int, heartbeat_s: int, **place: Any) -> None:
    """Joins the processes; those with CPU devices exchange by gloo.

    The coordinator is reached directly, also where the environment names a proxy, which gRPC would otherwise ask.

    Args:
        host: the coordinator's host.
        address: the host with the port, as gRPC reads it.
        timeout_s: seconds in which all processes must join.
        heartbeat_s: seconds of silence after which a process is taken for lost.
        place: num_processes, process_id and local_device_ids, as `jax.distributed.initialize` takes them.
    """
    if any(name.lower().endswith("_proxy") for name in os.environ):
        direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")
        os.environ["no_grpc_proxy"] = ",".join(filter(None, [direct, host]))
        # jax warns of proxies that may keep the processes from joining, which this one does not.
        jax.config.update("jax_check_proxy_envs", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=address,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=heartbeat_s,
        **place,
    )


def distributed_place() -> tuple[int, int]:
    """Returns process id and number of processes without making devices, which `jax.process_index` would."""
    from jax._src.distributed import global_state

    return (0, 1) if global_state.client is None else (global_state.process_id, global_state.num_processes)


def distributed_client():
    """Returns the client of the coordination service: its key-value store and barriers; None before `start`."""
    from jax._src.distributed import global_state

    return global_state.client


def outside_meshes() -> contextlib.AbstractContextManager:
    """Returns a context in which a program is traced as if no `jax.set_mesh` were in force."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def mesh_in_force() -> jax.sharding.AbstractMesh | None:
    """Returns the mesh of `jax.set_mesh`, None if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def has_explicit_sharding(x: jax.Array) -> bool:
    """Returns whether the type of an array says over which mesh axes the array is sharded."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)


def without_explicit_sharding(x: jax.Array) -> jax.Array:
    """Returns an array in its place, with a type that does not say how the array is sharded."""
    if not isinstance(x, jax.Array) or not has_explicit_sharding(x):
        return x
    mesh, spec = x.sharding.mesh, x.sharding.spec
    auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.shape))
    return jax.device_put(x, jax.sharding.NamedSharding(auto, spec))
