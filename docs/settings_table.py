"""Keep the table of settings in serve.md as the settings class has it; called by `make docs`.

python docs/settings_table.py          print the table
python docs/settings_table.py --write  put it into serve.md
"""

import sys
from pathlib import Path

from nepserve.settings import FIELDS, Settings, flag_of

PAGE = Path(__file__).with_name("serve.md")
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def table() -> str:
    """Flags, defaults and meanings as a table in Markdown."""
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for name in FIELDS:
        field = Settings.model_fields[name]
        default = field.get_default()
        if default in (None, ()):
            shown = ""
        elif isinstance(default, bool):
            shown = "yes" if default else "no"
        elif isinstance(default, tuple):
            shown = f"`{','.join(map(str, default))}`"
        else:
            shown = f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{flag_of(name)}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def page_with(text: str) -> str:
    """The page with this table in the place of the one it has."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with(table()), encoding="utf-8")
    else:
        print(table(), end="")
