"""What Python packs for the C kernels has the layout of their structures: the same kinds of fields, in order."""

import importlib
import re
import struct
from pathlib import Path

import pytest

from outrider.kernels import native_library

KERNELS = Path(native_library.__file__).parent


def structures() -> dict[str, str]:
    """Of every `typedef struct` whose fields all take eight bytes: its fields as `struct` has them."""
    source = "\n".join(path.read_text() for path in native_library.SOURCES)
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    bodies = {name: body for body, name in re.findall(r"typedef struct \{(.*?)\}\s*(\w+);", source, flags=re.DOTALL)}
    found: dict[str, str] = {}

    def fields(name: str) -> str:
        kinds = ""
        for statement in bodies[name].replace("const ", "").split(";")[:-1]:
            kind, names = statement.split(maxsplit=1)
            for each in names.split(","):
                if "*" in each:
                    kinds += "q"  # an address
                elif kind in bodies:
                    kinds += fields(kind)
                else:
                    kinds += {"long": "q", "int64_t": "q", "double": "d"}.get(kind, "?")
        return kinds

    for name, body in bodies.items():
        if "[" not in body:
            found[name] = fields(name)
    return found


def taken() -> dict[str, str]:
    """The structure that each operation is given."""
    source = "\n".join(path.read_text() for path in native_library.SOURCES)
    return dict(re.findall(r"outrider_(\w+)\(const (\w+) \*", source))


def packed() -> dict[str, str]:
    """Every format with which some module of kernels packs."""
    modules = [importlib.import_module(f"outrider.kernels.{path.stem}") for path in KERNELS.glob("[a-z]*.py")]
    pairs = [(f"{module.__name__}.{name}", each) for module in modules for name, each in vars(module).items()]
    return {name: written_out(each.format) for name, each in pairs if isinstance(each, struct.Struct)}


def written_out(layout: str) -> str:
    assert layout[0] == "@"
    return "".join(int(count or 1) * kind for count, kind in re.findall(r"(\d*)([a-z])", layout))


def test_every_operation_is_given_what_it_takes() -> None:
    assert taken().keys() >= set(native_library._OPERATIONS)
    formats = set(packed().values())
    for operation in native_library._OPERATIONS:
        assert structures()[taken()[operation]] in formats, operation


@pytest.mark.parametrize("name", packed())
def test_every_format_is_that_of_a_structure(name: str) -> None:
    assert packed()[name] in structures().values()
