# SPDX-License-Identifier: Apache-2.0
"""Applies the patch without an edit to the program: `NPU_MOE_AUTOLOAD=1` in its environment.

`import torch` calls `autoload` (an entry point of the group torch.backends, PyTorch 2.5 and newer). This is a module
of its own, outside the package, so that nothing else is imported where the variable is not set.
"""

import os
import sys

_MODULE = "transformers.integrations.moe"


def autoload() -> None:
    if os.environ.get("NPU_MOE_AUTOLOAD") == "1":
        apply_when_transformers_is_imported()


def apply_when_transformers_is_imported() -> None:
    """Calls `apply_npu_patch` as soon as `transformers.integrations.moe` is imported, or now where it has been.

    Not earlier: importing transformers costs seconds, which a process that never uses it should not pay. An error of
    the patch is logged; it does not become one of an import.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        sys.meta_path.insert(0, _Finder())
    elif getattr(module.__spec__, "_initializing", False):
        _apply_when_complete(module.__spec__)  # it is the one that imports torch
    else:
        _apply()


class _Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls)]
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None:
            _apply_when_complete(spec)
        return spec


def _apply_when_complete(spec) -> None:
    class Spec(type(spec)):
        """importlib sets this attribute to False when the module's code has run, also where it has begun already."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                self.__class__ = Spec.__base__
                _apply()

    spec.__class__ = Spec


def _apply() -> None:
    try:
        from npu_moe import apply_npu_patch

        apply_npu_patch()
    except Exception:
        import logging

        logging.getLogger("npu_moe").exception("[PATCH] NPU_MOE_AUTOLOAD=1: the patch could not be applied")
