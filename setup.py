"""Package map: the top-level folders of this checkout are the sub-packages of `isoloss`.

`pip install -e .` (setuptools' default, lenient editable mode) makes `import isoloss.engine`, `python -m`, pytest and
subprocesses work, and new files need no reinstall. The top of the package, which is `isoloss` itself, is a folder of
the command of that name. Everything else about the project is in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("engine", "models", "parallel", "recipes", "tools")
TOP = "tools/command/isoloss"
NOT_SHIPPED = ("dev", "dev.*", "command.isoloss")  # in tools/: scripts for developers; the top, under its own name

setup(
    packages=[
        "isoloss",
        *(
            f"isoloss.{package}"
            for folder in FOLDERS
            for package in (folder, *(f"{folder}.{sub}" for sub in find_packages(folder, exclude=NOT_SHIPPED)))
        ),
    ],
    package_dir={"isoloss": TOP, **{f"isoloss.{folder}": folder for folder in FOLDERS}},
    package_data={
        "": ["py.typed"],
        "isoloss.recipes": ["conf/**/*.yaml", "assets/**/*"],
        "isoloss.engine": ["config/trainers/*.toml"],
        "isoloss.tools.audit": ["page.css", "page.js"],
        "isoloss.tools.migrate": ["*.toml"],
        "isoloss.tools.serve.front": ["page.html"],
    },
)
