"""The docs as a site: it builds without a warning, and its plots are those of the data beside them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_results", ROOT / "scripts" / "plot_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds(tmp_path: Path) -> None:
    """With --strict: a page that is in no menu, or a link or an anchor that leads nowhere, is an error."""
    pytest.importorskip("mkdocs", reason="the site is built where the extra docs is installed: pip install '.[docs]'")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {path.stem for path in DOCS.glob("*.md")}
    assert 'src="pictures/round.svg"' in (tmp_path / "site" / "tour.html").read_text()


def test_plots_show_the_data(plots: ModuleType, tmp_path: Path) -> None:
    """python scripts/plot_results.py writes them."""
    for name, draw in plots.PLOTS.items():
        draw(tmp_path / "drawn.svg")
        assert (tmp_path / "drawn.svg").read_text() == (DOCS / "pictures" / f"{name}.svg").read_text(), name


def test_pictures_are_shown_and_pages_are_in_the_menu() -> None:
    """Also where mkdocs is not installed."""
    text = "".join(page.read_text() for page in DOCS.glob("*.md")) + (ROOT / "README.md").read_text()
    for picture in (path for path in DOCS.rglob("*") if path.suffix in {".svg", ".png"}):
        assert f"{picture.relative_to(DOCS).as_posix()})" in text, picture
    menu = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert set(menu) == {page.name for page in DOCS.glob("*.md")}
