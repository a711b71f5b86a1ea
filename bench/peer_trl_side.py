"""TRL's side of peer_trl.py: run by the Python of TRL's own environment, and without this project.

python bench/peer_trl_side.py make FOLDER ROWS LENGTH COUNT [ROWS LENGTH COUNT ...]
python bench/peer_trl_side.py train FOLDER ROWS OUT SETTINGS.json
"""

import importlib.metadata
import json
import resource
import sys
import sysconfig
import time
from pathlib import Path

import torch

PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets")


def make(folder: str, files: list[tuple[str, int, int]]) -> None:
    """Makes a Llama of 4 layers with a tokenizer, and files of rows of tokens: Python's standard library, end to end.

    Args:
        folder: the folder of the model.
        files: of each file the path, the tokens of a row, and the number of rows.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for path in paths if len(text := path.read_text(errors="ignore")) > 2000]
    level = pre_tokenizers.ByteLevel
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>"]
    made.train_from_iterator(
        texts[:60], trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=level.alphabet())
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        rope_theta=500000.0,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[0], pad_token=special[1]).save_pretrained(folder)
    ids: list[int] = []
    for text in texts:
        ids += [*made.encode(text).ids, 0]
    for path, length, count in files:
        if count * length > len(ids):
            raise ValueError(
                f"{path} must have at most {len(ids):,} tokens, got {count:,} rows of {length:,}; lower it"
            )
        with open(path, "w") as file:
            for row in range(count):
                file.write(json.dumps({"input_ids": ids[row * length : (row + 1) * length]}) + "\n")


def train(folder: str, rows: str, out: str, settings: dict) -> dict:
    """Trains with TRL's SFTTrainer; returns losses (not rounded, as its log is), seconds of the steps, and versions."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []
    ends_s: list[tuple[float, float]] = []

    class Exact(SFTTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends_s.append((time.perf_counter(), time.process_time()))

    trainer = Exact(
        folder,
        args=SFTConfig(output_dir=out, **settings),
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        callbacks=[Clock()],
    )
    trainer.train()
    trainer.save_model(out)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": losses,
        "learning_rates": [float(row["learning_rate"]) for row in logged],
        "step_s": [after[0] - before[0] for before, after in zip(ends_s, ends_s[1:], strict=False)],
        "step_cpu_s": [after[1] - before[1] for before, after in zip(ends_s, ends_s[1:], strict=False)],
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "dtype": str(next(trainer.model.parameters()).dtype),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def main(words: list[str]) -> None:
    kind, folder, *rest = words
    if kind == "make":
        make(folder, [(rest[at], int(rest[at + 1]), int(rest[at + 2])) for at in range(0, len(rest), 3)])
        return
    rows, out, settings = rest
    result = train(folder, rows, out, json.loads(Path(settings).read_text()))
    (Path(out) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
