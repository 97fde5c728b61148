"""versions.json: packages, state of the source, data by content."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version

from molflt.data.lmdb_writer import write_lmdb
from molflt.testing import toy_records
from molflt.training.provenance import data_fingerprints, git_state


def git(folder, *words):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def test_a_run_says_what_it_was_made_from(finished_run):
    """Versions as installed, and a fingerprint for each split."""
    content = json.loads((finished_run.output / "versions.json").read_text())
    assert content["python"] == sys.version.split()[0]
    assert content["packages"]["molflt"] == version("molflt")
    assert content["packages"]["torch"] == version("torch")
    assert content["data"].keys() == {"train", "val_a", "val_b"}
    assert len(set(content["data"].values())) == 3


def test_fingerprints_follow_the_content_and_not_the_place(tiny_config, toy_root, tmp_path):
    """A copy has the same; another split of other records does not."""
    data = tiny_config(tmp_path).data
    before = data_fingerprints(data)
    shutil.copytree(toy_root, tmp_path / "copy")
    data.root = str(tmp_path / "copy")
    assert data_fingerprints(data) == before
    (tmp_path / "copy" / "val_b" / "data.0000.lmdb").unlink()
    write_lmdb(tmp_path / "copy" / "val_b" / "data.0000.lmdb", toy_records(5, first_seed=300))
    after = data_fingerprints(data)
    assert {split for split in before if before[split] != after[split]} == {"val_b"}


def test_the_state_of_a_source_tree_is_its_commit_and_whether_it_was_changed(tmp_path):
    """Nothing for a folder outside of any, and for one that is installed below another project's."""
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "__init__.py").write_text("a = 1\n")
    assert git_state(tmp_path) is None
    git(tmp_path, "add", "__init__.py")
    git(tmp_path, "commit", "-qm", "first")
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["modified"] is False
    (tmp_path / "__init__.py").write_text("a = 2\n")
    assert git_state(tmp_path) == state | {"modified": True}
