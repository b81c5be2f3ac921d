"""Print the versions of this environment as constraints for the images: all that ``nepserve[server]`` needs but torch.

Torch and what it needs alone follow from the base image or from the wheel index. Called by ``make lock``.
"""

from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(extras: frozenset[str], name: str, found: dict[str, str]) -> dict[str, str]:
    """Versions by name of a distribution's requirements, and of theirs."""
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        wanted = canonicalize_name(requirement.name)
        marker = requirement.marker
        # Certificates are better new than pinned.
        if wanted in {"torch", "certifi"} or (marker and not any(marker.evaluate({"extra": e}) for e in extras | {""})):
            continue
        if wanted not in found:
            found[wanted] = distribution(wanted).version
            closure(frozenset(requirement.extras), wanted, found)
    return found


def main() -> None:
    """Print one line a package."""
    print("# Made by `make lock`.")
    for name, version in sorted(closure(frozenset({"server"}), "nepserve", {}).items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
