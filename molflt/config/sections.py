"""The settings of a training run, as documented dataclasses.

One YAML file under `configs/` holds one `Config`, complete and without inheritance. The command line is
made from the same classes, so `--optim.lr 1e-3` and the YAML key `optim: {lr: 1e-3}` are one thing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AttentionKind = Literal["flt", "performer", "softmax", "range_separated"]
Coupling = Literal["additive", "multiplicative"]
Geometry = Literal["radius_graph", "all_pairs"]
Sampler = Literal["gaussian", "orthogonal", "sobol", "matched_mixture", "spherical", "lattice"]
Rotation = Literal["none", "z", "any"]
Optimizer = Literal["adamw", "adam"]
Schedule = Literal["cosine", "polynomial", "constant"]
Precision = Literal[32, "bf16", "fp16"]


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
    max_atoms: int | None = None
    """Fills batches up to so many atoms, padding counted (systems x atoms of the largest), with systems of
    like size, instead of `batch_size` systems; null does not."""
    max_edges: int | None = None
    """Fills batches up to so many edges of the neighbour graph (systems x edges of the largest), as
    `max_atoms` does for atoms; at most one of the two is set."""
    interpolate_fraction: float = 0.0
    """Share of the training structures that start, anew each epoch, from a random point between initial
    and relaxed positions plus noise; 0.5 is usual where there are relaxed positions."""
    noise_std: float = 0.3
    """Standard deviation per coordinate of that noise on free atoms, Å."""
    random_rotation: Rotation = "none"
    """Turns each training structure anew each epoch: `any` rotation, or about `z` only."""
    energy_mean: float | None = None
    """Mean by which targets are normalised, eV; null measures it on the training split."""
    energy_std: float | None = None
    """Standard deviation by which targets are normalised, eV; null measures it on the training split."""
    element_references: bool = False
    """For total energies as targets: fits an energy per element to the training split, trains on what is
    left, and adds the elements' energies back in predictions."""


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
    random from the spectrum's own components (`matched_mixture`); a rule for molecules (`spherical`, which
    chooses its own number); each structure's reciprocal lattice (`lattice`: additive keeps `num_frequencies`
    of it with G = 0, multiplicative all up to `far_cutoff`). The last two make energies invariant under
    rotation with the multiplicative coupling; with the additive one they do not."""
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
    element_rank: int = 0
    """Rank of element factors on the frequencies of additive `flt`, which let the RPE depend on both elements
    of a pair; 0 leaves them out."""


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
    geometry: Geometry = "radius_graph"
    """What distances the embedding sums over: `radius_graph`, linear in the atoms; or `all_pairs`,
    Graphormer-3D as published, quadratic, whose attention bias is an MLP of the same Gaussians
    (attention.kind softmax, attention.use_rpe false) and whose Δpos head does not turn with the structure."""
    image_radius: float | None = None
    """Adds to the attention, as atoms of their own, all periodic images within this many Å of an adsorbate
    atom (of any atom where there is none); null adds none."""
    input_dropout: float = 0.0
    """Dropout of the embeddings."""
    activation_dropout: float = 0.0
    """Dropout inside the feed-forward part."""
    attention_dropout: float = 0.0
    """Dropout of the attention weights, with geometry `all_pairs`."""
    drop_path: float = 0.0
    """Stochastic depth: probability of leaving out a branch of the last layer; earlier layers have less, in
    proportion to their depth."""
    gradient_checkpointing: bool = False
    """Runs each layer again in the backward pass instead of keeping what it computed: less memory, more
    time, the same gradients."""


@dataclass
class OptimConfig:
    """Loss and optimiser."""

    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the optimiser's two moments."""
    weight_decay: float = 1e-3
    """Weight decay: by AdamW apart from the gradient, by Adam as a part of it."""
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
    optimizer: Optimizer = "adamw"
    """Adam with decoupled weight decay, or Adam as published."""
    schedule: Schedule = "cosine"
    """How the learning rate goes on after the warm-up: to zero along half a cosine or as
    (1 - progress)^power, or not at all."""
    power: float = 1.0
    """Exponent of the polynomial schedule; 1 is linear, as Graphormer has it."""


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
    epoch. Random augmentation changes copies of them."""
    precision: Precision = 32
    """Floating-point type of matrix products: `32` bits, or `bf16` or `fp16` by autocast, with attention
    features, energies and weights in float32 all the same."""
    checkpoint_every: int = 0
    """Steps between states to continue from within an epoch; 0 saves one after each epoch only."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """At a loss or gradient that is not finite: `stop` with a file to reproduce it, or `skip` the step."""
    devices: int | None = None
    """Processes on each node, a GPU or CPU share each; null takes what the launcher (torchrun, srun) started,
    one process without a launcher. `data.batch_size` is that of each process."""
    num_nodes: int | None = None
    """Machines; null takes what the launcher says."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes share the work: `ddp` copies the model to each, `fsdp` shards it; `auto` is `ddp`."""
    init_from: str | None = None
    """Checkpoint (a file or the name of a shipped one) whose weights training starts from; null: new ones."""
    init_skip: list[str] = field(default_factory=list)
    """Patterns (`energy_head.*`) of weights that `init_from` may lack and that are not taken from it."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: str | None = None
    """Weights & Biases project to log to, needs the package wandb; null does not."""


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
