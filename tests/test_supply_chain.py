"""The locks pin every dependency to one version and its digests, and name no host or folder."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = {
    extra: (ROOT / file).read_text(encoding="utf-8")
    for extra, file in {"dev": "requirements.lock", "docs": "requirements-docs.lock"}.items()
}
LOCK = LOCKS["dev"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?!\S)")


def entries(lock=LOCK):
    code = re.sub(r"^\s*#.*\n", "", lock, flags=re.MULTILINE)
    return code.replace("\\\n", " ").splitlines()


def locked(lock=LOCK):
    return [Requirement(HASH.sub("", entry)) for entry in entries(lock)]


def wanted(lines):
    """Names of requirements, with our own extras replaced by what is in them."""
    for requirement in map(Requirement, lines):
        if requirement.name == "simfbo":
            for extra in requirement.extras:
                yield from wanted(EXTRAS[extra])
        else:
            yield canonicalize_name(requirement.name)


@pytest.fixture(params=LOCKS)
def lock(request):
    return LOCKS[request.param]


def test_pinned_to_one_version(lock):
    operators = {r.name: [s.operator for s in r.specifier] for r in locked(lock)}
    assert {name: found for name, found in operators.items() if found != ["=="]} == {}
    assert [str(r) for r in locked(lock) if "*" in str(r.specifier)] == []


def test_every_entry_has_a_digest(lock):
    assert len(entries(lock)) > 20
    assert [entry for entry in entries(lock) if not HASH.search(entry)] == []


@pytest.mark.parametrize("extra", LOCKS)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    "system", [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")], ids="-".join
)
def test_everything_we_name_is_locked_once(extra, python, system):
    where = {"python_version": python, "python_full_version": f"{python}.0"}
    where |= dict(zip(("sys_platform", "platform_machine"), system))
    names = [
        canonicalize_name(r.name)
        for r in locked(LOCKS[extra])
        if r.marker is None or r.marker.evaluate(where)
    ]
    assert len(names) == len(set(names))
    assert set(wanted(PYPROJECT["project"]["dependencies"] + EXTRAS[extra])) <= set(names)


def test_what_builds_the_package_is_locked():
    assert set(wanted(PYPROJECT["build-system"]["requires"])) <= {r.name for r in locked()}


def test_the_locks_agree():
    """`make docs` installs one on top of the other."""
    dev, docs = ({(r.name, str(r.specifier)) for r in locked(LOCKS[x])} for x in ("dev", "docs"))
    shared = {name for name, _ in dev} & {name for name, _ in docs}
    assert {one for one in docs if one[0] in shared} <= dev


def test_versions_satisfy_pyproject():
    versions = [(canonicalize_name(r.name), next(iter(r.specifier)).version) for r in locked()]
    extras = [line for name in ("pandas", "privacy", "dev") for line in EXTRAS[name]]
    for requirement in map(Requirement, PYPROJECT["project"]["dependencies"] + extras):
        found = [v for name, v in versions if name == canonicalize_name(requirement.name)]
        assert found or requirement.name == "simfbo", requirement
        assert all(requirement.specifier.contains(v) for v in found), requirement


def test_names_no_host_and_no_folder(lock):
    assert "://" not in lock
    assert not re.search(r"index-url|find-links|trusted-host|(?:^|[\s='\"])(?:/|~|[A-Z]:\\)", lock)


def test_pytorch_stays_outside():
    assert "torch" not in {requirement.name for requirement in locked()}
