# SPDX-License-Identifier: Apache-2.0
import npu_moe
from training_cases import TrainingCases


class TrainingOnAnNPUTest(TrainingCases):
    __test__ = True
    device = "npu"

    def run(self, result=None):
        npu_moe.apply_npu_patch()
        try:
            return super().run(result)
        finally:
            npu_moe.revert_npu_patch()
