# SPDX-License-Identifier: Apache-2.0
import os

import pytest

import npu_process

if npu_process.ON_NPU not in os.environ:

    def pytest_pycollect_makemodule(module_path, parent):
        return npu_process.ForwardedFile.from_parent(parent, path=module_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(item):
        if not isinstance(item, npu_process.ForwardedItem):
            return None
        following = item.session.items[item.session.items.index(item) + 1 :]
        next_item = next((other for other in following if isinstance(other, npu_process.ForwardedItem)), None)
        try:
            reports = list(npu_process.process_of(item.config).reports(item, next_item))
        except (RuntimeError, OSError) as error:
            item.error = error
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

elif "VIRTUAL_NPU_DEVICES" not in os.environ:

    def pytest_collection_modifyitems(items):
        # On a real NPU torch_npu's operators are not ours to test.
        for item in items:
            if item.path.name.startswith(("test_operators_", "test_pytorch_operators", "test_virtual_")):
                item.add_marker(pytest.mark.skip(reason="tests the virtual NPU"))
