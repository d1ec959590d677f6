# SPDX-License-Identifier: Apache-2.0
"""`python -m npu_moe COMMAND`; each command is a module of its own."""

import argparse
import sys

from npu_moe import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m npu_moe", description="Fast MoE training on Ascend NPUs.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run.add_command(commands)
    arguments = parser.parse_args()
    sys.exit(arguments.run(arguments))


if __name__ == "__main__":
    main()
