"""The lock pins every dependency to one version and its digests, and names no host or folder."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?!\S)")


def entries():
    code = re.sub(r"^\s*#.*\n", "", LOCK, flags=re.MULTILINE)
    return code.replace("\\\n", " ").splitlines()


def locked():
    return [Requirement(HASH.sub("", entry)) for entry in entries()]


def wanted(lines):
    """Names of requirements, with our own extras replaced by what is in them."""
    for requirement in map(Requirement, lines):
        if requirement.name == "simfbo":
            for extra in requirement.extras:
                yield from wanted(EXTRAS[extra])
        else:
            yield canonicalize_name(requirement.name)


def test_pinned_to_one_version():
    operators = {r.name: [s.operator for s in r.specifier] for r in locked()}
    assert {name: found for name, found in operators.items() if found != ["=="]} == {}
    assert [str(r) for r in locked() if "*" in str(r.specifier)] == []


def test_every_entry_has_a_digest():
    assert len(entries()) > 20
    assert [entry for entry in entries() if not HASH.search(entry)] == []


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    "system", [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")], ids="-".join
)
def test_everything_we_name_is_locked_once(python, system):
    where = {"python_version": python, "python_full_version": f"{python}.0"}
    where |= dict(zip(("sys_platform", "platform_machine"), system))
    names = [
        canonicalize_name(r.name) for r in locked() if r.marker is None or r.marker.evaluate(where)
    ]
    project = PYPROJECT["project"]["dependencies"] + PYPROJECT["build-system"]["requires"]
    assert len(names) == len(set(names))
    assert set(wanted(project + EXTRAS["dev"])) <= set(names)


def test_versions_satisfy_pyproject():
    versions = [(canonicalize_name(r.name), next(iter(r.specifier)).version) for r in locked()]
    extras = [line for name in ("pandas", "privacy", "dev") for line in EXTRAS[name]]
    for requirement in map(Requirement, PYPROJECT["project"]["dependencies"] + extras):
        found = [v for name, v in versions if name == canonicalize_name(requirement.name)]
        assert found or requirement.name == "simfbo", requirement
        assert all(requirement.specifier.contains(v) for v in found), requirement


def test_names_no_host_and_no_folder():
    assert "://" not in LOCK
    assert not re.search(r"index-url|find-links|trusted-host|(?:^|[\s='\"])(?:/|~|[A-Z]:\\)", LOCK)


def test_pytorch_stays_outside():
    assert "torch" not in {requirement.name for requirement in locked()}
