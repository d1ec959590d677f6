# SPDX-License-Identifier: Apache-2.0
from unittest import mock

import pytest
import transformers
from transformers.integrations import moe

import npu_moe
from strict_npu import strict_npu
from training_cases import TrainingCases

if not hasattr(moe, "_grouped_mm"):
    # tests/npu/test_training.py has these cases for the operator that it calls instead.
    pytest.skip(f"transformers {transformers.__version__} has no _grouped_mm (5.2.0 has)", allow_module_level=True)


class TrainingOnTheStrictReferenceTest(TrainingCases):
    __test__ = True
    device = "cpu"

    def run(self, result=None):
        with strict_npu(), mock.patch("npu_moe.monkey_patch_npu.npu_unavailable_reason", lambda: None):
            npu_moe.apply_npu_patch()
            try:
                return super().run(result)
            finally:
                npu_moe.revert_npu_patch()
