# SPDX-License-Identifier: Apache-2.0
from grouped_mm_cases import GroupedMMCases


class GroupedMMOnAnNPUTest(GroupedMMCases):
    __test__ = True
    device = "npu"
