"""The settings of a training run, as documented dataclasses.

One YAML file under `configs/` holds one `Config`, complete and without inheritance. The command line is
made from the same classes, so `--optim.lr 1e-3` and the YAML key `optim: {lr: 1e-3}` are one thing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AttentionKind = Literal["flt", "performer", "softmax", "range_separated"]
Coupling = Literal["additive", "multiplicative"]
Sampler = Literal["gaussian", "orthogonal", "sobol", "matched_mixture", "spherical", "lattice"]


@dataclass
class DataConfig:
    """Where the structures come from and how they become batches."""

    root: str = "datasets/fcc111"
    """Folder that holds one OC20-format LMDB (a file or a folder of shards) per split."""
    train_split: str = "train"
    """Split to train on: the name of a folder or of a `.lmdb` file under `root`."""
    val_splits: list[str] = field(default_factory=lambda: ["val_id"])
    """Splits to validate on; the first one selects the best checkpoint."""
    radius: float = 6.0
    """Cutoff of the periodic neighbour graph in Å."""
    max_neighbors: int | None = None
    """Nearest neighbours kept per atom (a shell of equal distance is never cut); null keeps all."""
    batch_size: int = 32
    """Systems per batch."""
    num_workers: int = 0
    """Data-loader worker processes."""
    energy_meaning: str = "adsorption energy of the relaxed structure"
    """What the target `y_relaxed` is, in words; kept in checkpoints and shown with predictions."""


@dataclass
class AttentionConfig:
    """What the encoder's attention layers compute."""

    kind: AttentionKind = "flt"
    """`flt`: linear attention with a learned Fourier RPE; `performer`: the same without RPE;
    `softmax`: quadratic attention with the exact RPE bias, the twin of `flt`; `range_separated`: exact over
    the radius graph, and beyond it linear on the reciprocal lattice."""
    num_random_features: int = 64
    """M, random features that linearise the exponential."""
    num_frequencies: int = 16
    """R, frequencies sampled per head for the RPE."""
    num_basis: int = 32
    """T, Gaussian basis functions of the RPE's spectrum per head."""
    basis_width_range: tuple[float, float] = (0.5, 5.0)
    """Smallest and largest initial width s_t of the basis functions, Å."""
    share_rpe: bool = True
    """One RPE for all layers (as published) instead of one per layer."""
    use_rpe: bool = True
    """False leaves the RPE bias of `softmax` out (`flt` without RPE is `performer`)."""
    coupling: Coupling = "additive"
    """How the RPE enters `flt`: added to the logits (as published), or as a factor of the weights, which
    wants a smaller `num_random_features` such as 16. `range_separated` is always multiplicative."""
    sampler: Sampler = "gaussian"
    """Frequencies of `flt`: random with learnable std (`gaussian` as published, `orthogonal`, `sobol`);
    random from the spectrum's own components (`matched_mixture`); a rotation-invariant rule for molecules
    (`spherical`, which chooses its own number); each structure's reciprocal lattice (`lattice`: additive
    keeps `num_frequencies` of it with G = 0, multiplicative all up to `far_cutoff`)."""
    quadrature_extent: float = 10.0
    """Largest distance, Å, at which the `spherical` rule is accurate for all of `basis_width_range`."""
    far_cutoff: float = 0.16
    """Longest reciprocal lattice vector in cycles/Å, of the `lattice` sampler and of `range_separated`."""
    far_basis: int = 4
    """Gaussians per head of the far part's M, for `range_separated` and the multiplicative `lattice`."""
    far_peak: float = 0.1
    """M(0) at the start. All atoms within the widths share in the far weights: 0.1 suits solids; few atoms
    far apart want more, such as 1."""
    far_widths: tuple[float, float] | None = None
    """Smallest and largest width of M's Gaussians, Å; null takes 0.5 and 1 times 1 / `far_cutoff`."""
    max_frequencies: int | None = None
    """Most reciprocal lattice vectors per structure: makes the cost linear when one cell grows, by smoothing
    M more in cells with more; null keeps all, so that a supercell equals its cell."""
    near: bool = True
    """The near part of `range_separated`, softmax attention over the radius graph."""
    far: bool = True
    """The far part of `range_separated`."""
    separate_normalizers: bool = False
    """Near and far part of `range_separated` as two attentions whose outputs are added, instead of weights
    under one normaliser."""


@dataclass
class ModelConfig:
    """The Graphormer-3D backbone and its heads."""

    channels: int = 128
    """C, width of the encoder."""
    num_heads: int = 8
    """H, attention heads; divides `channels`."""
    num_layers: int = 4
    """Pre-LN transformer layers with weights of their own."""
    num_blocks: int = 1
    """How often the stack of layers is repeated with shared weights."""
    ffn_channels: int = 128
    """Hidden width of the feed-forward part."""
    num_gaussians: int = 64
    """K, Gaussians of the element-pair geometry embedding."""
    displacement_channels: int = 32
    """Width of the queries and keys of the Δpos head, over all heads; divisible by `num_heads`."""
    dropout: float = 0.0
    """Dropout after attention and feed-forward."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention layers."""


@dataclass
class OptimConfig:
    """Loss and optimiser."""

    lr: float = 3e-4
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's moment decay rates."""
    weight_decay: float = 1e-3
    """AdamW's weight decay."""
    warmup_fraction: float = 0.05
    """Share of all steps over which the learning rate rises linearly from zero."""
    grad_clip: float = 5.0
    """Largest gradient norm."""
    delta_pos_weight: tuple[float, float] = (15.0, 1.0)
    """Weight of the Δpos loss at the first and the last step, changing linearly; (0, 0) trains no
    Δpos head."""
    ema_decay: float = 0.999
    """Decay per step of the exponential moving average of the weights, which is what is validated and
    saved; it rises to this value as (1 + step) / (10 + step). 0 uses the weights themselves."""


@dataclass
class TrainingConfig:
    """How long to train and where the results go."""

    epochs: int = 100
    """Passes over the training split."""
    output: str = "runs/fcc111-flt"
    """Run folder: config.yaml, metrics.csv, checkpoints/, tensorboard/."""
    redraw_every: int = 0
    """Steps between redraws of frequencies and random features; 0 keeps the first draw."""
    validate_every: int = 1
    """Epochs between validations (each also saves checkpoints); the last epoch is always validated."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute; `auto` takes a CUDA GPU if there is one."""
    cache_gib: float = 1.0
    """Prepared samples of a split are kept in memory up to this size in GiB; 0 prepares them anew each
    epoch, as random augmentation always does."""


@dataclass
class Config:
    """One training run."""

    seed: int = 0
    """Fixes the initial weights, the frequencies and the order of batches."""
    data: DataConfig = field(default_factory=DataConfig)
    """The structures."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Loss and optimiser."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Duration and output."""
