#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a command, and all that it starts, with virtual NPUs.

    python utils/virtual_npu/run.py [--devices N] [--trace FILE] [--poison] -- COMMAND ...

`environment()` gives the same to a program that starts its processes itself. It builds what is not built yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

# The file beside this one, whatever `build` means in the process that loaded this one.
_spec = importlib.util.spec_from_file_location("virtual_npu_build", Path(__file__).resolve().with_name("build.py"))
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

unavailable_reason = build.unavailable_reason


def environment(
    devices: int = 1,
    trace: str | os.PathLike[str] | None = None,
    poison: bool = False,
    keep_going: bool = False,
) -> dict[str, str]:
    """The variables that make a process see `devices` virtual NPUs, to be added to os.environ.

    With `trace`, what the devices do is appended to that file. With `poison`, torch_npu does not reuse memory, so that
    every tensor begins as NaN (and freeing one synchronises). Raises build.BuildError where none can be built.
    """
    directory = str(build.build(keep_going=keep_going))
    search_path = [directory, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    variables = {
        "LD_LIBRARY_PATH": os.pathsep.join(search_path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # `import torch` brings torch_npu, as where CANN is installed
        "VIRTUAL_NPU_DEVICES": str(devices),
    }
    if trace is not None:
        variables["VIRTUAL_NPU_TRACE"] = os.path.abspath(trace)
    if poison:
        variables["PYTORCH_NO_NPU_MEMORY_CACHING"] = "1"
    return variables


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1, help="how many NPUs there are (default: 1)")
    parser.add_argument("--trace", metavar="FILE", help="append what the NPUs do to this file (see trace.py)")
    parser.add_argument("--poison", action="store_true", help="every tensor begins as NaN; slower")
    parser.add_argument("--keep-going", action="store_true", help="leave out operators that do not compile")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("there is no command to run")
    if arguments.devices < 1:
        parser.error(f"--devices {arguments.devices}: at least 1")
    try:
        os.environ.update(environment(arguments.devices, arguments.trace, arguments.poison, arguments.keep_going))
        os.execvp(command[0], command)
    except build.BuildError as error:
        print(f"there is no virtual NPU here: {error}", file=sys.stderr)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
