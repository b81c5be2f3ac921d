"""Model files of any shape come back; damaged ones are refused by the one error there is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model_texts import FLEXIBLE, SI, TWO, text_of
from nepcore.errors import ModelFileError
from nepcore.files import nep_layout, nep_txt
from nepcore.synthetic import make_model

if TYPE_CHECKING:
    import random

HEADER = """nep4 1 Si
cutoff 6.0 4.0 251 80
n_max 0 0
basis_size 0 0
l_max 1 0 0
ANN 1 0
"""


@st.composite
def models(draw: st.DrawFn) -> nep_txt.NepFile:
    elements = draw(
        st.lists(st.sampled_from(["H", "C", "O", "Si", "Te", "Pb", "Pu"]), min_size=1, max_size=4, unique=True)
    )
    version = draw(st.sampled_from([3, 4, 5]))
    pair = st.tuples(st.floats(3.0, 9.0), st.floats(0.5, 3.0))
    size = st.integers(0, 3)
    return make_model(
        elements,
        version=version,
        zbl=draw(st.sampled_from(["none", "universal", "typewise", "flexible"])),
        temperature=version != 5 and draw(st.booleans()),
        cutoff=draw(st.one_of(pair, st.tuples(*[pair] * len(elements)))),
        n_max=draw(st.tuples(size, size)),
        basis_size=draw(st.tuples(size, size)),
        l_max=draw(st.integers(1, 8)),
        switches=draw(st.sets(st.sampled_from(nep_layout.SWITCHES))),
        hidden=draw(st.one_of(st.tuples(st.integers(1, 4)), st.tuples(st.integers(1, 4), st.integers(1, 3)))),
        seed=draw(st.integers(0, 1000)),
    )


@given(models())
@settings(max_examples=60, deadline=None)
def test_round_trip_of_any_shape(model: nep_txt.NepFile) -> None:
    text = nep_txt.dumps(model)
    again = nep_txt.loads(text)
    assert again.equals(model)
    assert nep_txt.dumps(again) == text
    # and with a header made anew
    bare = nep_txt.dumps(dataclasses.replace(model, header=()))
    assert nep_txt.loads(bare).equals(model)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=9, max_size=9))
@settings(max_examples=100, deadline=None)
def test_round_trip_of_any_number(numbers: list[float]) -> None:
    text = HEADER + "\n".join(map(repr, numbers))
    model = nep_txt.loads(text)
    once = nep_txt.dumps(model)
    assert [float(x).hex() for x in once.splitlines()[6:]] == [x.hex() for x in numbers]
    assert nep_txt.dumps(nep_txt.loads(once)) == once


FUZZED = [
    SI,
    TWO,
    FLEXIBLE,
    text_of("Si", "C", version=5, zbl="typewise"),
    text_of("Si", temperature=True, hidden=(2, 2)),
]
TOKENS = [
    "",
    "nan",
    "-1",
    "0",
    "1e999",
    "zbl",
    "cutoff",
    "Si",
    "\u0663",
    "9" * 30,
    "1e-",
    "\t",
    "\r",
    "\x0b",
    "\x85",
    "#",
]


@given(st.integers(0, len(FUZZED) - 1), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_damaged_lines_are_refused_or_read(which: int, dice: random.Random) -> None:
    lines = FUZZED[which].split("\n")
    for _ in range(dice.randint(1, 3)):
        i = dice.randrange(min(len(lines), dice.choice([7, 10_000])))
        action = dice.randrange(5)
        if action == 0:
            del lines[i]
        elif action == 1:
            lines.insert(i, dice.choice(lines))
        elif action == 2:
            words = lines[i].split() or [""]
            words[dice.randrange(len(words))] = dice.choice(TOKENS)
            lines[i] = " ".join(words)
        elif action == 3:
            lines[i] += f" {dice.choice(TOKENS)}"
        else:
            del lines[i:]
        if not lines:
            break
    check_either("\n".join(lines))


@given(st.integers(0, len(FUZZED) - 1), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_are_refused_or_read(which: int, dice: random.Random) -> None:
    content = bytearray(FUZZED[which].encode())
    for _ in range(dice.randint(1, 4)):
        i = dice.randrange(min(len(content), dice.choice([90, 100_000])))
        content[i] = dice.choice([dice.randrange(256), ord(dice.choice(" \n.0123456789-+eE_"))])
    check_either(content.decode("utf-8", errors="replace"))


@given(st.text(max_size=200))
@example("nep4")
@example("nep4 1")
@example("nep4 1 Si\ncutoff")
@settings(max_examples=200, deadline=None)
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ModelFileError):
        nep_txt.loads(text)


def check_either(text: str) -> None:
    """Read, and then written and read again the same; or refused by the one error there is."""
    model, refused = None, None
    try:
        model = nep_txt.loads(text)
    except ModelFileError as error:
        refused = error
    if model is not None:
        once = nep_txt.dumps(model)
        assert nep_txt.loads(once).equals(model)
        assert nep_txt.dumps(nep_txt.loads(once)) == once
    if refused is not None:
        assert refused.line is None or 1 <= refused.line <= text.count("\n") + text.count("\r") + 2
        assert str(refused).isprintable()
