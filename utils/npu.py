# SPDX-License-Identifier: Apache-2.0
"""The gate for launch scripts and CI runners: prints whether PyTorch can use an NPU here, and if not, why not.

    python utils/npu.py             # always exits with 0
    python utils/npu.py --require   # 0: an NPU can be used; 1: there is none; 2: torch_npu is installed but broken

The one line it prints ends in `devices=N`, for scripts.
"""

import argparse
import importlib.util
import os
import sys

# With torch_npu installed and CANN missing, `import torch` itself fails while it loads torch_npu by itself.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

try:
    import torch

    from npu_moe import is_npu_available, npu_unavailable_reason
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed: run `pip install -e .` in the repository's root first")


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints whether PyTorch can use an NPU here.")
    parser.add_argument("--require", action="store_true", help="exit with 1 (no NPU) or 2 (torch_npu broken) if not")
    arguments = parser.parse_args()
    if is_npu_available():
        import torch_npu

        print(f"NPU: {torch_npu.npu.get_device_name(0)} devices={torch_npu.npu.device_count()}")
        return 0
    # torch_npu is there and could not be imported: then transformers cannot import a model class either.
    broken = importlib.util.find_spec("torch_npu") is not None and "torch_npu" not in sys.modules
    # The virtual NPU is for those without CANN; it does not help against a CUDA build of PyTorch.
    helps = broken and torch.version.cuda is None
    hint = ", or set VIRTUAL_NPU=1 to run examples/run_fsdp2_moe_npu.sh on the virtual NPU" if helps else ""
    print(f"no NPU: {npu_unavailable_reason()}{hint} devices=0")
    return (2 if broken else 1) if arguments.require else 0


if __name__ == "__main__":
    sys.exit(main())
