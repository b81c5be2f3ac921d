"""The keywords of ``nep.in``: GPUMD's, and those of training by gradients.

Each keyword has what it means, how many values it takes, their kind and their range. Ranges are those of GPUMD where
the keyword is GPUMD's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ANGULAR = 90
"""Most angular descriptor components that GPUMD can evaluate."""

MAX_INTEGER = 10_000_000


@dataclass(frozen=True)
class Value:
    """One value of a keyword: its name, kind (``int``, ``float``, ``word``, ``path``), range or choices."""

    name: str
    kind: str
    low: float = -inf
    high: float = inf
    choices: tuple[str, ...] = ()
    above: bool = False

    def wanted(self) -> str:
        """What may stand here, for messages."""
        if self.kind == "word":
            return f"one of {', '.join(self.choices)}"
        if self.kind == "path":
            return "a file name"
        noun = "a whole number" if self.kind == "int" else "a number"
        if self.low > -inf and self.high < inf:
            return f"{noun} from {self.low:.12g} to {self.high:.12g}"
        if self.low > -inf:
            return f"{noun} {'above' if self.above else 'of at least'} {self.low:.12g}"
        return noun


@dataclass(frozen=True)
class Keyword:
    """A keyword.

    Attributes:
        name: As it is written.
        group: ``model``, ``loss``, ``data``, ``gradient``, ``output``, ``evolution`` (has no meaning for gradients) or
            ``other`` (kinds of models that are not trained here; only their harmless values are taken).
        meaning: What it does, a clause.
        values: Its values; the last ones may be left out down to ``least``.
        least: Fewest values.
        each: Whether it has one value of this kind for each type instead.
        default: What holds where it is not given, as it would be written; None if nothing does.
    """

    name: str
    group: str
    meaning: str
    values: tuple[Value, ...]
    least: int
    each: bool = False
    default: str | None = None


def _int(name: str, low: float = 0, high: float = MAX_INTEGER) -> Value:
    return Value(name, "int", low, high)


def _float(name: str, low: float = 0.0, high: float = inf, *, above: bool = False) -> Value:
    return Value(name, "float", low, high, above=above)


def _flag(name: str = "flag") -> Value:
    return Value(name, "int", 0, 1)


def _word(name: str, *choices: str) -> Value:
    return Value(name, "word", choices=choices)


def _path(name: str) -> Value:
    return Value(name, "path")


SCHEDULERS = ("plateau", "step", "cosine")

_DEFINED: tuple[tuple[str, str, str, tuple[Value, ...], int, str | None], ...] = (
    # name, group, meaning, values, fewest, default
    ("version", "model", "version of NEP: 4, or 5, which has an energy offset for each type",
     (_int("version", 3, 5),), 1, "4"),
    ("model_type", "other", "0 potential, 1 dipole, 2 polarizability, 3 temperature", (_int("kind", 0, 3),), 1, "0"),
    ("n_max", "model", "radial and angular functions less one",
     (_int("radial", 0, 12), _int("angular", 0, 8)), 2, "6 6"),
    ("basis_size", "model", "radial and angular basis functions less one",
     (_int("radial", 0, 16), _int("angular", 0, 12)), 2, "6 6"),
    ("l_max", "model", "largest l of the three-body terms, then flags of the four- and five-body invariants",
     (_int("l", 1, 8), *[_int(name, 0, 4) for name in ("q222", "q1111", "q112", "q123", "q233", "q134")]), 1, "4 1"),
    ("neuron", "model", "neurons of the hidden layer, and of a second one (0: none)",
     (_int("neurons", 1, 120), _int("second layer", 0, 120)), 1, "30"),
    ("zbl", "model", "outer cutoff of the ZBL repulsion, Å; the inner one is half of it",
     (_float("outer", 1, 4),), 1, None),
    ("use_typewise_cutoff_zbl", "model", "ZBL cutoffs from covalent radii, times a factor",
     (_float("factor", 0.5),), 0, None),
    ("import_q_scaler", "model", "take the scaler of the descriptors from the nep.txt beside this file",
     (_flag(),), 1, "0"),
    ("q_scaler", "model", "scaler of the descriptors: from the first coefficients, or from ones as in GPUMD",
     (_word("how", "self", "gpumd"),), 1, "self"),
    ("fine_tune", "model", "start from this model (GPUMD's second and third file are not needed)",
     (_path("model"), _path("restart"), _path("descriptors")), 1, None),
    # The loss.
    ("lambda_e", "loss", "weight of the energies", (_float("weight"),), 1, None),
    ("lambda_f", "loss", "weight of the forces", (_float("weight"),), 1, None),
    ("lambda_v", "loss", "weight of the virials", (_float("weight"),), 1, None),
    ("lambda_shear", "loss", "factor of the errors of off-diagonal virials", (_float("factor"),), 1, "1"),
    ("lambda_1", "loss", "weight of the L1 regularisation", (_float("weight"),), 1, None),
    ("lambda_2", "loss", "weight of the L2 regularisation", (_float("weight"),), 1, None),
    ("force_delta", "loss", "small forces count more: weight δ / (δ + |F|), eV/Å", (_float("δ"),), 1, "0"),
    ("loss_form", "loss", "mean squares, or GPUMD's square roots of them", (_word("form", "mse", "rmse"),), 1, "mse"),
    ("weight_form", "loss", "the weight of a frame counts squared (GPUMD) or as it is",
     (_word("form", "square", "linear"),), 1, "square"),
    # Data.
    ("batch", "data", "frames of a step (GPUMD's second value, full batches, has no meaning here)",
     (_int("frames", 1), _flag("full")), 1, "32"),
    ("valid_ratio", "data", "share of the frames that is kept for validation where there is no test.xyz",
     (_float("share", 0.0, 0.9),), 1, "0"),
    ("seed", "data", "seed of everything that is random", (_int("seed", 0, 2**63 - 1),), 1, None),
    # Gradients.
    ("epoch", "gradient", "passes over the training frames", (_int("epochs", 1),), 1, None),
    ("lr", "gradient", "learning rate at the start", (_float("rate", 0.0, 1.0, above=True),), 1, None),
    ("stop_lr", "gradient", "smallest learning rate", (_float("rate", 0.0, 1.0),), 1, None),
    ("lr_scheduler", "gradient", "how the learning rate falls", (_word("name", *SCHEDULERS),), 1, None),
    ("scheduler_patience", "gradient", "epochs without progress before the rate falls (plateau)",
     (_int("epochs"),), 1, None),
    ("scheduler_factor", "gradient", "factor of the rate when it falls (plateau, step)",
     (_float("factor", 1e-6, 1.0),), 1, None),
    ("scheduler_step", "gradient", "epochs between falls (step)", (_int("epochs", 1),), 1, None),
    ("early_stop", "gradient", "end a stage after so many epochs without progress (0: never); one value a stage",
     (_int("stage 1"), _int("stage 2")), 1, "0"),
    ("weight_decay", "gradient", "decay of the weights (AdamW)", (_float("decay"),), 1, None),
    ("max_grad_norm", "gradient", "longest gradient; 0 for any", (_float("norm"),), 1, None),
    ("stage2", "gradient", "a second stage, in which energies count more", (_flag(),), 1, None),
    ("start_stage2", "gradient", "epoch with which the second stage begins", (_int("epoch", 1),), 1, None),
    ("stage2_lr", "gradient", "learning rate at the start of stage 2",
     (_float("rate", 0.0, 1.0, above=True),), 1, None),
    ("stage2_stop_lr", "gradient", "smallest learning rate of stage 2", (_float("rate", 0.0, 1.0),), 1, None),
    ("stage2_lambda_e", "gradient", "weight of the energies in stage 2", (_float("weight"),), 1, None),
    ("stage2_lambda_f", "gradient", "weight of the forces in stage 2", (_float("weight"),), 1, None),
    ("stage2_lambda_v", "gradient", "weight of the virials in stage 2", (_float("weight"),), 1, None),
    ("stage2_lr_scheduler", "gradient", "as lr_scheduler, of stage 2", (_word("name", *SCHEDULERS),), 1, None),
    ("stage2_scheduler_patience", "gradient", "as scheduler_patience, of stage 2", (_int("epochs"),), 1, None),
    ("stage2_scheduler_factor", "gradient", "as scheduler_factor, of stage 2", (_float("factor", 1e-6, 1.0),), 1, None),
    ("stage2_scheduler_step", "gradient", "as scheduler_step, of stage 2", (_int("epochs", 1),), 1, None),
    ("average", "gradient", "last epochs over which the parameters are averaged (nep_average.txt); 0 for none",
     (_int("epochs"),), 1, None),
    # Outputs.
    ("output_interval", "output", "epochs between lines of loss.out and evaluations of the test set",
     (_int("epochs", 1),), 1, None),
    ("save_potential", "output", "epochs between copies of the model, form of names (0 number, 1 time), checkpoint too",
     (_int("epochs", 1), _flag("form"), _flag("checkpoint")), 1, None),
    # The evolution strategy.
    ("generation", "evolution", "generations of the evolution strategy", (_int("generations"),), 1, "100000"),
    ("population", "evolution", "size of the population", (_int("size", 10, 200),), 1, "50"),
    ("initial_para", "evolution", "range of the parameters at the start", (_float("range", 0.1, 1.0),), 1, "1"),
    ("sigma0", "evolution", "deviation of the parameters at the start", (_float("deviation", 0.01, 0.1),), 1, "0.1"),
    # Other kinds of runs and models.
    ("prediction", "other", "1: evaluate only", (_flag(),), 1, "0"),
    ("output_descriptor", "other", "write descriptors when evaluating", (_int("form", 0, 2),), 1, "0"),
    ("charge_mode", "other", "qNEP: charges", (_int("mode", 0, 3), _flag("flip")), 1, "0"),
    ("vdw", "other", "dispersion", (_flag(),), 1, "0"),
    ("charge_vdw", "other", "charges and dispersion", (_flag(),), 1, "0"),
    ("atomic_v", "other", "fit atomic dipoles or polarizabilities", (_flag(),), 1, "0"),
    ("lambda_q", "other", "weight of the total charge (qNEP)", (_float("weight"),), 1, None),
    ("lambda_z", "other", "weight of the Born charges (qNEP)", (_float("weight"),), 1, None),
)  # fmt: skip

_EACH = (
    Keyword("type", "model", "number of types and their symbols, in the order of the model", (), 2, each=True),
    Keyword("cutoff", "model", "radial and angular cutoff, Å; or a pair of them for each type",
            (_float("radial", 3, 100), _float("angular", 3, 100)), 2, each=True, default="8 4"),
    Keyword("type_weight", "loss", "weight of the forces of each type; counts squared",
            (_float("weight"),), 1, each=True),
)  # fmt: skip

KEYWORDS: Mapping[str, Keyword] = MappingProxyType(
    {
        keyword.name: keyword
        for keyword in (
            *_EACH,
            *(Keyword(n, g, meaning, v, least, default=default) for n, g, meaning, v, least, default in _DEFINED),
        )
    }
)
"""All keywords by name."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "mode": "model_type",
        "patience": "scheduler_patience",
        "factor": "scheduler_factor",
        "start_lr": "lr",
        "stage2_patience": "stage2_scheduler_patience",
        "stage2_factor": "stage2_scheduler_factor",
        "swa": "average",
    }
)
"""Other spellings."""

STAGED = frozenset(name for name in KEYWORDS if name.startswith("stage2_")) | {"start_stage2"}
"""Keywords that turn the second stage on."""
