"""Reading the plain part of written answers: numbers, units, lists. Pure functions, no symbolic algebra.

``grading`` decides everything it can with this module, exactly and in microseconds, and asks math-verify for the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 400  # a power of ten beyond this is left to the symbolic grader, which has a time limit

_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "⁄": "/", "∕": "/", "％": "%", "＄": "$", "，": ",", "：": ":", "÷": "/",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "’": "'", "‘": "'", "“": '"', "”": '"', "²": "^{2}", "³": "^{3}",
    "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "°": r"^{\circ}", "½": " 1/2", "⅓": " 1/3",
    "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "⅕": " 1/5", "⅖": " 2/5", "⅗": " 3/5", "⅘": " 4/5", "⅙": " 1/6", "⅛": " 1/8",
})  # fmt: skip

_SIZING = r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits|quad|qquad)(?![A-Za-z])"
_ROW_BREAK_OR_SPACING = re.compile(rf"(?P<row>\\\\)|\\[!,;:> ]|{_SIZING}|~")
_BRACKETED_ARRAY = re.compile(r"[\[(]\s*\\begin\s*\{array\}\s*\{[lcr| ]*\}(.*?)\\end\s*\{array\}\s*[\])]", re.DOTALL)
_DELIMITED = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\*\*(.+)\*\*|`([^`]+)`|\"([^\"]+)\"", re.DOTALL)
_WRAPPING_COMMAND = re.compile(r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|mathit|textrm|mbox)\s*\{")
_AND_OR = r"(?<=[\s}$])(?:and|or)(?=[\s$\\])"
_CONNECTOR = re.compile(rf"\$?\s*(?:,\s*(?:and|or)\b|[,;]|{_AND_OR}|\\text\s*\{{\s*,?\s*(?:and|or)\s*\}})\s*\$?")


def normalize(text: str) -> str:
    """The same answer in one spelling: Unicode signs as LaTeX or ASCII, outer delimiters and sizing commands removed."""
    text = text.translate(_CHARACTERS)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = text.replace("{,}", ",").replace(r"\%", "%").replace(r"\$", "$").replace(r"^\circ", r"^{\circ}").replace(r"\degree", r"^{\circ}")
    text = re.sub(r"\\lbrace(?![A-Za-z])", r"\\{", re.sub(r"\\rbrace(?![A-Za-z])", r"\\}", text))
    text = _ROW_BREAK_OR_SPACING.sub(lambda match: match["row"] or " ", text)
    text = _BRACKETED_ARRAY.sub(lambda match: rf"\begin{{bmatrix}}{match[1]}\end{{bmatrix}}", text)
    text = re.sub(r"(?<!\$)\$\s+\$(?!\$)", " ", text).strip()
    for _ in range(6):
        before = text
        text = _unwrap(text.strip() if text.endswith("\\") else text.strip().rstrip(".;,").rstrip())
        if text == before:
            break
    return re.sub(r"\s+", " ", text).strip()


def _unwrap(text: str) -> str:
    """Without one pair of delimiters or one ``\\boxed{}``, ``\\text{}``, ... that holds the whole text."""
    match = _DELIMITED.fullmatch(text)
    if match:
        return next(group for group in match.groups() if group is not None)
    command = _WRAPPING_COMMAND.match(text)
    return text[command.end() : -1] if command and _closing_brace(text, command.end()) == len(text) - 1 else text


def _closing_brace(text: str, start: int) -> int:
    """Position of the brace that closes the one before ``start``; -1 if none does. Escaped braces are not counted."""
    depth = 1
    for match in re.compile(r"\\[{}\\]|[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1


def squeeze(text: str) -> str:
    """Without spaces, except between two digits: ``1 1/2`` is not ``11/2``."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def well_formed(text: str, depth: int = 40) -> bool:
    """Whether brackets close (``[0, 1)`` does) and nest no deeper than ``depth``: what does not is no mathematics."""
    open_now = 0
    for character in text:
        open_now += (character in "([{") - (character in ")]}")
        if not 0 <= open_now <= depth:
            return False
    return open_now == 0


