"""Predicted and compiled waits for host copies: the table is of today's planner, and rows are compiled one by one."""

from bench import plans, rows, waits
from bench.blocks import read_block


def test_the_table_is_of_todays_planner():
    stored = waits.load()
    assert stored and read_block(waits.DOCUMENT, "waits") == waits.table(stored).strip()
    name, row = next(iter(stored.items()))
    assert waits.table({name: {**row, "together": [], "loop_waits": []}}) != waits.table({name: row})


def test_every_case_has_a_config_of_its_own():
    names = waits.cases()
    assert len(set(names)) == len(names) and set(waits.load()) <= set(names)
    assert all(waits.config_of(name).hardware.cluster for name in names)


def test_rows_are_saved_as_they_end(tmp_path):
    path, seen = tmp_path / "rows.json", []

    def compiled(name):
        seen.append(rows.load_rows(path))
        return {"name": name}

    assert set(rows.compile_rows(["one", "two", "other"], ["o"], compiled, path)) == {"one", "two", "other"}
    assert [len(before) for before in seen] == [0, 1, 2]
    rows.compile_rows(["one", "two", "other"], ["tw"], compiled, path)
    assert len(seen) == 4 and rows.load_rows(path)["two"] == {"name": "two"}


def test_the_table_of_plans_is_of_the_stored_rows():
    rows_of_plans = plans.load_rows(plans.RESULTS)
    assert read_block(plans.DOCUMENT, "plans") == plans.table(rows_of_plans) and set(rows_of_plans) <= set(
        plans.names()
    )
    name, row = next(iter(rows_of_plans.items()))
    assert plans.table({name: {**row, "before": row["after"]}}) != plans.table({name: row})
