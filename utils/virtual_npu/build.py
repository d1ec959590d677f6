#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the virtual NPU for the installed torch and torch_npu, and prints the directory that holds it.

The result is a set of shared libraries with the names torch_npu asks for (libascendcl.so, libhccl.so, libopapi.so and
others), kept in a cache under a hash of what they were made from: the sources, this file, the compiler, torch and
torch_npu. Nothing here imports torch: with torch_npu installed and no CANN that fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
RUNTIME = "libvirtual_npu.so"  # the runtime, the collectives and the function of every name that nobody defines
OPERATORS = "libopapi.so"  # the aclnn functions; the only one that links libtorch
FLAGS = ["-std=c++20", "-g0", "-fPIC", "-pthread", "-Wall", "-Wno-unknown-pragmas"]


class BuildError(RuntimeError):
    """The virtual NPU cannot be built; the message is for a person."""


def package(name: str) -> Path:
    """The directory of an installed package."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{name} is not installed for {sys.executable}")
    return Path(spec.submodule_search_locations[0])


def compiler() -> str:
    """The path of the C++ compiler."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"there is no C++ compiler {name} (install g++, or name another g++ with CXX)")
    return found


def check() -> None:
    """Raises BuildError where the virtual NPU cannot be built, whatever its sources."""
    if platform.system() != "Linux":
        raise BuildError(f"it runs on Linux only, and this is {platform.system()}")
    package("torch")
    headers = package("torch_npu") / "include" / "third_party" / "acl" / "inc" / "acl" / "acl.h"
    if not headers.exists():
        raise BuildError(f"torch_npu {importlib.metadata.version('torch_npu')} does not bring the headers of ACL")
    versions = [importlib.metadata.version(name) for name in ("torch", "torch_npu")]
    if len({tuple(version.split(".")[:2]) for version in versions}) > 1:
        raise BuildError("torch {} and torch_npu {} do not belong together".format(*versions))
    if re.search(r"^cuda\b.*= '", (package("torch") / "version.py").read_text(), re.MULTILINE):
        # Both would register themselves with PyTorch's allocators, and the second ends the process.
        raise BuildError(f"torch {versions[0]} is a CUDA build, torch_npu needs the CPU build of PyTorch")
    compiler()
    for tool in ("nm", "readelf"):
        if shutil.which(tool) is None:
            raise BuildError(f"there is no {tool} (install binutils)")


def unavailable_reason() -> str | None:
    """Why the virtual NPU cannot be used here, in one line; None where it can."""
    try:
        check()
    except BuildError as error:
        return str(error)
    return None


def run(*command: str | Path) -> str:
    """The output of a command; BuildError, with all that it said, where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def digest(*parts: str | bytes) -> str:
    """A short hash that differs where any part does."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:20]


def included(source: Path) -> set[Path]:
    """The headers in csrc/ that a source includes, directly or not."""
    found: set[Path] = set()
    pending = [source]
    while pending:
        for name in re.findall(r'^#include "([^"]+)"', pending.pop().read_text(), re.MULTILINE):
            header = SOURCES / name
            if header.exists() and header not in found:
                found.add(header)
                pending.append(header)
    return found


def contents(paths: set[Path]) -> list[bytes]:
    return [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(paths)]


