"""Bad configs, data, command lines and environments: exit code 2, one line of what to change, nothing written."""

import functools
import os
import re
import sys

import jax
import numpy as np
import pytest
from bad_inputs import Reached, array, both, check_refused, folder, link, parquet, run, text, torn_gzip, write_place
from data_cases import write_tokenizer
from hf_folders import write_folder

from sppo_jax.compat import check_offload
from sppo_jax.plan.plan import SCHEMA_VERSION

TRAIN = "train c.yaml --run-dir new"
FLEX = "flex c.yaml"
# A plan, or measured figures, of a version to come.
NEWER = text("newer.json", '{"schema_version": 99}')


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a config and documents; nothing may be trained in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])

    jax.devices()  # the rows ask for other numbers of devices: too late

    def reached(*_):
        raise Reached

    monkeypatch.setattr("sppo_jax.train.loop.train", reached)
    write_place(tmp_path)
    return tmp_path


SETTINGS = [
    ("model.hiden_size=3", "model.hiden_size is not a setting; the nearest setting is model.hidden_size"),
    ("trian.steps=3", "trian is not a setting; the nearest setting is train"),
    ("a.b.c.d=1", "a is not a setting"),
    ("train..steps=3", "an override must read section.key=value, got 'train..steps=3'"),
    (".steps=3", "an override must read section.key=value"),
    ("=3", "an override must read section.key=value"),
    ("train.steps", "an override must read section.key=value, got 'train.steps'; write e.g. train.steps=10"),
    ("train.steps=nan", "train.steps must be a whole number, got 'nan'; correct the value"),
    ("train.steps=.inf", "train.steps must be a whole number, got .inf"),
    ("train.steps=", "train.steps must be given, got none; add it to the config"),
    ("train.step=", "train.step is not a setting; the nearest setting is train.steps"),
    ("train.devices=null", "train.devices must be text, got null; correct the value, or write train.devices= for the"),
    ("train.devices=''", "or write train.devices= for the default (auto)"),
    ("train.steps=-5", "train.steps must be at least 1, got -5; use train.steps=1 or more"),
    ("train.steps=1e30", "train.steps must be at most 2147483647"),
    ("train.steps.x=3", "train.steps must be a whole number, got {'x': 3}"),
    ("train.steps=[1,2]", "train.steps must be a whole number, got [1, 2]"),
    ("train.steps=[", "settings must be YAML, got train.steps=["),
    ("train.steps=!!python/object:os.system", "settings must be YAML"),
    ("train.seed=99999999999999999999", "train.seed must be at most 2147483647"),
    ("data.seed=-1", "data.seed must be at least 0"),
    ("train.max_nonfinite=0", "train.max_nonfinite must be at least 1"),
    ("train.log_every=0", "train.log_every must be at least 1"),
    ("train.stall_s=0.01", "train.stall_s must be 0 or at least 1"),
    (
        "optimizer.place=gpu",
        "auto | device | host, got 'gpu'; correct the value, or write optimizer.place= for the default (auto)",
    ),
    ("optimizer.place=host schedule.name=sppo", "one group of layers at a time, got schedule.name=sppo; use"),
    ("optimizer.place=host mesh.weights=resident", "must have mesh.weights=gathered, got mesh.weights=resident; use"),
    (
        "optimizer.place=host schedule.interleave=1",
        "optimizer.place=host must have at least 2 groups of layers per stage",
    ),
    (
        "optimizer.place=host schedule.wave=1 sequence.per_pipeline=2 schedule.interleave=2",
        "optimizer.place=host must have all 2 sequences of a pipeline in one wave, got schedule.wave=1",
    ),
    ("optimizer.lr=-1", "optimizer.lr must be at least 0"),
    ("optimizer.lr=1e308", "optimizer.lr must be at most 1e+30"),
    ("optimizer.b1=1", "optimizer.b1 must be in [0, 1)"),
    (
        "optimizer.clip_norm=0",
        "optimizer.clip_norm must be above 0, got 0.0; raise it, or write optimizer.clip_norm=null",
    ),
    ("optimizer.warmup_ratio=1.5", "optimizer.warmup_ratio must be in [0, 1], got 1.5; write 0.1 for a tenth"),
    (
        "optimizer.warmup_ratio=0.5 optimizer.warmup_steps=1",
        "one of optimizer.warmup_steps and optimizer.warmup_ratio must say the warm-up, got 1 and 0.5; write",
    ),
    ("optimizer.decay_steps=0", "optimizer.decay_steps must be at least 1"),
    (
        "optimizer.decay_steps=2 optimizer.warmup_steps=1",
        "optimizer.decay_steps must be at most train.steps less the warm-up = 1, got 2; lower it, or write",
    ),
    ("optimizer.warmup_steps=3", "optimizer.warmup_steps must be at most train.steps = 2, got 3; lower it"),
    ("sequence.length=0", "sequence.length must be at least 1"),
    ("sequence.length=1e12", "sequence.length must be at most 2147483647"),
    ("sequence.chunks=1000", "each of sequence.chunks=1000 chunks must have at least mesh.seq tokens, got mesh.seq=1"),
    ("sequence.chunks=[]", "sequence.chunks must be auto, a count or lengths of at least 1, got []; change it"),
    ("sequence.chunks=[32,31]", "sequence.chunks must add up to sequence.length=64, got 63; change a chunk by +1"),
    ("sequence.per_step=3 sequence.per_pipeline=2", "sequence.per_step must be a multiple of"),
    ("sequence.ulysses=3", "sequence.ulysses=3 must divide mesh.seq, got mesh.seq=1; use sequence.ulysses=auto"),
    ("mesh=3", "mesh must be a section of settings, got 3"),
    ("mesh.pipe=2", "train.devices must be a multiple of mesh.pipe = 2, got cpu:1; write cpu:2 or change the mesh"),
    (
        "mesh.pipe=16 train.devices=auto",
        "mesh.pipe must divide model.num_layers=2, got mesh.pipe=16; use 2 virtual stages",
    ),
    ("mesh.pipe=2 mesh.seq=8 train.devices=cpu:16", "must not exceed the number of devices, got 8"),
    ("train.devices=cpu:0", "train.devices must be auto or cpu:N, got cpu:0"),
    ("train.devices=gpu", "train.devices must be auto or cpu:N, got gpu"),
    ("train.devices=4", "train.devices must be auto or cpu:N, got 4; write e.g. cpu:8"),
    ("train.devices=cpu:1000000", "train.devices must be at most cpu:1024"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last must be at least 1"),
    ("checkpoint.every_s=-1", "checkpoint.every_s must be at least 0"),
    ('checkpoint.dir=""', "checkpoint.dir must be text, or null, got ''"),
    ("checkpoint.dir=tokens.npy", "the directory of checkpoints must be a directory, got the file tokens.npy"),
    ("checkpoint.dir=/proc/x", "the directory of checkpoints must be writable, got /proc/x"),
    ("metrics.peak_flops=0", "metrics.peak_flops must be at least 1"),
    ("metrics.wandb=a/b", "metrics.wandb must be a project's name"),
    ("metrics.tensorboard=perhaps", "metrics.tensorboard must be true | false, got 'perhaps'"),
    ("hardware.cluster=nope:1x1", "name one of the devices cpu, a100-40g"),
    ("hardware.cluster=h100:0x8", "with every size at least 1, got 'h100:0x8'"),
    ("hardware.cluster=h100:100000000x8", "a cluster must have at most 1,048,576 devices"),
    ("hardware.measured=absent.json", "a file of measured figures must be what sppo profile"),
    ("hardware.measured=c.yaml", "which is not JSON"),
    ("hardware.measured=newer.json", "got newer.json: schema_version must be 1 or 2, got 99; "),
    ("stash.alpha=2", "stash.alpha must be auto or in [0, 1]"),
    ("stash.alpha=[0.5]", "give 2 values, one number, or auto"),
    ("sequence.longest=0.5", "sequence.longest must be at least 1 (the mean chunk), got 0.5; raise it or set auto"),
    ("sequence.longest=2 sequence.balance=flops", "got 2 with sequence.balance=flops; set sequence.longest=auto"),
    ("sequence.longest=2 sequence.chunks=[32,32]", "got 2 with a list of sequence.chunks; set sequence.longest=auto"),
    (
        "sequence.longest=2 schedule.name=table schedule.table=a.csv",
        "must be auto with schedule.table, which gives the chunk lengths",
    ),
    ("sequence.shapes=[]", "sequence.shapes must be auto or at least one token count, got []; set auto"),
    ("sequence.shapes=[1,2,3,4,5,6,64]", "sequence.shapes must be at most 6 token counts, got 7; leave some out"),
    ("sequence.shapes=[64,32]", "sequence.shapes must be positive and rise, got [64, 32]; sort them"),
    ("sequence.shapes=[16] sequence.chunks=2", "must hold the longest chunk, 32 tokens, got 16; add a longer shape"),
    (
        "sequence.shapes=[33,64] mesh.seq=2 train.devices=cpu:2",
        "mesh.seq must divide each of sequence.shapes=[33, 64], got mesh.seq=2 and [33]",
    ),
    ("sequence.balance=dear", "sequence.balance must be auto | equal | flops | cost, got 'dear'"),
    ("schedule.wave=0", "schedule.wave must be at least 1, got 0"),
    (
        "schedule.wave=4 sequence.per_pipeline=6",
        "schedule.wave=4 must divide the sequences of a pipeline, got 6; use 3 or 6",
    ),
    ("schedule.wave=2 sequence.per_pipeline=2 schedule.name=1f1b", "got 2; use schedule.name=seq1f1b"),
    (
        "schedule.wave=5 sequence.per_step=4",
        "schedule.wave=5 must divide the sequences of a pipeline, got 4; use schedule.wave=auto",
    ),
    ("schedule.name=table", "schedule.table (a CSV file) must be given with schedule.name=table"),
    ("schedule.name=table schedule.table=absent.csv", "schedule.table must be a readable CSV file"),
    ("schedule.name=table schedule.table=c.yaml", "correct c.yaml"),
    ("model=hf:", "model.hf must be the folder of a Hugging Face model, got ''; give the path of the folder"),
    (
        "model=hf:s3://bucket/x",
        "the folder must be a path on this machine, got the address s3://bucket/x; mount or copy",
    ),
    (
        "model=hf:https://hf.co/owner/name/tree/main",
        "got the address https://hf.co/owner/name/tree/main; write hf:owner/name",
    ),
    (
        "model=hf:a/b/c",
        "a/b/c (No such file or directory); name another folder, or a model of the hub as hf:OWNER/NAME",
    ),
    ("model=hf:a:b", "a local folder with config.json, got"),
    ("model=hf:absent", "a Hugging Face model must be a local folder with config.json"),
    ("model.hf=absent model.preset=llama3-8b", "model must have either preset or hf, got both"),
    ("model.preset=llama3-8bb", "did you mean 'llama3-8b'?"),
    ("model.vocab_size=10", "use model.vocab_size=23 or more"),
    ("model.num_layers=1000000", "model.num_layers must be at most 10000"),
    ("model.head_dim=7", "model.head_dim must be even"),
    ("model.kernel=cudnn", "use model.kernel=blockwise"),
    ("model.kernel=pallas", "model.kernel=pallas must have a TPU"),
    ("model.compute_dtype=float64", "set JAX_ENABLE_X64=1, or use float32"),
    ("model.sliding_window=-1", "model.sliding_window must be at least 1"),
    ("model.rope.scaling=yarn", "set the length, e.g. to 8192"),
    (
        "model.layers=delta,full mesh.seq=4 train.devices=cpu:4",
        "mesh.seq must divide the 2 heads of a layer with a state, got mesh.seq=4; use",
    ),
    (
        "model.layers=delta,full mesh.seq=2 train.devices=cpu:2 sequence.groups=flex",
        "a model with layers that have a state must have sequence.groups=static, got sequence.groups=flex; use",
    ),
    ("model.layers=2xdelta stash.kv=rebuild", "because it has no keys and values, got stash.kv=rebuild; use"),
    ("model.layers=kda,full", "model.layers must name types of model.layer_types, full or delta, got kda; use one of"),
    ("model.mixer=mamba", "model.mixer must be attention | delta, got 'mamba'; correct the value"),
    (
        "model.layers=delta,full model.delta.key_heads=3",
        "model.delta.value_heads must be a multiple of model.delta.key_heads, got 2 and 3; set both",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), SETTINGS)
def test_settings(place, capfd, overrides, expected):
    NEWER()
    check_refused(f"{TRAIN} {overrides}", expected, place, capfd)


CONFIGS = {
    "of a newer version": (
        b"schema_version: 99\nmodel: {preset: gpt-7b}\nsequence: {length: 4}\ntrain: {steps: 1}\n",
        "schema_version is not a setting; the nearest setting is",
    ),
    "with a setting of a newer version": (
        b"model: {preset: gpt-7b, speculation: 3}\nsequence: {length: 4}\ntrain: {steps: 1}\n",
        "model.speculation is not a setting; the nearest setting is model.",
    ),
    "empty": (b"", "a config must hold sections of settings such as model and train, got x.yaml with none"),
    "a list": (b"- a\n- b\n", "a config must hold sections of settings"),
    "binary": (bytes(range(256)), "a config must be a readable YAML file, got x.yaml"),
    "UTF-16": ("model: 1".encode("utf-16"), "a config must be a readable YAML file"),
    "a tab": (b"model:\n\thidden_size: 3\n", "settings must be YAML, got x.yaml"),
    "a group twice": (
        b"train: {steps: 5}\nmodel: {}\ntrain: {steps: 6}\n",
        "got train again on line 3; keep one of the two",
    ),
    "a key twice": (b"train:\n  steps: 5\n  steps: 6\n", "x.yaml: a key must be given once, got steps again on line 3"),
    "two documents": (b"a: 1\n---\nb: 2\n", "settings must be YAML"),
    "an alias of nothing": (b"model: *shape\n", "settings must be YAML"),
    "a key that is a list": (b"? [a, b]\n: 3\n", "settings must be YAML"),
    "a key that is a number": (b"1: 2\n", "1 is not a setting"),
    "very deep": (b"[" * 5000, "settings must be YAML with few nested levels"),
    "code": (b"!!python/object/apply:os.system ['echo hi']", "settings must be YAML"),
    "a list for a group": (
        b"model: {preset: gpt-7b}\ntrain: {steps: 1}\nsequence: [1]\n",
        "sequence must be a section of settings",
    ),
    "no model": (b"train: {steps: 3}\n", "model must be given, got none; add it to the config"),
    "a NUL in a path": (
        b'model: {preset: gpt-7b}\nsequence: {length: 4}\ntrain: {steps: 1}\ndata: {source: "a\\0b"}\n',
        "data.source must be text",
    ),
}


@pytest.mark.parametrize(("content", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_config_files(place, capfd, content, expected):
    text("x.yaml", content)()
    check_refused("train x.yaml --run-dir new", expected, place, capfd)


COMMANDS = {
    "no command": ("", "sppo: the following arguments are required: COMMAND", None),
    "no such command": ("trian c.yaml", "got trian; use sppo train", None),
    "no config": ("train", "sppo train: the following arguments are required: CONFIG.yaml; see", None),
    "no such config": ("train absent.yaml", "a shipped one, got absent.yaml, which is neither; the nearest of", None),
    "a folder for a config": ("train hf:absent", "write one with sppo init hf:absent --out new.yaml", None),
    "a directory for a config": ("train .", "a config must be a YAML file, got the folder .; ", None),
    "an address for a config": (
        "train s3://b/c.yaml",
        "a config must be a path on this machine, got the address",
        None,
    ),
    "a page of the hub": (
        "plan hf:https://huggingface.co/Qwen/Qwen3-8B",
        "a model of the hub must be named hf:OWNER/NAME, got the address https://huggingface.co/Qwen/Qwen3-8B; write "
        "hf:Qwen/Qwen3-8B",
        None,
    ),
    "a link to itself": ("train x.yaml", "Too many levels of symbolic links", link("x.yaml", "x.yaml")),
    "a dangling link": ("train x.yaml", "No such file or directory", link("nowhere", "x.yaml")),
    "no such option": (
        "train c.yaml --restart",
        "--restart; the nearest option is --resume; see sppo train --help",
        None,
    ),
    "an option without its word": ("train c.yaml --run-dir", "argument --run-dir: expected one argument", None),
    "an empty run dir": (["train", "c.yaml", "--run-dir", ""], "a path must be given, got ''", None),
    "a run dir too long": (f"train c.yaml --run-dir {'a' * 300}", "File name too long", None),
    "no such plan": (f"{TRAIN} --plan absent.json", "--plan must be a readable plan.json, got absent.json", None),
    "a plan that is none": (f"{TRAIN} --plan c.yaml", "--plan c.yaml: plan.json must hold JSON text", None),
    "a plan of a newer version": (
        f"{TRAIN} --plan newer.json",
        f"--plan newer.json: schema_version of plan.json must be {SCHEMA_VERSION}, got 99; plan again",
        NEWER,
    ),
    "a fit of a plan of a newer version": (
        "fit c.yaml --plan newer.json",
        f"--plan newer.json: schema_version of plan.json must be {SCHEMA_VERSION}, got 99; plan again",
        NEWER,
    ),
    "a plan of no keys": (f"{TRAIN} --plan p.json", "--plan p.json: ", text("p.json", "{}")),
    "a page in no directory": ("plan c.yaml --html a/b.html", "there is no directory a", None),
    "a page that is a directory": ("plan c.yaml --html .", "it is a directory", None),
    "a plan for no cluster": ("plan c.yaml --cluster h100", "a cluster must read NAME:HOSTSxDEVICES", None),
    "a plan without memory": ("plan c.yaml hardware.hbm_bytes=0", "hardware.hbm_bytes must be at least 1", None),
    "a fit for a mesh too large": (
        "fit c.yaml --cluster h100:1x1 mesh.pipe=2 train.devices=auto",
        "the mesh must have at most the 1 devices of h100:1x1",
        None,
    ),
    "a fit of a plan that is none": ("fit c.yaml --plan absent.json", "--plan must be a readable plan.json", None),
    "a folder of a model with KDA layers": (
        f"{TRAIN} model=hf:kimi",
        "got 'kimi_linear', whose linear layers are KDA, with a decay of each channel; choose a model",
        both(folder("kimi"), text("kimi/config.json", '{"model_type": "kimi_linear"}')),
    ),
    "a folder of a model with Mamba layers": (
        f"{TRAIN} model=hf:nemotron",
        "got 'nemotron_h', whose linear layers are Mamba; choose a model",
        both(folder("nemotron"), text("nemotron/config.json", '{"model_type": "nemotron_h"}')),
    ),
    "no devices to profile": ("profile --devices cpu:0", "--devices must be auto or cpu:N with N at least 1", None),
    "a profile in no directory": (
        "profile --out a/b.json",
        "--out must name a file that can be written, got a/b.json (there is no directory a)",
        None,
    ),
    "a profile that is a directory": (
        "profile --out .",
        "--out must name a file that can be written, got . (it is a directory)",
        None,
    ),
    "a profile of no config": ("profile --config absent.yaml", "a config must be a YAML file or the name of", None),
    "no steps to trace": ("profile-trace c.yaml --steps 0", "--steps must be in 1..100, got 0", None),
    "half a step to trace": ("profile-trace c.yaml --steps 1.5", "argument --steps: invalid int value", None),
    "a trace in a file": ("profile-trace c.yaml --out c.yaml", "--out must be a directory that can be made", None),
    "a trace of no data": ("profile-trace c.yaml --out t data.source=absent.txt", "data.source must be readable", None),
    "a report of nothing": ("report absent", "RUN_DIR must be a run directory, got absent (nothing there)", None),
    "a report of a file": ("report c.yaml", "RUN_DIR must be a run directory, got c.yaml (a file)", None),
    "a report of no run": ("report .", "a run directory must hold config.yaml", None),
    "an evaluation of nothing": (
        "eval absent",
        "the path must be a checkpoint or a run directory with a checkpoint",
        None,
    ),
    "an evaluation of a file": (
        "eval c.yaml",
        "the path must be a checkpoint or a run directory with a checkpoint",
        None,
    ),
    "an evaluation of no run": ("eval .", "the path must be a checkpoint or a run directory with a checkpoint", None),
    "lengths of no file": (f"{FLEX} --lengths absent", "--lengths must be a readable file, got absent", None),
    "lengths of a directory": (
        f"{FLEX} --lengths .",
        "--lengths must be a readable file, got . (Is a directory)",
        None,
    ),
    "no lengths": (f"{FLEX} --lengths n", "got n without any; add the lengths", text("n", "\n")),
    "a negative length": (f"{FLEX} --lengths n", "got '-3' (n, line 2)", text("n", "7\n-3\n")),
    "a length of zero": (f"{FLEX} --lengths n", "got '0' (n, line 1)", text("n", "0\n")),
    "a length that is no number": (f"{FLEX} --lengths n", "got 'nan' (n, line 1)", text("n", "nan\n")),
    "lengths with fractions": (f"{FLEX} --lengths n.npy", "got float64 of shape (2,)", array("n.npy", [1.5, np.nan])),
    "a negative length in an array": (f"{FLEX} --lengths n.npy", "got -1 (n.npy, index 1)", array("n.npy", [3, -1])),
    "lengths in bytes that are no array": (f"{FLEX} --lengths n.npy", "numpy cannot load", text("n.npy", "abc")),
    "too many tokens of lengths": (f"{FLEX} --lengths n", "at most 10,000,000 pieces", text("n", f"{10**17}\n")),
    "no such corpus": (f"{FLEX} --corpus bible", "argument --corpus: invalid choice: 'bible'", None),
    "lengths and a corpus": (f"{FLEX} --corpus wikipedia --lengths n", "not allowed with argument", None),
    "groups without a mesh": (
        "plan c.yaml sequence.groups=flex mesh.seq=3 train.devices=cpu:3",
        "mesh.seq must be a power of two of at least 2 for sequence.groups=flex, got 3",
        None,
    ),
    "no windows": (f"{FLEX} --windows 0", "--windows must be in 1..256, got 0", None),
    "a fill of nothing": (
        f"{FLEX} --corpus wikipedia data.fill=0",
        "data.fill must be above 0 and at most 1, got 0",
        None,
    ),
    "a fill that is no number": (
        f"{FLEX} --corpus wikipedia data.fill=.nan",
        "data.fill must be a number, got .nan",
        None,
    ),
    "more than full": (
        f"{FLEX} data.fill=1.01",
        "data.fill must be above 0 and at most 1, got 1.01",
        None,
    ),
    "a report in no directory": (f"{FLEX} --json a/b.json", "there is no directory a", None),
    "a setting behind --json": (f"{FLEX} --json train.steps=3", "got the setting train.steps=3; put --json last", None),
    "groups of no data": (
        f"{FLEX} data.source=absent.txt",
        "data.source must be readable, got absent.txt (No such file or directory); choose another source, or give "
        "document lengths with --lengths or --corpus",
        None,
    ),
    "groups of three": (
        f"{FLEX} mesh.seq=3 train.devices=cpu:3 model.num_heads=3 model.hidden_size=24 sequence.length=48",
        "the members of a window must be a power of two, got 3; change mesh.seq",
        None,
    ),
    "groups in a sequence too short": (
        f"{FLEX} mesh.seq=2 train.devices=cpu:2 sequence.length=3",
        "mesh.seq must divide sequence.length=3, got mesh.seq=2",
        None,
    ),
    "no way to convert": ("convert", "sppo convert: the following arguments are required: from-hf|to-hf", None),
    "an unknown way to convert": ("convert to-gguf a b", "invalid choice: 'to-gguf'", None),
}


@pytest.mark.parametrize(("words", "expected", "prepare"), COMMANDS.values(), ids=COMMANDS)
def test_command_lines(place, capfd, words, expected, prepare):
    if prepare:
        prepare()
    check_refused(words, expected, place, capfd)


DATA = [
    ("absent.txt", "data.source must be readable, got absent.txt", None),
    ("empty", "data.source must name files that exist", folder("empty")),
    ("*.parquet", "data.source must name files that exist", None),
    ("a.csv", "data.source must be stdlib or .txt", text("a.csv", "a,b\n")),
    ("loop.txt", "Too many levels of symbolic links", link("loop.txt", "loop.txt")),
    ("no.txt", "must hold tokens, got none in", text("no.txt", "")),
    ("no.jsonl", "must hold tokens, got none in", text("no.jsonl", "")),
    ("no.bin", "must hold tokens, got none in", text("no.bin", "")),
    ("odd.bin", "must hold whole uint16 tokens, got 3 bytes", text("odd.bin", b"abc")),
    ("float.npy", "1-D integer array, got float64 [4]", array("float.npy", [1.0, 2, 3, 4])),
    ("flat.npy", "1-D integer array", array("flat.npy", [[1, 2], [3, 4]])),
    ("torn.npy", "must be a readable .npy", text("torn.npy", b"\x93NUMPY\x01\x00v")),
    ("pickled.npy", "must be a readable .npy", array("pickled.npy", [{}, "a"], dtype=object)),
    ("big.npy", "use model.vocab_size=1001 or more", array("big.npy", [1, 1000])),
    ("neg.npy", "got -2", array("neg.npy", [1, -2])),
    ("one.npy", "at least two tokens where data.validation_fraction is above 0", array("one.npy", [1])),
    ("torn.jsonl", "got torn.jsonl line 2", text("torn.jsonl", '{"text": "a"}\n{"text')),
    ("list.jsonl", "line 1 with a value of type list", text("list.jsonl", "[1]\n")),
    ("key.jsonl", "data.text_key must be a key of every row", text("key.jsonl", '{"body": "a"}\n')),
    ("num.jsonl", "must name text", text("num.jsonl", '{"text": 3}\n')),
    ("torn.jsonl.gz", "must be whole gzip", torn_gzip("torn.jsonl.gz")),
    ("torn.parquet", "must be whole", text("torn.parquet", "PAR1ab")),
    ("col.parquet", "must be a column", parquet("col.parquet", body=["a"])),
    ("int.parquet", "of type int in int.parquet row 1", parquet("int.parquet", text=[1])),
    ("{}", "weight above 0, got no source", None),
    ("{ok.txt: 0}", "weight above 0", None),
    ("{ok.txt: -1}", "weight above 0", None),
    ("{ok.txt: 1, recall: 1}", "recall must be the only data.source", None),
    ("3", "data.source must be readable, got 3 (No such file or directory)", None),
    ("recall", "sequence.length must be", None),
    ("ok.txt data.tokenizer=absent.json", "absent.json", None),
    ("ok.txt data.tokenizer=empty", "data.tokenizer", folder("empty")),
    ("ok.txt data.tokenizer=bad.json", "bad.json", text("bad.json", "{}")),
    ("ok.txt model.vocab_size=3 data.tokenizer=t.json", "t.json", lambda: write_tokenizer("t.json")),
    ("ok.txt data.tokenizer=t.json data.end_token=nope", "nope", lambda: write_tokenizer("t.json")),
    (
        "latin.txt data.tokenizer=t.json",
        "must be UTF-8",
        both(text("latin.txt", b"\xff\xfe\xe4 a"), lambda: write_tokenizer("t.json")),
    ),
    ("ok.txt model.vocab_size=256", "use model.vocab_size=257 or more", None),
    ("ok.txt data.cache=ok.txt", "must be a directory that can be written", None),
    ("ok.txt data.cache=/proc/x", "must be a directory that can be written", None),
    ("ok.txt data.pack=hole", "did you mean whole?", None),
    ("ok.txt data.validation_fraction=1", "data.validation_fraction must be in [0, 1)", None),
    ("ok.txt data.validation_source=absent.txt", "absent.txt", None),
    ("tokens.npy data.separator=-7", "data.separator must be at least 0", None),
]


@pytest.mark.parametrize(("source", "expected", "prepare"), DATA, ids=[source for source, _, _ in DATA])
def test_data(place, capfd, source, expected, prepare):
    text("ok.txt", "the cat " * 40)()
    if prepare:
        prepare()
    source, *others = [source] if source.startswith("{") else source.split()
    check_refused(["data", "c.yaml", f"data.source={source}", *others], expected, place, capfd)


ENVIRONMENTS = [
    ({"SPPO_COORDINATOR": "a:1"}, "must be set together"),
    ({"SPPO_NUM_PROCESSES": "2"}, "set all three"),
    ({"SPPO_COORDINATOR": "a:1", "SPPO_NUM_PROCESSES": "two", "SPPO_PROCESS_ID": "0"}, "must be a whole number"),
    ({"SPPO_COORDINATOR": "a:1", "SPPO_NUM_PROCESSES": "2", "SPPO_PROCESS_ID": "2"}, "number the processes from 0"),
    ({"SPPO_COORDINATOR": "a:1", "SPPO_NUM_PROCESSES": "2", "SPPO_PROCESS_ID": "-1"}, "must be a whole number"),
    (
        {"SPPO_COORDINATOR": "a:1", "SPPO_NUM_PROCESSES": "0", "SPPO_PROCESS_ID": "0"},
        "SPPO_NUM_PROCESSES must be at least 1",
    ),
    ({"SPPO_COORDINATOR": "a", "SPPO_NUM_PROCESSES": "1", "SPPO_PROCESS_ID": "1"}, "number the processes from 0"),
    (
        {"SPPO_COORDINATOR": "a:1", "SPPO_NUM_PROCESSES": "2", "SPPO_PROCESS_ID": "1"},
        "must be a multiple of the number of processes = 2, got 1",
    ),
    ({"SPPO_COORDINATOR": "a", "SPPO_NUM_PROCESSES": "2", "SPPO_PROCESS_ID": "1"}, "HOST:PORT"),
    ({"SPPO_COORDINATOR": "a:b", "SPPO_NUM_PROCESSES": "2", "SPPO_PROCESS_ID": "1"}, "HOST:PORT"),
    (
        {"SPPO_COORDINATOR": "a:1", "SPPO_NUM_PROCESSES": "2", "SPPO_PROCESS_ID": "1", "SPPO_TIMEOUT_S": "soon"},
        "SPPO_TIMEOUT_S must be a number of seconds",
    ),
    (
        {"SPPO_COORDINATOR": "a:1", "SPPO_NUM_PROCESSES": "2", "SPPO_PROCESS_ID": "1", "SPPO_HEARTBEAT_S": "0"},
        "SPPO_HEARTBEAT_S must be a number of seconds",
    ),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "without MASTER_ADDR"),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "got OMPI_COMM_WORLD_RANK=1 and"),
    ({"PMIX_RANK": "1"}, "PMIX_RANK"),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "got PMI_RANK=1 and PMI_SIZE=2 alone"),
    ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "without JAX_COORDINATOR_ADDRESS"),
]


