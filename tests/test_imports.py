"""Who may import whom: each package imports packages above it in this list alone, so there is no circle.

What stands here is the map in CONTRIBUTING.md.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "sppo_jax"
LAYERS = (
    "version",
    "files",
    "arrays",
    "rules",
    "schedule",
    "plan",
    "program",
    "config",
    "hardware",
    "compat",
    "processes",
    "attention",
    "mixers",
    "models",
    "predict",
    "search",
    "flex",
    "data",
    "pipeline",
    "profile",
    "report",
    "evaluation",
    "train",
    "fit",
    "check",
    "commands",
    "cli",
)
WITHOUT_JAX = (
    "version.py",
    "files",
    "rules.py",
    "schedule",
    "plan",
    "program",
    "config",
    "hardware",
    "processes/gpu_start.py",
    "processes/output.py",
    "processes/own_gpus.py",
    "processes/rendezvous.py",
    "processes/stopping.py",
    "predict",
    "search",
    "flex",
)


def imported(tree: ast.AST) -> list[str]:
    """Returns the full names of all modules that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def package(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_packages_above_its_own_alone(path):
    own = package(path.relative_to(ROOT).parts)
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        if name.startswith("sppo_jax."):
            other = name.split(".")[1]
            assert other == own or LAYERS.index(other) < LAYERS.index(own), f"{path.name} imports {name}"


def test_no_file_imports_itself_by_way_of_others():
    """Imports for types alone count too: who reads a file of a circle has to read them all."""
    names = {".".join(("sppo_jax", *path.relative_to(ROOT).with_suffix("").parts)): path for path in FILES}
    of_file = {}
    for name, path in names.items():
        found = imported(ast.parse(path.read_text(encoding="utf-8")))
        of_file[name] = {one if one in names else one.rpartition(".")[0] for one in found} & names.keys() - {name}
    below: list[str] = []

    def visit(name, above):
        assert name not in above, f"a circle: {' -> '.join([*above[above.index(name) :], name])}"
        if name not in below:
            for other in sorted(of_file[name]):
                visit(other, [*above, name])
            below.append(name)

    for name in of_file:
        visit(name, [])


def test_folders_within_a_package_have_no_circle():
    """Each file that lies loose in a package counts as a folder of its own."""
    above: dict[str, set[str]] = {}
    for path in FILES:
        node = folder_of(path)
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            found = [
                ROOT.parent.joinpath(*one.split(".")).with_suffix(".py") for one in (name, name.rpartition(".")[0])
            ]
            other = next((folder_of(file) for file in found if file in FILES), node)
            above.setdefault(node, set()).update({other} - {node})
    while free := [node for node, others in above.items() if not others & above.keys()]:
        for node in free:
            del above[node]
    assert not above, f"a circle among {sorted(above)}"


def folder_of(path: Path) -> str:
    """Returns the folder of a package in which a file lies, at any depth; the file itself if it lies loose."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2])


def test_folders_are_small():
    sizes: dict[str, int] = {}
    for path in FILES:
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT))
            sizes[folder] = sizes.get(folder, 0) + 1
    assert sizes["."] <= 6, "modules that lie loose"
    assert max(sizes.values()) <= 18, {folder: size for folder, size in sizes.items() if size > 18}
    assert len(set(LAYERS) - {"parts", "layers", "check", "evaluation"}) <= 25


def writes_environment(tree: ast.AST) -> bool:
    """Returns whether a file sets or deletes a variable of the environment."""

    def is_environ(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "environ"

    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_environ(node.value) and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.AugAssign) and is_environ(node.target):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = node.func
            changes = called.attr in ("update", "setdefault", "pop", "popitem", "clear") and is_environ(called.value)
            if changes or called.attr in ("putenv", "unsetenv"):
                return True
    return False


def test_two_files_write_the_environment():
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    found = {name for name, tree in trees.items() if writes_environment(tree)}
    assert found == {"compat.py", "processes/environment.py"}


@pytest.mark.parametrize(
    ("code", "writes"),
    [
        ("os.environ['A'] = '1'", True),
        ("del os.environ['A']", True),
        ("os.environ |= {'A': '1'}", True),
        ("os.environ.setdefault('A', '1')", True),
        ("os.putenv('A', '1')", True),
        ("os.environ['A'] + os.environ.get('B', '')", False),
        ("found.update({})", False),
    ],
)
def test_a_write_to_the_environment_is_found(code, writes):
    assert writes_environment(ast.parse(code)) == writes


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_what_plans_does_not_import_jax(name):
    files = [path for path in FILES if path.relative_to(ROOT).is_relative_to(name)]
    assert files
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not {"jax", "flax", "optax"} & {name.split(".")[0] for name in imported(tree)}, path


def test_the_map_in_the_guide_is_this_one():
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert [name for name in rows if name in LAYERS] == list(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_takes_more_than_eight_arguments(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert len([name for name in given if name not in ("self", "cls")]) <= 8, f"{node.name} takes {given}"