def value_of_statement(text: str) -> str:
    """``3`` for ``\\log_6(216) = 3``: the right side of an equation that defines no variable; else the text unchanged."""
    left, _, right = text.rpartition("=")
    if not left or not right.strip() or re.search(r"[<>!:]\s*$|\\(?:le|ge|ne)q?(?![a-z])|,|;", left) or re.search("[<>]", right):
        return text
    computes = re.match(r"\\(?:lim|int|sum|prod)(?![a-z])", left)
    names = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+|(?<![A-Za-z])[ei](?![A-Za-z])", "", _ENVIRONMENT.sub("", left)))
    return right.strip() if computes or (not names and not re.search(r"\\(?:alpha|beta|theta|lambda|mu|phi|sigma)", left)) else text


# --- units -----------------------------------------------------------------------------------------------------------

_UNIT_TABLE = {  # kind -> "unit size" in the kind's base unit; a plural loses its s first ("inches" -> "inche")
    "length": "mm 1/1000, millimeter 1/1000, cm 1/100, centimeter 1/100, m 1, meter 1, km 1000, kilometer 1000, in 254/10000, "
    "inch 254/10000, inche 254/10000, ft 3048/10000, foot 3048/10000, feet 3048/10000, yard 9144/10000, mile 1609344/1000",
    "mass": "mg 1/1000, milligram 1/1000, g 1, gram 1, kg 1000, kilogram 1000",
    "time": "s 1, sec 1, second 1, min 60, minute 60, h 3600, hr 3600, hour 3600, day 86400, week 604800",
    "volume": "ml 1/1000, milliliter 1/1000, l 1, liter 1",
    "money": "cent 1/100, ¢ 1/100, $ 1, dollar 1, usd 1",
    "angle": r"degree 1, deg 1, ^{\circ} 1",
    "before noon": "am 1, a.m 1",
    "after noon": "pm 1, p.m 1",
}
_UNITS = {name: (kind, Fraction(size)) for kind, units in _UNIT_TABLE.items() for name, size in (unit.split() for unit in units.split(","))}
_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_CURRENCY = "$€£¥₹"


def known_unit(unit: str) -> tuple[str, Fraction] | None:
    """What a unit measures and its size in that kind's base unit; ``None`` for units outside the small table."""
    name = unit.casefold().strip().rstrip(".").replace("metre", "meter").replace("litre", "liter")
    return _UNITS.get(name) or (_UNITS.get(name[:-1]) if name.endswith("s") and len(name) > 2 else None)


