"""Maps configs/, which stays at the top of the checkout, into the package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["sppo_jax*"]), "sppo_jax.configs"],
    package_dir={"sppo_jax.configs": "configs"},
    package_data={
        "sppo_jax": ["py.typed"],
        "sppo_jax.configs": ["*.yaml", "recipes/*.yaml"],
        "sppo_jax.flex": ["*.csv"],
        "sppo_jax.check": ["*.json"],
        "sppo_jax.hardware": ["*.json"],
    },
)
