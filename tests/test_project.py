"""The tree compared with its own rules: lint, types, requirements, files that stand alone, README's commands."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

LEAVES = ["model_act", "dist", "ckpt", "data", "lora", "sim", "track", "lerobot_flags"]
CORE = ["torch", "torchvision", "safetensors", "tyro", "numpy", "pytest"]
SOURCES = sorted(path for path in ROOT.glob("*.py"))


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_linter_finds_nothing():
    run(sys.executable, "-m", "ruff", "check", ".")


def test_the_formatter_changes_nothing():
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_the_type_checker_finds_nothing():
    run(sys.executable, "-m", "mypy", *(path.name for path in SOURCES))


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_copied_alone_into_an_empty_folder_imports(leaf, tmp_path):
    shutil.copy(ROOT / f"{leaf}.py", tmp_path)
    # -I: no PYTHONPATH, no current folder; only the copy can be found.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {leaf}; print({leaf}.__file__)"
    assert str(tmp_path) in run(sys.executable, "-I", "-c", code, cwd=tmp_path)


def test_requirements_hold_the_six_core_packages_and_no_other():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert [re.split(r"[<>=]", line)[0] for line in lines] == CORE
    assert (ROOT / "requirements-extra.txt").read_text().startswith("-r requirements.txt")


def test_no_file_imports_an_optional_package_at_its_head():
    siblings = {path.stem for path in SOURCES}
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
