"""The Graphormer-3D backbone, its embeddings and its heads."""

from molflt.models.embeddings import AtomEmbedding, PairGaussians
from molflt.models.encoder import Encoder, EncoderLayer
from molflt.models.graphormer3d import Graphormer3D, Graphormer3DOutput
from molflt.models.heads import DisplacementHead, EnergyHead

__all__ = [
    "AtomEmbedding",
    "DisplacementHead",
    "Encoder",
    "EncoderLayer",
    "EnergyHead",
    "Graphormer3D",
    "Graphormer3DOutput",
    "PairGaussians",
]
