"""A run on conversations and text, killed as it tokenizes and stopped inside an epoch, goes on bit for bit."""

import json
import random
import signal

import pytest
from chat_cases import THINKING, draw
from distributed_cases import finish, start_processes
from tiny_runs import losses_of

from sppo_jax.config import load_config
from sppo_jax.data.open import open_data

STEPS, PER_STEP, CHATS = 9, 8, 6
# The text comes first and is one piece, so this dies in the middle of the conversations.
DIES = f"""
from sppo_jax.data import cache
add, pieces = cache.Writer.add_tokens, []
def add_or_die(writer, tokens):
    pieces.append(tokens)
    if len(pieces) > {CHATS // 2}:
        os.kill(os.getpid(), 9)
    add(writer, tokens)
cache.Writer.add_tokens = add_or_die
"""
# One process alone is told to stop, the last one.
STOPS = """
import signal
from tiny_runs import at_batch
from sppo_jax.train import setup
prepare, change = setup.prepare, at_batch(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
if int(os.environ["SPPO_PROCESS_ID"]) == int(os.environ["SPPO_NUM_PROCESSES"]) - 1:
    setup.prepare = lambda *given: change(prepare(*given))
"""
TRAIN = "from sppo_jax.cli import main\nsys.exit(main(['train', *sys.argv[1:]]))\n"


@pytest.fixture
def config_in(tmp_path):
    """Returns a config of a mixture by the name of its cache."""
    rng = random.Random(3)
    rows = [{"messages": draw(rng)} for _ in range(CHATS)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "books.txt").write_text("river stone tree " * 60)
    (tmp_path / "chat.jinja").write_text(THINKING)

    def config(cache):
        settings = {
            "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_size": 32},
            "data": {
                "source": {
                    str(tmp_path / "books.txt"): 1,
                    str(tmp_path / "chats.jsonl"): {"weight": 2, "train_on": "assistant"},
                },
                "chat": {"template": str(tmp_path / "chat.jinja"), "too_long": "cut"},
                "validation_fraction": 0,
                "cache": str(tmp_path / cache),
            },
            "mesh": {"data": 2, "pipe": 2},
            "sequence": {"length": 128, "chunks": 2, "per_step": PER_STEP},
            "optimizer": {"lr": 0.01},
            "train": {"steps": STEPS, "devices": "cpu:4", "log_every": 1, "eval_sequences": 0},
        }
        path = tmp_path / f"{cache}.yaml"
        path.write_text(json.dumps(settings))
        return path

    return config


def statuses_of(num_processes, config, run_dir, before=""):
    """Trains in several processes; returns their exit codes, and all that they said."""
    results = finish(start_processes(before + TRAIN, num_processes, config, "--run-dir", run_dir), 300)
    return [status for status, _, _ in results], results


def tokens_in(cache):
    """Returns the tokens and the bounds of each entry."""
    return {path.relative_to(cache): path.read_bytes() for path in cache.glob("*/*.bin")}


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_killed_and_stopped_processes_go_on_bit_for_bit(config_in, tmp_path, num_processes):
    alone, hit = config_in("alone"), config_in("hit")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    statuses, said = statuses_of(num_processes, alone, straight)
    assert statuses == [0] * num_processes, said

    statuses, said = statuses_of(num_processes, hit, stopped, DIES)
    assert -signal.SIGKILL in statuses and 0 not in statuses, said
    left = [path.stat().st_size for path in (tmp_path / "hit").glob("*.new-*/tokens.bin")]
    # Of several, the last may remove what the others left, and end with them before it begins.
    assert (left or num_processes > 1) and len(
        list((tmp_path / "hit").glob("*/facts.json"))
    ) == 1  # the text is whole, the chats are not

    statuses, said = statuses_of(num_processes, hit, stopped, STOPS)
    assert statuses == [0] * num_processes, said
    assert tokens_in(tmp_path / "hit") == tokens_in(tmp_path / "alone")  # and nothing is left of what was killed
    mixture, step = open_data(load_config(hit)).training, max(losses_of(stopped))
    drawn = [mixture.num_drawn(number * PER_STEP) for number in (step, STEPS)]
    for source, before, after in zip(mixture.sources, *drawn, strict=True):
        assert before % len(source) and before < after > len(source), (step, before, after, len(source))

    statuses, said = statuses_of(num_processes, hit, stopped)
    assert statuses == [0] * num_processes, said
    assert losses_of(stopped) == losses_of(straight) and len(losses_of(straight)) == STEPS
