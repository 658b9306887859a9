"""Translates the equations in docstrings into TeX, for the pages of the site.

Docstrings write equations in plain text, because `help` shows them: `mean over anchors of  log(1 + Σ_{N_i} e^{s_ij})`.
Runs of words become text, Greek letters and operators their TeX names, `( a / b )` with spaces around the slash a
fraction, and two spaces a gap.
"""

from __future__ import annotations

import re

GREEK = (
    "α alpha β beta γ gamma δ delta ε varepsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu ν nu ξ xi π pi ρ rho "
    "σ sigma τ tau φ varphi χ chi ψ psi ω omega"
)
NAMES = dict(re.findall(r"(\S) (\w+)", GREEK))
SIGNS = {
    "ᵢ": "_{i}", "∝": r"\propto ",
    "Σ": r"\sum ", "·": r"\cdot ", "⟨": r"\langle ", "⟩": r"\rangle ", "≠": r"\neq ", "≥": r"\geq ", "≤": r"\leq ",
    "∈": r"\in ", "∖": r"\setminus ", "½": r"\tfrac{1}{2}", "∞": r"\infty ", "→": r"\to ", "²": "^{2}", "₊": "_{+}",
    "₋": "_{-}", "*": "^{*}", "∇": r"\nabla ", "×": r"\times ", "‖": r"\Vert ", "{": r"\{", "}": r"\}", "%": r"\%",
}  # fmt: skip
FUNCTIONS = ("log", "cos", "max", "min", "tan", "exp", "mean", "softmax", "softplus", "Var", "sigmoid")
KNOWN = ("log", "cos", "max", "min", "tan", "exp")
WORD = r"(?:[A-Za-z]{2,}(?:-[A-Za-z]{2,}|'s)*(?![\w'_(^])|`\w+`)"
TOKEN = re.compile(
    rf"""(?P<gap>[ ]{{2,}})|(?P<over>[ ]/[ ])|(?P<space>[ ])
       |(?P<said>\({WORD}(?:[ ]{WORD})*\))
       |(?P<words>(?:(?:a|A)[ ])?{WORD}(?:[ ](?:a[ ])?{WORD})*)
       |(?P<name>{"|".join(FUNCTIONS)})
       |(?P<place>[_^]\{{)|(?P<short>[_^][A-Za-z0-9]+'?)
       |(?P<open>\(|\[)|(?P<close>\)|\]|\}})
       |(?P<root>√\()|(?P<any>.)""",
    re.VERBOSE,
)


class Reader:
    """Reads one line of an equation from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def group(self, end: str = "") -> list[str]:
        """TeX of what stands before `end`, in parts."""
        parts: list[str] = []
        while found := TOKEN.match(self.text, self.at):
            self.at = found.end()
            if found[0] == end:
                break
            if found["over"]:
                return _fraction(parts, self.group(end), inside=bool(end))
            parts.append(self.part(found))
        return parts

    def part(self, found: re.Match[str]) -> str:
        """TeX of one token, with all that it opens."""
        kind, text = found.lastgroup, found[0]
        if kind == "gap":
            return r"\quad "
        if kind == "said":
            return rf"\ \text{{{text}}}"
        if kind in ("words", "name"):
            return _words(text)
        if kind == "place":
            return f"{text[0]}{{{''.join(self.group('}'))}}}"
        if kind == "short":
            return f"{text[0]}{{{text[1:]}}}"
        if kind == "root":
            return rf"\sqrt{{{''.join(self.group(')'))}}}"
        if kind == "open":
            return self._bracket(text, found.start())
        return " " if kind == "space" else SIGNS.get(text, rf"\{NAMES[text]} " if text in NAMES else text)

    def _bracket(self, text: str, start: int) -> str:
        """A bracket with its content; `(1/α)` is a fraction without brackets."""
        simple = re.match(r"\(([^()/ ]+)/([^()/ ]+)\)", self.text[start:])
        if simple and not self.text[:start].endswith(FUNCTIONS):
            self.at = start + simple.end()
            return rf"\frac{{{tex(simple[1])}}}{{{tex(simple[2])}}}"
        end = ")" if text == "(" else "]"
        return rf"\left{text}{''.join(self.group(end)).strip()}\right{end}"


def _words(text: str) -> str:
    """Names of functions are operators; other words are text, with the spaces around them."""
    if all(word in FUNCTIONS for word in text.split()):
        return "".join(rf"\{word} " if word in KNOWN else rf"\operatorname{{{word}}} " for word in text.split())
    return re.sub(r"`(\w+)`", r"\\texttt{\1}", rf"\text{{ {text} }}")


def _fraction(left: list[str], right: list[str], inside: bool) -> list[str]:
    """A fraction: of all that a bracket holds, else of the parts beside the slash."""
    if inside:
        return [rf"\frac{{{_bare(''.join(left).strip())}}}{{{_bare(''.join(right).strip())}}}"]
    start = max(place for place, part in enumerate(left) if not part.startswith(("_", "^")))
    above = _bare("".join(left[start:]))
    return [*left[:start], rf"\frac{{{above}}}{{{_bare(right[0])}}}", *right[1:]]


def _bare(text: str) -> str:
    """Without the brackets around the whole."""
    inner = text.removeprefix(r"\left(").removesuffix(r"\right)")
    whole = text.startswith(r"\left(") and text.endswith(r"\right)") and inner.count(r"\left") == inner.count(r"\right")
    return inner if whole and _balanced(inner) else text


def _balanced(text: str) -> bool:
    depth = 0
    for found in re.finditer(r"\\(left|right)(?![a-z])", text):
        depth += 1 if found[1] == "left" else -1
        if depth < 0:
            return False
    return depth == 0


def tex(line: str) -> str:
    """TeX of one line."""
    return "".join(Reader(re.sub(r" {2,}(?==)", " ", line.strip())).group()).strip()


def display(lines: list[str]) -> str:
    """TeX of an equation of one or several lines."""
    found = [tex(line) for line in lines]
    return found[0] if len(found) == 1 else r"\begin{gathered}" + r"\\[1ex]".join(found) + r"\end{gathered}"


def equation(docstring: str) -> tuple[str, list[str]] | None:
    """The first indented block of a docstring: as it stands, and its lines."""
    found = re.search(r"(?<=\n\n)(?: {4}\S.*\n)+", docstring + "\n")
    return (found[0], found[0].splitlines()) if found else None
