"""How the page looks: light, dark and on paper."""

from __future__ import annotations

from torchelastic.ledger.accounts import Account
from torchelastic.ledger.looks import LOOKS

#: A phase has the colour of an account; a phase of that name (detect, re_form) that of its own.
_PHASES = {
    "agree": Account.DATA_WAIT,
    "restart": Account.SAVE_STALL,
    "sync": Account.START_UP,
    "step": Account.PRODUCTIVE,
    "other": Account.IDLE,
}
#: By class.
_LOOKS = {account.label: look for account, look in LOOKS.items()} | {
    name: LOOKS[account] for name, account in _PHASES.items()
}

_LIGHT = """--page: #ffffff; --card: #f6f8fa; --line: #d6dce2; --text: #1c2126; --faint: #5b6670; --good: #1a7f46;
  --bad: #c0302b; --mark: #1c2126; --curve: #2f6fb5; --band: #2f6fb5;"""
_DARK = """--page: #0f1317; --card: #171d23; --line: #323b44; --text: #eef2f5; --faint: #98a4af; --good: #4cc07f;
  --bad: #ff7b72; --mark: #eef2f5; --curve: #6cb0f5; --band: #6cb0f5;"""

_RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 28px 48px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 8px; }
p { margin: 6px 0; } .faint, th { color: var(--faint); } .small { font-size: 13px; }
header .verdict { font-size: 18px; margin: 14px 0 0; max-width: 62em; }
.badge { display: inline-block; margin-left: 10px; padding: 1px 10px; border: 1px solid currentColor;
  border-radius: 99px; font-size: 13px; font-weight: 600; vertical-align: 4px; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.lacks { margin: 16px 0; padding: 8px 16px; border-left: 4px solid var(--bad); background: var(--card); }
.lacks ul { margin: 0; padding-left: 18px; }
.cards { display: grid; grid-template-columns: repeat(5, 1fr); gap: 12px; margin-top: 20px; }
@media (max-width: 900px) { .cards { grid-template-columns: repeat(2, 1fr); } }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.card .name { font-size: 13px; font-weight: 600; color: var(--faint); }
.card .value { font-size: 29px; font-weight: 650; line-height: 1.25; letter-spacing: -0.5px; }
.card .says { font-size: 12.5px; line-height: 1.35; color: var(--faint); }
.card summary, .card details p { font-size: 12px; color: var(--faint); } .card details { margin-top: 6px; }
summary { cursor: pointer; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0; padding: 0; list-style: none; font-size: 13px; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--text); } svg .faint { fill: var(--faint); } svg .grid { stroke: var(--line); }
svg .edge { stroke: var(--line); fill: none; } svg .track { fill: var(--line); opacity: 0.35; }
svg .failure { stroke: var(--bad); stroke-width: 1.3; } svg .many { opacity: 0.45; stroke-width: 1; }
svg .flag { fill: var(--bad); }
svg .flagged { fill: #ffffff; font-size: 10.5px; font-weight: 700; }
svg .mark { fill: var(--mark); stroke: var(--page); stroke-width: 0.8; }
svg .lost { stroke: var(--bad); stroke-width: 2.4; }
svg .save { stroke: var(--curve); stroke-width: 1.2; } svg .outage { fill: var(--bad); opacity: 0.16; }
svg .line { fill: none; stroke: var(--curve); stroke-width: 1.8; stroke-linejoin: round; }
svg .band { fill: var(--band); opacity: 0.18; } svg .bound { stroke: var(--mark); stroke-width: 2; }
.scroll { overflow: auto; max-height: 640px; border: 1px solid var(--line); border-radius: 8px; }
.whole { max-height: none; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { padding: 5px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; } thead th { background: var(--card); position: sticky; top: 0; font-weight: 600; }
th:first-child, td:first-child, .left { text-align: left; } td.wrap { white-space: normal; min-width: 20em;
  overflow-wrap: anywhere; text-align: left; }
tr.sum td { font-weight: 650; background: var(--card); }
.ledger th, .ledger td { padding: 5px 7px; font-size: 12.5px; }
td.phases { width: 30%; min-width: 240px; } td .none { color: var(--faint); opacity: 0.6; }
footer { margin-top: 40px; padding-top: 10px; border-top: 1px solid var(--line); color: var(--faint);
  font-size: 12.5px; }
code { font: 0.94em ui-monospace, SFMono-Regular, Menlo, monospace; }
@media print {
  body { max-width: none; padding: 0; font-size: 11px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .scroll { overflow: visible; max-height: none; border: 0; } thead th { position: static; }
  section, .card, tr, svg { break-inside: avoid; } section.long { break-inside: auto; } h2 { break-after: avoid; }
  table { font-size: 8.5px; } th, td { padding: 2px 4px; }
}
"""

#: Whatever is folded is shown on paper.
SCRIPT = 'addEventListener("beforeprint",()=>{for(const one of document.querySelectorAll("details"))one.open=true})'


def style() -> str:
    """The style sheet."""
    light = "".join(f" --{name}: {look.light};" for name, look in _LOOKS.items())
    dark = "".join(f" --{name}: {look.dark};" for name, look in _LOOKS.items())
    classes = "".join(f".{name} {{ fill: var(--{name}); background: var(--{name}); }}\n" for name in _LOOKS)
    return (
        f":root {{ color-scheme: light dark; {_LIGHT}{light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK}{dark} }} }}\n"
        f"{classes}{_RULES}"
    )
