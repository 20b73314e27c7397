"""Functions of the user's own: found in their files without running them, then imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.system.own_code import OwnFunction, import_modules, parameters_of


def written(folder: Path, text: str, name: str = "f") -> OwnFunction:
    (folder / "mine.py").write_text(text)
    function = OwnFunction.named(f"{folder}/mine.py:{name}")
    assert function is not None
    return function


def test_parameters_are_read_without_running_the_file(tmp_path: Path) -> None:
    text = "raise SystemExit\n\ndef f(a, b=1, /, c=2, *rest, d, e=None, **more): pass\n"
    parameters = written(tmp_path, text).parameters()
    assert parameters.names == ("a", "b", "c", "d", "e")
    assert parameters.optional == {"b", "c", "e"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def g(): pass\nclass C:\n    def f(self): pass\n", "the file defines no such function; it has g"),
        ("async def f(): pass\n", "is an async function"),
        ("def f(:\n", "is not Python: .* \\(line 1\\)"),
        ("x = '\0'\n", "is not Python"),
    ],
)
def test_what_has_no_parameters(tmp_path: Path, text: str, why: str) -> None:
    function = written(tmp_path, text)
    with pytest.raises(ValueError, match=why):
        function.parameters()
    assert parameters_of(f"{tmp_path}/mine.py:f").names == ()


def test_a_file_is_imported_once_and_its_error_has_a_line(tmp_path: Path) -> None:
    function = written(tmp_path, "made = []\n\ndef f(): return made\n")
    assert function.load()() is function.load()()
    broken = OwnFunction(tmp_path / "broken.py", "f")
    broken.path.write_text("x = 1\ny = {}[x]\n")
    with pytest.raises(ConfigError, match=r"broken.py: cannot be imported: KeyError: 1 \(line 2: y = "):
        broken.load()


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_of_mine.py").write_text("")
    import_modules(None, "model.external_lib")
    import_modules("one_of_mine", "model.external_lib")
    assert sys.modules.pop("one_of_mine")
    with pytest.raises(ConfigError, match="model.external_lib=none_of_mine: cannot be imported: ModuleNot"):
        import_modules(["one_of_mine", "none_of_mine"], "model.external_lib")
    assert sys.modules.pop("one_of_mine")
