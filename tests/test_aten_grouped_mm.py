# SPDX-License-Identifier: Apache-2.0
from aten_grouped_mm_cases import AtenGroupedMMCases
from npu_moe.grouped_mm import aten_grouped_mm
from strict_npu import strict_npu


class AtenGroupedMMOnTheStrictReferenceTest(AtenGroupedMMCases):
    __test__ = True
    device = "cpu"

    def run(self, result=None):
        with strict_npu():
            return super().run(result)

    def call(self, *args, **kwargs):
        return aten_grouped_mm(*args, **kwargs)
