"""Recognises what lies in a folder of texts but was not written by its owner: licences, and what programs depend on."""

import re
from pathlib import Path

# Folders of package managers, by names that nothing else has.
_PACKAGES = {"node_modules", "bower_components", "jspm_packages", "site-packages", "dist-packages", "__pycache__"}
_PACKAGES_ENDINGS = (".dist-info", ".egg-info")
# Folders that are of a package manager only if one of its files lies beside them.
_VENDORED = {"vendor", "vendored", "third_party", "third-party", "pods", "carthage"}
_MANIFESTS = (
    *("package.json", "composer.json", "go.mod", "gemfile", "cargo.toml", "podfile", "cartfile", "mix.exs"),
    *("pyproject.toml", "setup.py", "cmakelists.txt", "makefile"),
)
_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"

# Names of licence files, whatever is in them, and those that need a look: somebody's note may be on a driving licence.
_LICENCE = re.compile(
    r"(?:(?:UN)?LICEN[CS]E|COPYING|(?:MIT|BSD|GPL|APACHE)-LICEN[CS]E)(?:[-_.][A-Z0-9.]+)?|(?i:code[_-]of[_-]conduct)"
)
_MAY_BE_LICENCE = re.compile(r"(?:.*[-_. ])?(?:licen[cs]es?|copying|notice|code[-_ ]of[-_ ]conduct)(?:[-_. ].*)?", re.I)
_TITLE = re.compile(
    r"""
      (?:the\s+)?(?:mit|x11|isc|zlib|bsd(?:\s+\S+)?|boost\s+software|expat)\s+licen[cs]e\b
    | apache\s+licen[cs]e | mozilla\s+public\s+licen[cs]e | eclipse\s+public\s+licen[cs]e
    | gnu\s+(?:affero\s+|lesser\s+|library\s+)?general\s+public\s+licen[cs]e | gnu\s+free\s+documentation\s+licen[cs]e
    | creative\s+commons | cc0\s+1\.0 | attribution(?:-\w+)*\s+\d\.\d | sil\s+open\s+font\s+licen[cs]e
    | this\s+is\s+free\s+and\s+unencumbered\s+software | contributor\s+covenant | copyright\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_GRANT = re.compile(
    r"""
      permission\s+is\s+hereby\s+granted | redistribution\s+and\s+use\s+in\s+source\s+and\s+binary
    | permission\s+to\s+use,\s+copy,\s+modify | terms\s+and\s+conditions\s+for\s+use,\s+reproduction
    | everyone\s+is\s+permitted\s+to\s+copy | statement\s+of\s+purpose | covered\s+software
    | by\s+exercising\s+the\s+licensed\s+rights | the\s+person\s+who\s+associated\s+a\s+work\s+with\s+this\s+deed
    | released\s+into\s+the\s+public\s+domain | (?:as\s+members,\s+contributors|contributors\s+and\s+maintainers)
    | licensed\s+under\s+the\s+apache\s+licen[cs]e | without\s+warranties\s+or\s+conditions\s+of\s+any\s+kind
    | development\s+of\s+collaborative\s+font\s+projects
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SOMEBODY = re.compile(r"\b(?:I|I'm|I’m|I've|my|My)\b(?![.)])")
# In characters: where the title and the grant of a licence stand.
_BEGINNING, _SEARCHED = 300, 5_000

# Why such a file is left out.
LICENCE = "a licence or a code of conduct; give the file itself to use it"


def reason_against_folder(folder: Path) -> str | None:
    """Returns why a folder within the given one holds nothing of its owner's; None if it may."""
    name = folder.name.lower()
    try:
        is_packages = name in _PACKAGES or name.endswith(_PACKAGES_ENDINGS) or (folder / _VIRTUAL_ENVIRONMENT).exists()
        if not is_packages and name in _VENDORED:
            is_packages = any(file.name.lower() in _MANIFESTS for file in folder.parent.iterdir())
    except OSError:
        return None  # The folder cannot be opened, which its own reader reports.
    return "what a program depends on; give the folder itself to use it" if is_packages else None


def is_licence_name(path: Path) -> bool:
    """Returns whether the name of a file is that of a licence or a code of conduct, as programs have them."""
    return bool(_LICENCE.fullmatch(path.stem if path.suffix else path.name))


def is_licence(name: str, text: str) -> bool:
    """Returns whether a text is a licence or a code of conduct, by its title or its name, and by its words."""
    has_name = _MAY_BE_LICENCE.fullmatch(Path(name).stem)
    if not (has_name or _TITLE.match(text[:_BEGINNING].lstrip("#=*-_ \t\n"))):
        return False
    # Whoever writes about a licence says "I".
    return bool(_GRANT.search(text, 0, _SEARCHED)) and bool(has_name or not _SOMEBODY.search(text, 0, _SEARCHED))
