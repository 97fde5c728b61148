"""What a system is called, and the groups it falls in."""

import torch

from molflt.data.fields import StructureData
from molflt.evaluation.systems import describe_system, grouped, size_range


def system(sid, numbers, tags=None):
    data = StructureData(atomic_numbers=torch.tensor(numbers), sid=torch.tensor([sid]))
    if tags is not None:
        data.tags = torch.tensor(tags)
    return describe_system(data)


def test_a_slab_with_adsorbate_in_words():
    """Adsorbate from tag 2, metal from the rest, in the order of the alphabet."""
    found = system(31, [78, 29, 78, 8, 1], [0, 0, 1, 2, 2])
    assert (found.sid, found.formula, found.num_atoms) == (31, "HCuOPt2", 5)
    assert (found.adsorbate, found.metal, found.tags) == ("HO", "Cu-Pt", "0 1 2")
    assert found.elements == ("H", "O", "Cu", "Pt")


def test_without_tags_all_is_metal_and_nothing_adsorbate():
    """Absent tags, a clean slab, and an adsorbate alone."""
    assert (system(1, [29, 8]).adsorbate, system(1, [29, 8]).metal, system(1, [29, 8]).tags) == (
        "none",
        "Cu-O",
        "none",
    )
    assert system(1, [29], [1]).adsorbate == "none"
    assert system(1, [8], [2]).metal == "none"


def test_sizes_are_ranges():
    """Each bound belongs to the range below it."""
    assert [size_range(n) for n in (1, 20, 21, 40, 80, 81, 160, 161)] == [
        *("1-20", "1-20", "21-40", "21-40", "41-80", "81-160", "81-160", ">160"),
    ]


def test_groups_hold_the_rows_of_their_systems():
    """The largest first; a system with several elements is in the group of each."""
    systems = [system(1, [29, 8], [1, 2]), system(2, [78, 8], [1, 2]), system(3, [29, 1], [1, 2])]
    assert grouped(systems, "metal") == {"Cu": [0, 2], "Pt": [1]}
    assert list(grouped(systems, "metal")) == ["Cu", "Pt"]
    assert grouped(systems, "adsorbate") == {"O": [0, 1], "H": [2]}
    assert grouped(systems, "element") == {"Cu": [0, 2], "O": [0, 1], "H": [2], "Pt": [1]}
    assert grouped(systems, "size") == {"1-20": [0, 1, 2]}


def test_by_tag_systems_are_told_apart_by_their_adsorbed_atoms():
    """And those without an adsorbate, without a slab or without tags."""
    tags = [[0, 1, 2], [0, 2, 2], [1, 2, 2], [0, 1, 1], [2, 2, 2], [0, 0, 2], None, [0, 1, 2]]
    systems = [system(sid, [29, 29, 8], row) for sid, row in enumerate(tags)]
    assert grouped(systems, "tag") == {
        "0 1 2, 1 of tag 2": [0, 7],
        "0 1": [3],
        "0 2, 1 of tag 2": [5],
        "0 2, 2 of tag 2": [1],
        "1 2, 2 of tag 2": [2],
        "2, 3 of tag 2": [4],
        "none": [6],
    }
