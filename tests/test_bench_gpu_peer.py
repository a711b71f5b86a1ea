"""The PyTorch side of the GPU benchmark, on the CPU: its loss and gradients, what it keeps where, and its rows."""

import copy
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)  # tensors are tiny, and other tests share the cores

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from bench.gpu_parts import peer_torch  # noqa: E402

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 48,
    "tied_embeddings": True,
    "rope_theta": 10000.0,
}
SETTINGS = {"model": SIZES, "lengths": [16, 32, 64], "timed_steps": 2, "warm_up_steps": 1}
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SOFTMAX = torch.ops.aten._log_softmax.default


class Operations(TorchDispatchMode):
    """Records what runs, and the elements of the largest tensor."""

    def __init__(self):
        super().__init__()
        self.names, self.most_elements = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.names.append(function)
        tensors = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]
        self.most_elements = max([self.most_elements, *(x.numel() for x in tensors)])
        return found


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_of_the_plain_model(tied, monkeypatch):
    monkeypatch.setattr(peer_torch, "_CHUNK_TOKENS", 5)
    model = peer_torch.make_model(SIZES | {"tied_embeddings": tied}, CPU)
    tokens_BS = peer_torch.random_tokens(64, 24)
    loss = peer_torch.mean_loss(model, tokens_BS, torch.float32)
    loss.backward()

    plain = LlamaForCausalLM(copy.deepcopy(model.config))
    plain.set_attn_implementation("eager")
    plain.load_state_dict(model.state_dict())
    expected = plain(input_ids=tokens_BS, labels=tokens_BS).loss
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found = dict(model.named_parameters())
    assert ("lm_head.weight" in found) != tied
    for name, parameter in plain.named_parameters():
        error = (found[name].grad - parameter.grad).abs().max()
        assert error <= 1e-5 * parameter.grad.abs().max(), name


def test_the_host_keeps_the_input_of_each_layer_and_no_more(monkeypatch):
    kept = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory):
            assert pin_memory
            super().__init__(lambda x: kept.append(x) or x, lambda x: x)

    monkeypatch.setattr(peer_torch, "save_on_cpu", Recorded)
    model = peer_torch.make_model(SIZES, CPU)
    peer_torch.mean_loss(model, peer_torch.random_tokens(64, 16), torch.bfloat16).backward()
    kept = [x for x in kept if x.numel()]
    assert [(x.shape, x.dtype) for x in kept] == [((1, 16, 32), torch.bfloat16)] * 3


def test_flash_attention_without_a_mask_and_logits_a_chunk_at_a_time(step, monkeypatch):
    monkeypatch.setattr(peer_torch, "_CHUNK_TOKENS", 32)
    with Operations() as seen:
        step(peer_torch._KERNELS["flash"])
    # Of 3 layers and 8 chunks: in the forward, and again in the backward.
    assert (seen.names.count(FLASH), seen.names.count(SOFTMAX)) == (2 * 3, 2 * 8)
    assert seen.most_elements == 256 * 48  # those of the MLP; [S, S] and [S, vocabulary] have more


def test_the_chunks_of_the_head_sum_its_gradient_in_float32(monkeypatch):
    monkeypatch.setattr(peer_torch, "_CHUNK_TOKENS", 4)
    model = peer_torch.make_model(SIZES | {"tied_embeddings": False}, CPU)
    peer_torch.mean_loss(model, peer_torch.random_tokens(64, 16), torch.bfloat16).backward()
    gradient = model.lm_head.weight.grad
    assert not torch.equal(gradient, gradient.bfloat16().float())


def test_no_other_kernel_than_the_one_asked_for_runs(step):
    with pytest.raises(RuntimeError, match="No viable backend"):
        step(peer_torch._KERNELS["cudnn"])  # a CPU has none


def test_gradients_are_clipped_by_global_norm(step, monkeypatch):
    monkeypatch.setattr(peer_torch, "_CLIP_NORM", 0.01)
    parameters = step(peer_torch._KERNELS["flash"])
    assert torch.nn.utils.get_total_norm([x.grad for x in parameters]).item() == pytest.approx(0.01, rel=1e-3)


@pytest.fixture
def step():
    """Return a function that takes one step of 256 tokens with a kernel and returns the parameters."""
    model = peer_torch.make_model(SIZES, CPU)
    optimizer = torch.optim.AdamW(model.parameters())

    def take(kernel):
        peer_torch.train_step(model, optimizer, peer_torch.random_tokens(64, 256), kernel)
        return list(model.parameters())

    return take


def test_a_row_for_each_length():
    rows = []
    peer_torch.run(SETTINGS | {"lengths": [16, 32]}, "cpu", rows.append)
    assert [(row["framework"], row["status"], row["length"]) for row in rows] == [("torch", "ran", n) for n in (16, 32)]
    for row in rows:
        assert len(row["step_s"]) == len(row["loss"]) == 2 and min(row["step_s"]) > 0
        assert row["loss"][1] < row["loss"][0] < 5  # the same tokens again; ln(64) is 4.2
        assert row["tokens_per_s"] == pytest.approx(2 * row["length"] / sum(row["step_s"]))
        assert {row[f"{what}_bytes"] for what in ("hbm_peak", "hbm_reserved", "host_pinned")} == {None}
        assert row["host_peak_bytes"] > 2**26
    json.dumps(rows)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.\nAnd more."),
        pytest.param(
            RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), marks=pytest.mark.slow
        ),
        pytest.param(MemoryError(), marks=pytest.mark.slow),
    ],
)
def test_short_memory_ends_the_search_with_a_row(error, failing_at_32):
    lengths, rows = failing_at_32(error), []
    peer_torch.run(SETTINGS, "cpu", rows.append)
    assert [(row["length"], row["status"]) for row in rows] == [(16, "ran"), (32, "out of memory")]
    assert rows[1]["reason"] == (str(error).split("\n")[0] or "MemoryError")
    assert lengths == [16, 16, 16, 32]


@pytest.mark.slow
def test_another_error_is_no_lack_of_memory(failing_at_32):
    lengths, rows = failing_at_32(RuntimeError("No available kernel. Aborting execution.")), []
    with pytest.raises(RuntimeError, match="No available kernel"):
        peer_torch.run(SETTINGS, "cpu", rows.append)
    assert [row["length"] for row in rows] == [16] and lengths[-1] == 32


@pytest.fixture
def failing_at_32(monkeypatch):
    """Make steps do nothing, but raise an error at 32 tokens; return the lengths that were tried."""

    def make(error):
        lengths = []

        def step(model, optimizer, tokens_BS, kernel):
            lengths.append(tokens_BS.shape[1])
            if lengths[-1] == 32:
                raise error
            return torch.tensor(4.0)

        monkeypatch.setattr(peer_torch, "train_step", step)
        return lengths

    return make
