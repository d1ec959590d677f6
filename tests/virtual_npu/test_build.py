# SPDX-License-Identifier: Apache-2.0
"""How the virtual NPU is built and started: utils/virtual_npu/build.py and run.py."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[2] / "utils" / "virtual_npu"
RUN = DIRECTORY / "run.py"


@pytest.fixture(scope="module")
def libraries(virtual_npu) -> Path:
    return Path(virtual_npu(devices=1)["LD_LIBRARY_PATH"].split(os.pathsep)[0])


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("build_under_test", DIRECTORY / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(*command: object, **variables: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    command = [sys.executable, RUN, *command]
    return subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=280)


def needed(library: Path) -> set[str]:
    lines = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def test_run_gives_a_command_its_devices_and_its_exit_status(libraries):
    code = "import torch, sys; print(torch.npu.is_available(), torch.npu.device_count()); sys.exit(5)"
    done = start("--devices", "3", "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (5, "True 3"), done.stderr


def test_every_library_that_torch_npu_needs_is_there(libraries):
    torch_npu = Path(PathFinder.find_spec("torch_npu").submodule_search_locations[0])  # it is hidden from find_spec
    wanted = {name for name in needed(torch_npu / "lib" / "libtorch_npu.so") if name.endswith(".so")}
    present = {path.name for path in (*libraries.glob("*.so"), *torch_npu.glob("lib/*.so"))}
    assert wanted - present <= {"libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so"}
    assert {"libascendcl.so", "libhccl.so", "libopapi.so"} <= present
    assert "libvirtual_npu.so" in needed(libraries / "libascendcl.so")
    assert not any(name.startswith(("libtorch", "libc10")) for name in needed(libraries / "libvirtual_npu.so"))


def test_a_name_that_no_source_defines_fails_and_says_so(libraries):
    code = """
import ctypes
library = ctypes.CDLL("libascendcl.so")
library.aclGetRecentErrMsg.restype = ctypes.c_char_p
assert library.aclrtBinaryLoadFromData() != 0
assert library.aclGetRecentErrMsg() == b"virtual NPU: aclrtBinaryLoadFromData is not implemented"
assert library.aclGetRecentErrMsg() is None
"""
    done = start("--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "virtual NPU: aclrtBinaryLoadFromData is not implemented\n"


def test_what_is_built_is_not_built_again(libraries):
    before = libraries.stat().st_mtime_ns
    done = subprocess.run([sys.executable, DIRECTORY / "build.py"], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()) == libraries and libraries.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--", "true"], {"CXX": "no-such-compiler"}, "there is no C++ compiler no-such-compiler"),
        (["--", "no-such-command"], {}, "cannot run no-such-command: No such file or directory"),
        ([], {}, "there is no command to run"),
        (["--devices", "0", "--", "true"], {}, "--devices 0: at least 1"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(libraries, arguments, variables, message):
    done = start(*arguments, **variables)
    assert done.returncode != 0 and message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_without_torch_npu_the_reason_is_given(build):
    # In this process torch_npu is hidden.
    assert "torch_npu is not installed" in build.unavailable_reason()
    with pytest.raises(build.BuildError, match="torch_npu is not installed"):
        build.build()


def test_versions_that_do_not_belong_together_are_refused(build, monkeypatch, tmp_path):
    header = tmp_path / "include" / "third_party" / "acl" / "inc" / "acl" / "acl.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setattr(build, "package", lambda name: tmp_path)
    monkeypatch.setattr(build.importlib.metadata, "version", {"torch": "2.12.1", "torch_npu": "2.13.0"}.get)
    assert build.unavailable_reason() == "torch 2.12.1 and torch_npu 2.13.0 do not belong together"


def test_a_cuda_build_of_torch_is_refused(build, monkeypatch, tmp_path):
    header = tmp_path / "include" / "third_party" / "acl" / "inc" / "acl" / "acl.h"
    header.parent.mkdir(parents=True)
    header.touch()
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(build, "package", lambda name: tmp_path)
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "2.13.0")
    assert build.unavailable_reason() == "torch 2.13.0 is a CUDA build, torch_npu needs the CPU build of PyTorch"


def test_an_object_depends_on_the_headers_it_includes(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "a.h").write_text('#include "b.h"\n#include <vector>\n')
    (tmp_path / "b.h").write_text('#include "a.h"\n#include "acl/acl.h"\n')
    (tmp_path / "c.h").write_text("")
    (tmp_path / "x.cpp").write_text('#include "a.h"\n')
    assert build.included(tmp_path / "x.cpp") == {tmp_path / "a.h", tmp_path / "b.h"}
