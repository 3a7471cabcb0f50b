"""Write each image's requirements out of pyproject.toml: NAME:EXTRA,EXTRA -> NAME.txt (no extras: the base install)."""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """One file for each argument."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for argument in sys.argv[1:]:
        name, _, extras = argument.partition(":")
        lines = (
            [
                line
                for extra in extras.split(",")
                for line in project["optional-dependencies"][extra]
            ]
            if extras
            else project["dependencies"]
        )
        Path(f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
