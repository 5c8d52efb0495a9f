"""How the dashboard looks: one sheet, light and dark."""

from __future__ import annotations

CSS = """
body { --ground:#f3f5fa; --card:#ffffff; --ink:#172033; --soft:#5c6880; --line:#e1e6f0; --accent:#6366f1;
  --good:#10b981; --warn:#f59e0b; --bad:#ef4444; --chip:#eef1f8 }
body.body--dark { --ground:#0a0f1d; --card:#121a2d; --ink:#e8edf7; --soft:#8d9ab4; --line:#212c45; --chip:#1b2540 }
body, body.body--dark { background:var(--ground)!important; color:var(--ink);
  font-family:Inter,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif; font-variant-numeric:tabular-nums }
.nicegui-content { padding:0; display:block; width:100% }
.dash { display:grid; gap:12px; padding:14px; grid-template-columns:repeat(12,minmax(0,1fr)); max-width:2200px;
  margin:0 auto }
.card { background:var(--card); border:1px solid var(--line); border-radius:14px; padding:12px 14px; min-width:0;
  display:flex; flex-direction:column; gap:6px; grid-column:span 12 }
.card h2 { margin:0; font-size:13px; line-height:1.3; font-weight:650; letter-spacing:.01em; display:flex; gap:8px;
  align-items:baseline; flex-wrap:wrap }
.card h2 small { font-weight:400; color:var(--soft); font-size:12px }
.chart { width:100%; height:100%; min-height:0 }
.top { grid-column:span 12; display:flex; align-items:center; gap:8px 12px; flex-wrap:wrap }
.brand { display:flex; align-items:center; gap:10px; font-size:17px; font-weight:700; letter-spacing:-.01em }
.brand i { width:26px; height:26px; border-radius:8px; background:var(--accent); display:flex; align-items:flex-end;
  justify-content:center; gap:2px; padding:6px 5px }
.brand i b { width:4px; background:#fff; border-radius:1px }
.brand span { font-weight:450; color:var(--soft) }
.chips { display:flex; gap:6px; flex-wrap:wrap; flex:1 }
.chip { background:var(--chip); border-radius:999px; padding:3px 10px; font-size:12px; white-space:nowrap }
.chip em { font-style:normal; color:var(--soft); margin-right:5px }
.state { border-radius:999px; padding:3px 11px; font-size:12px; font-weight:650; color:#fff; background:var(--good) }
.state.warn { background:var(--warn) } .state.bad { background:var(--bad) }
.icon { border:1px solid var(--line); background:var(--card); color:var(--ink); border-radius:9px; height:30px;
  padding:0 11px; font-size:12px; cursor:pointer; font-family:inherit }
.icon:hover { border-color:var(--accent) } .top form { margin:0 }
.cause { grid-column:span 12; background:color-mix(in srgb,var(--bad) 14%,var(--card)); border:1px solid var(--bad);
  border-radius:12px; padding:8px 14px; font-size:13px } .cause:empty { display:none }
.tiles { grid-column:span 12; display:grid; gap:12px; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)) }
.tile { background:var(--card); border:1px solid var(--line); border-radius:14px; padding:8px 14px 22px;
  position:relative; overflow:hidden; min-height:82px }
.tile p { margin:0; font-size:12px; color:var(--soft) }
.tile strong { font-size:23px; line-height:1.25; font-weight:680; letter-spacing:-.02em }
.tile strong small { font-size:12px; font-weight:450; color:var(--soft); letter-spacing:0; margin-left:4px }
.tile svg { position:absolute; inset:auto 0 0 0; width:100%; height:22px; opacity:.75 }
.tile div { position:relative; z-index:1 }
.steps { grid-column:span 8 } .queue { grid-column:span 4 } .third { grid-column:span 4 }
.steps .bars { height:158px } .steps .lanes { height:262px } .map { height:226px }
.keys { display:flex; gap:4px 14px; flex-wrap:wrap; font-size:12px; color:var(--soft) }
.keys i { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px; vertical-align:-1px }
table.waits { width:100%; border-collapse:collapse; font-size:12px }
table.waits th { text-align:left; font-weight:450; color:var(--soft); padding:3px 6px 3px 0; position:sticky; top:0;
  background:var(--card) }
table.waits td { padding:3px 6px 3px 0; border-top:1px solid var(--line); white-space:nowrap; overflow:hidden;
  text-overflow:ellipsis; max-width:150px }
table.waits td.n, table.waits th.n { text-align:right }
.scroll { overflow:auto; max-height:372px; flex:1 }
.reasons { display:flex; height:12px; border-radius:6px; overflow:hidden; gap:2px; margin:4px 0 }
.reasons i { min-width:4px } .why { font-weight:600 }
.none { color:var(--soft); font-size:13px; padding:18px 0; text-align:center }
.asked { display:flex; flex-wrap:wrap; gap:6px 26px; font-size:12px; align-items:baseline; color:var(--soft) }
.asked code { color:var(--soft); font-size:12px; margin-right:8px }
.asked .chip { margin:0 4px 0 0; display:inline-block; color:var(--ink) }
.chip.bad { background:var(--bad); color:#fff }
@media (max-width:1180px) { .steps,.queue { grid-column:span 12 } .third { grid-column:span 6 } }
@media (max-width:760px) { .third { grid-column:span 12 } .dash { padding:8px; gap:8px } .tiles { gap:8px;
  grid-template-columns:repeat(2,1fr) } .steps .lanes { height:260px } .brand span { display:none } }
"""
