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


PAGES = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "examples" / "README.md", ROOT / "scripts" / "README.md"]
# names that are no file and no name of ours: a user's own, or another project's
FOREIGN = {
    "NAME_config.py",
    "drafters/NAME.py",
    "models/NAME.py",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
}
FOREIGN |= {"tokenizer.model", "model.safetensors", "/openapi.json", "SET.jsonl", "mask_embedding.pt", "traffic.png"}


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Everything that is written down in the repository, by its path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    listed = listed or [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()]
    kinds = {".py", ".c", ".md", ".json", ".toml", ".svg", ".yml", ".html", ".jsonl", ""}
    return {name: (ROOT / name).read_text() for name in listed if Path(name).suffix in kinds}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_that_pages_speak_of_exist(page: Path, files: dict[str, str]) -> None:
    """`path/file.py` is a file, and of `Class.name` the class is somewhere, with that name in its file."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        for word in re.split(r"[\s,:()=\[\]{}\"'|]+", code):
            if word in FOREIGN or "diary" in page.name:  # what was true on its day
                continue
            if re.fullmatch(r"[\w./-]+\.(py|c|md|json|svg|toml)", word):
                name = word.lstrip("./")
                assert any(path == name or path.endswith(f"/{name}") for path in files), word
            elif re.fullmatch(r"[A-Z]\w*[a-z]\w*\.[a-z_]\w+", word):
                kind, name = word.split(".")
                homes = [text for text in files.values() if f"class {kind}" in text]
                assert any(re.search(rf"\b{name}\b", text) for text in homes), word


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