# --- plain quantities --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact number as written. ``rounded``: it has a decimal point, so it may stand for a nearby number."""

    value: Fraction
    rounded: bool = False
    percent: bool = False
    unit: str | None = None


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:,\d{2})+,\d{3}|\d{1,3}(?:[ ]\d{3})+|\d+)"
_NUMBER = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_POWER = r"\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<exp2>[+-]?\d+)\s*\}?"
_QUANTITY = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?P<currency>[{_CURRENCY}]?)\s*(?P<sign2>[+-]?)\s*
    (?: (?P<whole>{_DIGITS}) (?:\s+and\s+|\s+|(?=\\frac))
            (?: \\frac\s*\{{\s*(?P<mn>\d+)\s*\}}\s*\{{\s*(?P<md>\d+)\s*\}} | (?P<mn2>\d+)\s*/\s*(?P<md2>\d+) )
      | \\frac\s*\{{\s*(?P<fsign>[+-]?)\s*(?P<fn>{_NUMBER})\s*\}}\s*\{{\s*(?P<fdsign>[+-]?)\s*(?P<fd>{_NUMBER})\s*\}}
      | \\frac\s*(?P<fn1>\d)\s*(?P<fd1>\d)
      | (?P<n>{_NUMBER}) \s*/\s* (?P<d>{_NUMBER})
      | (?P<mantissa>{_NUMBER}) (?: [eE](?P<exp>[+-]?\d+) | {_POWER} )?
    )
    (?P<tail>.*)""",
    re.VERBOSE | re.DOTALL,
)
_TEXT_TAIL = re.compile(
    r"\s*(?:\\(?:text|mathrm|textrm|mbox|rm)\s*\{(?P<latex>[^{}]*)\}|\((?P<paren>[^()]*)\)|(?P<bare>.*?))"
    r"\s*(?:\^\s*\{?(?P<power>[23])\}?)?\s*",
    re.DOTALL,
)
_NO_UNIT = re.compile(
    r"(?:and|or|to|of|plus|minus|times(?=\s)|over|mod|by|if|for|when|where|at|in(?=\s))\b|.*\d", re.IGNORECASE | re.DOTALL
)
_BARE_UNIT = re.compile(r"(?:[A-Za-z][A-Za-z.'-]*)(?:\s*[ /-]\s*[A-Za-z.'-]+)*")
_PERCENT = re.compile(r"%|percent(?:age)?(?: points?)?|pct\.?|\\text\s*\{\s*(?:%|percent)\s*\}", re.IGNORECASE)


def _decimal(text: str) -> tuple[Fraction, bool]:
    digits = text.replace(",", "").replace(" ", "")
    return Fraction(digits if digits[0] != "." else "0" + digits), "." in digits


def _number(match: re.Match[str]) -> tuple[Fraction, bool] | None:
    """The number before its tail, with ``rounded``; ``None`` for a zero denominator or an absurd exponent."""
    group = match.groupdict()
    if group["whole"] is not None:
        numerator, denominator = Fraction(group["mn"] or group["mn2"]), Fraction(group["md"] or group["md2"])
        return (_decimal(group["whole"])[0] + numerator / denominator, False) if denominator else None
    for top, bottom in (("fn", "fd"), ("fn1", "fd1"), ("n", "d")):
        if group[top] is not None:
            numerator, top_rounded = _decimal(group[top])
            denominator, bottom_rounded = _decimal(group[bottom])
            sign = -1 if top == "fn" and (group["fsign"] == "-") != (group["fdsign"] == "-") else 1
            return (sign * numerator / denominator, top_rounded or bottom_rounded) if denominator else None
    value, rounded = _decimal(group["mantissa"])
    exponent = int((group["exp"] or group["exp2"] or "0")[:6])
    return None if abs(exponent) > MAX_EXPONENT else (value * Fraction(10) ** exponent, rounded)


def _is_bare_unit(words: str, spaced: bool) -> bool:
    """Whether unquoted text after a number is a unit: words after a space, or anything in the table. ``5x``, ``5 x`` are algebra."""
    return bool(_BARE_UNIT.fullmatch(words)) and (known_unit(words) is not None or (spaced and len(words) > 1))


def _read_tail(tail: str) -> tuple[Fraction, bool, str | None] | None:
    """(multiplier, percent, unit) of what follows a number; ``None`` if it is not a unit, so the whole is no plain quantity."""
    stripped = tail.strip()
    if not stripped:
        return Fraction(1), False, None
    if _PERCENT.fullmatch(stripped):
        return Fraction(1), True, None
    if stripped in (r"^{\circ}", "¢") or (len(stripped) == 1 and stripped in _CURRENCY):
        return Fraction(1), False, stripped
    match = _TEXT_TAIL.fullmatch(tail)
    if match is None:
        return None
    quoted = match["latex"] if match["latex"] is not None else match["paren"]
    words = (quoted if quoted is not None else match["bare"]).strip()
    if quoted is None and not _is_bare_unit(words, spaced=tail[0].isspace()):
        return None
    first, _, rest = words.partition(" ")
    magnitude = _MAGNITUDES.get(first.casefold().rstrip("s"))
    if magnitude is not None:
        return Fraction(magnitude), False, rest.strip() or None
    if _NO_UNIT.match(words):
        return None
    return Fraction(1), False, (words + (f"^{match['power']}" if match["power"] else "")) or None


def parse_quantity(text: str) -> Quantity | None:
    """The number that a normalized answer consists of, with an optional unit, percent or currency sign; else ``None``.

    Understood: signs, thousands separators (comma, space, Indian grouping), decimals, ``a/b`` and ``\\frac``, mixed numbers,
    powers of ten, ``3 million``, units in words, in ``\\text{}`` or in parentheses. ``5x`` and ``2ab`` are algebra, not units.
    """
    inner = re.fullmatch(r"\(\s*([+-]?\s*[\d./]*\d)\s*\)", text)
    match = _QUANTITY.fullmatch(inner[1] if inner else text)
    if match is None or (match["sign"] and match["sign2"]):
        return None
    number, tail = _number(match), _read_tail(match["tail"])
    if number is None or tail is None:
        return None
    (value, rounded), (multiplier, percent, unit) = number, tail
    negative = "-" in (match["sign"] + match["sign2"])
    return Quantity(-value * multiplier if negative else value * multiplier, rounded, percent, match["currency"] or unit)


def _close(left: Fraction, right: Fraction, rounded: bool) -> bool:
    """Exact, or for decimals equal to six places (never more than 0.05 % of ``right``, never less than one part in 1e13)."""
    if not rounded:
        return left == right
    size = abs(right)
    tolerance = max(min(Fraction(5, 10**7), size * Fraction(5, 10**4)), size * Fraction(1, 10**13)) if size else Fraction(1, 10**9)
    return abs(left - right) <= tolerance


def quantities_equal(answer: Quantity, gold: Quantity) -> bool:
    """Whether two plain quantities are the same. Units are ignored unless both are in the table: then they are converted.

    A percent sign on one side only: ``p %`` equals ``p / 100``; it also equals ``p`` where that cannot be a proportion
    (a whole number or above 1), since questions ask "what percent" and golds leave the sign out.
    """
    rounded = answer.rounded or gold.rounded
    left, right = answer.value, gold.value
    if answer.percent != gold.percent:
        bare = right if answer.percent else left
        hundredth = _close(left / 100, right, rounded) if answer.percent else _close(left, right / 100, rounded)
        return hundredth or ((bare.denominator == 1 or abs(bare) > 1) and _close(left, right, rounded))
    units = (known_unit(answer.unit or ""), known_unit(gold.unit or ""))
    if units[0] is not None and units[1] is not None:
        if units[0][0] != units[1][0]:
            return False
        left, right = left * units[0][1], right * units[1][1]
    return _close(left, right, rounded)


# --- collections and words -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collection:
    """Comma-separated parts: ``opening`` and ``closing`` are brackets, or empty for a bare list; ``{`` means a set."""

    opening: str
    closing: str
    parts: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        return self.opening in ("(", "[")


def _split_commas(text: str) -> list[str] | None:
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character in ",;" and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]] if depth == 0 else None


def parse_collection(text: str) -> Collection | None:
    """Split ``(a, b)``, ``[a, b)``, ``{a, b}`` or ``a, b`` at its top-level commas; ``None`` if it is a single thing."""
    body, opening, closing = text, "", ""
    match = re.fullmatch(r"(\(|\[|\\\{|\{)(.*?)(\\\}|\)|\]|\})", text, re.DOTALL)
    if match and (match[1][-1] == "{") == (match[3][-1] == "}") and _split_commas(match[2]) is not None:
        opening, body, closing = match[1][-1], match[2], match[3][-1]
    elif not match:
        body = _CONNECTOR.sub(",", text)
    parts = [part.strip().strip("$").strip() for part in _split_commas(body) or []]
    if not opening:
        parts = [expanded for part in parts for expanded in _plus_minus(part)]
    if (len(parts) < 2 and opening != "{") or any(not part for part in parts) or len(parts) > 50:
        return None
    return Collection(opening, closing, tuple(parts))


def _plus_minus(part: str) -> list[str]:
    return [part.replace(r"\pm", "+"), part.replace(r"\pm", "-")] if part.count(r"\pm") == 1 and r"\mp" not in part else [part]


_TEXT_COMMAND = r"\\(?:text|mathrm|textbf|mbox|textrm)(?![A-Za-z])\s*"
_COMMAND = re.compile(rf"{_TEXT_COMMAND}|\\[A-Za-z]+")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}(?:\s*\{[lcr| ]+\})?|\\operatorname\*?\s*\{\w+\}")
_FUNCTIONS = frozenset({"sqrt", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "frac", "cdot", "times", "binom", "infty"})
_SHORT_WORDS = frozenset({"yes", "no", "true", "false", "none", "even", "odd", "all", "zero", "one", "two", "six", "ten", "am", "pm"})


def is_words(text: str) -> bool:
    """Whether an answer is language rather than mathematics, so that letters must not be read as a product of variables."""
    text = _CONNECTOR.sub(",", _ENVIRONMENT.sub(" ", text))
    if re.fullmatch(r"\d{1,2}:[0-5]\d.*", text) or re.search(r"\d_\{?\d", text) or "$" in text.strip("$"):
        return True
    runs = re.findall(r"[A-Za-z]+", _COMMAND.sub(" ", text))
    return any((len(run) > 3 and run not in _FUNCTIONS) or run.casefold() in _SHORT_WORDS for run in runs)


def words_key(text: str) -> str:
    """Text reduced to what two spellings of the same words share: case, spacing, quotes and full stops do not count."""
    plain = re.sub(_TEXT_COMMAND, "", text)
    plain = re.sub(r"[;!?'\"$*`{}~]+|[.,](?!\s*\d)|\\(?![a-zA-Z])", "", plain)
    return squeeze(plain).casefold()
