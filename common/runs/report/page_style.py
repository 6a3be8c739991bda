"""The style sheet of the page: light and dark, wide and narrow. PURE."""

STYLE = """
:root { --paper:#fbfbfa; --card:#fff; --ink:#1d2125; --quiet:#68707a; --edge:#e2e4e7; --grid:#eceef0;
  --c0:#2463c5; --c1:#d2600f; --c2:#11835a; --c3:#8e44ad; --c4:#b58612; --c5:#c0304d;
  --new:#d8f3dd; --new-ink:#0c5a26; --gone:#fbe1e1; --gone-ink:#98292c; --warn:#fff5de; --warn-edge:#e6b94c; }
@media (prefers-color-scheme: dark) { :root { --paper:#14171a; --card:#1c2024; --ink:#e5e8eb; --quiet:#98a1ab;
  --edge:#30363c; --grid:#292e34; --c0:#6ea4f7; --c1:#f59a52; --c2:#4dc596; --c3:#c690e0; --c4:#e0b84e;
  --c5:#f0788f; --new:#153d24; --new-ink:#a3e6b6; --gone:#47201f; --gone-ink:#f0a9a7; --warn:#332a14;
  --warn-edge:#8a6d22; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width:1180px; margin:0 auto; padding:20px 20px 60px; }
h2 { font-size:1.15rem; margin:0 0 .6rem; }
h3 { font-size:1rem; margin:1.1rem 0 .4rem; }
section { margin-top:2.2rem; }
p { margin:.4rem 0; }
code { font:.86em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap:anywhere; }
.quiet, .meaning { color:var(--quiet); }
.bad { color:var(--c5); font-weight:600; }
.heads { display:grid; gap:14px; grid-template-columns:repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.head { background:var(--card); border:1px solid var(--edge); border-radius:10px; padding:16px 18px; }
.head h2 { margin:0; font-size:1.3rem; overflow-wrap:anywhere; }
.head p { color:var(--quiet); margin:.1rem 0 .8rem; }
.tiles { display:flex; flex-wrap:wrap; gap:10px 28px; }
.tile { display:flex; flex-direction:column; }
.tile b { font-size:1.45rem; line-height:1.25; font-variant-numeric:tabular-nums; }
.tile .meaning, .tile .quiet { font-size:.8rem; }
.signs { list-style:none; margin:0; padding:0; display:grid; gap:10px; }
.signs li { background:var(--warn); border-left:4px solid var(--warn-edge); border-radius:6px;
  padding:8px 14px; }
.signs .quiet { font-size:.85rem; }
.panels { display:grid; gap:14px; grid-template-columns:repeat(auto-fill, minmax(min(100%, 310px), 1fr)); }
.panel { margin:0; background:var(--card); border:1px solid var(--edge); border-radius:10px;
  padding:10px 12px 6px; }
.panel svg { display:block; width:100%; height:auto; }
figcaption { display:grid; grid-template-columns:1fr auto; column-gap:8px; }
figcaption .title { font-weight:600; font-size:.9rem; overflow-wrap:anywhere; }
figcaption .values { font-size:.9rem; font-variant-numeric:tabular-nums; text-align:right; }
figcaption .meaning { grid-column:1/-1; font-size:.78rem; min-height:1.2em; }
svg text { font:10.5px system-ui, sans-serif; fill:var(--quiet); }
.grid { stroke:var(--grid); fill:none; } .axis { stroke:var(--quiet); stroke-opacity:.55; fill:none; }
.line { fill:none; stroke-width:1.7; stroke-linejoin:round; stroke-linecap:round; }
.faint { opacity:.28; stroke-width:1; }
.hover { fill:transparent; } .hover:hover { fill:var(--quiet); fill-opacity:.35; }
path.c0 { stroke:var(--c0); } path.c1 { stroke:var(--c1); } path.c2 { stroke:var(--c2); }
path.c3 { stroke:var(--c3); } path.c4 { stroke:var(--c4); } path.c5 { stroke:var(--c5); }
.dot.c0, .end.c0, .bar.c0 { fill:var(--c0); } .dot.c1, .end.c1, .bar.c1 { fill:var(--c1); }
.dot.c2, .end.c2, .bar.c2 { fill:var(--c2); } .dot.c3, .end.c3, .bar.c3 { fill:var(--c3); }
.dot.c4, .end.c4, .bar.c4 { fill:var(--c4); } .dot.c5, .end.c5, .bar.c5 { fill:var(--c5); }
.end { stroke:var(--card); stroke-width:1.5; }
.t0 { --key:var(--c0); } .t1 { --key:var(--c1); } .t2 { --key:var(--c2); }
.t3 { --key:var(--c3); } .t4 { --key:var(--c4); } .t5 { --key:var(--c5); }
.values b, .when .t0, .when .t1, .when .t2, .when .t3, .when .t4, .when .t5 { color:var(--key); }
.key::before { content:""; display:inline-block; width:.68em; height:.68em; border-radius:50%;
  margin-right:.45em; background:var(--key); }
.legend { display:flex; flex-wrap:wrap; gap:4px 20px; margin:.5rem 0 .8rem; font-size:.9rem; }
.shares { display:block; width:100%; height:22px; border-radius:6px; margin-top:.4rem; }
.scroll { overflow-x:auto; margin:.5rem 0; }
table { border-collapse:collapse; font-size:.88rem; }
th, td { text-align:left; vertical-align:top; padding:4px 16px 4px 0; border-bottom:1px solid var(--edge); }
th { font-weight:500; } tr:first-child th { color:var(--quiet); font-size:.82rem; }
td code { overflow-wrap:anywhere; }
.numbers td { font-variant-numeric:tabular-nums; }
details { margin:.7rem 0; } summary { cursor:pointer; color:var(--quiet); }
details > .panels { margin-top:.7rem; }
.card { background:var(--card); border:1px solid var(--edge); border-radius:10px; padding:10px 14px; }
.card summary { color:var(--ink); }
.prompt { font-weight:600; overflow-wrap:anywhere; }
.answers { margin-top:.4rem; }
.answer { display:grid; grid-template-columns:104px 1fr; gap:14px; padding:7px 0;
  border-top:1px solid var(--edge); }
.when { color:var(--quiet); font-size:.82rem; overflow-wrap:anywhere; display:flex; flex-direction:column; }
.text { white-space:pre-wrap; overflow-wrap:anywhere; min-width:0; }
ins { background:var(--new); color:var(--new-ink); text-decoration:none; border-radius:3px; }
del { background:var(--gone); color:var(--gone-ink); border-radius:3px; }
@media (max-width:560px) { main { padding:12px 12px 40px; } .answer { grid-template-columns:1fr; gap:2px; }
  .when { flex-direction:row; gap:12px; } th, td { padding-right:10px; } }
"""
