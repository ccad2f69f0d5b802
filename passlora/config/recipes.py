"""The recipes that come with passlora: of a checkout, or inside the installed package."""

from __future__ import annotations

from pathlib import Path

from passlora.errors import PassloraError, nearest

PACKAGE = Path(__file__).parent.parent
LAUNCHING = "accelerate_configs"  # of accelerate launch, not of passlora


def recipes_folder() -> Path:
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def recipe_names() -> list[str]:
    """Such as mini/digits; those of accelerate last."""
    paths = sorted(recipes_folder().glob("*/*.yaml"), key=lambda path: (path.parent.name == LAUNCHING, path))
    return [f"{path.parent.name}/{path.stem}" for path in paths]


def find_recipe(name: str) -> Path:
    """The file of a recipe: mini/digits, with or without recipes/ before it and .yaml behind."""
    plain = name.removeprefix("recipes/").removesuffix(".yaml")
    known = recipe_names()
    if plain not in known:
        raise PassloraError(f"no recipe at {name}{nearest(plain, known)}; passlora recipes lists those that there are")
    return recipes_folder() / f"{plain}.yaml"


def about(name: str) -> str:
    """The first line of a recipe's header."""
    with open(find_recipe(name), encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()
