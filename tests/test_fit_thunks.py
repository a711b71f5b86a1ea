"""Which loops are in CUDA graphs, from dumps as XLA writes them."""

from sppo_jax.fit.thunks import graphed_loops

SEQUENCE = """\
001: kCopy  [source       | next=003 (2)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] compare
  body:
    004: kCommandBuffer [source | sink]
        005: kWhile [source | sink]
condition:
            006: kCustomKernel [source | sink] compare
          body:
            007: kConditional [source | sink]
    008: kWhile [source | sink]
condition:
        009: kCustomKernel [source | sink] compare
"""
NAMES = {2: "while.ticks", 5: "while.attention", 7: "conditional.1", 8: "while.turns"}


def write(folder, sequence=SEQUENCE):
    text = "".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
        for number, name in NAMES.items()
    )
    (folder / "module_0001.jit_step.thunk_metadata.txt").write_text(text)
    if sequence:
        (folder / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(sequence)


def test_a_loop_below_a_command_buffer_is_in_a_graph(tmp_path):
    write(tmp_path)
    assert graphed_loops(tmp_path) == {"while.attention", "conditional.1"}


def test_without_command_buffers_no_loop_is(tmp_path):
    write(tmp_path, "")
    assert graphed_loops(tmp_path) == frozenset()
