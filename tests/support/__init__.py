"""Functions that tests run in worker processes (`pool.run(world, function, ...)`).

Workers unpickle a function by its module's name, and test modules have none (--import-mode=importlib). This package
does: `pythonpath = ["tests"]` in pyproject.toml puts it on sys.path, which multiprocessing hands on to every worker.
"""
