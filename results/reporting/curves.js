"use strict";
// Values under the pointer, or under the arrow keys of a focused figure. Each figure carries its numbers as data-told.
for (const figure of document.querySelectorAll("figure[data-told]")) {
  const told = JSON.parse(figure.dataset.told), svg = figure.querySelector("svg");
  const [left, right, top, bottom] = told.box, [low, high] = told.limits;
  const places = [...new Set(told.lines.flatMap((line) => line[2]))].sort((a, b) => a - b);
  const box = document.createElement("output"), rule = document.createElement("div");
  box.className = "told";
  rule.className = "at";
  let now = -1;
  const hide = () => { now = -1; box.remove(); rule.remove(); };
  const show = (index) => {
    now = Math.max(0, Math.min(places.length - 1, index));
    const place = places[now], share = left + ((right - left) * (place - low)) / (high - low);
    const x = svg.offsetLeft || svg.getBoundingClientRect().left - figure.getBoundingClientRect().left - figure.clientLeft;
    const area = svg.getBoundingClientRect(), y = area.top - figure.getBoundingClientRect().top - figure.clientTop;
    const text = (tag, value) => { const made = document.createElement(tag); made.textContent = value; return made; };
    const rows = told.lines.flatMap(([label, colour, steps, values]) => {
      const at = steps.indexOf(place);
      if (at < 0) return [];
      const row = document.createElement("span"), dot = document.createElement("i");
      dot.style.background = colour;
      row.append(dot, label ? `${label} ` : "", text("b", String(values[at])));
      return [row];
    });
    box.replaceChildren(text("span", `step ${place}`), ...rows);
    figure.append(rule, box);
    const across = x + share * area.width;
    Object.assign(rule.style, { left: `${across}px`, top: `${y + top * area.height}px`, height: `${(bottom - top) * area.height}px` });
    const room = figure.clientWidth - box.offsetWidth - 4;
    Object.assign(box.style, { left: `${Math.max(4, Math.min(room, across + 10))}px`, top: `${y + top * area.height}px` });
  };
  const nearest = (event) => {
    const area = svg.getBoundingClientRect(), share = (event.clientX - area.left) / area.width;
    const wanted = low + ((share - left) / (right - left)) * (high - low);
    let best = 0;
    places.forEach((place, index) => { if (Math.abs(place - wanted) < Math.abs(places[best] - wanted)) best = index; });
    show(best);
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  figure.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    show(now < 0 ? (by > 0 ? 0 : places.length - 1) : now + by);
  });
}
