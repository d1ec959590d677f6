# SPDX-License-Identifier: Apache-2.0
"""`python -m npu_moe run`: runs a Python program with the patch, without an edit to it."""

import argparse
import os
import runpy
import sys

from npu_moe_autoload import apply_when_transformers_is_imported


def add_command(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a script or a module with the patch applied",
        usage="python -m npu_moe run (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description="Runs a script, or with -m a module, with the patch applied in it and in every Python process "
        "that it starts (torchrun's and accelerate's workers).",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module, as in python -m")
    parser.add_argument("target", metavar="TARGET", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    # For the processes that the program starts; in this one torch has been imported already.
    os.environ["NPU_MOE_AUTOLOAD"] = "1"
    apply_when_transformers_is_imported()
    sys.argv = [arguments.target, *arguments.arguments]
    # As `python SCRIPT` and `python -m MODULE` set it.
    sys.path[0] = os.getcwd() if arguments.is_module else os.path.dirname(os.path.abspath(arguments.target))
    if arguments.is_module:
        runpy.run_module(arguments.target, run_name="__main__", alter_sys=True)
    elif os.path.isfile(arguments.target):
        runpy.run_path(arguments.target, run_name="__main__")
    else:
        sys.exit(f"error: no such script: {arguments.target} (a module is run with -m)")
