"""The packages of a wheel. What is beside `minddp/` in the repository is under its name when installed.

`reference/` becomes `minddp.reference`: its files import each other by relative names. The benchmarks import each
other as `benchmarks`, so they are in a folder that only `minddp bench` puts on the path.
"""

from setuptools import find_namespace_packages, setup

BESIDE = {"minddp.reference": "reference", "minddp.beside.benchmarks": "benchmarks"}

if __name__ == "__main__":
    found = find_namespace_packages(include=["minddp", "minddp.*"], exclude=["*.__pycache__"])
    setup(packages=[*found, *BESIDE], package_dir=BESIDE)
