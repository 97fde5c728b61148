"""Structures as PyG `Data`: from OC20-format LMDBs and structure files, with periodic graphs."""

from molflt.data.datasets import OC20IS2RE, list_splits
from molflt.data.displacements import edge_displacement, minimum_image
from molflt.data.fields import FIELDS, FieldSpec, StructureData, check_same_fields
from molflt.data.graphs import radius_graph
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.structures import (
    Structure,
    StructureError,
    iter_structures,
    read_structures,
    structure_from_atoms,
    structure_from_pymatgen,
)
from molflt.data.transforms import DeltaPos, InterpolateNoise, RadiusGraph, RandomRotation

__all__ = [
    "FIELDS",
    "OC20IS2RE",
    "DeltaPos",
    "FieldSpec",
    "InterpolateNoise",
    "RadiusGraph",
    "RandomRotation",
    "Structure",
    "StructureData",
    "StructureError",
    "check_same_fields",
    "edge_displacement",
    "iter_structures",
    "list_splits",
    "minimum_image",
    "radius_graph",
    "read_structures",
    "structure_from_atoms",
    "structure_from_pymatgen",
    "write_lmdb",
]
