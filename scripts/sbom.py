"""Write the software bill of materials of the wheel in dist/, in the format CycloneDX: ``scripts/dist`` runs this.

The wheel is installed with all extras into an empty environment, in the versions of requirements.txt, with which the
tests ran. cyclonedx-py describes this environment and validates the result against the schema of CycloneDX. Packages
that exist on Windows only, as those of the extra ``msmq``, are not in it: the environment is that of the machine that
builds.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "build" / "sbom-environment"
UV = ROOT / ".venv" / "bin" / "uv"


def install(wheel: Path) -> None:
    """Make an environment that has the wheel with all extras, and nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = ",".join(sorted(project["optional-dependencies"]))
    subprocess.run([UV, "-q", "venv", "--clear", "--python", sys.executable, ENVIRONMENT], check=True)
    command = [UV, "-q", "pip", "install", "--python", ENVIRONMENT / "bin" / "python", f"{wheel}[{extras}]"]
    locks = ["--constraints", ROOT / "requirements.txt", "--build-constraints", ROOT / "requirements-bootstrap.txt"]
    subprocess.run([*command, *locks], check=True)


def describe(tools: Path, path: Path, version: str) -> None:
    """Write the bill of the environment. The same environment gives the same bytes."""
    tool = [tools / "bin" / "cyclonedx-py", "environment", "--pyproject", ROOT / "pyproject.toml"]
    options = ["--mc-type", "library", "--output-reproducible", "--validate", "--output-file", path]
    subprocess.run([*tool, *options, ENVIRONMENT / "bin" / "python"], check=True)
    # cyclonedx-py takes Postdate itself from pyproject.toml, which does not have the version.
    bill = json.loads(path.read_text("utf-8"))
    bill["metadata"]["component"] |= {"version": version, "purl": f"pkg:pypi/postdate@{version}"}
    path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", "utf-8")


def check(path: Path) -> int:
    """Return the number of components. Each must be a package of requirements.txt, in the version that it has there."""
    lock = (ROOT / "requirements.txt").read_text("utf-8")
    locked = {f"{name}=={pin}" for name, pin in re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE)}
    components = json.loads(path.read_text("utf-8"))["components"]
    described = {f"{re.sub(r'[-_.]+', '-', each['name'].lower())}=={each['version']}" for each in components}
    if strangers := described - locked:
        raise SystemExit(f"sbom: not in requirements.txt: {', '.join(sorted(strangers))}")
    return len(described)


def main(tools: Path) -> None:
    """Write ``dist/postdate-VERSION.cdx.json``."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    version = wheel.name.split("-")[1]
    install(wheel)
    path = ROOT / "dist" / f"postdate-{version}.cdx.json"
    describe(tools, path, version)
    print(f"sbom: {path.relative_to(ROOT)} has {check(path)} components, in the versions of requirements.txt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
