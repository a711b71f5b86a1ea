"""Every way of YAML 1.1 to write a number, in files, words and lists: as Python reads it, refused, or a text."""

import pytest
import yaml

from sppo_jax.config import ConfigError, config_from_dict, load_config, to_yaml

MODEL = "model: {vocab_size: 257, hidden_size: 64, num_layers: 2, num_heads: 2, mlp_size: 128}"
# What Python reads alike: for whole numbers, and for any numbers.
WHOLE = {"64": 64, "+64": 64, "1_000_000": 10**6, "1e3": 1000, "1E+3": 1000, "1.5e3": 1500, "0x40": 64}
WHOLE |= {"7.": 7, "64.0": 64, "1_0.0": 10, "07": 7, "08": 8}
ANY = {"1e-5": 1e-5, "1.0e-5": 1e-5, ".5": 0.5, "5e-1": 0.5, ".5e+0": 0.5, "0.25": 0.25, "1_0.5": 10.5, "00.5": 0.5}
# What YAML 1.1 reads, its form, and the ways to write it.
REFUSED = {
    "0100000": ("32768", "octal", "32768 or 100000"),
    "+0100": ("64", "octal", "64 or 100"),
    "0_100": ("64", "octal", "64 or 100"),
    "12:00": ("720", "base 60", "720"),
    "190:20:30": ("685230", "base 60", "685230"),
    "1:30.5": ("90.5", "base 60", "90.5"),
    "1:30.": ("90", "base 60", "90"),
    "0b101": ("5", "binary", "5"),
    "+0b1_1": ("3", "binary", "3"),
    "1__0": ("10", "its underscores left out", "10"),
    "1_": ("1", "its underscores left out", "1"),
}
TEXTS = [*WHOLE, *ANY, *REFUSED, "-0100", ".inf", ".nan", "2026-01-31", "2026-01-31 10:00:00", "1.10"]


def write(tmp_path, lines):
    path = tmp_path / "c.yaml"
    path.write_text("\n".join([MODEL, "sequence:", "  length: 4096", *lines, "train: {steps: 10}"]) + "\n")
    return path


def in_places(tmp_path, section, key, value):
    """Yields the place and a call that loads a setting from a file, and from a word."""
    rest = [f"{section}:", f"  {key}: {value}"] if section != "sequence" else [f"  {key}: {value}"]
    path = write(tmp_path, rest)
    yield f"{path}:{5 if section != 'sequence' else 4}", lambda: load_config(path)
    word, bare = f"{section}.{key}={value}", write(tmp_path, [])
    yield word, lambda: load_config(bare, [word])


@pytest.mark.parametrize("written", WHOLE)
def test_what_python_reads_alike_stays(tmp_path, written):
    for _, load in in_places(tmp_path, "data", "seed", written):
        seed = load().data.seed
        assert seed == WHOLE[written] and type(seed) is int
    for _, load in in_places(tmp_path, "data", "recall", f"{{distances: [{written}, 5]}}"):
        assert load().data.recall.distances == (WHOLE[written], 5)


@pytest.mark.parametrize("written", [*ANY, "64", "1e3"])
def test_numbers_with_a_fraction_stay(tmp_path, written):
    for _, load in in_places(tmp_path, "optimizer", "lr", written):
        assert load().optimizer.lr == (ANY | WHOLE)[written] and type(load().optimizer.lr) is float
    if 0 <= (ANY | WHOLE)[written] <= 1:
        for _, load in in_places(tmp_path, "stash", "alpha", f"[{written}, 1]"):
            assert load().stash.alpha == (ANY[written], 1.0)


@pytest.mark.parametrize("written", REFUSED)
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("sequence", "per_step", "{}"),
        ("optimizer", "lr", "{}"),
        ("mesh", "pipe", "{}"),
        ("sequence", "chunks", "[1, {}]"),
        ("stash", "alpha", "[0, {}]"),
        ("model", "rope.theta", "{}"),
        ("data", "source", "{{a: {}}}"),
        ("data", "source", "{{a: {{weight: {}}}}}"),
        ("data", "chat", "{{values: {{a: {}}}}}"),
    ],
)
def test_what_python_reads_otherwise_is_refused_everywhere(tmp_path, section, key, value, written):
    number, form, ways = REFUSED[written]
    for place, load in in_places(tmp_path, section, key, value.format(written)):
        if section == "model" and place.startswith("/"):
            continue  # the model is one line in the file
        with pytest.raises(ConfigError) as error:
            load()
        text = str(error.value)
        got = f"must be a number that YAML and Python read alike, got {written} in {place}, which is {number} to YAML"
        assert f"{got} 1.1 ({form}); write {ways}" in text and text.startswith(section) and "\n" not in text
        assert text.endswith(" in quotes for a text") == ("values" in value)


@pytest.mark.parametrize("written", TEXTS)
def test_a_text_setting_takes_the_text(tmp_path, written):
    for section, key in (("data", "text_key"), ("data", "source"), ("checkpoint", "dir")):
        for _, load in in_places(tmp_path, section, key, written):
            config = load()
            assert getattr(getattr(config, section), key) == written


@pytest.mark.parametrize("written", [each for each in TEXTS if " " not in each])
def test_a_name_of_a_source_is_a_text(tmp_path, written):
    path = write(tmp_path, ["data:", "  source:", f"    {written}: 2", "    64.5: 1"])
    config = load_config(path)
    assert config.data.source == {written: 2.0, "64.5": 1.0}
    path.write_text(to_yaml(config))
    assert load_config(path) == config


def test_names_that_yaml_reads_as_one_number_stay_two(tmp_path):
    assert load_config(write(tmp_path, []), ["data.source={0100: 1, 64: 2}"]).data.source == {"0100": 1.0, "64": 2.0}


def test_values_of_a_template_are_numbers_without_quotes_and_texts_with_them(tmp_path):
    values = "{a: 2024, b: '2024', c: 1e-5, d: '1e-5', e: 2026-01-31, f: '0100', g: true, h: x}"
    config = load_config(write(tmp_path, []), [f"data.chat.values={values}"])
    found = {"a": 2024, "b": "2024", "c": 1e-5, "d": "1e-5", "e": "2026-01-31", "f": "0100", "g": True, "h": "x"}
    assert config.data.chat.values == found and type(config.data.chat.values["a"]) is int
    assert config_from_dict(yaml.safe_load(to_yaml(config))) == config


def test_a_day_needs_no_quotes(tmp_path):
    for _, load in in_places(tmp_path, "data", "chat", "{date: 2026-01-31}"):
        assert load().data.chat.date == "2026-01-31"


def test_a_folder_of_digits_is_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="model.hf: a Hugging Face model must be a local folder .*/0100 "):
        load_config(write(tmp_path, []), ["model.hf=0100"])


def test_the_first_wrong_number_of_a_file_has_its_line(tmp_path):
    path = tmp_path / "y.yaml"
    path.write_text(f"{MODEL}\ndata: {{source: t.npy}}\nsequence: {{length: 0100000}}\ntrain: {{steps: 12:00}}\n")
    with pytest.raises(ConfigError, match=r"sequence.length must .* got 0100000 in .*y.yaml:3, which is 32768"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"train.steps must .* got 12:00 in .*y.yaml:4, which is 720"):
        load_config(path, ["sequence.length=100000"])
