// A histogram as SVG: shares of the samples per bar, one outline per series.
function histogram(spec) {
  const legend = element("p", { class: "legend" });
  const svg = element("svg", { role: "img", "aria-label": spec.title });
  const card = element("section", { class: "card" }, element("h2", {}, spec.title), legend, svg);
  const high = 176, pad = { left: 46, right: 8, top: 8, bottom: 22 };
  const [low, last] = [spec.edges[0], spec.edges.at(-1)], bars = spec.edges.length - 1;
  const marks = ticks(0, Math.max(...spec.series.flatMap((s) => s.y), 1e-9), 4);
  const top = Math.max(marks.at(-1), ...spec.series.flatMap((s) => s.y));
  let scale = null;
  spec.series.forEach((s, i) => legend.append(
    element("span", {}, Object.assign(element("i"), { style: `background:${color("", i)}` }), s.name)));

  function paint() {
    const width = svg.clientWidth || 320, inner = width - pad.left - pad.right;
    const x = (v) => pad.left + ((v - low) / (last - low)) * inner;
    const y = (v) => pad.top + (1 - v / top) * (high - pad.top - pad.bottom);
    scale = { x, inner };
    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.setAttribute("height", high);
    svg.replaceChildren();
    for (const mark of marks) {
      svg.append(element("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: y(mark), y2: y(mark) }));
      svg.append(element("text", { x: pad.left - 7, y: y(mark) + 4, "text-anchor": "end" }, `${+(mark * 100).toPrecision(4)} %`));
    }
    spec.series.forEach((s, i) => {
      let line = `M${x(low).toFixed(1)},${y(0)}`;
      s.y.forEach((share, j) => {
        line += `L${x(spec.edges[j]).toFixed(1)},${y(share).toFixed(1)}L${x(spec.edges[j + 1]).toFixed(1)},${y(share).toFixed(1)}`;
      });
      line += `L${x(last).toFixed(1)},${y(0)}Z`;
      svg.append(element("path", { d: line, fill: color("", i), "fill-opacity": 0.22, stroke: color("", i), "stroke-width": 1.5, "stroke-linejoin": "round" }));
    });
    for (const v of ticks(low, last, inner / 80)) {
      const end = x(v) > width - pad.right - 14;
      svg.append(element("text", { x: x(v), y: high - 4, "text-anchor": end ? "end" : "middle" }, amount(v, "")));
    }
  }
  svg.addEventListener("pointermove", (event) => {
    const v = (event.clientX - svg.getBoundingClientRect().left - pad.left) / scale.inner;
    const j = Math.min(Math.max(Math.floor(v * bars), 0), bars - 1);
    const range = `${amount(spec.edges[j], "")} to ${amount(spec.edges[j + 1], spec.unit)}`;
    show(event, range, spec.series.map((s, i) => [color("", i), s.name, amount(s.y[j], "%")]));
  });
  svg.addEventListener("pointerleave", hide);
  return { card, paint };
}
