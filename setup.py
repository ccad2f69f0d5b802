"""What pyproject.toml cannot say: the recipes go into the package when it is built."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("recipes", Path(self.build_lib) / "passlora" / "recipes", dirs_exist_ok=True)


setup(cmdclass={"build_py": WithRecipes})
