"""Part `peer`, framework "torch": the same model and lengths in PyTorch, with the means that its users have at hand.

The model is transformers' LlamaForCausalLM. Its parameters are float32; the layers and the residual stream compute in
bfloat16 (autocast). The backward recomputes each layer from its input, which waits in pinned memory of the host, as
with `offload` in transformers. PyTorch copies on the stream that computes, so no kernel runs beside a copy.
The loss takes the tokens in chunks, each recomputed in the backward. The optimizer is the fused AdamW.

Letters: B sequences (one), S tokens, T tokens with a target (all but the last), C tokens of a chunk, D hidden size.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu_parts.case import Emit

_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_SEED = 0
_CLIP_NORM = 1.0
# Tokens of a chunk of the loss: with 128K words its float32 logits take 2 GiB.
_CHUNK_TOKENS = 4096
# What PyTorch and CUDA say when the device is full, when the host is, and when the host cannot pin more.
_SHORT_OF_MEMORY = ("out of memory", "can't allocate memory", "OS call failed")
_MOST_WORDS = 200


def run(settings: dict[str, Any], device: str, emit: Emit) -> None:
    """Train for a few steps at each length; stop at the first that does not fit.

    Args:
        settings: "model", "lengths" in tokens, "warm_up_steps" and "timed_steps" of each length; "attention": "flash"
            (the default) or "cudnn", the only kernel that may run.
        device: "cpu", or the name of a GPU.
        emit: takes a row a length.
    """
    place = _begin(device)
    model = make_model(settings["model"], place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    kernel = _KERNELS[settings.get("attention", "flash")]
    for length in settings["lengths"]:
        _forget(place)
        row = {"framework": "torch", "length": length}
        tokens_BS = random_tokens(settings["model"]["vocab_size"], length).to(place)
        step = partial(train_step, model, optimizer, tokens_BS, kernel)
        try:
            for _ in range(settings["warm_up_steps"]):
                step()
            steps = [_timed(step, place) for _ in range(settings["timed_steps"])]
        except (RuntimeError, MemoryError) as error:
            if not _is_short_of_memory(error):
                raise
            emit({**row, "status": "out of memory", "reason": _first_line(error)})
            return
        emit({**row, "status": "ran", **_figures(steps, length), **_memory(place)})


def make_model(sizes: dict[str, Any], place: torch.device) -> LlamaForCausalLM:
    """Build the model with random float32 weights, its layers recomputed from inputs that wait on the host.

    Args:
        sizes: the model's sizes, named as in this project's settings.
        place: where the weights are made.
    """
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["mlp_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        tie_word_embeddings=sizes["tied_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(_SEED)
    with place:
        model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.forward = partial(_recomputed, layer.forward)
    return model


def _recomputed(forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a layer and keep nothing on the device but its output."""
    with save_on_cpu(pin_memory=True):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def random_tokens(vocab_size: int, length: int) -> torch.Tensor:
    """Draw one document, int64 [1, length]; the same one each time."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(vocab_size, (1, length), generator=generator)


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, tokens_BS: torch.Tensor, kernel: SDPBackend
) -> torch.Tensor:
    """Take one step; return the loss before it, a scalar on the device."""
    optimizer.zero_grad(set_to_none=True)
    with sdpa_kernel(kernel):  # the backward, which recomputes the layers, calls it too
        loss = mean_loss(model, tokens_BS, torch.bfloat16 if tokens_BS.is_cuda else torch.float32)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
    optimizer.step()
    return loss.detach()


def mean_loss(model: LlamaForCausalLM, tokens_BS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the mean loss of the next token.

    Args:
        model: from `make_model`.
        tokens_BS: int64 ids.
        dtype: of products and of the residual stream.
    """
    # With autocast's cache the chunks would share one cast head matrix, and sum its gradient in bfloat16.
    with torch.autocast(tokens_BS.device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
        embedded_BSD = model.model.embed_tokens(tokens_BS).to(dtype)
        # Without a mask and positions, transformers asks for causal attention by a flag and builds no [S, S] mask.
        hidden_BSD = model.model(inputs_embeds=embedded_BSD).last_hidden_state
        hidden_BTD, targets_BT = hidden_BSD[:, :-1].to(dtype), tokens_BS[:, 1:]
        chunks = zip(hidden_BTD.split(_CHUNK_TOKENS, 1), targets_BT.split(_CHUNK_TOKENS, 1), strict=True)
        losses = [checkpoint(_chunk_loss, model.lm_head, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum() / targets_BT.numel()


def _chunk_loss(head: torch.nn.Linear, hidden_BCD: torch.Tensor, targets_BC: torch.Tensor) -> torch.Tensor:
    """Sum the losses of a chunk, in float32."""
    return cross_entropy(head(hidden_BCD).float().flatten(0, 1), targets_BC.flatten(), reduction="sum")


def _timed(step: Callable[[], torch.Tensor], place: torch.device) -> tuple[float, float]:
    """Take a step; return its seconds and its loss."""
    _wait(place)
    start_s = time.perf_counter()
    loss = step()
    _wait(place)
    return time.perf_counter() - start_s, loss.item()


def _figures(steps: list[tuple[float, float]], length: int) -> dict[str, Any]:
    seconds, losses = zip(*steps, strict=True)
    return {"step_s": list(seconds), "loss": list(losses), "tokens_per_s": length / median(seconds)}


def _is_short_of_memory(error: BaseException) -> bool:
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in _SHORT_OF_MEMORY)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:_MOST_WORDS]


# What needs CUDA stands below, and does nothing on a CPU.


def _begin(device: str) -> torch.device:
    """Return where to run; on a GPU let freed memory join, unless the user chose the allocator's settings."""
    if device == "cpu":
        return torch.device("cpu")
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return torch.device("cuda:0")


def _forget(place: torch.device) -> None:
    """Give back what the length before left in caches, and begin new peaks."""
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        torch.cuda.reset_peak_memory_stats(place)


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _memory(place: torch.device) -> dict[str, int | None]:
    on_gpu = place.type == "cuda"
    return {
        "hbm_peak_bytes": torch.cuda.max_memory_allocated(place) if on_gpu else None,
        "hbm_reserved_bytes": torch.cuda.max_memory_reserved(place) if on_gpu else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        # The resident set may leave out what CUDA has pinned.
        "host_pinned_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak") if on_gpu else None,
    }
