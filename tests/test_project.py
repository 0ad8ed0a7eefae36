"""The tree compared with its own rules: lint, types, requirements, files that stand alone, README's commands."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

CORE_FILES = ["train", "model_act", "dist", "ckpt", "data"]
CORE_LEAVES = ["model_act", "dist", "ckpt", "data"]
COMMANDS = ["train", "evaluate", "bench"]
STANDALONE = [
    "lora",
    "sim",
    "track",
    "frames",
    "lerobot_data",
    "plain_act",
    "hub",
    "lerobot_flags",
    "report",
    "ranks",
    "noise",
    "pretrained",
]
CORE = ["torch", "torchvision", "safetensors", "tyro", "numpy", "pytest"]
SOURCES = sorted([*ROOT.glob("*.py"), *(ROOT / "extras").glob("*.py")])
LINES = {
    "train.py": 680,
    "model_act.py": 900,
    "dist.py": 880,
    "ckpt.py": 1040,
    "data.py": 680,
    "extras/plain_act.py": 180,
}
"""Lines that a file may have; any other 1,000, the five core files together 4,000, their spines 2,000."""
SPINE_ENDS = "end of the spine"
IMPORT_LINES = 20


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_linter_finds_nothing():
    run(sys.executable, "-m", "ruff", "check", ".")


def test_the_formatter_changes_nothing():
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_the_type_checker_finds_nothing():
    run(sys.executable, "-m", "mypy", *(str(path.relative_to(ROOT)) for path in SOURCES))


@pytest.mark.parametrize("leaf", [*CORE_LEAVES, *(f"extras/{name}" for name in STANDALONE)])
def test_a_leaf_copied_alone_into_an_empty_folder_imports(leaf, tmp_path):
    shutil.copy(ROOT / f"{leaf}.py", tmp_path)
    name = leaf.removeprefix("extras/")
    # -I: no PYTHONPATH, no current folder; only the copy can be found.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {name}; print({name}.__file__)"
    assert str(tmp_path) in run(sys.executable, "-I", "-c", code, cwd=tmp_path)


# ---- one sitting: who imports whom, and how long a file may be


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path, heads_only: bool = True) -> set[str]:
    """The modules of this project that a file imports: at its head, or anywhere but under `__main__`."""
    names = {module_name(source) for source in SOURCES}
    found = set()
    tree = ast.parse(path.read_text())
    body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
    ]
    nodes = body if heads_only else [inner for node in body for inner in ast.walk(node)]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & names
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & names
            found |= {node.module or ""} & names - {"extras"}
    return found - {module_name(path), "extras.__init__"}


def test_the_core_leaves_and_what_makes_sense_alone_import_nothing_of_the_project():
    for name in CORE_LEAVES:
        assert imports(ROOT / f"{name}.py", heads_only=False) == set(), name
    for name in STANDALONE:
        assert imports(ROOT / f"extras/{name}.py", heads_only=False) == set(), name


def test_no_import_points_upwards_and_none_goes_in_a_circle():
    arrows = {module_name(path): imports(path, heads_only=False) for path in SOURCES}
    for name, targets in arrows.items():
        if name.startswith("extras."):
            assert not targets & set(COMMANDS), f"{name} imports {targets & set(COMMANDS)}"
    done: set[str] = set()
    while left := arrows.keys() - done:
        free = {name for name in left if arrows[name] <= done}
        assert free, f"a circle among {sorted(left)}"
        done |= free


def test_every_file_keeps_its_budget_of_lines():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: n for name, n in lengths.items() if n > LINES.get(name, 1000)} == {}
    assert sum(lengths[f"{name}.py"] for name in CORE_FILES) <= 4000


def spine(name: str) -> int:
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    ends = [number for number, line in enumerate(lines, 1) if line.startswith("# ---") and SPINE_ENDS in line]
    assert len(ends) == 1, f"{name}.py has {len(ends)} ruled lines that end a spine"
    return ends[0]


def test_the_five_spines_together_are_one_sitting():
    assert sum(spine(name) for name in CORE_FILES) <= 2000


def test_no_function_is_longer_than_a_screen():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno + 1 <= 60, f"{path.name}: {node.name}"


def test_a_core_file_begins_with_few_imports_and_has_few_wide_lines():
    for name in CORE_FILES:
        text = (ROOT / f"{name}.py").read_text()
        nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert sum((node.end_lineno or 0) - node.lineno + 1 for node in nodes) <= IMPORT_LINES, name
        lines = text.splitlines()
        assert max(map(len, lines)) <= 110, name
        assert sum(len(line) > 100 for line in lines) < 0.05 * len(lines), name


def test_requirements_hold_the_six_core_packages_and_no_other():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert [re.split(r"[<>=]", line)[0] for line in lines] == CORE
    assert (ROOT / "requirements-extra.txt").read_text().startswith("-r requirements.txt")


def test_no_file_imports_an_optional_package_at_its_head():
    siblings = {path.stem for path in SOURCES} | {"extras"}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names}
            assert roots <= {*CORE, *siblings, *sys.stdlib_module_names}, path


def test_help_names_every_flag_of_the_readme():
    said = run(sys.executable, "train.py", "--help")
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*(?:\.[a-z-]+)?", (ROOT / "README.md").read_text()))
    others = {
        "--nproc-per-node",
        "--numa-binding",
        "--nnodes",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--max-restarts",
    }
    others |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--signal", "--requeue", "--root"}
    others |= {"--checkpoint-dir", "--dtype", "--checkpoint", "--episodes", "--video"}
    others |= {"--rows", "--warmup", "--threads", "--layouts"}  # of bench.py
    for flag in sorted(flags - others):
        if "_" in flag or flag.startswith(("--accelerator", "--wandb", "--policy.type", "--config")):
            continue  # lerobot-train's, translated
        assert flag in said, flag


def commands() -> list[str]:
    """The README's command lines of this project, that need no GPU, cluster or network."""
    lines = [
        line.strip() for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    ")
    ]
    lines = [line.split("#")[0].strip() for line in lines]
    return [line for line in lines if line.startswith(("python ", "torchrun ")) and "push-to-hub" not in line]


def test_the_readme_shows_commands_of_every_kind():
    said = " ".join(commands())
    for part in (
        "--resume",
        "ckpt.py convert",
        "ckpt.py show",
        "evaluate.py",
        "data.py check",
        "torchrun",
        "LORA",
    ):
        assert part in said
