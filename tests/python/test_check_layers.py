"""What points up is found: an include or import planted in each layer and room."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))

import check_layers

_ROOT = Path(__file__).parent.parent.parent
_LAYERS = [
    (layer, other)
    for layer, allowed in check_layers.ALLOWED.items()
    for other in check_layers.ALLOWED.keys() - allowed - {layer}
]
_ROOMS = [
    (layer, *pair)
    for layer, rooms in check_layers.ROOMS.items()
    for pair in itertools.pairwise(rooms)
]


def _plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tree_is_clean() -> None:
    sources, package = _ROOT / "src" / "memscale", _ROOT / "python" / "memscale"
    assert check_layers.offences(sources) == []
    assert check_layers.same_names(sources) == []
    assert check_layers.python_offences(package) == []


@pytest.mark.parametrize(("layer", "above"), sorted(_LAYERS))
def test_layers(layer: str, above: str, tmp_path: Path) -> None:
    room = check_layers.ROOMS.get(layer, ("any",))[0]
    _plant(tmp_path, f"{layer}/{room}/a.h", f'#include "memscale/{above}/json/b.h"\n')
    (line,) = check_layers.offences(tmp_path)
    assert f"layer {layer} may not include memscale/{above}" in line


@pytest.mark.parametrize(("layer", "room", "above"), _ROOMS)
def test_rooms(layer: str, room: str, above: str, tmp_path: Path) -> None:
    include = '#include "memscale/{}/{}/b.h"\n'
    _plant(tmp_path, f"{layer}/{room}/a.h", include.format(layer, above))
    _plant(tmp_path, f"{layer}/{above}/b.h", include.format(layer, room))  # down
    (line,) = check_layers.offences(tmp_path)
    assert line == f"{layer}/{room}/a.h: {layer}/{room} may not include {layer}/{above}"


def test_a_folder_that_is_no_room(tmp_path: Path) -> None:
    _plant(tmp_path, "core/attic/a.h", '#include "memscale/core/trace/b.h"\n')
    _plant(tmp_path, "core/a.h", "")
    _plant(tmp_path, "attic/a.h", "")
    found = check_layers.offences(tmp_path)
    assert found == [
        "attic/a.h: attic is no layer",
        "core/a.h: core/a.h is no room of core",
        "core/attic/a.h: core/attic is no room of core",
    ]


def test_paths_that_go_up_and_down(tmp_path: Path) -> None:
    _plant(tmp_path, "core/trace/a.h", '#include "../plan/b.h"\n')
    (line,) = check_layers.offences(tmp_path)
    assert line == "core/trace/a.h: ../plan/b.h must begin with memscale/"


@pytest.mark.parametrize(
    ("room", "above"), list(itertools.pairwise(check_layers.PYTHON_ROOMS))
)
@pytest.mark.parametrize(
    "text",
    [
        "from memscale.{0} import thing\n",
        "import memscale.{0}\n",
        "from memscale import {0}\n",
        "def late():\n    from memscale.{0} import thing\n",
        "if TYPE_CHECKING:\n    from memscale.{0} import thing\n",
    ],
)
def test_python_rooms(room: str, above: str, text: str, tmp_path: Path) -> None:
    if above == "__init__":
        text = "import memscale\n"
    _plant(tmp_path, f"{room}.py", text.format(above))
    _plant(tmp_path, f"{above}.py", "")
    (line,) = check_layers.python_offences(tmp_path)
    assert line.startswith(f"{room}.py: {room} may not import {above}")


def test_python_cycles_and_underscores(tmp_path: Path) -> None:
    _plant(tmp_path, "trace/__init__.py", "")
    _plant(tmp_path, "trace/a.py", "from memscale.trace import b\n")
    _plant(tmp_path, "trace/b.py", "from memscale.trace.a import x\n")
    _plant(tmp_path, "trace/_c.py", "from memscale import _C\n")
    _plant(tmp_path, "attic/a.py", "")
    found = check_layers.python_offences(tmp_path)
    assert [line for line in found if "need each other" in line] == [
        "modules need each other: trace.a -> trace.b -> trace.a"
    ]
    assert [line for line in found if "underscore" in line] == [
        "trace/_c.py: a room is private enough, no underscore"
    ]
    assert "attic/a.py: attic is no room of the package" in found
    assert len(found) == 3


@pytest.mark.parametrize("text", ["from . import b\n", "from ..api import wrap\n"])
def test_relative_imports(text: str, tmp_path: Path) -> None:
    _plant(tmp_path, "trace/a.py", text)
    (line,) = check_layers.python_offences(tmp_path)
    assert line == "trace/a.py: imports must begin with memscale"
