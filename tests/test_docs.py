"""What the pages say must be so."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

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


def test_the_python_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    assert len(code.splitlines()) <= 10
    code = code.replace('"compare": "none"', '"compare": "none", "max_train_per_class": 1, "max_test_per_class": 1')
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