class Build:
    """One build; `result()` does it, or finds it done."""

    def __init__(self, jobs: int = 2, keep_going: bool = False) -> None:
        check()
        self.jobs, self.keep_going = jobs, keep_going
        self.compiler, self.torch, self.torch_npu = compiler(), package("torch"), package("torch_npu")
        sources = set(SOURCES.glob("*.cpp"))
        self.operators = sorted(path for path in sources if path.name.startswith("op_"))
        self.others = sorted(sources - set(self.operators))
        acl = self.torch_npu / "include" / "third_party" / "acl" / "inc"
        self.flags = [*FLAGS, "-O2", f"-I{SOURCES}", f"-I{acl}", f"-I{self.torch_npu / 'include'}"]
        headers = self.torch / "include"
        # The operators are calls of ATen: there is nothing to optimise in them, and -O1 compiles faster.
        self.torch_flags = ["-O1", f"-isystem{headers}", f"-isystem{headers / 'torch' / 'csrc' / 'api' / 'include'}"]
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torch_npu")]
        self.toolchain = digest(run(self.compiler, "--version"), *versions, *self.flags, *self.torch_flags)
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.cache = Path(base) / "npu_moe" / "virtual_npu"
        self.objects = self.cache / "objects"
        everything = contents({*sources, *SOURCES.glob("*.h"), Path(__file__)})
        name = digest(self.toolchain, *everything)
        self.directory = self.cache / (f"partial_{name}" if keep_going else name)

    def result(self) -> Path:
        """The directory of the libraries. Of several processes that need them, one builds and the others wait."""
        if not self.directory.exists():
            self.objects.mkdir(parents=True, exist_ok=True)
            with open(self.cache / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self.directory.exists():
                    self.build()
        return self.directory

    def build(self) -> None:
        target = Path(tempfile.mkdtemp(prefix="unfinished_", dir=self.cache))
        try:
            self.link(target)
            target.rename(self.directory)
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def link(self, target: Path) -> None:
        others, operators = self.compile_all()
        command = [self.compiler, "-shared", "-pthread", "-Wl,--no-undefined", "-Wl,-rpath,$ORIGIN", f"-L{target}"]
        if self.keep_going:
            command.append("-Wl,--allow-multiple-definition")
        run(*command, f"-Wl,-soname,{RUNTIME}", *others, self.stubs(others), "-ldl", "-o", target / RUNTIME)
        command += ["-Wl,--no-as-needed", "-lvirtual_npu"]
        lib = self.torch / "lib"
        libtorch = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10", "-ldl"]
        run(*command, f"-Wl,-soname,{OPERATORS}", *operators, *libtorch, "-o", target / OPERATORS)
        for name in self.wanted_libraries():  # empty but for its name: what is looked up in it is found in the runtime
            run(*command, f"-Wl,-soname,{name}", "-o", target / name)

    def compile_all(self) -> tuple[list[Path], list[Path]]:
        """The objects of the runtime and those of the operators."""
        header = self.precompiled()
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            others = [pool.submit(self.compile, path) for path in self.others]
            operators = [pool.submit(self.compile, path, [*self.torch_flags, *header]) for path in self.operators]
        if not self.keep_going:
            return [future.result() for future in others], [future.result() for future in operators]
        for future in operators:
            if future.exception():
                print(f"left out: {future.exception()}", file=sys.stderr)
        return [future.result() for future in others], [f.result() for f in operators if not f.exception()]

    def precompiled(self) -> list[str]:
        """The flags that use opapi.h precompiled: reading ATen takes longer than compiling an operator."""
        source = SOURCES / "opapi.h"
        headers = {source, *included(source)}
        # For `#pragma once` a file with another time is another file than the one in the precompiled header.
        times = [str(path.stat().st_mtime_ns) for path in sorted(headers)]
        name = f"header_{digest(self.toolchain, *contents(headers), *times)}"
        header = self.cache / name / "opapi_precompiled.h"
        compiled = header.with_suffix(".h.gch")
        if not compiled.exists():
            for stale in self.cache.glob("header_*"):  # they are large
                shutil.rmtree(stale)
            header.parent.mkdir()
            header.write_text(f'#include "{source}"\n')
            part = header.with_suffix(".part")
            run(self.compiler, *self.flags, *self.torch_flags, "-x", "c++-header", header, "-o", part)
            part.rename(compiled)
        return ["-include", str(header)]

    def compile(self, source: Path, extra: list[str] | None = None) -> Path:
        """The object of a source, from the cache where nothing that it depends on has changed."""
        extra = extra or []
        key = digest(self.toolchain, *self.torch_flags, *contents({source, *included(source)}))
        target = self.objects / f"{source.stem}_{key}.o"
        if not target.exists():
            part = target.with_suffix(".part")
            run(self.compiler, *self.flags, *extra, "-c", source, "-o", part)
            part.rename(target)
        return target

    def torch_npu_libraries(self) -> list[Path]:
        """What `import torch_npu` loads."""
        names = ("libtorch_npu.so", "libtensorpipe.so", "libnpu_profiler.so")
        present = [self.torch_npu / "lib" / name for name in names if (self.torch_npu / "lib" / name).exists()]
        return [*self.torch_npu.glob("_C*.so"), *present]

    def wanted_libraries(self) -> list[str]:
        """The names of the libraries of CANN: without a version, and in neither package."""
        needed: set[str] = set()
        for library in self.torch_npu_libraries():
            needed.update(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library)))
        present = {path.name for path in (*self.torch.glob("lib/*.so"), *self.torch_npu.glob("lib/*.so"))}
        needed.add("libhcomm.so")  # opened at run time only (HcclGroupStart)
        return sorted(name for name in needed - present if name.endswith(".so"))

    def stubs(self, objects: list[Path]) -> Path:
        """An object with a function that fails for each C name that torch_npu needs and nothing defines."""
        libraries = self.torch_npu_libraries()
        names = {name for library in libraries for name in symbols(library, "--undefined-only", "U")}
        names = {name for name in names if "@" not in name and not name.startswith("_")}  # neither libc's nor C++
        libtorch = [self.torch / "lib" / f"lib{name}.so" for name in ("torch_python", "torch_cpu", "c10")]
        for library in [*libraries, *libtorch]:
            names -= symbols(library, "--defined-only")
        for path in objects:
            names -= symbols(path, "--defined-only", dynamic=False)
        interpreter = ctypes.CDLL(None)  # the C library and Python
        lines = ["namespace vnpu { int missing(const char* name); }", 'extern "C" {']
        for name in sorted(name for name in names if not hasattr(interpreter, name)):
            lines.append(f'int {name}() {{ return vnpu::missing("{name}"); }}')
        source = self.objects / f"stubs_{digest(*lines)}.cpp"
        source.write_text("\n".join([*lines, "}", ""]))
        return self.compile(source)


def symbols(library: Path, which: str, kind: str = "", dynamic: bool = True) -> set[str]:
    """The names in a library or an object, those of one kind (a letter of nm) where `kind` is given."""
    lines = run("nm", *(["-D"] if dynamic else []), which, library).splitlines()
    return {line.split()[-1] for line in lines if not kind or line.split()[-2:-1] == [kind]}


def build(jobs: int = 2, keep_going: bool = False) -> Path:
    """The directory with the libraries for this interpreter's torch and torch_npu."""
    return Build(jobs, keep_going).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (each takes up to 1.5 GB)")
    parser.add_argument("--keep-going", action="store_true", help="leave out operators that do not compile")
    arguments = parser.parse_args()
    try:
        print(build(arguments.jobs, arguments.keep_going))
    except BuildError as error:
        print(f"the virtual NPU cannot be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
