"""The Graphormer-3D backbone, its embeddings and its heads."""

from molflt.models.all_pairs import AllPairsGraphormer3D
from molflt.models.embeddings import AtomEmbedding, PairGaussians
from molflt.models.encoder import Encoder, EncoderLayer
from molflt.models.graphormer3d import Graphormer3D, Graphormer3DOutput
from molflt.models.heads import DisplacementHead, EnergyHead

__all__ = [
    "AllPairsGraphormer3D",
    "AtomEmbedding",
    "DisplacementHead",
    "Encoder",
    "EncoderLayer",
    "EnergyHead",
    "Graphormer3D",
    "Graphormer3DOutput",
    "PairGaussians",
]
