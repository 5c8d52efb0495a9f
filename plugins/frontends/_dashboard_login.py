"""The page that asks for an API key. Plain HTML: it loads nothing and runs nothing."""

from __future__ import annotations

from html import escape

LOGIN_POLICY = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}

STYLE = """
:root { color-scheme: light dark }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; font: 15px/1.5 system-ui, sans-serif;
       background: light-dark(#f4f6fb, #0b1020); color: light-dark(#172033, #e6ebf5) }
form { width: min(22rem, 86vw); padding: 2rem; border-radius: 14px; background: light-dark(#fff, #131a2e);
       box-shadow: 0 12px 40px rgb(0 0 0 / .18) }
h1 { margin: 0 0 .25rem; font-size: 1.25rem } p { margin: 0 0 1.25rem; opacity: .75 }
.wrong { color: #ef4444; opacity: 1; font-weight: 600 }
input, button { box-sizing: border-box; width: 100%; font: inherit; padding: .65rem .8rem; border-radius: 8px }
input { border: 1px solid light-dark(#cbd3e1, #33405f); background: transparent; color: inherit }
button { margin-top: .8rem; border: 0; background: #6366f1; color: #fff; font-weight: 600; cursor: pointer }
"""


def login_page(action: str, words: str) -> str:
    """The form, which posts to ``action``. ``words``: what was wrong; may be empty."""
    wrong = f'<p class="wrong" role="alert">{escape(words)}</p>' if words else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sixhooks dashboard</title><style>{STYLE}</style></head>
<body><form method="post" action="{escape(action, quote=True)}">
<h1>Sixhooks</h1><p>The dashboard wants one of this server's API keys.</p>{wrong}
<input type="password" name="key" placeholder="API key" aria-label="API key" autocomplete="current-password" autofocus
 required>
<button type="submit">Log in</button></form></body></html>"""
