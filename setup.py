# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from setuptools import find_packages, setup

EXAMPLES = ["numpy", "peft>=0.18", "tqdm"]
TEST_CPU = [*EXAMPLES, "accelerate", "hypothesis", "parameterized", "pytest", "pytest-timeout", "ruff"]
# The virtual NPU runs the real torch_npu, of which there are wheels for Linux only.
TEST = [*TEST_CPU, "trl", "torch_npu; platform_system == 'Linux'"]

setup(
    name="npu-moe",
    version="0.1.0",
    description="Fast Mixture-of-Experts training with Hugging Face transformers on Ascend NPUs",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    package_dir={"": "src"},
    packages=find_packages("src"),
    py_modules=["npu_moe_autoload"],
    # `import torch` calls it; without NPU_MOE_AUTOLOAD=1 it does nothing.
    entry_points={"torch.backends": ["npu_moe = npu_moe_autoload:autoload"]},
    python_requires=">=3.10",
    # Lower bounds only: torch_npu pins the torch it was built for, and installing this must not move it.
    install_requires=["torch>=2.7", "transformers>=5.0"],
    extras_require={"examples": EXAMPLES, "test": TEST, "test-cpu": TEST_CPU},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
