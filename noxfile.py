# SPDX-License-Identifier: Apache-2.0
"""The fast tests over the versions that are supported: `pip install nox && nox`.

nox -s "tests(transformers='5.2.0')"    # those on the virtual NPU too; needs g++
nox -s "cpu(torch='2.9.1')"             # without torch_npu, which pins a torch of its own
"""

import tempfile

import nox

TRANSFORMERS = ["5.0.0", "5.2.0", "5.6.2", "5.12.1", "5.18.0", "5.24.0"]
TORCH = ["2.9.1", "2.13.0", "2.14.1"]


def install(session: nox.Session, extra: str, **versions: str) -> None:
    """Installs the package with an extra, the pinned versions, and other versions of some."""
    with open("constraints.txt") as file:
        pinned = [line for line in file if not line.startswith(tuple(f"{name}==" for name in versions))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines([*pinned, *(f"{name}=={version}\n" for name, version in versions.items())])
        constraints.flush()
        session.install("-c", constraints.name, "-e", f".[{extra}]")


@nox.session
@nox.parametrize("transformers", TRANSFORMERS)
def tests(session: nox.Session, transformers: str) -> None:
    install(session, "test", transformers=transformers)
    session.run("python", "-m", "pytest", "-m", "not slow", *session.posargs)


@nox.session
@nox.parametrize("torch", TORCH)
def cpu(session: nox.Session, torch: str) -> None:
    install(session, "test-cpu", torch=torch)
    session.run("python", "-m", "pytest", "-m", "not slow", *session.posargs)


@nox.session
def twinkle(session: nox.Session) -> None:
    """The one test that needs Twinkle, which wants an older peft and numpy."""
    session.install("twinkle-kit==0.5.1", "-e", ".[test]", "torch_npu==2.13.0", "transformers==5.24.0")
    session.run("python", "-m", "pytest", "tests/npu/test_twinkle.py", *session.posargs)
