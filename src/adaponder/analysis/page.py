"""The HTML page of a report: light and dark, printable, self-contained, with only the script below."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from rich.style import Style

from adaponder.analysis.figures.words import on_one_line
from adaponder.analysis.style import DARK, LIGHT, Theme
from adaponder.terminal import depth_style

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 5rem;
  background: var(--paper); color: var(--ink); }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 3rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.8rem 0 .3rem; }
a { color: var(--link); }
a:focus-visible, button:focus-visible, summary:focus-visible, .scroll:focus-visible, pre:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px; }
p, figcaption { max-width: 46rem; overflow-wrap: anywhere; }
.muted, .remark { color: var(--muted); }
.remark { font-size: .9rem; margin: 1.2rem 0 .3rem; }
header { display: flex; gap: 1rem; align-items: flex-start; justify-content: space-between; }
button { font: inherit; font-size: .85rem; padding: .3rem .8rem; color: var(--ink); background: var(--card);
  border: 1px solid var(--muted); border-radius: .4rem; cursor: pointer; white-space: nowrap; }
.four { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; margin: 1.5rem 0; }
.four div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.four dt { font-size: .85rem; color: var(--muted); }
.four dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.four dd small { display: block; font-size: .78rem; font-weight: 400; color: var(--muted); line-height: 1.35; }
nav ol { columns: 2 16rem; padding-left: 1.4rem; margin: .4rem 0 0; }
figure { margin: 0; }
/* Narrower than this, labels could not be read: the figure is moved sideways instead. */
figure img { width: 100%; min-width: 44rem; height: auto; display: block; }
.sideways { display: none; margin-top: 2rem; }
@media (max-width: 46.4rem) { .sideways { display: block; } }
figcaption { margin-top: .5rem; }
.on-dark { display: none !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child, td.word { text-align: left; }
td.word { overflow-wrap: anywhere; }
.facts th { text-align: left; font-weight: 400; color: var(--muted); white-space: nowrap; }
.facts td { text-align: left; overflow-wrap: anywhere; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); font-size: .9rem; }
pre.words { font: .92rem/1.75 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0; padding: .7rem .9rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; }
pre.words span { padding: .1em 0; unicode-bidi: isolate; -webkit-box-decoration-break: clone;
  box-decoration-break: clone; }
pre.words .target, .legend .target { display: inline-block; padding: 0 .1em; border: 3px solid var(--mark);
  line-height: 1.3; font-weight: 700; margin: 0 2px; }
.legend span { padding: .1rem .5rem; margin-right: .3rem; font-size: .85rem; border-radius: .2rem; }
.d0 { color: var(--ink); }
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  nav, button, .sideways { display: none !important; }
  figure img { min-width: 0; }
  figure, .excerpt, table { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  pre.words span, .legend span { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""

_SWAP = ".on-light { display: none !important; } ROOT .on-dark { display: block !important; }"

_SCRIPT = """
const root = document.documentElement, button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const say = () => { button.textContent = dark() ? "Light page" : "Dark page"; };
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
system.addEventListener("change", say);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
button.hidden = false;
say();
"""


def page(title: str, body: str, *, deepest: int) -> str:
    """Returns the whole document; ``title`` is text and is escaped, ``body`` is HTML."""
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(_SCRIPT)}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{escape(on_one_line(title))}</title>
<style>{_styles(deepest)}</style>
</head>
<body>
{body}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def theme_button() -> str:
    """Returns the button that switches themes; without scripts it is hidden and the page follows the system."""
    return '<button id="theme" type="button" hidden>Dark page</button>'


def both(light: bytes, dark: bytes, alt: str) -> str:
    """Returns a picture in a light and a dark version; the page shows the one of its theme."""
    images = ((light, "on-light"), (dark, "on-dark"))
    return "".join(
        f'<img class="{kind}" alt="{escape(alt)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
        for svg, kind in images
    )


def legend(deepest: int) -> str:
    """Returns the legend of background colours by depth."""
    spans = "".join(f'<span class="d{depth}">{depth}</span>' for depth in range(1, deepest + 1))
    return f'<p class="legend">depth {spans}; <span class="target">the token in question</span></p>'


def _styles(deepest: int) -> str:
    """Returns the style sheet; dark rules apply to screens only, not to print."""
    follows, chosen = ':root:not([data-theme="light"])', ':root[data-theme="dark"]'
    dark = {
        root: f"{root} {{ {_colours(DARK, dark=True)} }} {root} {_SWAP.replace('ROOT', root)}"
        for root in (follows, chosen)
    }
    rules = [
        f":root {{ {_colours(LIGHT, dark=False)} }}",
        _STYLE,
        *(_depth(depth, deepest) for depth in range(1, deepest + 1)),
        f"@media screen and (prefers-color-scheme: dark) {{ {dark[follows]} }}",
        f"@media screen {{ {dark[chosen]} }}",
    ]
    return "\n".join(rules)


def _colours(theme: Theme, *, dark: bool) -> str:
    own = (
        {"card": "#1C2027", "link": "#6CB8F0", "mark": "#FF9D5C"}
        if dark
        else {"card": "#F6F6F4", "link": "#005A9C", "mark": "#C14A00"}
    )
    named = {"paper": theme.paper, "ink": theme.ink, "muted": theme.muted, "line": theme.grid} | own
    scheme = "color-scheme: dark" if dark else "color-scheme: light"
    return "; ".join([scheme, *(f"--{name}: {value}" for name, value in named.items())])


def _depth(depth: int, deepest: int) -> str:
    """Returns the style rule of a depth, in the terminal's colours."""
    style = Style.parse(depth_style(depth, deepest))
    assert style.color is not None  # depth 1 and more have both
    assert style.bgcolor is not None
    ink = "#000" if style.color.name == "black" else "#fff"
    return f".d{depth} {{ background: {style.bgcolor.get_truecolor().hex}; color: {ink}; }}"


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
