"""All metadata is in pyproject.toml; this file lets older tools find it."""

from setuptools import setup

setup()
