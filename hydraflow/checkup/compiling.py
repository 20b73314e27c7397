"""A compiler that works: a C file against Python's headers (Triton needs both), and a kernel made by
torch.compile.

In: nothing but this machine. Out: findings. Nothing of a run compiles today, so this is looked at only when
asked for (`--all`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hydraflow.checkup.facts import Facts
from hydraflow.checkup.finding import Finding, Skip, ok, problem
from hydraflow.checkup.probe import Ended, run, run_python

COMPILERS = ("cc", "gcc", "clang")
C_SECONDS, KERNEL_SECONDS = 30.0, 240.0
_SOURCE = "#include <Python.h>\nlong answer(void) { return 6 * 7 + 0 * PY_MAJOR_VERSION; }\n"
_KERNEL = """
import sys, torch
device = sys.argv[1]
compiled = torch.compile(lambda x: torch.relu(x * 2 + 1).sum(), fullgraph=True)
found = compiled(torch.arange(-4.0, 4.0, device=device)).item()
assert found == 16.0, found  # 1 + 3 + 5 + 7
print("relu(2x + 1) compiled for", device)
"""


def check_compiler(facts: Facts) -> Iterator[Finding]:
    """Compiles a C file and a kernel."""
    if not facts.everything:
        raise Skip("nothing compiles under this configuration (--all tries it)")
    found = compile_c(os.environ)
    yield found
    if found.remedy:
        return
    yield compile_kernel(facts.device_type)


def compile_c(environ: Mapping[str, str]) -> Finding:
    """Builds and calls a function that includes Python.h. `environ`: where PATH and CC are looked up."""
    named = environ.get("CC")
    compiler = next(
        (
            path
            for name in ([named] if named else COMPILERS)
            if (path := shutil.which(name, path=environ.get("PATH", "")))
        ),
        None,
    )
    if compiler is None:
        tried = f"CC={named}" if named else ", ".join(COMPILERS)
        return problem(f"no C compiler on the PATH (tried {tried})", "apt-get install gcc, or CC=<compiler>")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "answer.c", Path(folder) / "answer.so"
        source.write_text(_SOURCE)
        headers = sysconfig.get_paths()["include"]
        ended = run(
            [compiler, "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(library)],
            seconds=C_SECONDS,
            environ=environ,
        )
        if ended.code != 0:
            return problem(f"{compiler} cannot build against {headers}: {ended.reason}", _c_remedy(ended))
        answer = ctypes.CDLL(str(library)).answer()
    return ok(f"{compiler} built a C function, which answered {answer}")


def _c_remedy(ended: Ended) -> str:
    version = sysconfig.get_python_version()
    return (
        f"apt-get install python{version}-dev"
        if "Python.h" in ended.output
        else "install a C compiler that works: apt-get install gcc"
    )


def compile_kernel(device_type: str) -> Finding:
    """Has torch.compile make a kernel for the device, in a process and a cache folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        ended = run_python(_KERNEL, device_type, seconds=KERNEL_SECONDS, environ={**os.environ, **caches})
    if ended.code != 0:
        return problem(
            f"torch.compile failed on {device_type}: {ended.reason}",
            "apt-get install g++ (CPU), pip install triton (GPU)",
        )
    return ok(ended.last)