@pytest.mark.parametrize(("environ", "expected"), ENVIRONMENTS)
def test_environments(place, capfd, monkeypatch, environ, expected):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    devices = "cpu:1" if "multiple" in expected else "cpu:2"
    check_refused(f"{TRAIN} train.devices={devices}", expected, place, capfd)


PACKAGES = [
    ("tensorboardX", f"{TRAIN} metrics.tensorboard=true", "run pip install tensorboardX, or"),
    ("wandb", f"{TRAIN} metrics.wandb=mine", "run pip install wandb, or"),
    ("tokenizers", f"{TRAIN} data.source=ok.txt data.tokenizer=t.json", "run pip install tokenizers"),
    ("pyarrow", f"{TRAIN} data.source=a.parquet", "run pip install pyarrow"),
    ("safetensors", "convert from-hf hf out", "run pip install safetensors"),
]


@pytest.mark.parametrize(("package", "words", "expected"), PACKAGES, ids=[package for package, _, _ in PACKAGES])
def test_packages_that_are_not_installed(place, capfd, monkeypatch, package, words, expected):
    text("ok.txt", "the cat")()
    text("t.json", "{}")()
    parquet("a.parquet", text=["a"])()
    write_folder(place / "hf")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "pyarrow":
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    check_refused(words, expected, place, capfd)


