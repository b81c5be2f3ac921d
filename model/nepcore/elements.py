"""Chemical elements H to Pu, the range of NEP models: symbols and atomic numbers."""

from __future__ import annotations

# fmt: off
SYMBOLS: tuple[str, ...] = (
    "X",
    "H", "He", "Li", "Be", "B", "C", "N", "O", "F", "Ne", "Na", "Mg", "Al", "Si", "P", "S", "Cl", "Ar",
    "K", "Ca", "Sc", "Ti", "V", "Cr", "Mn", "Fe", "Co", "Ni", "Cu", "Zn", "Ga", "Ge", "As", "Se", "Br", "Kr",
    "Rb", "Sr", "Y", "Zr", "Nb", "Mo", "Tc", "Ru", "Rh", "Pd", "Ag", "Cd", "In", "Sn", "Sb", "Te", "I", "Xe",
    "Cs", "Ba", "La", "Ce", "Pr", "Nd", "Pm", "Sm", "Eu", "Gd", "Tb", "Dy", "Ho", "Er", "Tm", "Yb", "Lu",
    "Hf", "Ta", "W", "Re", "Os", "Ir", "Pt", "Au", "Hg", "Tl", "Pb", "Bi", "Po", "At", "Rn",
    "Fr", "Ra", "Ac", "Th", "Pa", "U", "Np", "Pu",
)
# fmt: on
"""Symbols by atomic number; entry 0 is the placeholder that no element has."""

NUMBERS: dict[str, int] = {symbol: z for z, symbol in enumerate(SYMBOLS) if z > 0}
"""Atomic numbers by symbol; case sensitive, as in ``nep.txt``."""

MAX_NUMBER = len(SYMBOLS) - 1


def symbol_of(number: int) -> str:
    """Symbol of an atomic number, ``Z=<number>`` where there is none (for messages)."""
    return SYMBOLS[number] if 1 <= number <= MAX_NUMBER else f"Z={number}"
