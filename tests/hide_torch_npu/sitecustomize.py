# SPDX-License-Identifier: Apache-2.0
"""On the PYTHONPATH of a process, this hides torch_npu from it: `import` and `find_spec` do not find it."""

import sys

sys.modules["torch_npu"] = None
