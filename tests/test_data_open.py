"""From a config to sequences."""

import numpy as np

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data


def make_config(source, **data):
    return config_from_dict(
        {
            "model": {"vocab_size": 257, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "mlp_size": 8},
            "data": {"source": str(source), **data},
            "sequence": {"length": 16},
            "train": {"steps": 1},
        }
    )


def test_text_becomes_sequences_that_decode(tmp_path):
    (tmp_path / "a.txt").write_text("caf\u00e9 au lait")
    data = open_data(make_config(tmp_path / "a.txt", validation_fraction=0.3))
    row = data.training[0]
    assert data.decode(row["tokens"][row["document_ids"] >= 0]) == "caf\u00e9 au "
    assert len(data.training) == len(data.validation) == 1
    assert data.validation[7]["document_ids"].tolist().count(0) == 4
    assert open_data(make_config(tmp_path / "a.txt", validation_fraction=0)).validation is None
    assert np.array_equal(data.training[3]["tokens"], data.training[0]["tokens"])
