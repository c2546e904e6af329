#!/usr/bin/env python3
"""Builds kvferry-kernels in every mode of KVFERRY_CUDA and checks what comes of it.

Uses fake compilers, so it needs no CUDA; with an nvcc 13.0 at hand the real one is checked as well.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from find_nvcc import NvccNotFoundError, find_nvcc

ROOT = Path(__file__).resolve().parent.parent

# Answers --version, logs that it ran, and writes a depfile and an output that starts like a fatbin.
FAKE = r"""#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, release RELEASE, V0.0.0"; exit 0; }
echo "$@" >> "LOG"
COMPLAINT
while [ $# -gt 0 ]; do
  case "$1" in
    -MF) echo "out : vectorized_copy.cu \\
    include/kvferry/vectorized_copy.cuh include/kvferry/platform.cuh /usr/include/stdio.h" > "$2"; shift ;;
    -o) printf '\120\355\125\272fake' > "$2"; shift ;;
  esac
  shift
done
"""


class Workspace:
    """A copy of the crate and the kernels alone, built with a scrubbed environment."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.target = folder / "target"
        self.log = folder / "nvcc.log"
        self.fakes = folder / "fakes"
        self.root.mkdir()
        self.fakes.mkdir()
        shutil.copytree(ROOT / "cuda", self.root / "cuda")
        shutil.copytree(ROOT / "crates/kvferry-kernels", self.root / "crates/kvferry-kernels", symlinks=True)
        for name in ("Cargo.toml", "Cargo.lock"):
            shutil.copy(ROOT / name, self.root / name)
        # Only this member: the other crates are not copied.
        manifest = self.root / "Cargo.toml"
        lines, skipping = [], False
        for line in manifest.read_text().splitlines():
            if line.startswith("default-members"):
                skipping = True
            if not skipping:
                lines.append(line)
            if skipping and line.rstrip().endswith("]"):
                skipping = False
        manifest.write_text("\n".join(lines) + "\n")
        self.no_python = self.fake("no-python", "#!/bin/sh\nexit 0\n")

    def fake(self, name: str, text: str) -> str:
        """An executable script."""
        path = self.fakes / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def fake_nvcc(self, name: str, release: str = "13.0", complaint: str = "") -> str:
        """A script that passes for an nvcc."""
        text = FAKE.replace("RELEASE", release).replace("LOG", str(self.log))
        return self.fake(name, text.replace("COMPLAINT", complaint))

    def cargo(self, **settings: str) -> subprocess.CompletedProcess[str]:
        """Builds and runs the example; nothing of the caller's CUDA shines through."""
        path = [p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "nvcc").exists()]
        hidden = ("KVFERRY_", "NVCC", "CUDA_", "PYO3_", "PYTHON", "VIRTUAL_ENV", "RUSTFLAGS", "CARGO_")
        keep = {k: v for k, v in os.environ.items() if not k.startswith(hidden) or k == "CARGO_HOME"}
        env = keep | {
            "PATH": os.pathsep.join(path),
            "CARGO_TARGET_DIR": str(self.target),
            "PYO3_PYTHON": self.no_python,
        }
        command = ["cargo", "run", "--offline", "-p", "kvferry-kernels", "--example", "build_info"]
        return subprocess.run(
            command, cwd=self.root, env=env | settings, capture_output=True, text=True, check=False
        )

    def info(self, **settings: str) -> tuple[dict[str, Any], str]:
        """What build_info says, and cargo's own words."""
        done = self.cargo(**settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    def error(self, **settings: str) -> str:
        """The words of a build that must fail."""
        done = self.cargo(**settings)
        assert done.returncode != 0, f"built, but must not: {done.stdout}"
        return done.stderr

    def compilations(self) -> int:
        """How often a fake nvcc compiled."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def off_ignores_a_compiler(w: Workspace) -> None:
    info, _ = w.info(KVFERRY_CUDA="off", NVCC=w.fake_nvcc("nvcc"))
    assert info["available"] is False and info["toolkit"] is None and info["archs"] == []
    assert info["cuda_mode"] == "off" and w.compilations() == 0


def auto_without_a_compiler_warns(w: Workspace) -> None:
    info, said = w.info(KVFERRY_CUDA="auto")
    assert info["available"] is False and info["fatbin_bytes"] == 0
    assert "warning" in said and "built without CUDA kernels" in said and "nvidia-cuda-nvcc" in said


def unset_means_auto(w: Workspace) -> None:
    info, _ = w.info()
    assert info["cuda_mode"] == "auto" and info["available"] is False


def require_without_a_compiler_fails(w: Workspace) -> None:
    said = w.error(KVFERRY_CUDA="require")
    for place in (
        "KVFERRY_CUDA=require",
        "NVCC (not set)",
        "no-python",
        "CUDA_HOME (not set)",
        "PATH (no nvcc)",
    ):
        assert place in said, f"{place!r} is missing in:\n{said}"


def require_refuses_another_release(w: Workspace) -> None:
    old, new = w.fake_nvcc("nvcc-12.4", "12.4"), w.fake_nvcc("nvcc-13.1", "13.1")
    assert "is release 12.4" in w.error(KVFERRY_CUDA="require", NVCC=old)
    assert "is release 13.1" in w.error(KVFERRY_CUDA="require", NVCC=new)
    assert "does not run" in w.error(KVFERRY_CUDA="require", NVCC="/nowhere/nvcc")


def another_release_is_passed_over(w: Workspace) -> None:
    home = w.fakes / "home"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(w.fake_nvcc("nvcc-good"), home / "bin/nvcc")
    info, _ = w.info(KVFERRY_CUDA="require", NVCC=w.fake_nvcc("nvcc-old", "12.4"), CUDA_HOME=str(home))
    assert info["available"] is True and info["toolkit"] == "13.0"


def wheels_come_before_cuda_home(w: Workspace) -> None:
    site = w.fakes / "site/nvidia"
    (site / "cu13/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(w.fake_nvcc("nvcc-wheel"), site / "cu13/bin/nvcc")
    python = w.fake("python", f"#!/bin/sh\necho {site}\n")
    home = w.fakes / "failing-home"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(w.fake_nvcc("nvcc-failing", complaint="exit 9"), home / "bin/nvcc")
    info, _ = w.info(KVFERRY_CUDA="require", PYO3_PYTHON=python, CUDA_HOME=str(home))
    assert info["available"] is True


def path_comes_last(w: Workspace) -> None:
    folder = w.fakes / "on-path"
    folder.mkdir(exist_ok=True)
    shutil.copy(w.fake_nvcc("nvcc-path"), folder / "nvcc")
    info, _ = w.info(KVFERRY_CUDA="require", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert info["available"] is True


def a_failing_compiler_is_an_error(w: Workspace) -> None:
    broken = w.fake_nvcc("nvcc-broken", complaint="echo 'no luck today' >&2; exit 7")
    for mode in ("auto", "require"):
        said = w.error(KVFERRY_CUDA=mode, NVCC=broken)
        assert "no luck today" in said and "vectorized_copy.cu" in said, said


def wrong_settings_are_errors(w: Workspace) -> None:
    assert "is not one of auto, require, off" in w.error(KVFERRY_CUDA="yes")
    assert "KVFERRY_CUDA_ARCHS" in w.error(KVFERRY_CUDA="off", KVFERRY_CUDA_ARCHS="sm_75")


def archs_are_passed_on(w: Workspace) -> None:
    info, _ = w.info(KVFERRY_CUDA="require", NVCC=w.fake_nvcc("nvcc"), KVFERRY_CUDA_ARCHS="90;ptx_90")
    assert info["archs"] == ["sm_90", "compute_90"]
    arguments = w.log.read_text().splitlines()[-1]
    for option in ("arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90", "--compress-mode=size"):
        assert option in arguments, arguments


def a_touched_header_rebuilds(w: Workspace) -> None:
    settings = {"KVFERRY_CUDA": "require", "NVCC": w.fake_nvcc("nvcc")}
    w.info(**settings)
    before = w.compilations()
    w.info(**settings)
    assert w.compilations() == before, "compiled again although nothing changed"
    os.utime(w.root / "cuda/include/kvferry/platform.cuh")
    w.info(**settings)
    # Every kernel source includes it.
    sources = len(list((w.root / "cuda").glob("*.cu")))
    assert w.compilations() == before + sources, "a touched header was not noticed"


def the_real_compiler_works_and_leaves_no_paths(w: Workspace) -> None:
    try:
        nvcc = find_nvcc()
    except NvccNotFoundError as error:
        print(f"    not checked: {error}")
        return
    built = []
    for _ in range(2):
        info, _ = w.info(KVFERRY_CUDA="require", NVCC=str(nvcc))
        assert info["available"] is True and info["fatbin_bytes"] > 4096
        newest = max(
            w.target.glob("debug/build/kvferry-kernels-*/out/*.fatbin"), key=lambda p: p.stat().st_mtime
        )
        built.append(newest.read_bytes())
        # The same sources elsewhere.
        w.root = w.root.rename(w.root.parent / "another tree")
    assert built[0] == built[1], "the fatbin depends on where the tree lies"


CASES: list[Callable[[Workspace], None]] = [
    off_ignores_a_compiler,
    auto_without_a_compiler_warns,
    unset_means_auto,
    require_without_a_compiler_fails,
    require_refuses_another_release,
    another_release_is_passed_over,
    wheels_come_before_cuda_home,
    path_comes_last,
    a_failing_compiler_is_an_error,
    wrong_settings_are_errors,
    archs_are_passed_on,
    a_touched_header_rebuilds,
    the_real_compiler_works_and_leaves_no_paths,
]


def main() -> int:
    """Runs all cases."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        for case in CASES:
            try:
                case(workspace)
            except AssertionError as error:
                failed += 1
                print(f"FAILED {case.__name__}: {error}")
            else:
                print(f"ok     {case.__name__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
