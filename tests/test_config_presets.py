"""Named shapes: their parameter counts, and that neither they nor the counts need jax."""

import subprocess
import sys

import jax
import pytest
from flax import nnx

from sppo_jax.config import ModelConfig
from sppo_jax.models import PRESETS, Decoder, apply_preset, num_params

# The counts of the published checkpoints; for the gpt shapes, which have none, the size in their name.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "gemma-3-27b": 27_009_346_304,
    "olmo-3-7b": 7_298_011_136,
    "mistral-7b-v0.3": 7_248_023_552,
    "gpt-oss-20b": 20_914_757_184,
}
NOMINAL = {"gpt-1.3b": 1.3e9, "gpt-2.7b": 2.7e9, "gpt-7b": 6.7e9, "gpt-13b": 13e9, "gpt-30b": 30e9, "gpt-65b": 65e9}


@pytest.mark.parametrize("name", PRESETS)
def test_abstract_model_has_the_published_number_of_parameters(name):
    config = ModelConfig(**apply_preset(name))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0)))
    counted = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert counted == num_params(config)
    if name in PUBLISHED:
        assert counted == PUBLISHED[name]
    else:
        assert counted == pytest.approx(NOMINAL[name], rel=0.03)


def test_every_preset_has_an_expected_size():
    assert set(PRESETS) == set(PUBLISHED) | set(NOMINAL)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match=r"got 'llama3-8B'; did you mean 'llama3-8b'\?"):
        apply_preset("llama3-8B")


def test_a_preset_is_the_callers_to_change():
    apply_preset("llama3.1-8b")["rope"]["factor"] = 99.0
    assert apply_preset("llama3.1-8b")["rope"]["factor"] == 8.0


def test_presets_and_sizes_import_no_jax():
    code = (
        "import sys; from sppo_jax.models import apply_preset, num_params; from sppo_jax.config import ModelConfig;"
        "num_params(ModelConfig(**apply_preset('llama3-8b'))); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
