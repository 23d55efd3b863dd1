"""The page that `musespark routes` writes: one file, no network, nothing but its own script."""

import html
import json
from typing import Any

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.3em}h2{font-size:1.05em;margin-top:2em}canvas{width:100%;image-rendering:pixelated;
border:1px solid #ccc}#tokens span{white-space:pre-wrap;border-radius:3px;padding:1px}
#tokens span:hover,#tokens span:focus{background:#ffd97a;outline:none}
#tokens{background:#f6f6f6;padding:1em;max-height:16em;overflow:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:2px 10px;
text-align:right;border-bottom:1px solid #eee}.left{text-align:left}#routes{min-height:9em}
.note{color:#666}
</style></head><body>
<h1>TITLE</h1><p id="summary"></p>
<h2>Load: one row a layer, one column an expert</h2>
<canvas id="load" role="img" aria-label="Load of every expert in every layer"></canvas>
<p class="note">White: never chosen. Dark: chosen often; black at four times an even share.
<span id="cell"></span></p>
<h2>Tokens: point at one to see where it went</h2>
<div id="tokens"></div><div id="routes" class="note">expert (weight), a line per layer</div>
<h2>Layers</h2><table id="layers"><thead><tr><th>layer</th><th>busiest / even share</th>
<th>entropy of the load</th><th>never chosen</th><th class="left">often together</th></tr></thead>
<tbody></tbody></table>
<script type="application/json" id="data">DATA</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const L = data.layers.length, E = data.num_experts, even = data.num_tokens * data.top_k / E;
document.getElementById("summary").textContent = data.num_tokens + " tokens, " + L +
  " layers of " + E + " experts, " + data.top_k + " a token.";
const canvas = document.getElementById("load");
canvas.width = E; canvas.height = L; canvas.style.height = Math.min(24, 1200 / L) * L + "px";
const paint = canvas.getContext("2d");
data.layers.forEach((layer, row) => layer.load.forEach((count, expert) => {
  const light = Math.round(255 * (1 - Math.min(1, count / even / 4)));
  paint.fillStyle = `rgb(${light},${light},${Math.min(255, light + 40 * (light < 255))})`;
  paint.fillRect(expert, row, 1, 1);
}));
canvas.addEventListener("mousemove", event => {
  const box = canvas.getBoundingClientRect();
  const expert = Math.min(E - 1, Math.floor((event.clientX - box.left) / box.width * E));
  const row = Math.min(L - 1, Math.floor((event.clientY - box.top) / box.height * L));
  const layer = data.layers[row];
  document.getElementById("cell").textContent = `Layer ${layer.layer}, expert ${expert}: ` +
    `${layer.load[expert]} of ${data.num_tokens} tokens.`;
});
const tokens = document.getElementById("tokens"), routes = document.getElementById("routes");
data.tokens.forEach((text, index) => {
  const span = document.createElement("span");
  span.textContent = text; span.tabIndex = 0;
  const show = () => {
    routes.textContent = "";
    const head = document.createElement("b");
    head.textContent = `token ${index}: ${JSON.stringify(text)}`; routes.append(head);
    data.layers.forEach(layer => {
      const line = document.createElement("div");
      line.textContent = `layer ${layer.layer}: ` + layer.ids[index].map(
        (expert, slot) => `${expert} (${layer.weights[index][slot].toFixed(2)})`).join(", ");
      routes.append(line);
    });
  };
  span.addEventListener("mouseenter", show); span.addEventListener("focus", show);
  tokens.append(span);
});
const body = document.querySelector("#layers tbody");
data.layers.forEach(layer => {
  const row = document.createElement("tr");
  [layer.layer, layer.busiest.toFixed(2), layer.entropy.toFixed(3), layer.never,
   layer.pairs.map(([a, b, n]) => `${a}+${b}: ${n}`).join(", ")].forEach((text, column) => {
    const cell = document.createElement("td");
    cell.textContent = text; if (column === 4) cell.className = "left"; row.append(cell);
  });
  body.append(row);
});
</script></body></html>
"""


def routes_page(report: dict[str, Any], title: str) -> str:
    """The whole page; `report` is what `--json` prints."""
    # No "<" in the data, so that no text of a token can end the script element.
    data = json.dumps(report).replace("<", "\\u003c")
    return _PAGE.replace("TITLE", html.escape(title)).replace("DATA", data, 1)
