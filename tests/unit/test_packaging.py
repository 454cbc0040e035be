"""The image and the conda recipe have the requirements of pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from umem.base.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "packaging/Dockerfile").read_text()
RECIPE = (ROOT / "packaging/conda/recipe.yaml").read_text()


def normal(requirement: str) -> str:
    return requirement.partition(";")[0].replace(" ", "")


def entries(section: str) -> set[str]:
    """The plain entries of a list in the recipe's requirements."""
    block = re.search(rf"^  {section}:\n((?:    .*\n)+)", RECIPE, re.MULTILINE)
    assert block is not None, section
    return {normal(line.strip()[2:]) for line in block[1].splitlines() if line.startswith("    - ")}


def test_the_image_installs_what_the_build_needs() -> None:
    line = next(line for line in DOCKERFILE.splitlines() if "setuptools" in line)
    asked = set(line.partition("--no-cache-dir ")[2].rstrip(" \\").replace("'", "").split())
    assert asked == set(PROJECT["build-system"]["requires"])


def test_the_recipe_has_the_requirements_of_the_package() -> None:
    build = {normal(name) for name in PROJECT["build-system"]["requires"]}
    assert build <= entries("build") | entries("host")
    assert {normal(name) for name in PROJECT["project"]["dependencies"]} <= (
        entries("run") | {normal(text) for text in re.findall(r"then: (.*)", RECIPE)}
    )
    assert f"python{PROJECT['project']['requires-python']}" in entries("run")


def test_the_recipe_is_of_this_version() -> None:
    assert f"version: {__version__}\n" in RECIPE
    assert f"license: {PROJECT['project']['license']}\n" in RECIPE
    (newest,) = re.findall(
        r"^CUDA_TORCH \?= torch===2\.(\d+)", (ROOT / "Makefile").read_text(), re.M
    )
    assert f"pytorch >=2.11,<2.{int(newest) + 1}" in RECIPE
    assert f"torch 2.11 to 2.{newest}" in DOCKERFILE
