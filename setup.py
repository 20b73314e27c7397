"""The distribution: name, versions of what it needs, and the configuration files that travel with it.

In a clone and in an editable install `config/` stands beside `hydraflow/`; in a wheel it is
`hydraflow/config/`. The same holds for what a job on a cluster needs, `scripts/slurm/` and `examples/slurm/`.
Left out on purpose: pinned versions; those are in constraints.txt, which the scripts hand to pip.
"""

from pathlib import Path

from setuptools import find_packages, setup

REQUIRES = [
    "torch>=2.13",
    "ray[default]>=2.60",
    "hydra-core>=1.3.2",
    "tensordict>=0.11",
    "transformers>=5.0",
    "numpy>=2.1",
    "threadpoolctl>=3.5",
    "pyarrow>=19",
    "datasets>=4.0",
    "safetensors>=0.5",
    "peft>=0.18",
    "codetiming>=1.4",
    "filelock>=3.16",
    "packaging>=24",
    "psutil>=6.0",
    "tokenizers>=0.22",
    "huggingface_hub>=1.0",
    "httpx2>=2.0",
    "jinja2>=3.1",
    "omegaconf>=2.3",
    "math-verify>=0.8",
    "PyYAML>=6.0",
    "rich>=13.7",
    "tensorboard>=2.18",
    "matplotlib>=3.9",
]

TRACKERS = {
    "wandb": ["wandb>=0.22"],
    "mlflow": ["mlflow-skinny>=3.5", "sqlalchemy>=2.0", "alembic>=1.13"],
    "swanlab": ["swanlab>=0.10"],
}
# its sources are rewritten where there is no CUDA (hydraflow/engine/megatron/without_cuda.py)
MEGATRON = "megatron-core>=0.16,<0.17"

EXTRAS = {
    "dev": [
        *(
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.115",
            "ruff>=0.9",
            "mypy>=1.14",
        ),
        "hydra-submitit-launcher>=1.2",
        MEGATRON,
        *(package for packages in TRACKERS.values() for package in packages),
    ],
    "slurm": ["hydra-submitit-launcher>=1.2"],
    "vllm": ["vllm>=0.32"],
    "flash-attn": ["flash-attn"],
    "megatron": [MEGATRON],
    **TRACKERS,
}

BESIDE = {
    "hydraflow.config": "config",
    "hydraflow.scripts.slurm": "scripts/slurm",
    "hydraflow.examples.slurm": "examples/slurm",
}
"""Folders that travel with the package, by the name that they have in it."""

setup(
    name="hydraflow-trainer",
    version="0.1.0",
    description=(
        "Reinforcement learning for language models: one readable loop, the same command on a laptop and on"
        " GPUs."
    ),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["hydraflow", "hydraflow.*"]), *BESIDE],
    package_dir={"hydraflow": "hydraflow", **BESIDE},
    package_data={
        "hydraflow.compose": ["verl_data/*.yaml"],
        "hydraflow.config": ["*.yaml", "**/*.yaml"],
        "hydraflow.report": ["page.*"],
        "hydraflow.scripts.slurm": ["*.sh"],
        "hydraflow.examples.slurm": ["*.sbatch"],
    },
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
