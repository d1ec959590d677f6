# SPDX-License-Identifier: Apache-2.0
import importlib
from unittest import mock

import npu_moe
from strict_npu import strict_npu
from training_cases import TrainingCases

patch_module = importlib.import_module("npu_moe.monkey_patch_npu")


class TrainingOnTheStrictReferenceTest(TrainingCases):
    __test__ = True
    device = "cpu"

    def run(self, result=None):
        with strict_npu(), mock.patch.object(patch_module, "npu_unavailable_reason", lambda: None):
            npu_moe.apply_npu_patch()
            try:
                return super().run(result)
            finally:
                npu_moe.revert_npu_patch()