def test_a_tokenizer_that_is_larger_than_a_folders_vocabulary(place, capfd):
    """What a folder's config refuses is no advice."""
    text("ok.txt", "the cat")()
    write_tokenizer("t.json")
    write_folder(place / "hf", vocab_size=3)
    words = "data c.yaml model=hf:hf data.source=ok.txt data.tokenizer=t.json"
    check_refused(
        words, f"more tokens than the model in {place / 'hf'}; use the tokenizer of the same model", place, capfd
    )
    code, _, _, (line,) = run(words, capfd)
    assert code == 2 and "model.vocab_size=" not in line and "or train a new model from scratch" in line
    code, _, _, (line,) = run(words.replace("model=hf:hf", "model.vocab_size=3"), capfd)
    assert code == 2 and re.search(r"use model.vocab_size=\d+ or more", line)


def test_a_jaxlib_that_loses_gradients(place, capfd, monkeypatch):
    """Host offload on a GPU is refused before anything is written."""
    old = functools.partial(check_offload, "gpu", version=(0, 11, 0))
    monkeypatch.setattr("sppo_jax.pipeline.api.check_offload", lambda _, uses_host: old(uses_host))
    for settings in ("stash.inputs=host stash.attention=host", "optimizer.place=host schedule.interleave=2"):
        check_refused(f"{TRAIN} {settings}", "offload on a GPU needs jaxlib >= 0.11.1", place, capfd)


def test_a_disk_without_room(place, capfd, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("sppo_jax.train.setup.shutil.disk_usage", lambda path: usage)
    check_refused(TRAIN, "the disk must have space for two checkpoints", place, capfd)


def test_a_machine_without_memory(place, capfd, monkeypatch):
    """It is no wrong input, but one line all the same."""

    def too_much(*_):
        raise MemoryError("Unable to allocate 3.64 TiB")

    monkeypatch.setattr("sppo_jax.train.setup.prepare_data", too_much)
    code, _, _, lines = run(TRAIN, capfd)
    assert code == 1 and len(lines) == 1 and "3.64 TiB; make the run smaller" in lines[0]
