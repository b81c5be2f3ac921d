"""What a training is to do: the keywords of ``nep.in`` in plain names, with their defaults. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from nepcore.elements import NUMBERS
from nepcore.errors import NepError
from nepcore.files.nep_keywords import SCHEDULERS
from nepcore.files.nep_layout import MAX_L, SWITCHES, Header

if TYPE_CHECKING:
    from collections.abc import Mapping

LOSS_FORMS = ("mse", "rmse")
Q_SCALERS = ("self-consistent", "gpumd")
OFFSETS = ("common", "elements")
WEIGHTINGS = ("square", "linear")

DEFAULT_LAMBDAS = {"mse": (0.01, 1.0, 0.01), "rmse": (1.0, 1.0, 0.1)}
"""lambda_e, lambda_f and lambda_v of each form of the loss, where none are given."""


class SettingsError(NepError):
    """A setting that cannot be used.

    Attributes:
        field: Name of the field of :class:`Settings`.
        reason: What was found and what was wanted.
    """

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.reason)


@dataclass(frozen=True)
class Stage:
    """One stage of a training, made by :meth:`Settings.stages`; fields as in :class:`Settings`."""

    number: int
    epochs: int
    lr: float
    stop_lr: float
    lambda_e: float
    lambda_f: float
    lambda_v: float
    lr_scheduler: str
    scheduler_patience: int
    scheduler_factor: float
    scheduler_step: int
    early_stop: int


@dataclass(frozen=True)
class Settings:
    """All settings of a training. Names are those of ``nep.in`` unless the line says otherwise.

    Model:
        elements: (``type``) symbols in the order of the type index.
        cutoff: Radial and angular cutoff of each element, Å, T pairs; one pair holds for all.
        n_max: Radial and angular number of functions less one.
        basis_size: Largest index of the radial and of the angular basis.
        l_max: Highest degree of the three-body invariants.
        switches: (``l_max``, behind the first number) names of the higher invariants that are on.
        neuron: Neurons of the one or two hidden layers.
        zbl: Outer cutoff of a universal ZBL, Å; its inner one is half of it. None: no ZBL.
        zbl_factor: (``use_typewise_cutoff_zbl``) factor of the sum of radii, with ``zbl``; None: not typewise.
        zbl_pairs: (``zbl.in``) ten numbers for each pair 1-1, 1-2, … of a flexible ZBL, with ``zbl`` None.
        temperature: (``model_type 3``) the temperature of a structure is an input of the network.
        q_scaler: ``self-consistent``: scales follow from the initial coefficients; ``gpumd``: from coefficients that
            are all 1, and all parameters start evenly between −1 and 1.
        offset: ``common``: one energy offset for all atoms, solved exactly; ``elements``: one for each element, by
            least squares before the training, which only a file of version 5 can say.

    Loss (terms by GPUMD's formulas; E and W per atom, F by component):
        loss: ``mse``: Σ λ M of the mean squares M, suited to gradients; ``rmse``: Σ λ √M as GPUMD has it.
        lambda_e, lambda_f, lambda_v: Weights of energy, forces and virial; None: those of the form,
            :data:`DEFAULT_LAMBDAS`.
        lambda_shear: Factor of the errors of off-diagonal virial components (its square enters the squares).
        lambda_1, lambda_2: Weights of Σ|z|/N and √(Σz²/N) over all parameters but the common bias.
        type_weight: Force weight of each element (its square enters the squares); empty: 1.
        force_delta: δ, eV/Å; force errors count δ/(δ + |F|). 0: off.
        weighting: How a frame's ``weight`` enters the squares: ``square`` as in GPUMD, or ``linear``.

    Course:
        epochs: (``epoch``) passes over the data, all stages together.
        batch: Structures of a step, over all processes together.
        lr, stop_lr: Learning rate at the start, and the smallest that a scheduler comes to.
        weight_decay: Of AdamW; 0 is Adam. Biases are not decayed.
        max_grad_norm: Gradients are scaled down to this norm; 0: never.
        lr_scheduler: ``plateau`` (times ``scheduler_factor`` when the loss did not fall for ``scheduler_patience``
            epochs), ``step`` (times the factor every ``scheduler_step`` epochs) or ``cosine`` (to ``stop_lr`` at the
            end of the stage).
        scheduler_patience, scheduler_factor, scheduler_step: See there; a step of 0 is the patience.
        early_stop: A stage ends when its loss did not fall for so many epochs; 0: never.
        stage2: Whether there is a second stage.
        start_stage2: Epoch with which it starts, from 1; None: half way.
        stage2_lr, stage2_stop_lr, stage2_lambda_e, stage2_lambda_f, stage2_lambda_v, stage2_scheduler,
        stage2_scheduler_patience, stage2_scheduler_factor, stage2_scheduler_step, stage2_early_stop: Of the second
            stage; None: stop_lr, scheduler and early_stop as in the first one.
        average: Parameters of the last so many epochs are averaged (``nep_average.txt``); 0: no average.
        seed: Of the start parameters, the split and the order of the frames.

    Runs:
        valid_ratio: Share of the training frames that is set aside where there are no validation frames.
        output_interval: Epochs between two rows of ``loss.out``.
        checkpoint_interval: Epochs between two checkpoints.
        save_potential: Epochs between two ``nep_epochN.txt``; 0: none.
        dtype: ``float32`` or ``float64``.
    """

    elements: tuple[str, ...]
    cutoff: tuple[tuple[float, float], ...] = ((8.0, 4.0),)
    n_max: tuple[int, int] = (6, 6)
    basis_size: tuple[int, int] = (6, 6)
    l_max: int = 4
    switches: tuple[str, ...] = ("q222",)
    neuron: tuple[int, ...] = (30,)
    zbl: float | None = None
    zbl_factor: float | None = None
    zbl_pairs: tuple[tuple[float, ...], ...] | None = None
    temperature: bool = False
    q_scaler: str = "self-consistent"
    offset: str = "common"

    loss: str = "mse"
    lambda_e: float | None = None
    lambda_f: float | None = None
    lambda_v: float | None = None
    lambda_shear: float = 1.0
    lambda_1: float = 0.0
    lambda_2: float = 0.0
    type_weight: tuple[float, ...] = ()
    force_delta: float = 0.0
    weighting: str = "square"

    epochs: int = 600
    batch: int = 32
    lr: float = 0.01
    stop_lr: float = 1e-6
    weight_decay: float = 1e-4
    max_grad_norm: float = 10.0
    lr_scheduler: str = "plateau"
    scheduler_patience: int = 15
    scheduler_factor: float = 0.7
    scheduler_step: int = 0
    early_stop: int = 0
    stage2: bool = False
    start_stage2: int | None = None
    stage2_lr: float = 1e-3
    stage2_stop_lr: float | None = None
    stage2_lambda_e: float = 1.0
    stage2_lambda_f: float = 0.05
    stage2_lambda_v: float = 0.1
    stage2_scheduler: str | None = None
    stage2_scheduler_patience: int | None = None
    stage2_scheduler_factor: float | None = None
    stage2_scheduler_step: int | None = None
    stage2_early_stop: int | None = None
    average: int = 0
    seed: int = 0

    valid_ratio: float = 0.0
    output_interval: int = 1
    checkpoint_interval: int = 10
    save_potential: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("elements", "n_max", "basis_size", "switches", "neuron", "type_weight"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "cutoff", tuple(tuple(map(float, pair)) for pair in self.cutoff))
        if len(self.cutoff) == 1:
            object.__setattr__(self, "cutoff", self.cutoff * len(self.elements))
        if self.zbl_pairs is not None:
            object.__setattr__(self, "zbl_pairs", tuple(tuple(map(float, row)) for row in self.zbl_pairs))
        self._check_model()
        self._check_loss()
        self._check_course()

    @property
    def lambdas(self) -> tuple[float, float, float]:
        """lambda_e, lambda_f, lambda_v of the first stage."""
        given = (self.lambda_e, self.lambda_f, self.lambda_v)
        found = [d if v is None else v for v, d in zip(given, DEFAULT_LAMBDAS[self.loss], strict=True)]
        return found[0], found[1], found[2]

    def stages(self) -> tuple[Stage, ...]:
        """The one or two stages."""
        first = self.epochs
        if self.stage2:
            start = self.epochs // 2 + 1 if self.start_stage2 is None else self.start_stage2
            first = min(max(0, start - 1), self.epochs)
        one = Stage(
            1, first, self.lr, self.stop_lr, *self.lambdas, self.lr_scheduler, self.scheduler_patience,
            self.scheduler_factor, self.scheduler_step or self.scheduler_patience, self.early_stop,
        )  # fmt: skip
        if not self.stage2:
            return (one,)

        def own(value: Any, inherited: Any) -> Any:
            return inherited if value is None else value

        patience = own(self.stage2_scheduler_patience, self.scheduler_patience)
        two = Stage(
            2, self.epochs - first, self.stage2_lr, own(self.stage2_stop_lr, self.stop_lr), self.stage2_lambda_e,
            self.stage2_lambda_f, self.stage2_lambda_v, own(self.stage2_scheduler, self.lr_scheduler), patience,
            own(self.stage2_scheduler_factor, self.scheduler_factor),
            own(self.stage2_scheduler_step, self.scheduler_step) or patience,
            own(self.stage2_early_stop, self.early_stop),
        )  # fmt: skip
        return one, two

    @property
    def layout(self) -> Header:
        """Sizes of the model that is trained, without numbers of neighbours."""
        kind = "flexible" if self.zbl_pairs is not None else "none"
        if self.zbl is not None:
            kind = "universal" if self.zbl_factor is None else "typewise"
        version = 5 if self.offset == "elements" else 4
        tag = f"nep{version}{'_zbl' * (kind != 'none')}{'_temperature' * self.temperature}"
        return Header(
            tag=tag, version=version, elements=self.elements, temperature=self.temperature, zbl=kind,
            zbl_inner=None if self.zbl is None else self.zbl / 2, zbl_outer=self.zbl,
            zbl_factor=self.zbl_factor, cutoff_radial=tuple(r for r, _ in self.cutoff),
            cutoff_angular=tuple(a for _, a in self.cutoff), mn_radial=None, mn_angular=None,
            n_max_radial=self.n_max[0], n_max_angular=self.n_max[1], basis_radial=self.basis_size[0],
            basis_angular=self.basis_size[1], l_max=self.l_max,
            switches=tuple(name in self.switches for name in SWITCHES), hidden=self.neuron,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain values, JSON-able; :meth:`from_dict` takes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Settings of plain values, as from JSON.

        Raises:
            SettingsError: A name that is not a setting, or a value that cannot be used.
        """
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise SettingsError(name, "there is no such setting")
        return cls(**values)

    def _check_model(self) -> None:
        T = len(self.elements)
        _wanted("elements", T > 0, self.elements, "at least one symbol")
        for symbol in self.elements:
            _wanted("elements", NUMBERS.get(symbol, 0) in range(1, 95), symbol, "symbols from H to Pu")
        _wanted("elements", len(set(self.elements)) == T, self.elements, "each symbol once")
        _wanted("cutoff", len(self.cutoff) == T, self.cutoff, f"one pair, or one for each of {T} elements")
        for pair in self.cutoff:
            _wanted("cutoff", len(pair) == 2 and 0.0 < pair[-1] <= pair[0] <= 100.0, pair, "angular ≤ radial ≤ 100 Å")
        for name in ("n_max", "basis_size"):
            pair = getattr(self, name)
            ok = len(pair) == 2 and all(isinstance(v, int) and 0 <= v <= 64 for v in pair)
            _wanted(name, ok, pair, "two whole numbers from 0 to 64")
        _wanted("l_max", 1 <= self.l_max <= MAX_L, self.l_max, f"1 to {MAX_L}")
        for name in self.switches:
            _wanted("switches", name in SWITCHES, name, f"names among {' '.join(SWITCHES)}")
        ok = len(self.neuron) in {1, 2} and all(1 <= n <= 1000 for n in self.neuron)
        _wanted("neuron", ok, self.neuron, "one or two numbers from 1 to 1000")
        _wanted("zbl", self.zbl is None or 0.0 < self.zbl <= 10.0, self.zbl, "an outer cutoff up to 10 Å")
        _wanted("zbl_factor", self.zbl_factor is None or self.zbl is not None, self.zbl_factor, "zbl as well")
        _wanted("zbl_factor", self.zbl_factor is None or self.zbl_factor >= 0.5, self.zbl_factor, "at least 0.5")
        if self.zbl_pairs is not None:
            _wanted("zbl_pairs", self.zbl is None, self.zbl, "no universal ZBL beside a flexible one")
            rows, wide = len(self.zbl_pairs), {len(row) for row in self.zbl_pairs}
            pairs = T * (T + 1) // 2
            _wanted("zbl_pairs", rows == pairs and wide == {10}, f"{rows} rows of {sorted(wide)} numbers",
                    f"{pairs} rows of 10 numbers")  # fmt: skip
        _wanted("q_scaler", self.q_scaler in Q_SCALERS, self.q_scaler, " or ".join(Q_SCALERS))
        _wanted("offset", self.offset in OFFSETS, self.offset, " or ".join(OFFSETS))
        clash = self.offset == "elements" and self.temperature
        _wanted("offset", not clash, self.offset, "common, since version 5 has no temperature")

    def _check_loss(self) -> None:
        _wanted("loss", self.loss in LOSS_FORMS, self.loss, " or ".join(LOSS_FORMS))
        for name in (
            "lambda_e", "lambda_f", "lambda_v", "lambda_shear", "lambda_1", "lambda_2", "force_delta",
            "stage2_lambda_e", "stage2_lambda_f", "stage2_lambda_v", "weight_decay", "max_grad_norm", "stop_lr",
        ):  # fmt: skip
            value = getattr(self, name)
            _wanted(name, value is None or (math.isfinite(value) and value >= 0.0), value, "a number, at least 0")
        ok = len(self.type_weight) in {0, len(self.elements)} and all(w >= 0.0 for w in self.type_weight)
        _wanted("type_weight", ok, self.type_weight, f"{len(self.elements)} numbers, at least 0")
        _wanted("weighting", self.weighting in WEIGHTINGS, self.weighting, " or ".join(WEIGHTINGS))
        for stage in self.stages():
            if stage.epochs and not stage.lambda_e + stage.lambda_f + stage.lambda_v > 0.0:
                name = "lambda_e" if stage.number == 1 else "stage2_lambda_e"
                raise SettingsError(name, "lambda_e, lambda_f and lambda_v are all 0: there is nothing to train on")

    def _check_course(self) -> None:
        _wanted("epochs", self.epochs >= 0, self.epochs, "at least 0")
        for name in ("batch", "output_interval", "checkpoint_interval", "scheduler_patience"):
            _wanted(name, getattr(self, name) >= 1, getattr(self, name), "at least 1")
        for name in ("early_stop", "average", "save_potential", "scheduler_step", "seed"):
            _wanted(name, getattr(self, name) >= 0, getattr(self, name), "at least 0")
        for name in ("lr", "stage2_lr"):
            value = getattr(self, name)
            _wanted(name, math.isfinite(value) and value > 0.0, value, "a number above 0")
        for name in ("scheduler_factor", "stage2_scheduler_factor"):
            value = getattr(self, name)
            _wanted(name, value is None or 0.0 < value <= 1.0, value, "a number above 0, at most 1")
        for name in ("lr_scheduler", "stage2_scheduler"):
            value = getattr(self, name)
            _wanted(name, value is None or value in SCHEDULERS, value, ", ".join(SCHEDULERS))
        ok = self.start_stage2 is None or self.start_stage2 >= 1
        _wanted("start_stage2", ok, self.start_stage2, "an epoch, from 1")
        _wanted("valid_ratio", 0.0 <= self.valid_ratio < 1.0, self.valid_ratio, "at least 0 and below 1")
        _wanted("dtype", self.dtype in {"float32", "float64"}, self.dtype, "float32 or float64")


def _wanted(field: str, ok: bool, found: Any, wanted: str) -> None:
    if not ok:
        raise SettingsError(field, f"found {found!r}, wanted {wanted}")
