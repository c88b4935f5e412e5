"""Package metadata, in one place. `make setup` installs it editable, beside the pins of requirements/."""

from setuptools import find_packages, setup

setup(
    name="sigmoid-rl",
    version="0.1.0",
    description="Reinforcement learning for language models whose outcome you can predict",
    python_requires=">=3.11",
    packages=find_packages(include=["kernels", "kernels.*", "trainer", "trainer.*", "bench", "bench.*"]),
    package_data={"trainer": ["recipes/*.yaml"]},
    install_requires=[
        "torch>=2.11,<2.14",
        "transformers>=5.16.1,<5.20",
        "numpy>=1.26,<2.4",  # Triton's interpreter breaks on 2.4
        "scipy>=1.12",
        "safetensors>=0.5",
        "gguf>=0.10",
        "huggingface_hub>=1.0",
        "pyyaml>=6",
        "rich>=13",
        "matplotlib>=3.8",
        "tensorboard>=2.16",
        "math-verify>=0.9,<0.10",
        "reasoning-gym==0.1.25",  # same seed, same items: a new version may draw other ones
        "pyarrow>=15",
    ],
    extras_require={
        "vllm": ["vllm==0.32.0"],
        "flash": ["flash-attn"],
        "wandb": ["wandb"],
        "datasets": ["datasets"],
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-benchmark",
            "hypothesis",
            "ruff",
            "mypy",
        ],
    },
)
