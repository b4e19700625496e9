"""The doctor: what it finds of software, ours and others', without importing it."""

import sys
from types import SimpleNamespace

import pytest
from doctor_kit import program

from node.doctor import software

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9.1", "<2.14,>=2.11", False),
        ("1.1.12", "==1.1.12", True),
        ("1.1.13", "==1.1.12", False),
        ("44", ">=44", True),
        ("1.0.8.post1", ">=1.0.8", True),
        ("3.1", "~=3.0", True),
        ("4.0", "~=3.0", False),
        ("3.0", "", True),
    ],
)
def test_versions_against_bounds(version, bounds, fits):
    assert software.within(version, bounds) is fits


def test_packages_that_are_missing_or_too_old_are_named():
    found = software.judge_packages(["no-such-thing>=1", "pydantic>=99", 'x>1; extra == "test"'])
    assert found.status == "fail"
    assert "no-such-thing is missing" in found.found
    assert "is not >=99" in found.found
    assert "x" not in found.found.split(";")[0].split()


OURS = b"#!/somewhere/python\nfrom node.__main__ import main\n"


def test_node_js_before_ours(tmp_path, monkeypatch):
    program(tmp_path / "first" / "node", b"\x7fELF and so on")
    program(tmp_path / "env" / "atoll", OURS)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'env'}")
    found = software.command()
    assert found.status == "warn"
    assert "Node.js" in found.why
    assert "`atoll start`" in found.fix
    monkeypatch.setenv("PATH", str(tmp_path / "first"))
    assert "python -m node start" in software.command().fix


def test_our_command_first_is_fine_and_another_environments_is_not(tmp_path, monkeypatch):
    program(tmp_path / "env" / "node", OURS)
    monkeypatch.setenv("PATH", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    assert software.command().status == "ok"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "other" / "python"))
    assert "another environment" in software.command().why


def test_a_link_to_our_command_is_ours(tmp_path, monkeypatch):
    """As pipx and ``uv tool`` install it; the environment itself may lie behind a link, too."""
    program(tmp_path / "env" / "node", OURS)
    program(tmp_path / "env" / "atoll", OURS)
    (tmp_path / "linked").symlink_to(tmp_path / "env")
    monkeypatch.setattr("sys.executable", str(tmp_path / "linked" / "python"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "node").symlink_to(tmp_path / "env" / "node")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert software.command().status == "ok"
    program(tmp_path / "other" / "node", OURS)
    (tmp_path / "bin" / "node").unlink()
    (tmp_path / "bin" / "node").symlink_to(tmp_path / "other" / "node")
    assert "(another Atoll)" in software.command().found


def test_a_module_of_the_same_name_before_ours(tmp_path):
    (tmp_path / "gossip").mkdir()
    (tmp_path / "gossip" / "__init__.py").write_text("")
    found = software.imports([str(tmp_path), *sys.path], tmp_path.parent)
    assert found.status == "fail"
    assert f"gossip is found in {tmp_path} first" in found.found


def test_a_module_of_the_same_name_in_the_working_folder(tmp_path):
    (tmp_path / "node.py").write_text("")
    found = software.imports(sys.path, tmp_path)
    assert (found.status, "node of its own" in found.found) == ("warn", True)
    assert software.imports(sys.path, tmp_path.parent).status == "ok"


def test_a_package_of_others_with_our_name(tmp_path, monkeypatch):
    info = tmp_path / "node-2.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: node\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = software.imports()
    assert found.status == "fail"
    assert "the package node 2.0.0 of others" in found.found


def test_what_rocm_torch_was_built_for_is_read_from_its_files(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(
        "__version__ = '2.13.0+rocm7.1'\ncuda: Optional[str] = None\n"
        "hip: Optional[str] = '7.1.25424'\nrocm: Optional[str] = '7.1.0'\n"
    )
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: spec)
    assert software.torch_cuda() == ("2.13.0+rocm7.1", "")
    assert software.torch_rocm() == "7.1.25424"


def test_what_torch_was_built_for_is_read_from_its_files():
    import torch

    assert software.torch_cuda() == (str(torch.__version__), torch.version.cuda or "")
