"""Package map: the top-level folders of this checkout are the sub-packages of `isoloss`.

`pip install -e .` (setuptools' default, lenient editable mode) makes `import isoloss.engine`, `python -m`, pytest and
subprocesses work, and new files need no reinstall. Everything else about the project is in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("engine", "models", "parallel", "recipes", "tools")

setup(
    packages=[f"isoloss.{p}" for f in FOLDERS for p in (f, *(f"{f}.{sub}" for sub in find_packages(f)))],
    package_dir={f"isoloss.{folder}": folder for folder in FOLDERS},
    package_data={"": ["py.typed"], "isoloss.recipes": ["conf/**/*.yaml", "assets/**/*"]},
)
