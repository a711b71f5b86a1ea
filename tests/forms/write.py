"""Writes the small files that the readers of forms are tried with, by each form's own library.

    python tests/forms/write.py datasets|webdataset|array_record|streaming|megatron

One library a call: mosaicml-streaming needs transformers below 5, so each may have an environment of its own. The files
are kept beside this script, and tests/test_data_forms.py reads them.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
TEXTS = [f"document {number} of a form, \u00fc \U0001f600\n" + "line \u4e2d\n" * (number % 5) for number in range(24)]
TOKENS = [[(7 * number + place) % 900 + 1 for place in range(3 + number % 6)] for number in range(24)]
NUM_EMPTY = 5  # documents of gaps.bin without tokens
CHATS = [
    [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]
    for number in range(6)
]


def write_datasets():
    """Writes a stream, a saved data set in two files, one with splits, and conversations."""
    import datasets

    rows = datasets.Dataset.from_dict({"text": [TEXTS[0], None, *TEXTS[1:]], "id": list(range(len(TEXTS) + 1))})
    with datasets.arrow_writer.ArrowWriter(path=str(HERE / "stream.arrow"), writer_batch_size=5) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    rows.save_to_disk(HERE / "saved", num_shards=2)
    (HERE / "saved" / "cache-0123456789abcdef.arrow").write_bytes((HERE / "stream.arrow").read_bytes())
    parts = datasets.DatasetDict({"train": rows.select(range(4)), "test": rows.select(range(4, 6))})
    parts.save_to_disk(HERE / "splits")
    datasets.Dataset.from_dict({"messages": CHATS}).save_to_disk(HERE / "chats")
    labels = [[-100, *tokens[1:]] for tokens in TOKENS]
    datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": labels}).save_to_disk(HERE / "labelled")


def write_webdataset():
    """Writes a tar of samples, each a text and a JSON object."""
    import webdataset

    with webdataset.TarWriter(str(HERE / "samples.tar"), mtime=0) as writer:
        for number, text in enumerate(TEXTS):
            writer.write({"__key__": f"part/{number:04d}", "txt": text, "json": {"id": number}})


def write_array_record():
    """Writes records of JSON, of plain text, and of tf.train.Example."""
    from array_record.python.array_record_module import ArrayRecordWriter

    def varint(value):
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def field(content):
        return b"\x0a" + varint(len(content)) + content

    def example(text, number):
        value = b"\x12" + varint(len(entry := field(field(text.encode())))) + entry
        other = b"\x12" + varint(len(entry := b"\x1a" + varint(len(ids := b"\x0a\x01" + varint(number))) + ids)) + entry
        return field(field(field(b"text") + value) + field(field(b"id") + other))

    for name, encode in (
        ("json", lambda text, number: json.dumps({"text": text, "id": number}).encode()),
        ("plain", lambda text, number: text.encode()),
        ("example", example),
    ):
        writer = ArrayRecordWriter(str(HERE / f"{name}.array_record"), "group_size:4")
        for number, text in enumerate(TEXTS):
            writer.write(encode(text, number))
        writer.close()


def write_streaming():
    """Writes shards of MDS: texts, compressed texts, and tokens."""
    import numpy as np
    from streaming import MDSWriter

    for name, compression in (("mds", None), ("mds-zstd", "zstd")):
        with MDSWriter(
            out=str(HERE / name), columns={"text": "str", "id": "int"}, compression=compression, size_limit=900
        ) as writer:
            for number, text in enumerate(TEXTS):
                writer.write({"text": text, "id": number})
    with MDSWriter(
        out=str(HERE / "mds-tokens"), columns={"input_ids": "ndarray:uint32", "labels": "ndarray"}
    ) as writer:
        for tokens in TOKENS:
            writer.write({"input_ids": np.array(tokens, np.uint32), "labels": np.array([-100, *tokens[1:]], np.int64)})


def write_megatron():
    """Writes documents of one sequence, and of several, in two dtypes; and with NUM_EMPTY empty documents between."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name, dtype, each in (("narrow", np.uint16, 1), ("wide", np.int32, 2)):
        folder = HERE / "megatron"
        folder.mkdir(exist_ok=True)
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
        for first in range(0, len(TOKENS), each):
            tokens = TOKENS[first : first + each]
            builder.add_document(torch.tensor(sum(tokens, [])), [len(part) for part in tokens])
        builder.finalize(str(folder / f"{name}.idx"))
    builder = IndexedDatasetBuilder(str(folder / "gaps.bin"), dtype=np.int32)
    builder.end_document()  # no sequence
    for number, tokens in enumerate(TOKENS):
        builder.add_document(torch.tensor(tokens), [len(tokens)])
        if number % 6 == 5:
            builder.add_document(torch.zeros(0, dtype=torch.int64), [0])  # a sequence of no tokens
    builder.finalize(str(folder / "gaps.idx"))


if __name__ == "__main__":
    globals()[f"write_{sys.argv[1]}"]()
