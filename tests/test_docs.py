"""What the pages say must be so."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from passlora.cli.main import make_parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_configuration_reference_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs/make_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/configuration.md").read_text() == module.reference(), "run: python docs/make_configuration.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_flags_in_commands_exist(page):
    names = "|".join(make_parser()._subparsers._group_actions[0].choices)
    commands = re.findall(rf"passlora (?:{names})\b[^`\n]*(?:\\\n[^`\n]*)*", page.read_text())
    parsers = make_parser()._subparsers._group_actions[0].choices.values()
    known_flags = {option[2:] for parser in parsers for action in parser._actions for option in action.option_strings}
    flags = {flag for command in commands for flag in re.findall(r"--(\w+)", command)}
    assert flags <= known_flags


def test_the_functions_of_the_method_table_exist():
    rows = [line for line in (ROOT / "docs/method.md").read_text().splitlines() if line.startswith("| ")]
    names = {name for row in rows for name in re.findall(r"`((?:\w+\.)+\w+)`", row)} - {"nn.Linear"}
    assert len(names) >= 12
    for name in names:
        assert pkgutil.resolve_name(f"passlora.{name}")


def test_ci_runs_the_test_command_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    pattern = re.search(r"grep -m1 '(.*?)' README.md", (ROOT / ".ci/run").read_text()).group(1)
    lines = [line for line in readme.splitlines() if re.search(pattern, line)]
    assert len(lines) == 1 and lines[0].startswith("python3 -m venv")


def test_both_set_up_commands_of_the_readme_use_the_tested_versions():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if "pip install" in line]
    assert len(commands) == 2 and all(" -c constraints.txt -e " in command for command in commands)


def test_the_constraints_hold_a_release_of_every_dependency_that_pyproject_allows():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    tested = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(tested) == len(lines) and "passlora" not in tested
    assert not any(Version(version).local for version in tested.values()), (
        "a local build, which nobody else can install"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for claim in sum(project["optional-dependencies"].values(), project["dependencies"]):
        requirement = Requirement(claim)
        if requirement.name != "passlora":
            assert requirement.specifier.contains(tested[canonicalize_name(requirement.name)]), claim


def test_the_lowest_versions_are_those_that_pyproject_claims(tmp_path):
    lowest = runpy.run_path(str(ROOT / ".ci/lowest"))["lowest_versions"]
    (tmp_path / "pyproject.toml").write_text("""
        [project]
        dependencies = ["torch>=2.5", "huggingface_hub>=1.3"]
        [project.optional-dependencies]
        robustness = ["imagecorruptions-imaug>=1.1.5"]
        test = ["passlora[robustness]", "pytest>=8.4"]
        dev = ["ruff>=0.9"]
    """)
    expected = ["torch==2.5", "huggingface_hub==1.3", "imagecorruptions-imaug==1.1.5", "pytest==8.4"]
    assert lowest(tmp_path / "pyproject.toml") == expected


def test_the_python_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    assert len(code.splitlines()) <= 10
    few = '"compare": "none", "max_train_per_class": 1, "max_test_per_class": 1, "num_train_epochs": 1'
    assert '"compare": "none"' in code
    code = code.replace('"compare": "none"', few)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    exec(code, {})
    assert "points forgotten" in capsys.readouterr().out


def test_commands_are_documented():
    readme = "".join(page.read_text() for page in PAGES)
    actions = make_parser()._subparsers._group_actions[0].choices
    assert all(f"passlora {command}" in readme for command in actions if command != "env")


def test_no_page_or_source_names_a_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split("\n"):
        path = ROOT / name
        if name and path.suffix in (".py", ".md", ".yaml", ".toml") and path.is_file():
            assert not re.search(r"(?<![\w.])/(home|root|work)/", path.read_text()), name
