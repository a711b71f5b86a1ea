"""Which files make a lowered step."""

from sppo_jax.fit import sources
from sppo_jax.fit.sources import program_files


def names() -> set[str]:
    return {path.relative_to(sources._ROOT).as_posix() for path in program_files()}


def test_the_files_are_those_that_a_step_imports():
    found = names()
    assert {"pipeline/executor.py", "train/step.py", "compat.py", "attention/cudnn.py", "predict/workspace.py"} <= found
    assert {"models/__init__.py", "program/fold.py", "fit/targets.py"} <= found
    # What reads data, decides plans or reports makes no program.
    assert not [name for name in found if name.startswith(("data/", "search/", "report/", "commands/"))]


def test_what_only_a_type_checker_imports_is_left_out(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "if TYPE_CHECKING:\n    import b\nelse:\n    import c\nif x:\n    from d import e\n", encoding="ascii"
    )
    assert list(sources._imported(path)) == ["c", "d", "d.e"]


def test_a_changed_file_changes_the_digits(monkeypatch, tmp_path):
    before = sources.sources_digest()
    for change in (b"\n", b""):
        copy = tmp_path / "pkg"
        for path in program_files():
            target = copy / path.relative_to(sources._ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes() + (change if path.name == "executor.py" else b""))
        with monkeypatch.context() as patch:
            patch.setattr(sources, "program_files", lambda copy=copy: set(copy.rglob("*.py")))
            patch.setattr(sources, "_ROOT", copy)
            sources.sources_digest.cache_clear()
            assert (sources.sources_digest() == before) == (change == b"")
    sources.sources_digest.cache_clear()
